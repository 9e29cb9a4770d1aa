"""Pooling in an engine: results against transformers, and one result whatever else the engine computes."""

import contextlib
import functools
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import detjax
from detjax import audit, models
from detjax.engine import (
    BatchShapes,
    Engine,
    Pooling,
    Request,
    Sequence,
    StepLoop,
    StepLoopConfig,
    classify,
    embed,
    score,
)
from detjax.engine.pooled_texts import cosine, has_pair_template, pair_text
from detjax.engine.sequence import RequestContext
from detjax.models import Decoder, Tokenizer, load
from tests.support.bits import assert_same_bits, same_bits
from tests.support.simulated_devices import ALL_HOLD, run_on_devices

FIXTURES = Path(__file__).parents[1] / "fixtures"
POOLING = FIXTURES / "pooling"
TOLERANCE = 2e-4
METHODS = {"last": "lasttoken", "mean": "mean", "cls": "cls"}
SIZES = {"max_samples": 3, "token_budget": 48, "max_length": 300, "num_pages": 9}


@functools.cache
def loaded(name: str, **overrides: Any) -> tuple[Decoder, Tokenizer | None]:
    return load(POOLING / name, dtype="float32", progress=False, overrides=overrides)


@functools.cache
def pooling_by(method: str) -> tuple[Decoder, Tokenizer | None]:
    """The model of embeddings with another method of pooling, and without a normalization unless it is `last`."""
    if method == "last":
        return loaded("embedding")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(POOLING / "embedding", Path(folder) / method))
        (copy / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": METHODS[method]}))
        modules = json.loads((copy / "modules.json").read_text())
        (copy / "modules.json").write_text(json.dumps(modules[:2]))
        return load(copy, dtype="float32", progress=False)


@contextlib.contextmanager
def engine_of(model: Decoder, tokenizer: Tokenizer | None = None, **options: Any) -> Iterator[Engine]:
    with Engine(model, tokenizer, **SIZES | options) as engine:
        yield engine


def reference(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(POOLING / name / "reference.npz"))


def prompts_of(name: str) -> list[list[int]]:
    """The reference's tokens, texts that begin like them, and others, with a page's border within or at their ends."""
    tokens, rng = reference(name)["tokens"].tolist(), np.random.default_rng(0)
    others = [rng.integers(0, 130, size).tolist() for size in (1, 128, 129, 17)]
    return [tokens, tokens[:130], [*tokens[:128], 5, 6, 7], *others]


# --- transformers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["last", "mean", "cls"])
def test_embeddings_are_those_of_transformers(method: str) -> None:
    given = reference("embedding")
    hidden = {"last": given["hidden"][-1], "mean": given["hidden"].mean(axis=0), "cls": given["hidden"][0]}[method]
    model, _ = pooling_by(method)
    with engine_of(model) as engine:
        tokens = [given["tokens"].tolist()]
        requests = [Request(tokens[0], pooling=Pooling(is_scored=one)) for one in (False, True, None)]
        pooled = [answer.pooled for answer in engine.generate(requests)]
        plain, unit, default = (np.asarray(one) for one in pooled)
        np.testing.assert_allclose(plain, hidden, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(unit, hidden / np.linalg.norm(hidden), rtol=0, atol=TOLERANCE)
        assert_same_bits(default, unit if method == "last" else plain)
        cut = embed(engine, tokens, dimensions=16)[0]
        expected = hidden[:16] / (np.linalg.norm(hidden[:16]) if method == "last" else 1)
        np.testing.assert_allclose(cut, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["classifier", "process-reward", "reward"])
def test_scores_of_prompts_and_of_tokens_are_those_of_transformers(name: str) -> None:
    given = reference(name)
    logits, tokens = given["logits"], given["tokens"].tolist()
    exponents = np.exp(logits - logits.max(axis=-1, keepdims=True))
    expected = exponents / exponents.sum(axis=-1, keepdims=True)
    if logits.shape[1] == 1:
        expected = 1 / (1 + np.exp(-logits))
    with engine_of(loaded(name)[0]) as engine:
        np.testing.assert_allclose(classify(engine, [tokens])[0], expected[-1], rtol=0, atol=TOLERANCE)
        raw = classify(engine, [tokens, tokens[:40]], is_scored=False)
        np.testing.assert_allclose(raw, logits[[-1, 39]], rtol=0, atol=TOLERANCE)
        (all_tokens,) = engine.generate([Request(tokens, pooling=Pooling("token_classify"))])
        assert all_tokens.pooled is not None
        np.testing.assert_allclose(all_tokens.pooled, expected, rtol=0, atol=TOLERANCE)
        assert_same_bits(all_tokens.pooled[-1], classify(engine, [tokens])[0])


def test_a_reranker_scores_pairs_by_two_logits_of_the_language_model() -> None:
    overrides: dict[str, Any] = {"classifier_from_token": ["a", "b"], "is_original_qwen3_reranker": True}
    model, tokenizer = load(FIXTURES / "qwen3", dtype="float32", progress=False, overrides=overrides)
    generates, _ = load(FIXTURES / "qwen3", dtype="float32", progress=False)
    assert tokenizer is not None
    first = "{{ (messages | selectattr('role', 'eq', 'query') | first).content }}"
    template = f"Q:{first}|{{{{ messages[1].content if messages[1].role == 'document' }}}}="
    assert not has_pair_template(tokenizer)
    assert pair_text(tokenizer, "one", "two") == "onetwo"
    tokenizer = tokenizer.with_chat_template(template)
    assert pair_text(tokenizer, "one", "two") == "Q:one|two="
    params = detjax.SamplingParams(max_tokens=1, top_logprobs=515)
    text = "Q:A sum|An order="
    (answer,) = detjax.generate(generates, [text], params, tokenizer=tokenizer)
    logprobs = dict(answer.completions[0].top_logprobs[0])
    no, yes = (logprobs[tokenizer.id_of(one) or 0] for one in ("a", "b"))
    with engine_of(model, tokenizer) as engine:
        given = score(engine, "A sum", ["An order", "A row"])
        np.testing.assert_allclose(given[0], np.exp(yes) / (np.exp(yes) + np.exp(no)), atol=TOLERANCE)
        assert_same_bits(score(engine, ["A sum", "A sum"], ["A row", "An order"])[::-1], given)
        assert_same_bits(given[0], np.float32(score(engine, "A sum", ["An order"])[0]))


# --- one set of bits --------------------------------------------------------------------------------------------------


def results(engine: Engine, prompts: list[list[int]], task: str) -> list[np.ndarray]:
    requests = [Request(prompt, pooling=Pooling(task)) for prompt in prompts]  # pyright: ignore[reportArgumentType]
    return [np.asarray(answer.pooled) for answer in engine.generate(requests)]


@pytest.mark.parametrize(
    ("method", "task"),
    [
        ("last", "embed"),
        ("mean", "embed"),
        ("last", "token_embed"),
        pytest.param("cls", "embed", marks=pytest.mark.nightly),
    ],
)
def test_a_result_is_the_same_alone_and_together_in_any_chunks_and_from_the_cache(method: str, task: str) -> None:
    model, prompts = pooling_by(method)[0], prompts_of("embedding")
    with engine_of(model, prefix_cache=False) as engine:
        alone = [results(engine, [prompt], task)[0] for prompt in prompts]
    for options in ({"token_budget": 20}, {"max_samples": 7, "token_budget": 48}):
        with engine_of(model, **options) as engine:
            for _ in range(2):  # the second time from the prefix cache
                for given, expected in zip(results(engine, prompts, task), alone, strict=True):
                    assert_same_bits(given, expected)
            cached = engine.generate([Request(prompts[0], pooling=Pooling(task))])[0].cached_tokens  # pyright: ignore
            assert cached == (128 if (method, task) == ("last", "embed") else 0)


@pytest.mark.parametrize(
    "name",
    [
        "qwen2",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("qwen3-next", "deepseek-v3", "gemma2", "gpt-oss")),
    ],
)
def test_other_families_pool_too(name: str) -> None:
    overrides: dict[str, Any] = {
        "classifier_from_token": ["a"],
        "classifier_token_ids": [5],
        "method": "no_post_processing",
    }
    model, _ = load(FIXTURES / name, dtype="float32", progress=False, overrides=overrides)
    given = dict(np.load(FIXTURES / name / "reference.npz"))
    prompts = [given["tokens"].tolist(), given["tokens"][:130].tolist()]
    with engine_of(model, max_length=256, prefix_cache=False) as engine:
        alone = [classify(engine, [prompt], is_scored=False)[0] for prompt in prompts]
    np.testing.assert_allclose(np.array(alone)[:, 0], given["logits"][[-1, 129], 5], rtol=0, atol=TOLERANCE)
    with engine_of(model, max_length=256, token_budget=100) as engine:
        for _ in range(2):
            assert_same_bits(classify(engine, prompts, is_scored=False), np.array(alone))


@pytest.mark.parametrize(("method", "task"), [("mean", "embed"), ("last", "token_embed")])
def test_a_preempted_sequence_starts_over_with_the_same_bits(method: str, task: str) -> None:
    model, prompts = pooling_by(method)[0], prompts_of("embedding")[:2]
    with engine_of(model) as engine:
        expected = results(engine, prompts, task)
    shapes = BatchShapes.for_chunks(slots=2, prefill_chunk=40)
    loop = StepLoop.for_model(model, StepLoopConfig(shapes=shapes, num_pages=3, pages_per_sequence=2, variants=()))
    pooling = Pooling(task).resolved("a test", model.config)  # pyright: ignore[reportArgumentType]
    context = RequestContext(pooling=pooling, reads_all_rows=True)
    sequences = [Sequence(tuple(prompt), detjax.SamplingParams(max_tokens=1), context=context) for prompt in prompts]
    for sequence in sequences:
        loop.submit(sequence)
    while not loop.is_idle:
        loop.step()
    assert loop.scheduler.preemptions > 0
    for sequence, wanted in zip(sequences, expected, strict=True):
        assert_same_bits(np.asarray(sequence.pooled()), wanted)


@pytest.mark.parametrize("method", ["last", "mean"])
def test_every_program_is_compiled_in_advance(method: str) -> None:
    with engine_of(pooling_by(method)[0], token_budget=16, max_samples=1) as engine:
        before = [results(engine, [[1, 2, 3]], task)[0] for task in ("embed", "token_embed")]
        engine.warm_up()
        runner = engine._loop._runner
        needed = list[Any]()
        compiled = runner._compiled
        runner._compiled = Noting(compiled, needed)  # pyright: ignore[reportAttributeAccessIssue]
        after = [results(engine, [[1, 2, 3]], task)[0] for task in ("embed", "token_embed")]
        for given, expected in zip(after, before, strict=True):
            assert_same_bits(given, expected)
        assert needed and set(needed) <= set(compiled)


class Noting(dict[Any, Any]):
    """A dictionary that notes which keys are looked up."""

    def __init__(self, entries: dict[Any, Any], noted: list[Any]) -> None:
        super().__init__(entries)
        self._noted = noted

    def get(self, key: Any, default: Any = None) -> Any:
        self._noted.append(key)
        return super().get(key, default)


def test_sleep_forgets_what_slots_carry_and_no_bit() -> None:
    model, prompts = pooling_by("mean")[0], prompts_of("embedding")[:2]
    with engine_of(model) as engine:
        before = results(engine, prompts, "embed")
        engine.sleep()
        engine.wake_up()
        for given, expected in zip(results(engine, prompts, "embed"), before, strict=True):
            assert_same_bits(given, expected)


def test_every_number_of_devices_gives_the_bits_of_one() -> None:
    run_on_devices(__name__, devices=2)


def main() -> None:
    """Compares results on one device and on two."""
    for model, task in ((pooling_by("mean")[0], "embed"), (loaded("process-reward")[0], "token_classify")):
        prompts = [prompt[:20] for prompt in prompts_of("process-reward")[:2]]
        sizes = {"max_samples": 1, "token_budget": 16, "max_length": 64, "num_pages": 2}
        with engine_of(model, **sizes) as engine:
            expected = results(engine, prompts, task)
        with engine_of(model, mesh=models.mesh_of(2), **sizes) as engine:
            for given, wanted in zip(results(engine, prompts, task), expected, strict=True):
                assert_same_bits(given, wanted)
    print(ALL_HOLD)


@pytest.mark.parametrize(("method", "name"), [("mean", "embedding"), ("last", "process-reward")])
def test_no_program_leaves_a_number_to_the_compiler(method: str, name: str) -> None:
    model = pooling_by(method)[0] if name == "embedding" else loaded(name)[0]
    with engine_of(model, token_budget=16, max_samples=1) as engine:
        programs = engine.programs()
        assert any(program.purpose.startswith("results of") for program in programs)
        assert audit.engine_risks(model, programs) == {}


# --- texts ------------------------------------------------------------------------------------------------------------


def test_a_text_gets_the_checkpoints_prompt_and_last_token() -> None:
    model, tokenizer = loaded("embedding")
    assert tokenizer is not None
    prompts = dict(model.config.pooling.prompts)  # pyright: ignore[reportOptionalMemberAccess]
    tokens = tokenizer.encode(prompts["query"] + "A sum?")
    assert tokens[-1] == tokenizer.id_of("<|endoftext|>")
    with engine_of(model, tokenizer) as engine:
        (given,) = embed(engine, ["A sum?"], prompt_name="query")
        assert_same_bits(given, embed(engine, [tokens])[0])
        assert not same_bits(given, embed(engine, ["A sum?"])[0])
        assert_same_bits(embed(engine, ["A sum?"], prompt_name="document"), embed(engine, ["A sum?"]))
        with pytest.raises(ValueError, match="prompt_name is 'a'; accepted: 'document', 'query'"):
            embed(engine, ["A sum?"], prompt_name="a")
        one, other = embed(engine, ["A sum?", "An order"])
        assert_same_bits(score(engine, "A sum?", ["An order"]), np.float32([cosine(one, other)]))
        assert cosine(one, other) == pytest.approx(float(one @ other), abs=1e-6)
        assert cosine(one, np.zeros_like(one)) == 0


def test_no_prompts_have_no_results() -> None:
    with engine_of(loaded("reward")[0]) as engine:
        assert classify(engine, []).size == 0


# --- what is refused --------------------------------------------------------------------------------------------------


def test_other_requests_are_refused() -> None:
    with engine_of(loaded("embedding")[0]) as engine:
        for pooling, message in (
            (None, "asks for completions and the model pools; accepted: requests with pooling"),
            (Pooling("classify"), "task is 'classify'; accepted: embed, token_embed"),
            (Pooling(dimensions=17), "dimensions is 17; accepted: 16, 40"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.generate([Request([1, 2], pooling=pooling)])
        with pytest.raises(ValueError, match="has 301 tokens; accepted: up to 300"):
            engine.generate([Request([1] * 301, pooling=Pooling())])
        with pytest.raises(ValueError, match="has no tokens"):
            engine.generate([Request([], pooling=Pooling())])
        with pytest.raises(ValueError, match="is streamed and the model pools; accepted: whole answers"):
            engine.submit(Request([1], pooling=Pooling()), lambda _: None)
        assert engine.generate([Request([1] * 300, pooling=Pooling())])[0].pooled is not None
        with pytest.raises(ValueError, match="task is 'classify'"):
            classify(engine, [[1]])
    with engine_of(loaded("classifier")[0]) as engine:
        with pytest.raises(ValueError, match="dimensions is 3; accepted: null"):
            engine.generate([Request([1], pooling=Pooling(dimensions=3))])
        with pytest.raises(ValueError, match="score: the model has 3 classes; accepted: models with one"):
            score(engine, "a", ["b"])
    with engine_of(loaded("reward")[0]) as engine:
        with pytest.raises(ValueError, match="3 queries and 2 documents; accepted: one query, or one for each"):
            score(engine, ["a", "b", "c"], ["d", "e"])
        with pytest.raises(ValueError, match="the engine has no tokenizer"):
            score(engine, "a", ["b"])


def test_a_model_that_generates_refuses_to_pool() -> None:
    model, _ = load(FIXTURES / "qwen2", progress=False)
    with engine_of(model) as engine:
        with pytest.raises(ValueError, match="asks for pooling and the model generates; accepted: requests without"):
            engine.generate([Request([1], pooling=Pooling())])
        with pytest.raises(ValueError, match="embed: the model generates; accepted: a model that pools"):
            embed(engine, [[1]])


if __name__ == "__main__":
    main(*sys.argv[1:])
