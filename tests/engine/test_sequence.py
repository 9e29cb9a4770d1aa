"""Sequences: what ends them, and what the samples of a request share."""

import dataclasses
import itertools
import math
from typing import Any

import pytest

from detjax import SamplingParams
from detjax.engine import Completion, NotFinite, Token
from detjax.engine.page_pool import digests
from detjax.engine.sequence import RequestContext, Sequence, samples
from detjax.engine.validation import end_tokens
from detjax.models import GenerationDefaults
from tests.support.memory import allocated
from tests.support.small_loops import small_tokenizer


def added(sequence: Sequence, token: int, logprob: float, *numbers: Any, batch: int) -> Token:
    """Appends a token, and returns what is reported of it."""
    sequence.accept([(token, logprob)])
    return sequence.report(token, logprob, *numbers, batch=batch, is_last=sequence.finish_reason is not None)


@pytest.mark.parametrize(("last", "tokens"), [(11, [5, 11]), (12, [5, 12]), (13, [5, 13]), (14, [5, 14, 6])])
def test_every_end_token_ends_a_sequence(last: int, tokens: list[int]) -> None:
    params = SamplingParams(max_tokens=3, stop_token_ids=(13,))
    defaults = GenerationDefaults(eos_token_ids=(11, 12))
    sequence = Sequence((1, 2), params, context=RequestContext(end_tokens=end_tokens(defaults, params)))
    for token in (5, last, 6):
        if sequence.finish_reason is None:
            added(sequence, token, -1.0, (), batch=1)
    assert sequence.generated == tokens
    assert sequence.finish_reason == ("length" if last == 14 else "stop")


def test_a_token_that_ends_a_sample_does_so_even_if_it_is_the_last_one() -> None:
    params = SamplingParams(max_tokens=2)
    for last, reason in ((9, "stop"), (5, "length")):
        one = Sequence((1,), params, context=RequestContext(end_tokens=frozenset([9])))
        reasons = [added(one, token, -1.0, (), batch=1).finish_reason for token in (5, last)]
        assert reasons == [None, reason]
        assert (one.missing, one.has_all) == (0, True)


def test_tokens_in_flight_count_towards_the_length_and_the_most_tokens() -> None:
    one = Sequence((1, 2, 3), SamplingParams(max_tokens=5), generated=(4, 4))
    assert (one.length, one.missing, one.has_all, one.given) == (5, 3, False, 2)
    one.unread = 2
    assert (one.length, one.missing, one.has_all) == (7, 1, False)
    one.unread = 3
    assert (one.length, one.missing, one.has_all) == (8, 0, True)


def test_not_a_number_ends_a_sample_and_minus_infinity_does_not() -> None:
    one = Sequence((1, 2, 3), SamplingParams(max_tokens=9))
    # A constraint may force a token that the model never chooses.
    assert added(one, 4, -math.inf, (), batch=1).finish_reason is None
    token = added(one, 5, math.nan, (), batch=1)
    assert (token.finish_reason, one.finish_reason) == ("failed", "failed")
    with pytest.raises(NotFinite, match="logits for position 4 hold NaN or infinity"):
        one.completion()


def test_what_was_computed_for_a_token_is_in_it_and_in_the_completion() -> None:
    params = SamplingParams(max_tokens=2, top_logprobs=1, sampling_logprobs=True)
    one = Sequence((1,), params, index=3)
    one.cached_tokens = 7
    first = added(one, 4, -1.5, ((8, -0.5),), -2.5, ((7, -0.75),), batch=6)
    assert dataclasses.asdict(first) == {
        "sample": 3,
        "token": 4,
        "logprob": -1.5,
        "top_logprobs": ((8, -0.5),),
        "text": None,
        "finish_reason": None,
        "batch": 6,
        "cached_tokens": 7,
        "sampling_logprob": -2.5,
        "sampling_top_logprobs": ((7, -0.75),),
    }
    added(one, 5, -3.0, ((9, -0.25),), -4.0, ((6, -0.5),), batch=1)
    assert one.completion() == Completion(
        tokens=(4, 5),
        logprobs=(-1.5, -3.0),
        top_logprobs=(((8, -0.5),), ((9, -0.25),)),
        text=None,
        finish_reason="length",
        sampling_logprobs=(-2.5, -4.0),
        sampling_top_logprobs=(((7, -0.75),), ((6, -0.5),)),
    )


def test_a_continued_sample_has_the_rest_alone_and_its_streams_text_goes_on() -> None:
    tokenizer = small_tokenizer()
    whole = tokenizer.encode("He said no, and no again.")
    context = RequestContext(tokenizer=tokenizer, is_streamed=True)
    params = SamplingParams(max_tokens=len(whole))
    for count in range(len(whole)):
        one = Sequence((1,), params, context=context, generated=whole[:count])
        texts = [added(one, token, -1.0, (), batch=1).text or "" for token in whole[count:]]
        completion = one.completion()
        assert completion.tokens == tuple(whole[count:])
        assert completion.text == "".join(texts) == tokenizer.decode(whole)[len(tokenizer.decode(whole[:count])) :]
        assert one.text == tokenizer.decode(whole)
    ended = Sequence((1,), params, context=context, generated=whole)
    assert (ended.finish_reason, ended.completion().tokens, ended.completion().text) == ("length", (), "")
    with pytest.raises(ValueError, match="tokens for sample 0, which ends after 2 of them"):
        Sequence((1,), dataclasses.replace(params, max_tokens=2), context=context, generated=whole)


@pytest.mark.parametrize("includes_stop", [False, True])
@pytest.mark.parametrize("stop", [(), ("no, a",), ("again",)])
def test_tokens_that_are_accepted_together_and_reported_later_are_the_same(
    stop: tuple[str, ...], includes_stop: bool
) -> None:
    tokenizer = small_tokenizer()
    whole = tokenizer.encode("He said no, and no again. And no more.")
    for is_streamed, end in itertools.product((True, False), (whole[-3], whole[0] + 1)):
        context = RequestContext(tokenizer=tokenizer, is_streamed=is_streamed, end_tokens=frozenset([end]))
        params = SamplingParams(max_tokens=len(whole) - 1, stop=stop, include_stop_str_in_output=includes_stop)
        alone, together = (Sequence((1,), params, context=context) for _ in range(2))
        expected, tokens, rest = [], [], list(whole)
        for number, token in enumerate(whole):
            if alone.finish_reason is None:
                expected.append(added(alone, token, -float(number), (), batch=1))
        while together.finish_reason is None:
            group, rest = rest[:4], rest[4:]
            numbers = range(len(together.generated), len(together.generated) + 4)
            sampled = [(token, -float(number)) for token, number in zip(group, numbers, strict=False)]
            count, is_ended = together.accept(sampled), together.finish_reason is not None
            for number, (token, logprob) in enumerate(sampled[:count]):
                is_last = is_ended and number == count - 1
                tokens.append(together.report(token, logprob, (), batch=1, is_last=is_last))
        assert tokens == expected and len(tokens) > 4
        assert together.completion() == alone.completion()


def test_rows_are_needed_for_a_prompts_logprobs() -> None:
    assert not Sequence((1,), SamplingParams()).needs_rows
    assert Sequence((1,), SamplingParams(prompt_logprobs=True)).needs_rows


def test_digests_of_samples_are_those_of_the_prompt_then_of_their_own_tokens() -> None:
    first, second = samples(tuple(range(128)), SamplingParams(n=2), RequestContext(prefix_root=b"root"))
    assert first.digests() == second.digests() == digests(range(128), root=b"root") != digests(range(128))
    first.generated.extend(range(128))
    second.generated.extend([0] * 128)
    assert first.digests() == digests([*range(128)] * 2, root=b"root")
    assert first.digests()[0] == second.digests()[0] and first.digests()[1] != second.digests()[1]


def test_only_the_first_sample_leads_and_has_the_prompts_logprobs() -> None:
    first, *others = samples((1, 2), SamplingParams(n=3, prompt_logprobs=True), RequestContext())
    assert (first.leader, first.index, first.params.prompt_logprobs) == (None, 0, True)
    assert [(one.leader, one.index, one.params.prompt_logprobs) for one in others] == [
        (first, 1, False),
        (first, 2, False),
    ]


def test_waiting_samples_take_no_memory_of_the_size_of_their_request() -> None:
    size = 100_000
    prompt, stop_tokens = tuple(range(1000, 1000 + size)), tuple(range(size))
    stop = tuple(f"{index} " * 100 for index in range(100))
    params = SamplingParams(n=100, stop=stop, stop_token_ids=stop_tokens)
    ends = end_tokens(None, params)
    with allocated() as bytes_:
        together = samples(prompt, params, RequestContext(end_tokens=ends))
    assert bytes_[0] < 100 * 10_000
    assert all(one.prompt is prompt and one.context.end_tokens is ends for one in together)
    # A digest takes some 65 bytes, and a reference to it 8.
    with allocated() as bytes_:
        digests = [one.digests() for one in together]
    assert len(digests[0]) == size // 128
    assert bytes_[0] < (65 + 100 * 2 * 8 + 1000) * len(digests[0])


def test_tokens_are_the_prompt_and_then_the_generated_ones() -> None:
    sequence = Sequence((1, 2, 3), SamplingParams())
    sequence.generated.extend((4, 5))
    expected = [1, 2, 3, 4, 5]
    assert list(sequence.tokens) == expected
    assert [sequence.tokens[index] for index in range(-5, 5)] == expected * 2
    for start in range(6):
        for stop in range(6):
            assert list(sequence.tokens[start:stop]) == expected[start:stop]
