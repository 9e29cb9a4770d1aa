"""Divergence is exactly zero where bits are equal, exact where they are not, and honest about what is not finite."""

import decimal
import itertools
import json
import math
from decimal import Decimal

import numpy as np
import pytest

from detjax.audit.comparison.divergence import Divergence, divergence, ulps
from detjax.audit.comparison.logprobs import check_pairs
from tests.support.unchecked import unchecked

NONE = dict.fromkeys(("unequal_share", "mean_difference", "largest_difference", "k1", "k2", "k3"), 0.0)


def arrays(*sequences: list[float]) -> list[np.ndarray]:
    return [np.array(sequence, np.float32) for sequence in sequences]


def random_pairs(scale: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
    draw = np.random.default_rng(0)
    sampler = [-draw.exponential(size=length).astype(np.float32) for length in (5, 0, 1, 33, 400)]
    trainer = [array + (scale * draw.normal(size=array.size)).astype(np.float32) for array in sampler]
    return sampler, trainer


@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-5])
def test_every_measure_is_that_of_exact_arithmetic(scale: float) -> None:
    sampler, trainer = random_pairs(scale)
    pairs = list(zip(np.concatenate(sampler).tolist(), np.concatenate(trainer).tolist(), strict=True))
    with decimal.localcontext(prec=60):
        differences = [Decimal(trained) - Decimal(sampled) for sampled, trained in pairs]
        ratios, n = [difference.exp() for difference in differences], len(pairs)
        expected = {
            "mean_difference": sum(map(abs, differences)) / n,
            "largest_difference": max(map(abs, differences)),
            "k1": -sum(differences) / n,
            "k2": sum(d * d for d in differences) / (2 * n),
            "k3": sum(r - 1 - d for r, d in zip(ratios, differences, strict=True)) / n,
            "effective_sample_size": sum(ratios) ** 2 / sum(r * r for r in ratios),
        }
    measured = divergence(sampler, trainer)
    assert measured.tokens == n == 439
    assert measured.unequal_tokens == sum(d != 0 for d in differences) > 300
    assert measured.unequal_share == measured.unequal_tokens / n
    for name, value in expected.items():
        # k3's terms are small differences of float64 numbers that are about as large as the logprobs' difference.
        tolerance = 1e-16 / scale + 1e-14 if name == "k3" else 1e-14
        assert math.isclose(getattr(measured, name), value, rel_tol=tolerance), name


def test_equal_bits_have_no_divergence_at_all() -> None:
    sampler, _ = random_pairs(0.0)
    measured = divergence(sampler, [array.copy() for array in sampler])
    assert measured == Divergence(tokens=439, unequal_tokens=0, effective_sample_size=439.0, **NONE)
    # -0.0 equals 0.0, and would be an odd thing to read in a log.
    assert "-" not in json.dumps(measured.as_dict())


def test_one_unequal_bit_in_one_logprob_shows_in_every_measure() -> None:
    sampler, _ = random_pairs(0.0)
    trainer = [array.copy() for array in sampler]
    trainer[3][7] = np.nextafter(trainer[3][7], np.float32(0))
    measured = divergence(sampler, trainer).as_dict()
    assert (measured.pop("tokens"), measured.pop("unequal_tokens")) == (439, 1)
    assert measured.pop("effective_sample_size") <= 439
    assert measured.pop("k1") < 0
    assert (measured.pop("first_unequal"), measured["largest_ulps"]) == ((3, 7), 1)
    assert min(measured.values()) > 0, measured


def test_ulps_count_the_float32_numbers_between_two() -> None:
    numbers = np.float32([-np.inf, -1.0, np.nextafter(np.float32(-1.0), np.float32(0)), -1e-45, -0.0, 0.0, 1e-45])
    distances = [ulps(*pair) for pair in itertools.pairwise(numbers)]
    assert distances[1:2] + distances[3:] == [1, 1, 1, 1]
    assert ulps(numbers[0], numbers[-1]) == sum(distances) == ulps(numbers[-1], numbers[0])  # pyright: ignore[reportCallIssue]


def test_the_order_of_tokens_and_their_sequences_does_not_change_a_bit() -> None:
    sampler, trainer = random_pairs(0.5)
    expected = divergence(sampler, trainer)
    sampled, trained = np.concatenate(sampler), np.concatenate(trainer)
    for seed in range(20):
        draw = np.random.default_rng(seed)
        order, cuts = draw.permutation(sampled.size), np.sort(draw.integers(0, sampled.size, 5))
        assert divergence(np.split(sampled[order], cuts), np.split(trained[order], cuts)) == expected


def test_no_tokens_have_no_divergence() -> None:
    empty = Divergence(tokens=0, unequal_tokens=0, effective_sample_size=0.0, **NONE)
    assert divergence([], []) == divergence(arrays([], []), arrays([], [])) == empty


def test_zeros_of_unequal_signs_are_unequal_bits_without_a_difference() -> None:
    measured = divergence(arrays([0.0, -1.0]), arrays([-0.0, -1.0]))
    assert (measured.unequal_tokens, measured.unequal_share, measured.largest_difference) == (1, 0.5, 0.0)


def test_equal_infinities_and_equal_nans_are_equal() -> None:
    logprobs = arrays([-math.inf, math.nan, -1.0])
    expected = Divergence(tokens=3, unequal_tokens=0, effective_sample_size=3.0, **NONE)
    assert divergence(logprobs, logprobs) == expected


def test_a_token_that_the_trainer_thinks_impossible_diverges_without_limit() -> None:
    measured = divergence(arrays([-1.0, -2.0]), arrays([-math.inf, -2.0]))
    assert (measured.mean_difference, measured.largest_difference) == (math.inf, math.inf)
    assert (measured.k1, measured.k2, measured.k3) == (math.inf, math.inf, math.inf)
    assert (measured.unequal_share, measured.effective_sample_size) == (0.5, 1.0)
    assert divergence(arrays([-1.0]), arrays([-math.inf])).effective_sample_size == 0.0


def test_a_token_that_the_sampler_thought_impossible_leaves_no_effective_sample_size() -> None:
    measured = divergence(arrays([-math.inf, -2.0]), arrays([-1.0, -2.0]))
    assert (measured.k1, measured.k2, measured.k3) == (-math.inf, math.inf, math.inf)
    assert math.isnan(measured.effective_sample_size)
    both = divergence(arrays([-math.inf, -2.0]), arrays([-1.0, -math.inf]))
    assert math.isnan(both.k1) and (both.k2, both.k3) == (math.inf, math.inf)


def test_nan_shows_in_every_measure_but_the_counts() -> None:
    measured = divergence(arrays([-2.0, math.nan, -math.inf]), arrays([-2.5, -1.0, -1.0])).as_dict()
    assert (measured.pop("tokens"), measured.pop("unequal_tokens"), measured.pop("unequal_share")) == (3, 3, 1.0)
    assert (measured.pop("largest_ulps"), measured.pop("first_unequal")) == (
        ulps(*np.float32([np.inf, -np.inf])),
        (0, 0),
    )
    assert all(math.isnan(value) for value in measured.values()), measured


def test_ratios_that_no_float64_holds_are_infinite_in_k3_alone() -> None:
    measured = divergence(arrays([-709.5, -709.5, -2.0]), arrays([0.0, 0.0, -2.5]))
    assert measured.k3 == math.inf and measured.k2 == pytest.approx((2 * 709.5**2 + 0.25) / 6)
    assert measured.effective_sample_size == 2.0
    assert divergence(arrays([-1000.0]), arrays([-1.0])).k3 == math.inf


def test_arrays_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match="divergence: sampler has 1 sequences and trainer 0; accepted: equal numbers"):
        divergence(arrays([-1.0]), [])
    with pytest.raises(ValueError, match=r"divergence: trainer\[0\] is float32\[2\]; accepted: float32\[1\]"):
        divergence(arrays([-1.0]), arrays([-1.0, -1.0]))
    with pytest.raises(ValueError, match=r"divergence: trainer\[0\] is float64\[1\]; accepted: float32\[1\]"):
        unchecked(check_pairs)("divergence", arrays([-1.0]), [np.zeros(1)])
