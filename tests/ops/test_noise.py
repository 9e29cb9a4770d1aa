"""The noise of sampling: Random123's vectors, what it depends on, and the statistics of tokens drawn with it."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from detjax import ops
from detjax.operands import noise
from tests.contract import emulation
from tests.support.bits import assert_same_bits

# Counter, key and result of Philox-4x32-10 in Random123's file of known answers.
KNOWN = (
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
)
PROMPT = ops.prompt_digest([3, 1, 4])
SEEDS = 0, 1, 2**32 - 1, 2**32, 2**32 + 1, 2**63, 2**64 - 1


def test_philox_gives_the_known_answers() -> None:
    for counter, key, answer in KNOWN:
        words = [jnp.full(1, word, jnp.uint32) for word in (*counter, *key)]
        a, b, c, d, *words = words
        result = noise.philox((a, b, c, d), (words[0], words[1]))
        assert [int(word[0]) for word in result] == answer
        assert emulation.philox(counter, key) == answer


def test_the_upper_half_of_a_product_of_words_is_exact() -> None:
    words = np.random.default_rng(0).integers(0, 2**32, 1000, np.uint32)
    words[:6] = 0, 1, 2**16 - 1, 2**16, 2**31, 2**32 - 1
    for factor in (np.uint32(0xD2511F53), np.uint32(0xCD9E8D57), np.uint32(2**32 - 1)):
        expected = (words.astype(np.uint64) * np.uint64(factor) >> np.uint64(32)).astype(np.uint32)
        assert_same_bits(noise.multiply_high(jnp.asarray(words), factor), expected)


def test_digests_and_keys_are_the_same_on_every_machine() -> None:
    images = b"one", b"other"
    assert PROMPT.hex() == "9931569a24ced61f657e05c4957e7f0aadfc8405e5ba235d5fc90fad47446f9f"
    for tokens, given in (([], ()), ([3, 1, 4], ()), ([2**31 - 1, 0], images)):
        assert ops.prompt_digest(tokens, given) == emulation.prompt_digest(tokens, given)
    assert ops.noise_key(7, PROMPT) == (4133689421, 1470025727, 662003392, 3243293780)
    for seed in SEEDS:
        for index in (0, 1, 2**31 - 1):
            assert ops.noise_key(seed, PROMPT, index) == emulation.noise_key(seed, PROMPT, index)


def test_prompts_that_differ_have_other_digests() -> None:
    prompts: list[tuple[list[int], tuple[bytes, ...]]] = [([1, 2], ()), ([2, 1], ()), ([1, 2, 0], ()), ([1], ())]
    prompts += [([1, 2], images) for images in ((b"ab",), (b"a", b"b"), (b"b", b"a"), (b"",))]
    digests = {ops.prompt_digest(tokens, images) for tokens, images in prompts}
    assert len(digests) == len(prompts)
    assert len({ops.noise_key(seed, digest, index) for digest in digests for seed in SEEDS for index in (0, 1)}) == 112


@pytest.mark.parametrize(
    ("seed", "index", "words"),
    [(-1, 0, "seed is -1"), (2**64, 0, "seed is"), (0, -1, "sample_index is -1"), (0, 2**31, "sample_index is")],
)
def test_a_seed_or_an_index_out_of_range_is_refused(seed: int, index: int, words: str) -> None:
    with pytest.raises(ValueError, match=rf"{words}.*; accepted: 0 to 2\^(64|31) - 1"):
        ops.noise_key(seed, PROMPT, index)


def noise_of(keys: Sequence[Any], positions: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
    arrays = jnp.asarray(np.asarray(keys, np.uint32)), jnp.asarray(positions, jnp.int32)
    return np.asarray(ops.sampling_noise(*arrays, jnp.asarray(tokens, jnp.int32)))


def test_the_noise_of_given_ids_is_that_of_the_whole_vocabulary_and_of_numpy() -> None:
    keys = [ops.noise_key(seed, PROMPT) for seed in SEEDS[:3]]
    positions, borders = [0, 5, 2**31 - 1], [127, 128, 129, 383, 384, 511, 512, 513, 4095, 4096, 151_935, 2**31 - 1]
    result = noise_of(keys, positions, borders)
    for row, key, position in zip(result, keys, positions, strict=True):
        expected = emulation.gumbel(emulation.random_bits(key, position, borders))
        np.testing.assert_allclose(row, expected, rtol=2e-6, atol=2e-6)
    rows = jnp.asarray(keys, jnp.uint32), jnp.asarray(positions, jnp.int32)
    for first, size in ((0, 40), (0, 130), (4096, 1100)):
        whole = np.asarray(noise.noise_of_range(*rows, jnp.int32(first), size))
        np.testing.assert_allclose(noise_of(keys, positions, range(first, first + size)), whole, rtol=1e-6, atol=1e-6)


def exponential(bits: list[int]) -> np.ndarray:
    """The exponential variables of random bits. The noise is their negative logarithm."""
    return np.exp(-np.asarray(noise.gumbel(jnp.asarray(bits, jnp.uint32)), np.float64))


def test_the_largest_numbers_are_as_rare_as_they_should_be() -> None:
    """Unlikely tokens are chosen by large numbers alone: where those lie too low, such tokens come too seldom."""
    bits = [*range(64), 1000, 2**16 + 1, 2**23 - 1]
    # The probability of a smaller variable is the middle of the step of 2^-32.
    np.testing.assert_allclose(-np.expm1(-exponential(bits)), (np.array(bits) + 0.5) * 2.0**-32, rtol=3e-6)
    largest = np.asarray(noise.gumbel(jnp.asarray([0], jnp.uint32)))
    np.testing.assert_allclose(largest, 33 * np.log(2), rtol=1e-6)


def test_likely_numbers_have_23_bits() -> None:
    bits = np.array([2**23, 2**23 + 511, 2**23 + 512, 2**31 - 1, 2**31, 2**32 - 513, 2**32 - 512, 2**32 - 1])
    expected = ((bits >> 9) + 0.5) * 2.0**-23
    np.testing.assert_allclose(-np.expm1(-exponential(bits.tolist())), expected, rtol=2e-6)
    ends = exponential(bits.tolist())
    assert ends[0] == ends[1] < ends[2] and ends[-2] == ends[-1] > ends[-3] and np.isfinite(ends).all()
    # Rare numbers end where likely ones begin.
    below = exponential([2**23 - 1])
    assert below < ends[0]
    np.testing.assert_allclose(below, ends[0], rtol=4e-5)


# --- statistics -------------------------------------------------------------------------------------------------------

LOG_P = np.log(np.float32([0.3, 0.01, 0.2, 0.05, 0.14, 0.15, 0.05, 0.1]))
IDS = 0, 128, 256, 384, 1, 129, 512, 5000
"""Some of these ids share a result of Philox."""
CRITICAL = {7: 24.3, 49: 85.4}
"""A chi-square, by degrees of freedom, that is exceeded in 1 of 1000 cases. These are few cases, and fixed."""


def drawn(keys: Sequence[Any], positions: Sequence[int]) -> np.ndarray:
    return np.argmax(LOG_P + noise_of(keys, positions, IDS), axis=1)


@functools.cache
def axis(name: str, count: int) -> np.ndarray:
    """The tokens drawn with `count` values of one of the noise's arguments, the others being fixed."""
    number = range(count)
    keys = {
        "positions": lambda: [ops.noise_key(1, PROMPT)] * count,
        "samples": lambda: [ops.noise_key(1, PROMPT, index) for index in number],
        "seeds": lambda: [ops.noise_key(seed, PROMPT) for seed in number],
        "high seeds": lambda: [ops.noise_key(seed << 32, PROMPT) for seed in number],
        "prompts": lambda: [ops.noise_key(1, ops.prompt_digest([token])) for token in number],
    }[name]()
    return drawn(keys, number if name == "positions" else [9] * count)


COUNTS = [100_000, pytest.param(4_000_000, marks=pytest.mark.nightly)]


@pytest.mark.parametrize("count", COUNTS)
def test_tokens_have_their_probabilities_along_every_axis(count: int) -> None:
    for name, share in {"positions": 1, "samples": 4, "seeds": 4, "high seeds": 4, "prompts": 4}.items():
        tokens = axis(name, count // share)
        expected = np.exp(LOG_P.astype(np.float64)) * len(tokens)
        observed = np.bincount(tokens, minlength=len(LOG_P))
        assert np.sum((observed - expected) ** 2 / expected) < CRITICAL[7], name


def dependence(first: np.ndarray, second: np.ndarray) -> float:
    """The chi-square of a table of pairs, against independence."""
    table = np.zeros((len(LOG_P),) * 2)
    np.add.at(table, (first, second), 1)
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / len(first)
    return float(np.sum((table - expected) ** 2 / expected))


@pytest.mark.parametrize("count", COUNTS)
def test_tokens_of_other_prompts_samples_positions_and_seeds_are_independent(count: int) -> None:
    positions = range(count)

    def tokens(key: Any, shift: int = 0) -> np.ndarray:
        return drawn([key] * count, [position + shift for position in positions])

    base = tokens(ops.noise_key(0, PROMPT))
    others = {f"seed {seed}": ops.noise_key(seed, PROMPT) for seed in SEEDS[1:]}
    others |= {"sample": ops.noise_key(0, PROMPT, 1), "prompt": ops.noise_key(0, ops.prompt_digest([3, 1, 5]))}
    for name, key in others.items():
        assert dependence(base, tokens(key)) < CRITICAL[49], name
    assert dependence(base, tokens(ops.noise_key(0, PROMPT), 1)) < CRITICAL[49]
    # The same key is not independent, and neither is one with equal numbers at one position in 20.
    assert dependence(base, tokens(ops.noise_key(0, PROMPT))) > 1000
    mixed = np.where(np.arange(count) % 20, tokens(ops.noise_key(1, PROMPT)), base)
    assert dependence(base, mixed) > CRITICAL[49]


def test_numbers_of_ids_that_share_a_counter_are_not_correlated() -> None:
    columns = noise_of([ops.noise_key(3, PROMPT)] * 40_000, range(40_000), [*IDS[:4], 1, 2])
    correlations = np.corrcoef(columns.T)[np.triu_indices(6, 1)]
    assert np.abs(correlations).max() < 4 / np.sqrt(40_000)


def test_a_row_of_noise_does_not_depend_on_its_batch() -> None:
    keys = [ops.noise_key(seed, PROMPT) for seed in range(33)]
    positions = list(range(33))
    alone = noise_of(keys[7:8], positions[7:8], range(300))
    assert_same_bits(noise_of(keys, positions, range(300))[7:8], alone)
