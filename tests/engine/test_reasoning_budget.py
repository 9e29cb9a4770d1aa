"""Budgets of reasoning: the closing mark is forced in time, and nothing else changes."""

import dataclasses
import functools
from typing import Any

import pytest

import detjax
from detjax.audit import transcripts_of
from detjax.engine import (
    Constraint,
    FieldError,
    Generation,
    ReasoningBudget,
    ReasoningMarks,
    Request,
    SamplingParams,
)
from detjax.engine.reasoning_budget import ReasoningTokens
from tests.support.small_loops import small_engine, small_model, small_tokenizer

PROMPT = [5, 9, 300]
BEGIN, END, SPACE = 201, 202, 203
(BANG,) = small_tokenizer().encode("!")


def counted(marks: ReasoningMarks, tokens: list[int], budget: int) -> tuple[int, bool, int | None]:
    """The tokens of reasoning, whether it is open, and the token that must come next."""
    read = ReasoningTokens(marks, tokens)
    return read.count, read.is_open, read.forced(budget)


@pytest.mark.parametrize(
    ("marks", "tokens", "expected"),
    [
        (ReasoningMarks((END,), (BEGIN,), is_open=True), [], (0, True, None)),
        (ReasoningMarks((END,), (BEGIN,), is_open=True), [1], (1, True, None)),
        (ReasoningMarks((END,), (BEGIN,), is_open=True), [1, 2], (2, True, END)),
        (ReasoningMarks((END,), (BEGIN,), is_open=True), [1, END, 2, 3], (1, False, None)),
        (ReasoningMarks((END,), (BEGIN,), is_open=True), [1, END, BEGIN, 2, 3], (1, False, None)),
        (ReasoningMarks((END,), (BEGIN,)), [BEGIN, 1, 2], (2, True, END)),
        (ReasoningMarks((END,), (BEGIN,)), [1, BEGIN, 1, 2], (0, False, None)),
        (ReasoningMarks((END,), (BEGIN,)), [SPACE, BEGIN, 1, 2], (0, False, None)),
        (ReasoningMarks((END,), (BEGIN,), spaces=(SPACE,)), [SPACE, SPACE, BEGIN, 1, 2], (2, True, END)),
        (ReasoningMarks((END,), (BEGIN,), spaces=(SPACE,)), [SPACE, 1, BEGIN, 1, 2], (0, False, None)),
        (ReasoningMarks((END,)), [BEGIN, 1, 2], (0, False, None)),
        (ReasoningMarks((7, 8), (5, 6), is_open=True), [1, 2, 7], (3, True, 8)),
        (ReasoningMarks((7, 7, 8), (5, 6), is_open=True), [7, 7, 7], (3, True, 8)),
        (ReasoningMarks((7, 8), (5, 6), is_open=True), [7, 8, 5, 6, 1], (0, False, None)),
        (ReasoningMarks((7, 8), (5, 6)), [5, 6, 1, 7, 8], (1, False, None)),
        (ReasoningMarks((7, 8), (5, 6)), [5, 5, 6, 1, 2], (0, False, None)),
        (ReasoningMarks((7,), (5, 6), repeats=True), [5, 6, 1, 7, 9, 5, 5, 6, 1], (2, True, 7)),
        (ReasoningMarks((7,), (5, 6), is_open=True, repeats=True), [1, 2, 7, 9, 5, 6], (2, True, 7)),
    ],
)
def test_reasoning_is_what_is_between_the_marks(
    marks: ReasoningMarks, tokens: list[int], expected: tuple[int, bool, int | None]
) -> None:
    assert counted(marks, tokens, 2) == expected


def test_a_budget_has_tokens_and_a_mark() -> None:
    for tokens, end, says in ((-1, (END,), "tokens is -1"), (3, (), "the closing mark has no tokens")):
        with pytest.raises(FieldError, match=says) as raised:
            ReasoningBudget(tokens, ReasoningMarks(end))
        assert raised.value.field == "reasoning_budget"
    unknown = SamplingParams(reasoning_budget=ReasoningBudget(3, ReasoningMarks((999,))))
    with small_engine() as engine, pytest.raises(FieldError, match="has marks with token 999; accepted: ids 0 to 514"):
        engine.submit(Request(PROMPT, unknown))


# --- answers ----------------------------------------------------------------------------------------------------------

DRAWN = SamplingParams(max_tokens=12, temperature=1.3, seed=2, top_k=30, ignore_eos=True)


def with_budget(params: SamplingParams, tokens: int, **marks: Any) -> SamplingParams:
    budget = ReasoningBudget(tokens, ReasoningMarks(**{"end": (END, 44), "is_open": True} | marks))
    return dataclasses.replace(params, reasoning_budget=budget)


@functools.cache
def free() -> Generation:
    (one,) = detjax.generate(small_model(), [PROMPT], DRAWN, tokenizer=small_tokenizer())
    return one


@functools.cache
def requests() -> list[Request]:
    greedy = dataclasses.replace(DRAWN, temperature=0.0, seed=0)
    written = free().completions[0].tokens
    some = (
        with_budget(DRAWN, 5),
        with_budget(greedy, 0),
        with_budget(dataclasses.replace(DRAWN, n=2, sampling_logprobs=True, presence_penalty=0.7), 3),
        with_budget(DRAWN, 4, is_open=False, begin=written[:2]),
        with_budget(
            dataclasses.replace(DRAWN, ignore_eos=False, constraint=Constraint("regex", r"(.|\n)*")), 2, end=(BANG,)
        ),
    )
    return [Request(PROMPT, params) for params in some]


@functools.cache
def alone() -> list[Generation]:
    with small_engine(prefix_cache=False) as engine:
        return [engine.submit(request).result() for request in requests()]


def test_the_closing_mark_comes_after_the_budget_and_the_tokens_before_it_keep_their_bits() -> None:
    whole = free().completions[0]
    assert END not in whole.tokens
    first, zero, _, begun, constrained = (generation.completions[0] for generation in alone())
    assert first.tokens[:5] == whole.tokens[:5]
    assert first.logprobs[:5] == whole.logprobs[:5]
    assert first.tokens[5:7] == (END, 44)
    assert zero.tokens[:2] == (END, 44)
    assert begun.tokens[:6] == whole.tokens[:6]
    assert begun.tokens[6:8] == (END, 44)
    assert small_tokenizer().token_bytes(constrained.tokens[1])[-1] >= 0x80  # the constraint lets the character end
    assert BANG not in constrained.tokens[:3]
    assert BANG in constrained.tokens[3:6]
    for completion in alone()[2].completions:
        assert completion.tokens[3:5] == (END, 44)
        assert completion.sampling_logprobs[3:5] == (0.0, 0.0)
        assert all(value < 0 for value in completion.logprobs[3:5])
    assert len(first.tokens) == 12


def test_a_budget_that_is_not_reached_changes_no_bit() -> None:
    unused = (with_budget(DRAWN, 12), with_budget(DRAWN, 0, is_open=False, begin=(END,)))
    with small_engine() as engine:
        for answer in engine.generate([Request(PROMPT, params) for params in unused]):
            assert answer == free()


@pytest.mark.parametrize("options", [{}, {"token_budget": 1}], ids=["defaults", "a token a step"])
def test_answers_have_the_same_bits_in_a_crowd(options: dict[str, Any]) -> None:
    crowd = [Request([7, 8], SamplingParams(max_tokens=9, temperature=0.5, seed=s, ignore_eos=True)) for s in range(2)]
    with small_engine(**options) as engine:
        together = engine.generate([*crowd, *requests()[::-1], *crowd])
        plain = engine.generate(crowd)
    assert together[2:-2][::-1] == alone()
    assert together[:2] == together[-2:] == plain


def test_resumed_requests_continue_within_their_budget() -> None:
    with small_engine() as engine:
        for request, generation in zip(requests(), alone(), strict=True):
            for count in (1, 3, 6):
                begun = [completion.tokens[:count] for completion in generation.completions]
                (rest,) = engine.generate([dataclasses.replace(request, generated=begun)])
                expected = [one.tokens[count:] for one in generation.completions]
                assert [one.tokens for one in rest.completions] == expected


def test_receipts_hold_the_budget() -> None:
    model, tokenizer = small_model(), small_tokenizer()
    transcripts, changed = [], []
    for request, generation in zip(requests(), alone(), strict=True):
        budget = request.sampling.reasoning_budget
        assert budget is not None
        for transcript in transcripts_of(generation, request.sampling):
            read = type(transcript).from_json(transcript.as_json())
            assert read == transcript
            transcripts.append(read)
            other = dataclasses.replace(budget, tokens=budget.tokens + 4)
            for value in (None, other):
                sampling = dataclasses.replace(request.sampling, reasoning_budget=value)
                changed.append(dataclasses.replace(transcript, sampling=sampling))
    assert {str(verdict) for verdict in detjax.verify(model, transcripts, tokenizer)} == {"verified"}
    assert {verdict.reason for verdict in detjax.verify(model, changed, tokenizer)} == {"token"}
    sealed = transcripts[0].sealed()
    assert sealed.computed_digest() == sealed.digest != changed[0].computed_digest()
