"""Families beyond dense: an engine's answers, its logprobs in the trainer, and gradients, each with one set of bits."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

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
NAMES = (
    "gemma4",
    "gemma4-moe",
    "qwen3-moe",
    "mixtral",
    "olmoe",
    "gpt-oss",
    "glm4-moe",
    "qwen3-next",
    "qwen3-5",
    "qwen3-5-moe",
)
SMALL = "one layer of qwen3-5-moe"
"""A recurrent layer with experts."""
every_family = pytest.mark.parametrize(
    "name", [SMALL, *(pytest.param(name, marks=pytest.mark.nightly) for name in NAMES)]
)


@functools.cache
def model(name: str) -> Decoder:
    loaded = load(FIXTURES / name.removeprefix("one layer of "), dtype="bfloat16", progress=False)[0]
    if name != SMALL:
        return loaded
    config, experts, delta = loaded.config, loaded.config.experts, loaded.config.delta
    assert experts is not None and delta is not None and delta.layers[0]
    one = {
        "layers": 1,
        "windows": config.windows[:1],
        "experts": dataclasses.replace(experts, layers=experts.layers[:1]),
        "delta": dataclasses.replace(delta, layers=delta.layers[:1]),
    }
    return Decoder(dataclasses.replace(config, **one), rngs=nnx.Rngs(0), dtype="bfloat16")


@functools.cache
def prompts(name: str) -> list[list[int]]:
    random = np.random.default_rng(0)
    lengths = (1, 5, 70, 17) if name == SMALL else (1, 5, 40, 140, 17, 16, 33)
    return [random.integers(0, model(name).config.vocab_size, length).tolist() for length in lengths]


def answers(engine: Engine, given: list[list[int]]) -> list[Completion]:
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
    return [generation.completions[0] for generation in engine.generate([Request(prompt, params) for prompt in given])]


def trainer_logprobs(name: str, completions: list[Completion], layout: Layout) -> list[np.ndarray]:
    samples = [
        Sample(np.array([*prompt, *one.tokens], np.int32), *np.zeros((2, len(one.tokens)), np.float32))
        for prompt, one in zip(prompts(name), completions, strict=True)
    ]
    trainer = Trainer(model(name), adamw(1e-3), LogLikelihood(), Plan(layout))
    return trainer.logprobs(samples)


@every_family
def test_a_request_gets_the_same_answer_alone_and_in_a_crowd_and_the_trainer_its_logprobs(name: str) -> None:
    with Engine(model(name), None, max_samples=4, token_budget=48, max_length=192) as engine:
        together = answers(engine, prompts(name))
        alone = [answers(engine, [prompt])[0] for prompt in prompts(name)[::2]]
    assert alone == together[::2]
    logprobs = [np.asarray(one.logprobs, np.float32) for one in together]
    for layout in (Packed(192),) if name == SMALL else (Rows(2, 160), Packed(320)):
        assert_same_bits(trainer_logprobs(name, together, layout), logprobs)


def gradients(name: str, layout: Layout, batch: list[Sample]) -> Any:
    network, weights = split(model(name))
    result = batch_gradients(network, weights, batch, LogLikelihood(), Plan(layout, shards=2))
    return jax.device_get((result.leaves, result.logprobs))


@every_family
def test_microbatches_padding_and_packing_change_no_gradient(name: str) -> None:
    random = np.random.default_rng(1)
    batch = []
    for length in (17, 40, 2, 33, 16):
        tokens = random.integers(0, model(name).config.vocab_size, length).astype(np.int32)
        batch.append(Sample(tokens, random.standard_normal(length - 1).astype(np.float32), np.zeros(length - 1, "f4")))
    expected = gradients(name, Rows(3, 48), batch)
    assert [bool((leaf != 0).any()) for leaf in expected[0]] == list(split(model(name))[0].trained)
    for layout in (Packed(64),) if name == SMALL else (Rows(1, 48), Rows(2, 64), Packed(64)):
        assert_same_bits(gradients(name, layout, batch), expected)
    # The control: another order of the sequences.
    assert not same_bits(gradients(name, Rows(3, 48), batch[::-1])[0], expected[0])
