"""Families beyond dense: an engine's answers, its logprobs in the trainer, and gradients, each with one set of bits."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import detjax
from detjax.engine import Completion, Engine, Request, SamplingParams
from detjax.models import Decoder, load
from detjax.models.network import split
from detjax.rl.trainer.losses import LogLikelihood
from detjax.rl.trainer.microbatches import Layout, Packed, Rows, Sample
from detjax.rl.trainer.optimizers import adamw
from detjax.rl.trainer.step import Plan, batch_gradients
from detjax.rl.trainer.trainer import Trainer
from tests.support.bits import assert_same_bits, same_bits

FIXTURES = Path(__file__).parents[1] / "fixtures"
NAMES = ("qwen3-moe", "mixtral", "olmoe", "gpt-oss", "qwen3-next", "qwen3-5", "qwen3-5-moe")


@functools.cache
def model(name: str) -> Decoder:
    return load(FIXTURES / name, dtype="bfloat16", progress=False)[0]


@functools.cache
def prompts(name: str) -> list[list[int]]:
    random = np.random.default_rng(0)
    lengths = (1, 5, 40, 140, 17, 16, 33)
    return [random.integers(0, model(name).config.vocab_size, length).tolist() for length in lengths]


def engine_for(name: str) -> Engine:
    return Engine(model(name), None, max_samples=4, token_budget=48, max_length=192)


def answers(engine: Engine, given: list[list[int]]) -> list[Completion]:
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
    return [generation.completions[0] for generation in engine.generate([Request(prompt, params) for prompt in given])]


@pytest.fixture(scope="module", params=NAMES)
def family(request: pytest.FixtureRequest) -> Iterator[tuple[str, Engine]]:
    with engine_for(request.param) as engine:
        yield request.param, engine


def trainer_logprobs(name: str, completions: list[Completion], layout: Layout) -> list[np.ndarray]:
    samples = [
        Sample(np.array([*prompt, *one.tokens], np.int32), *np.zeros((2, len(one.tokens)), np.float32))
        for prompt, one in zip(prompts(name), completions, strict=True)
    ]
    trainer = Trainer(model(name), adamw(1e-3), LogLikelihood(), Plan(layout))
    return trainer.logprobs(samples)


@pytest.mark.sampled(0)
def test_a_request_gets_the_same_answer_alone_and_in_a_crowd_and_the_trainer_its_logprobs(
    family: tuple[str, Engine],
) -> None:
    name, engine = family
    together = answers(engine, prompts(name))
    alone = [answers(engine, [prompt])[0] for prompt in prompts(name)[::2]]
    assert alone == together[::2]
    for layout in (Rows(2, 160), Packed(320)):
        trained = trainer_logprobs(name, together, layout)
        assert_same_bits(trained, [np.asarray(one.logprobs, np.float32) for one in together])


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", NAMES)
def test_stock_numerics_differ_between_sampler_and_trainer(name: str) -> None:
    with detjax.use_backend("stock"), engine_for(name) as engine:
        together = answers(engine, prompts(name))
        trained = trainer_logprobs(name, together, Rows(2, 160))
        assert not same_bits(trained, [np.asarray(one.logprobs, np.float32) for one in together])


def gradients(name: str, layout: Layout, batch: list[Sample]) -> Any:
    network, weights = split(model(name))
    return jax.device_get(batch_gradients(network, weights, batch, LogLikelihood(), Plan(layout, shards=2)).leaves)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", NAMES)
def test_microbatches_padding_and_packing_change_no_gradient(name: str) -> None:
    random = np.random.default_rng(1)
    batch = []
    for length in (17, 40, 2, 33, 16):
        tokens = random.integers(0, model(name).config.vocab_size, length).astype(np.int32)
        batch.append(Sample(tokens, random.standard_normal(length - 1).astype(np.float32), np.zeros(length - 1, "f4")))
    expected = gradients(name, Rows(3, 48), batch)
    assert all((leaf != 0).any() for leaf in expected)
    for layout in (Rows(1, 48), Rows(2, 64), Packed(64)):
        assert_same_bits(gradients(name, layout, batch), expected)
    # The control: another order of the sequences.
    assert not same_bits(gradients(name, Rows(3, 48), batch[::-1]), expected)
