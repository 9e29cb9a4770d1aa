"""Allowed tokens and bad words: what is chosen, the same bits in every batch, and receipts that follow."""

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import pytest

import detjax
from detjax.audit import transcripts_of
from detjax.engine import Constraint, FieldError, Generation, Request, SamplingParams
from detjax.engine.token_masks import MaskComputer, Matcher, TokenRules, all_allowed, bad_word_tokens
from tests.support.small_loops import small_engine, small_model, small_tokenizer

VOCABULARY = 515
PROMPT = [5, 9, 300]
LETTERS = tuple(small_tokenizer().encode("abcdefgh .!"))


def rules(ends: tuple[int, ...] = (), **fields: Any) -> TokenRules:
    computer = MaskComputer(VOCABULARY)
    return TokenRules(computer, VOCABULARY, SamplingParams(**fields), ends, small_tokenizer())


def left(given: TokenRules, tokens: list[int]) -> set[int]:
    """The tokens that may follow."""
    (mask,) = all_allowed(1, VOCABULARY)
    given.restrict(mask, tokens, len(tokens))
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return {*np.flatnonzero(bits[:VOCABULARY]).tolist()}


# --- masks ------------------------------------------------------------------------------------------------------------


def test_only_allowed_tokens_are_left() -> None:
    everything = {*range(VOCABULARY)}
    assert left(rules(allowed_token_ids=(0, 31, 32, 514)), [7]) == {0, 31, 32, 514}
    bare, spaced = bad_word_tokens(["a"], small_tokenizer())
    assert left(rules(bad_words=("a",)), []) == everything - {*bare, *spaced}


def test_the_last_token_of_a_word_is_barred_after_the_others_alone() -> None:
    a, b, c = (small_tokenizer().encode(letter)[0] for letter in "axz")
    word = "axz"
    assert small_tokenizer().encode(word) == [a, b, c]
    given = rules(bad_words=(word,))
    everything = {*range(VOCABULARY)}
    for tokens in ([], [a], [b], [b, a], [a, b, b], [a, c, b]):
        assert left(given, tokens) == everything, tokens
    for tokens in ([a, b], [a, a, b], [c, a, b]):
        assert left(given, tokens) == everything - {c}, tokens


def test_a_word_is_barred_with_and_without_a_space_before_it() -> None:
    """The form with a space counts if it has as many tokens and another first one, as in vLLM."""
    tokenizer = small_tokenizer()
    spaced = next(word for word in ("and", "the", "to", "a", "in", "is") if len(tokenizer.encode(f" {word}")) == 1)
    assert len(tokenizer.encode("a")) == 1
    for word in (spaced, "xyz"):
        bare, after = tuple(tokenizer.encode(word)), tuple(tokenizer.encode(f" {word}"))
        counts = len(after) == len(bare) and after[0] != bare[0]
        assert bad_word_tokens([word], tokenizer) == [bare, after] if counts else [bare]
        assert bad_word_tokens([f"  {word}"], tokenizer) == bad_word_tokens([word], tokenizer)
    assert any(len(bad_word_tokens([word], tokenizer)) == 2 for word in ("a", "I", "s", "t"))


@pytest.mark.parametrize(
    ("fields", "ends", "field", "says"),
    [
        ({"allowed_token_ids": (3, 515)}, (), "allowed_token_ids", "has 515; accepted: ids 0 to 514"),
        ({"allowed_token_ids": (3,), "min_tokens": 1}, (3, 4), "allowed_token_ids", "leaves no token to choose"),
        ({"bad_words": ("\t\n ",)}, (), "bad_words", "has no tokens"),
    ],
)
def test_rules_that_leave_nothing_are_refused_by_name(
    fields: dict[str, Any], ends: tuple[int, ...], field: str, says: str
) -> None:
    with pytest.raises(FieldError, match=says) as raised:
        rules(ends, **fields)
    assert raised.value.field == field


def test_tokens_and_words_are_checked() -> None:
    for fields in ({"allowed_token_ids": (-1,)}, {"bad_words": ("",)}):
        with pytest.raises(FieldError, match="; accepted: "):
            SamplingParams(**fields)
    with pytest.raises(FieldError, match="bad_words need a tokenizer"):
        TokenRules(MaskComputer(9), 9, SamplingParams(bad_words=("a",)), (), None)


def test_a_row_without_a_token_to_choose_fails_alone() -> None:
    letter, other = (small_tokenizer().encode(one)[0] for one in "ab")
    # The second letter is barred after the first, and nothing else is allowed: the mask after it is empty.
    given = rules(allowed_token_ids=(letter,), bad_words=("aa",))
    free = rules(allowed_token_ids=(letter, other))
    matchers = {0: Matcher(None, (), given), 2: Matcher(None, (), free)}
    first = given.computer.start_masks(3, matchers, list).result()
    assert first.failures == {}
    accepted = [(matcher, letter) for matcher in matchers.values()]
    masks = given.computer.start_masks(3, matchers, lambda: accepted).result()
    assert [*masks.failures] == [0]
    assert "leave no token to choose" in masks.failures[0]
    rows = np.asarray(masks.allowed)
    assert (rows[:2] == np.uint32(0xFFFFFFFF)).all()
    assert np.unpackbits(rows[2].view(np.uint8)).sum() == 2


# --- answers ----------------------------------------------------------------------------------------------------------


def words_of(written: tuple[int, ...]) -> tuple[str, ...]:
    """Words of two tokens that an answer contains, and that are tokenized as it has them."""
    pairs = {small_tokenizer().decode(pair): pair for pair in itertools.pairwise(written)}
    words = [word for word, pair in pairs.items() if pair in bad_word_tokens([word], small_tokenizer())]
    assert words
    return tuple(words[:3])


@functools.cache
def requests() -> list[Request]:
    greedy = SamplingParams(max_tokens=12, ignore_eos=True)
    drawn = dataclasses.replace(greedy, temperature=1.3, seed=5, top_k=30)
    (free,) = detjax.generate(small_model(), [PROMPT], drawn, tokenizer=small_tokenizer())
    written = free.completions[0].tokens
    words = words_of(written)
    some = (
        dataclasses.replace(greedy, allowed_token_ids=LETTERS),
        dataclasses.replace(drawn, allowed_token_ids=LETTERS, presence_penalty=0.7, n=2),
        dataclasses.replace(drawn, bad_words=words, sampling_logprobs=True),
        dataclasses.replace(drawn, bad_words=words, allowed_token_ids=tuple(range(0, 515, 2)), min_tokens=3),
        dataclasses.replace(drawn, bad_words=("a",), constraint=Constraint("regex", "[a-d]{9}"), ignore_eos=False),
    )
    return [Request(PROMPT, params) for params in some]


@functools.cache
def alone() -> list[Generation]:
    with small_engine(prefix_cache=False) as engine:
        return [engine.submit(request).result() for request in requests()]


def test_answers_keep_the_rules() -> None:
    for request, generation in zip(requests(), alone(), strict=True):
        params = request.sampling
        for completion in generation.completions:
            if params.allowed_token_ids:
                assert {*completion.tokens} <= {*params.allowed_token_ids}
            for word in bad_word_tokens(params.bad_words, small_tokenizer()):
                assert all(completion.tokens[at : at + len(word)] != word for at in range(len(completion.tokens))), word
    assert {*(alone()[4].completions[0].text or "")} <= {*"bcd"}
    assert len(alone()[1].completions[0].tokens) == 12


@pytest.mark.parametrize("options", [{}, {"token_budget": 1}], ids=["defaults", "a token a step"])
def test_answers_have_the_same_bits_in_a_crowd(options: dict[str, Any]) -> None:
    crowd = [Request([7, 8], SamplingParams(max_tokens=9, temperature=0.5, seed=s, ignore_eos=True)) for s in range(2)]
    with small_engine(**options) as engine:
        together = engine.generate([*crowd, *requests()[::-1], *crowd])
        free = engine.generate(crowd)
    assert together[2:-2][::-1] == alone()
    assert together[:2] == together[-2:] == free


def test_generate_and_resumed_requests_give_the_same_answers() -> None:
    some = [requests()[index] for index in (2, 4)]
    made = detjax.generate(
        small_model(), [one.prompt for one in some], [one.sampling for one in some], tokenizer=small_tokenizer()
    )
    assert [one.completions for one in made] == [alone()[index].completions for index in (2, 4)]
    with small_engine() as engine:
        for request, generation in zip(requests(), alone(), strict=True):
            begun = [completion.tokens[:4] for completion in generation.completions]
            (rest,) = engine.generate([dataclasses.replace(request, generated=begun)])
            assert [one.tokens for one in rest.completions] == [one.tokens[4:] for one in generation.completions]


def test_rules_without_effect_change_no_bit() -> None:
    plain = SamplingParams(max_tokens=8, temperature=0.8, seed=1, ignore_eos=True)
    vacuous = dataclasses.replace(plain, allowed_token_ids=tuple(range(VOCABULARY)), bad_words=("zqzqzq",))
    with small_engine() as engine:
        one, other = engine.generate([Request(PROMPT, plain), Request(PROMPT, vacuous)])
    assert one == other


def test_receipts_hold_the_rules() -> None:
    model, tokenizer = small_model(), small_tokenizer()
    transcripts, changed = [], []
    for request, generation in zip(requests(), alone(), strict=True):
        for transcript in transcripts_of(generation, request.sampling):
            read = type(transcript).from_json(transcript.as_json())
            assert read == transcript
            transcripts.append(read)
            without = dataclasses.replace(request.sampling, allowed_token_ids=(), bad_words=())
            changed.append(dataclasses.replace(transcript, sampling=without))
    assert {str(verdict) for verdict in detjax.verify(model, transcripts, tokenizer)} == {"verified"}
    assert [verdict.reason for verdict in detjax.verify(model, changed, tokenizer)] == ["token"] * len(changed)


def test_a_sample_that_may_choose_nothing_ends_alone() -> None:
    stuck = SamplingParams(max_tokens=5, allowed_token_ids=tuple(small_tokenizer().encode("a")), bad_words=("aa",))
    with small_engine() as engine:
        futures = [engine.submit(Request(PROMPT, stuck)), engine.submit(requests()[0])]
        with pytest.raises(FieldError, match="leave no token to choose") as raised:
            futures[0].result()
        assert raised.value.field == "allowed_token_ids"
        assert futures[1].result() == alone()[0]
        assert engine.stats().pages_in_use == 0
