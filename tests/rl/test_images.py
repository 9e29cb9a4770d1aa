"""Samples with images: the sampler's logprobs in the trainer, and towers that no step changes."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

import detjax
from detjax.engine import Request, SamplingParams
from detjax.models.network import split
from detjax.models.vision.prompt_images import ImageReader
from detjax.rl.trainer.losses import LogLikelihood
from detjax.rl.trainer.microbatches import Layout, Packed, Rows, Sample
from detjax.rl.trainer.optimizers import adamw
from detjax.rl.trainer.step import Plan
from detjax.rl.trainer.trainer import Trainer
from tests.support import towers
from tests.support.bits import assert_same_bits, same_bits

NAMES = (towers.VIDEO_NAME, "qwen3-5-vl", "qwen3-vl", "kimi-k2-5")


def requests(name: str) -> list[Request]:
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
    shown: list[Any] = [towers.reference(name)["image_0"]]
    shown.append(towers.video() if name == towers.VIDEO_NAME else towers.reference(name)["image_1"])
    prompt = towers.reference(name)["prompt"].tolist()
    return [
        Request(prompt, params, images=shown),
        Request([7, 8, 9], params),
        Request(prompt, params, images=[255 - shown[0], shown[1]]),
    ]


@functools.cache
def sampled(name: str) -> tuple[list[Sample], list[np.ndarray]]:
    """A sample of each request's answer, and the sampler's logprobs."""
    model, given = towers.model(name, "bfloat16"), requests(name)
    reader = ImageReader(model.config, model.image_options, model.video_options)
    answers = detjax.generate(
        model, [one.prompt for one in given], given[0].sampling, images=[one.images for one in given]
    )
    samples, logprobs = [], []
    for request, answer in zip(given, answers, strict=True):
        (one,) = answer.completions
        tokens = np.array([*answer.prompt_tokens, *one.tokens], np.int32)
        arrays = np.full((2, len(one.tokens)), 0.1, np.float32)
        samples.append(Sample(tokens, *arrays, images=reader.patches("the test", request.images)))
        logprobs.append(np.asarray(one.logprobs, np.float32))
    return samples, logprobs


def trainer(name: str, layout: Layout, **options: Any) -> Trainer:
    return Trainer(towers.model(name, "bfloat16"), adamw(1e-2), LogLikelihood(), Plan(layout, shards=2, **options))


@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.nightly) for name in NAMES[1:])])
def test_a_step_has_the_samplers_bits_in_every_layout_and_leaves_the_tower(name: str) -> None:
    samples, logprobs = sampled(name)
    assert not same_bits(logprobs[0], logprobs[2])
    before = jax.tree.map(np.asarray, split(towers.model(name, "bfloat16"))[1])
    after = []
    for layout in (Rows(2, 160), Packed(320)):
        one = trainer(name, layout)
        assert_same_bits(one.step(samples).logprobs, logprobs)
        after.append(jax.tree.map(np.asarray, one.weights))
    assert_same_bits(after[0], after[1])
    for path, old, new in zip(one.network.paths, before, after[0], strict=True):
        assert same_bits(old, new) == (path[0] == "vision" or path[-1] == "correction"), path


@pytest.mark.parametrize("name", [*NAMES[2:], *(pytest.param(name, marks=pytest.mark.nightly) for name in NAMES[:2])])
def test_the_trainer_has_the_logprobs_of_the_sampler_and_sees_which_image_is_whose(name: str) -> None:
    samples, logprobs = sampled(name)
    one = trainer(name, Packed(320))
    assert_same_bits(one.logprobs(samples), logprobs)
    exchanged = [dataclasses.replace(samples[0], images=samples[2].images), samples[1]]
    result = one.logprobs(exchanged)
    assert not same_bits(result[0], logprobs[0])
    assert_same_bits(result[1], logprobs[1])


def test_images_that_are_not_those_of_the_prompt_are_refused() -> None:
    one, request = trainer(NAMES[1], Rows(2, 160)), requests(NAMES[1])[0]
    model = towers.model(NAMES[1], "bfloat16")
    reader = ImageReader(model.config, model.image_options, model.video_options)
    images = reader.patches("the test", request.images)
    whole = np.array([*request.prompt, 5, 6], np.int32)
    with pytest.raises(ValueError, match=r"sample 0 has 2 places for images.* and 1 images"):
        one.logprobs([Sample(whole, *np.zeros((2, 2), np.float32), images=images[:1])])
    short = np.array([100, 5, 6], np.int32)
    with pytest.raises(ValueError, match="sample 0 has one token for an image; accepted: all tokens of the image"):
        one.logprobs([Sample(short, *np.zeros((2, 1), np.float32), images=images[:1])])
