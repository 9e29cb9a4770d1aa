"""Constrained answers of the engine: valid, and of the same bits alone, in a crowd, recomputed and under `generate`."""

import dataclasses
import json
import random
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

import pytest

import detjax
from detjax.engine import Completion, Constraint, Engine, Generation, Request, SamplingParams
from detjax.engine.constraints import ConstraintCompiler
from detjax.engine.token_masks import Masks, Matcher
from tests.support.small_loops import small_engine, small_model, small_tokenizer
from tests.support.waits import HANGS_AFTER

SCHEMAS = [
    {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}}, "required": ["n"]},
    {"type": "array", "items": {"enum": ["to be", "not to be"]}, "minItems": 1, "maxItems": 3},
    {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"const": "x"}}, "required": ["a", "b"]},
    {"type": "string", "pattern": "^[a-z]{1,8}$"},
]
CONSTRAINTS = [
    Constraint.json_schema(schema | {"x-guidance": {"whitespace_flexible": False}, "additionalProperties": False})
    for schema in SCHEMAS
]
CONSTRAINTS += [Constraint.choice(["O Romeo", "O Juliet"]), Constraint("regex", "[A-Z]{2,4}: [a-z ]{3,12}[.]")]


def requests() -> list[Request]:
    """Two for each constraint, and others without one."""
    constrained = [
        # Requests that ask for likeliest tokens are served by other programs than those that do not.
        SamplingParams(
            max_tokens=60,
            temperature=float(index % 2),
            seed=index,
            constraint=constraint,
            top_logprobs=index // 2 % 2 * 2,
        )
        for index, constraint in enumerate(CONSTRAINTS)
    ]
    free = [
        SamplingParams(max_tokens=30, temperature=0.7, seed=seed, presence_penalty=float(seed)) for seed in range(2)
    ]
    return [
        # Many samples need one more page for the tokens that they generate.
        Request([*small_tokenizer().encode(f"{name}:"), *[7] * 116], params)
        for params in (*constrained, *free)
        for name in ("ROMEO", "JULIET")
    ]


@pytest.fixture(scope="module")
def alone() -> list[Generation]:
    with small_engine(prefix_cache=False) as engine:
        return [engine.submit(request).result() for request in requests()]


def text_of(completion: Completion) -> str:
    assert completion.text is not None
    return completion.text


def test_every_answer_is_what_its_constraint_asks_for(alone: list[Generation]) -> None:
    texts = [text_of(generation.completions[0]) for generation in alone]
    assert all(generation.completions[0].finish_reason == "stop" for generation in alone[:12])
    for number in texts[:2]:
        assert 0 <= json.loads(number)["n"] <= 99
    for items in texts[2:4]:
        assert set(json.loads(items)) <= {"to be", "not to be"}
    for both in texts[4:6]:
        assert json.loads(both)["b"] == "x"
    for word in texts[6:8]:
        assert json.loads(word).islower()
    assert set(texts[8:10]) <= {"O Romeo", "O Juliet"}
    assert all(text.endswith(".") and text[:2].isupper() for text in texts[10:12])


@pytest.mark.parametrize("pages", [None, 3])
def test_answers_have_the_same_bits_in_a_crowd(alone: list[Generation], pages: int | None) -> None:
    with small_engine(pages=pages) as engine:
        assert engine.generate(requests()) == alone
        assert pages is None or engine.stats().preemptions > 0


def test_no_answer_depends_on_when_its_masks_are_there(
    alone: list[Generation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks come late by chance, some requests are cancelled meanwhile, and the others get all of their tokens."""
    draw, start_masks = random.Random(0), ConstraintCompiler.start_masks

    def start_late(
        compiler: ConstraintCompiler,
        rows: int,
        matchers: Mapping[int, Matcher],
        accepted: Callable[[], Iterable[tuple[Matcher, int]]],
    ) -> Future[Masks]:
        before, after = (draw.choice([0.0, 0.0, 0.003, 0.01]) for _ in range(2))

        def accepted_late() -> list[tuple[Matcher, int]]:
            time.sleep(before)
            tokens = [*accepted()]
            time.sleep(after)
            return tokens

        return start_masks(compiler, rows, matchers, accepted_late)

    monkeypatch.setattr(ConstraintCompiler, "start_masks", start_late)
    with small_engine(pages=4) as engine:
        futures = [engine.submit(request) for request in requests()]
        cancelled = [engine.submit(dataclasses.replace(request, prompt="HAMLET:")) for request in requests()[::5]]
        time.sleep(0.1)
        for future in cancelled:
            future.cancel()
        assert [future.result(HANGS_AFTER) for future in futures] == alone
        assert engine.stats().pages_in_use == 0


def test_generate_answers_as_the_engine_does(alone: list[Generation]) -> None:
    some = requests()[:4]
    answers = detjax.generate(
        small_model(),
        [one.prompt for one in some],
        [one.sampling for one in some],
        tokenizer=small_tokenizer(),
        prefill_chunk=1,
    )
    assert [answer.completions for answer in answers] == [generation.completions for generation in alone[:4]]


def test_logprobs_are_those_that_the_model_gives_the_text(alone: list[Generation]) -> None:
    with small_engine() as engine:
        for generation in alone[:4]:
            prompt, completion = generation.prompt_tokens, generation.completions[0]
            scoring = Request([*prompt, *completion.tokens], SamplingParams(1, prompt_logprobs=True))
            scored = engine.generate([scoring])[0].prompt
            assert scored is not None
            assert scored.logprobs[len(prompt) - 1 :] == completion.logprobs


def test_samples_of_one_request_are_constrained_each_by_itself() -> None:
    params = SamplingParams(max_tokens=40, temperature=1.5, seed=2, n=4, constraint=CONSTRAINTS[1])
    with small_engine() as engine:
        (answer,) = engine.generate([Request("ROMEO:", params)])
    lists = [tuple(json.loads(text_of(completion))) for completion in answer.completions]
    assert len(set(lists)) > 1


def test_a_constraint_that_becomes_too_complex_ends_its_own_request() -> None:
    costly = SamplingParams(max_tokens=20, constraint=Constraint("regex", "(a{1000}){1000}"))
    with small_engine() as engine:
        futures = [engine.submit(Request("ROMEO:", costly)), engine.submit(requests()[0])]
        with pytest.raises(ValueError, match="the sample's constraint failed"):
            futures[0].result()
        assert json.loads(text_of(futures[1].result().completions[0]))
        assert engine.stats().pages_in_use == 0


def test_a_constraint_needs_an_end() -> None:
    with pytest.raises(ValueError, match="constraint is given with ignore_eos True"):
        SamplingParams(constraint=CONSTRAINTS[0], ignore_eos=True)
    with (
        Engine(small_model(), max_samples=1, token_budget=64, max_length=128) as engine,
        pytest.raises(ValueError, match="constraints need a tokenizer"),
    ):
        engine.submit(Request([1, 2], SamplingParams(8, constraint=CONSTRAINTS[0])))
