"""Corrections weigh tokens by exact ratios, and by exactly 1.0 where sampler and trainer agree in every bit."""

import functools
import math
from collections.abc import Callable

import numpy as np
import pytest

from detjax.audit.comparison.logprobs import check_pairs
from detjax.rl.policy_gradients.corrections import none, sequence_masked, sequence_truncated, token_truncated
from tests.support.bits import assert_same_bits
from tests.support.unchecked import unchecked

type Correction = Callable[[list[np.ndarray], list[np.ndarray]], list[np.ndarray]]

CORRECTIONS: dict[str, Correction] = {
    "none": none,
    "token_truncated": functools.partial(token_truncated, cap=2.0),
    "sequence_truncated": functools.partial(sequence_truncated, cap=2.0),
    "sequence_masked": functools.partial(sequence_masked, low=0.5, high=2.0),
}
every_correction = pytest.mark.parametrize("correction", CORRECTIONS.values(), ids=CORRECTIONS)


def arrays(*sequences: list[float]) -> list[np.ndarray]:
    return [np.array(sequence, np.float32) for sequence in sequences]


def values(weights: list[np.ndarray]) -> list[list[float]]:
    assert {array.dtype for array in weights} <= {np.dtype(np.float64)}
    return [array.tolist() for array in weights]


def random_pairs(scale: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
    draw = np.random.default_rng(0)
    sampler = [-draw.exponential(size=length).astype(np.float32) for length in (5, 0, 1, 33, 128)]
    trainer = [array + (scale * draw.normal(size=array.size)).astype(np.float32) for array in sampler]
    return sampler, trainer


@every_correction
def test_equal_logprobs_have_weights_of_exactly_one(correction: Correction) -> None:
    sampler, _ = random_pairs(0.0)
    weights = correction(sampler, [array.copy() for array in sampler])
    assert_same_bits(weights, [np.ones(array.shape) for array in sampler])


def test_no_correction_weighs_all_tokens_alike() -> None:
    sampler, trainer = random_pairs(1.0)
    assert_same_bits(none(sampler, trainer), [np.ones(array.shape) for array in sampler])


def test_ratios_of_tokens_are_cut_at_the_cap() -> None:
    # The logprobs' difference is exact, so the expected ratio is one exponential.
    weights = token_truncated(arrays([-1.0, -1.0, -1.0], [-2.0]), arrays([-0.5, -1.5, -0.25], [-2.0]), 2.0)
    assert values(weights) == [[math.exp(0.5), math.exp(-0.5), 2.0], [1.0]]


def test_a_sequence_has_the_product_of_its_ratios_cut_at_the_cap() -> None:
    sampler, trainer = arrays([-1.0, -1.0], [-1.0, -2.0], []), arrays([-0.5, -1.25], [-0.25, -1.5], [])
    assert values(sequence_truncated(sampler, trainer, 2.0)) == [[math.exp(0.25)] * 2, [2.0] * 2, []]


def test_sequences_outside_of_the_bounds_are_masked() -> None:
    sampler = arrays([-1.0, -1.0], [-1.0, -2.0], [-1.0], [-1.0], [])
    trainer = arrays([-0.5, -1.25], [-0.25, -1.5], [-2.0], [-1.5], [])
    weights = sequence_masked(sampler, trainer, 0.5, 2.0)
    assert values(weights) == [[math.exp(0.25)] * 2, [0.0] * 2, [0.0], [math.exp(-0.5)], []]


def test_products_on_the_bounds_are_kept() -> None:
    sampler, trainer = arrays([-1.0]), arrays([-1.5])
    ratio = math.exp(-0.5)
    assert values(sequence_masked(sampler, trainer, ratio, 1.0)) == [[ratio]]
    assert values(sequence_masked(sampler, trainer, 0.0, ratio)) == [[ratio]]
    assert values(sequence_masked(sampler, trainer, math.nextafter(ratio, 1), 1.0)) == [[0.0]]
    assert values(sequence_masked(sampler, trainer, 0.0, math.nextafter(ratio, 0))) == [[0.0]]


def test_the_logprobs_difference_is_not_rounded_to_float32() -> None:
    sampler, trainer = arrays([-1.0]), arrays([-1e-9])
    (weights,) = token_truncated(sampler, trainer, 10.0)
    assert weights.tolist() == [math.exp(1.0 - float(np.float32(1e-9)))] != [math.exp(1.0)]


@every_correction
def test_a_sequence_has_the_same_bits_alone_and_among_others(correction: Correction) -> None:
    sampler, trainer = random_pairs(0.1)
    together = correction(sampler, trainer)
    for index in range(len(sampler)):
        (alone,) = correction(sampler[index : index + 1], trainer[index : index + 1])
        assert_same_bits(alone, together[index])


def test_a_token_has_the_same_bits_wherever_it_stands() -> None:
    sampler, trainer = random_pairs(0.1)
    weights = token_truncated(sampler, trainer, 2.0)
    for start in range(40):
        (part,) = token_truncated([sampler[-1][start:]], [trainer[-1][start:]], 2.0)
        assert_same_bits(part, weights[-1][start:])


@pytest.mark.parametrize(
    "correction",
    [functools.partial(sequence_truncated, cap=1e30), functools.partial(sequence_masked, low=0.0, high=1e30)],
    ids=["truncated", "masked"],
)
def test_the_order_of_tokens_does_not_change_a_product(correction: Correction) -> None:
    # Magnitudes so different that no float64 holds all bits of the sum.
    sampler, trainer = (-(10 ** np.random.default_rng(seed).uniform(-14, 0.5, 64)) for seed in (0, 1))
    sampler, trainer = sampler.astype(np.float32), trainer.astype(np.float32)
    (expected,) = correction([sampler], [trainer])
    assert expected[0] not in (0.0, 1e30)
    for seed in range(20):
        order = np.random.default_rng(seed).permutation(sampler.size)
        (weights,) = correction([sampler[order]], [trainer[order]])
        assert_same_bits(weights, expected)


def test_ratios_that_no_float64_holds_are_cut_or_masked_and_those_of_impossible_tokens_are_zero() -> None:
    sampler, trainer = arrays([-2000.0, -1.0]), arrays([-1.0, -1.0])
    assert values(token_truncated(sampler, trainer, 2.0)) == [[2.0, 1.0]]
    assert values(sequence_truncated(sampler, trainer, 2.0)) == [[2.0, 2.0]]
    assert values(sequence_masked(sampler, trainer, 0.0, 1e300)) == [[0.0, 0.0]]
    impossible = arrays([-math.inf, -1.0])
    assert values(token_truncated(trainer, impossible, 2.0)) == [[0.0, 1.0]]
    assert values(sequence_truncated(trainer, impossible, 2.0)) == [[0.0, 0.0]]


@every_correction
@pytest.mark.parametrize(
    ("sampled", "trained"),
    [(math.nan, -1.0), (-math.inf, -1.0), (math.inf, -1.0), (-1.0, math.nan), (-1.0, math.inf), (-math.inf, -math.inf)],
)
def test_logprobs_for_which_no_weight_is_right_are_refused(
    correction: Correction, sampled: float, trained: float
) -> None:
    with pytest.raises(ValueError, match=rf"token 1 of sequence 1 has logprob {sampled} from .* and {trained} from"):
        correction(arrays([-1.0], [-1.0, sampled]), arrays([-1.0], [-1.0, trained]))


def test_caps_and_bounds_outside_of_their_range_are_refused() -> None:
    sampler, trainer = random_pairs(0.1)
    for cap in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="token_truncated: cap is"):
            token_truncated(sampler, trainer, cap)
        with pytest.raises(ValueError, match="sequence_truncated: cap is"):
            sequence_truncated(sampler, trainer, cap)
    for low, high in ((-0.1, 2.0), (2.0, 0.5), (0.5, math.inf), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="sequence_masked: low is"):
            sequence_masked(sampler, trainer, low, high)


def test_arrays_that_do_not_belong_together_are_refused() -> None:
    correction = unchecked(none)
    with pytest.raises(ValueError, match="none: sampler has 2 sequences and trainer 1; accepted: equal numbers"):
        correction(arrays([-1.0], [-1.0]), arrays([-1.0]))
    with pytest.raises(ValueError, match=r"none: trainer\[1\] is float32\[2\]; accepted: float32\[1\]"):
        correction(arrays([-1.0], [-1.0]), arrays([-1.0], [-1.0, -2.0]))
    check = functools.partial(unchecked(check_pairs), "none")
    with pytest.raises(ValueError, match=r"none: sampler\[0\] is float64\[1\]; accepted: float32\[1\]"):
        check([np.zeros(1)], arrays([-1.0]))
    with pytest.raises(ValueError, match=r"none: sampler\[0\] is float32\[1, 1\]; accepted: float32\[1\]"):
        check([np.zeros((1, 1), np.float32)], arrays([-1.0]))
