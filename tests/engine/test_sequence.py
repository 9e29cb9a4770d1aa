"""Sequences: what ends them, and what the samples of a request share."""

import pytest

from detjax import SamplingParams
from detjax.engine.sequence import RequestContext, Sequence, samples
from detjax.engine.validation import end_tokens
from detjax.models import GenerationDefaults
from tests.support.memory import allocated


@pytest.mark.parametrize(("last", "tokens"), [(11, [5, 11]), (12, [5, 12]), (13, [5, 13]), (14, [5, 14, 6])])
def test_every_end_token_ends_a_sequence(last: int, tokens: list[int]) -> None:
    params = SamplingParams(max_tokens=3, stop_token_ids=(13,))
    defaults = GenerationDefaults(eos_token_ids=(11, 12))
    sequence = Sequence((1, 2), params, context=RequestContext(end_tokens=end_tokens(defaults, params)))
    for token in (5, last, 6):
        if sequence.finish_reason is None:
            sequence.add(token, -1.0, (), batch=1)
    assert sequence.generated == tokens
    assert sequence.finish_reason == ("length" if last == 14 else "stop")


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
