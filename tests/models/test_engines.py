"""Families in an engine: a request has one answer, alone and together, after preemption and after other weights."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import detjax
from detjax import SamplingParams
from detjax.engine import Engine, Generation, Request
from detjax.engine.model_runner import bytes_of_slot
from detjax.models import Decoder
from tests.models.shallow_models import shallow
from tests.support.bits import assert_same_bits, same_bits


def bits_of(generations: list[Generation]) -> list[Any]:
    return [(np.asarray(c.tokens), np.float32(c.logprobs)) for g in generations for c in g.completions]


def trained_logprobs(model: Decoder, sequence: list[int]) -> np.ndarray:
    """Logprobs of all tokens but the first, as in training."""
    graphdef, state = nnx.split(model)

    def logprobs(state: Any, tokens: jax.Array) -> jax.Array:
        decoder = nnx.merge(graphdef, state)
        return decoder.logprobs(decoder.hidden(tokens[:, :-1])[0], tokens[:, 1:])

    return np.asarray(detjax.jit(logprobs)(state, jnp.asarray([sequence], jnp.int32))[0])


@dataclasses.dataclass(frozen=True)
class Case:
    """A fixture's layers from `first` to `stop`, and the pages of the engine; with 3 pages, requests are preempted."""

    name: str
    first: int
    stop: int
    dtype: str
    num_pages: int | None = None

    @property
    def is_small(self) -> bool:
        return self.stop - self.first == 1


LARGE = (
    *(Case("deepseek-v3", 0, 2, "bfloat16", num_pages) for num_pages in (None, 3)),
    *(Case("qwen3-next", 0, 4, "bfloat16", num_pages) for num_pages in (None, 3)),
    *(Case(name, 0, 3, "float32", num_pages) for name in ("gemma2", "gemma3") for num_pages in (None, 3)),
    *(Case("gemma4", 0, 5, "bfloat16", num_pages) for num_pages in (None, 3)),
    Case("gemma4-moe", 0, 3, "float32"),
    *(Case(name, 0, 2, "bfloat16", 3) for name in ("glm4", "glm4-moe", "granite", "phi3")),
    Case("smollm3", 0, 3, "bfloat16", 3),
    Case("gpt-oss", 0, 2, "bfloat16"),
    Case("mixtral", 0, 2, "bfloat16"),
)


@pytest.mark.parametrize(
    "case",
    [
        Case("gemma2", 0, 1, "float32"),
        *(pytest.param(case, marks=pytest.mark.nightly) for case in LARGE),
    ],
    ids=lambda case: f"{case.name}-{case.dtype}-{case.num_pages}",
)
def test_a_request_has_the_answer_of_the_training_forward_alone_and_together(case: Case) -> None:
    model = shallow(case.name, case.first, case.stop, case.dtype)
    random, vocabulary = np.random.default_rng(3), model.config.vocab_size
    lengths = [(131, 3), (0, 9)] if case.is_small else [(200, 3), (0, 9), (130, 1), (200, 40), (0, 1), (0, 122)]
    if case.num_pages is not None:
        # The first three have a page each, and need a second one while all are running.
        lengths = [(0, 122), (0, 120), (0, 121), (200, 3), (0, 9), (130, 1)]
    beginning = random.integers(2, vocabulary, 200).tolist()
    prompts = [beginning[:shared] + random.integers(2, vocabulary, rest).tolist() for shared, rest in lengths]
    params = SamplingParams(temperature=0.8, max_tokens=4 if case.is_small else 12, ignore_eos=True)
    requests = [Request(prompt, dataclasses.replace(params, seed=i)) for i, prompt in enumerate(prompts)]
    scored = Request(prompts[0], dataclasses.replace(params, seed=0, prompt_logprobs=True))
    settings: dict[str, Any] = {"max_samples": 2 if case.is_small else 6, "token_budget": 64, "max_length": 256}
    if model.has_slots:
        settings["snapshot_tokens"] = 1
    state = nnx.state(model)
    with Engine(model, None, num_pages=case.num_pages, **settings) as engine:
        answers = engine.generate(requests)
        expected = bits_of(answers)
        again = [engine.generate([request])[0] for request in requests]
        assert_same_bits(bits_of(again), expected)
        (with_prompt,) = engine.generate([scored])
        engine.update_weights(jax.tree.map(lambda leaf: (leaf * 1.25).astype(leaf.dtype), state))
        assert not same_bits(bits_of(engine.generate(requests[:1])), expected[:1])
        engine.update_weights(state)
        assert_same_bits(bits_of(engine.generate(requests[:1])), expected[:1])
        stats = engine.stats()
    tokens = answers[0].completions[0].tokens
    logprobs = trained_logprobs(model, [*prompts[0], *tokens])
    assert_same_bits(expected[0][1], logprobs[-len(tokens) :])
    assert with_prompt.prompt is not None
    assert_same_bits(np.float32(with_prompt.prompt.logprobs), logprobs[: -len(tokens)])
    assert_same_bits(bits_of([with_prompt]), expected[:1])
    if case.num_pages is not None:
        assert stats.preemptions > 0
    elif model.has_slots:
        assert (stats.snapshots > 0, stats.snapshot_hits > 0) == (True, True)
        assert stats.snapshot_bytes == stats.snapshots * bytes_of_slot(model)
    else:
        assert again[0].cached_tokens == 128
