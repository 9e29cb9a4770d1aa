"""The noise of requests in an engine, compared with NumPy for seed, prompt, sample and position."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from detjax.engine import Engine, Request, SamplingParams
from detjax.engine.sequence import RequestContext, samples
from detjax.models.vision.prompt_images import PromptImages
from tests.contract import emulation
from tests.support.small_loops import small_engine, small_model

FLAT = SamplingParams(max_tokens=6, temperature=1e30, ignore_eos=True, seed=2**64 - 1, n=2)
"""At this temperature, the noise alone chooses the token."""
PROMPTS = [3, 1, 4], [3, 1, 5]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with small_engine() as one:
        yield one


def chosen(prompt: Sequence[int], seed: int, index: int, count: int, vocabulary: int) -> list[int]:
    """The tokens of the largest noise in NumPy."""
    key = emulation.noise_key(seed, emulation.prompt_digest([*prompt]), index)
    places = range(len(prompt), len(prompt) + count)
    return [int(np.argmin(emulation.random_bits(key, place, range(vocabulary)))) for place in places]


def test_tokens_are_those_of_the_largest_noise_in_numpy(engine: Engine) -> None:
    vocabulary = small_model().config.vocab_size
    expected = [[chosen(prompt, FLAT.seed, index, 6, vocabulary) for index in range(2)] for prompt in PROMPTS]
    generations = engine.generate([Request(prompt, FLAT) for prompt in PROMPTS])
    assert [[[*one.tokens] for one in generation.completions] for generation in generations] == expected
    # Prompts and samples share no noise under one seed.
    assert len({tuple(tokens) for pair in expected for tokens in pair}) == 4
    # Generated tokens belong to no prompt: a request that is resumed keeps its noise.
    given = [tokens[:3] for tokens in expected[0]]
    (resumed,) = engine.generate([dataclasses.replace(Request(PROMPTS[0], FLAT), generated=given)])
    assert [[*one.tokens] for one in resumed.completions] == [tokens[3:] for tokens in expected[0]]


def test_images_salts_and_names_in_the_noise_of_a_request() -> None:
    def key(**fields: object) -> tuple[int, ...]:
        sequence, _ = samples((3, 1, 4), FLAT, RequestContext(**fields))  # pyright: ignore[reportArgumentType]
        return sequence.noise_key

    def images(*digests: bytes) -> PromptImages:
        images = object.__new__(PromptImages)
        images.spans = [(place, place + 1, digest) for place, digest in enumerate(digests)]
        return images

    prompt = emulation.prompt_digest([3, 1, 4])
    shown = emulation.prompt_digest([3, 1, 4], (b"a", b"b"))
    assert key() == key(client="c", prefix_root=b"salt") == emulation.noise_key(FLAT.seed, prompt, 0)
    assert key(images=images(b"a", b"b")) == emulation.noise_key(FLAT.seed, shown, 0)
    assert len({key(), *(key(images=images(*shown)) for shown in ([b"a"], [b"b"], [b"a", b"b"], [b"b", b"a"]))}) == 5
