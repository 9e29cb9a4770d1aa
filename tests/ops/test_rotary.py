"""Frequencies of rotary embeddings: YaRN's options, by the formulas of the paper and of transformers, in float64."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax.ops import RotaryEmbedding, YarnScaling, rope
from tests.support.bits import assert_same_bits
from tests.support.unchecked import unchecked

HEAD_DIM, THETA, FACTOR, CONTEXT = 64, 10_000.0, 8.0, 4096


def embedding(**options: Any) -> RotaryEmbedding:
    return RotaryEmbedding(HEAD_DIM, THETA, YarnScaling(FACTOR, CONTEXT, **options))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0.1 * math.log(FACTOR) + 1),
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 0.7, "mscale_all_dim": 1.1}, (0.07 * math.log(FACTOR) + 1) / (0.11 * math.log(FACTOR) + 1)),
        ({"mscale": 0.7}, 0.1 * math.log(FACTOR) + 1),
        ({"mscale": 0.7, "mscale_all_dim": 1.1, "attention_factor": 1.25}, 1.25),
    ],
    ids=str,
)
def test_cosine_and_sine_have_yarns_factor(options: dict[str, float], expected: float) -> None:
    assert embedding(**options).embedding_scale == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("options", [{}, {"beta_fast": 20.0, "beta_slow": 2.5}], ids=str)
@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_interpolates_by_parts(truncate: bool, options: dict[str, float]) -> None:
    """Pairs that turn often keep their frequency, pairs that turn seldom have it divided, and a ramp lies between."""
    rotations = options.get("beta_fast", 32.0), options.get("beta_slow", 1.0)
    low, high = (HEAD_DIM * math.log(CONTEXT / (r * 2 * math.pi)) / (2 * math.log(THETA)) for r in rotations)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    frequencies = []
    for pair in range(HEAD_DIM // 2):
        plain = THETA ** (-2 * pair / HEAD_DIM)
        ramp = min(max((pair - low) / (high - low), 0.0), 1.0)
        frequencies.append(plain / FACTOR * ramp + plain * (1 - ramp))
    result = embedding(truncate=truncate, **options).inverse_frequencies
    np.testing.assert_allclose(result, frequencies, rtol=1e-6)
    other = embedding(truncate=not truncate, **options).inverse_frequencies
    assert not np.allclose(other, frequencies, rtol=1e-3, atol=0)


STORED = dict(np.load(Path(__file__).parents[1] / "fixtures" / "rotation.npz"))


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("yarn", {}),
        ("fractional_ends", {"truncate": False, "beta_fast": 4.0}),
        ("factor", {"attention_factor": 1.25}),
        ("mscale", {"mscale": 0.7, "mscale_all_dim": 1.3}),
    ],
)
@pytest.mark.parametrize("backend", ["portable", "stock"])
def test_a_part_of_the_columns_turns_as_in_transformers(case: str, options: dict[str, Any], backend: Any) -> None:
    heads, positions = STORED["heads"], STORED["positions"]
    width, turning = heads.shape[-1], 24
    # Checkpoints have all columns that turn before the others, and here they come first in both halves.
    columns = np.arange(width)
    first, second, rest = np.split(columns, (turning // 2, turning))
    order = np.concatenate([first, rest[: len(rest) // 2], second, rest[len(rest) // 2 :]])
    partial = RotaryEmbedding(width, 500.0, YarnScaling(FACTOR, 64, **options), rotary_dim=turning)
    with detjax.use_backend(backend):
        result = np.asarray(unchecked(rope)(jnp.asarray(heads[:, :, order]), jnp.asarray(positions), partial))
    expected = STORED[case][:, :, order]
    np.testing.assert_allclose(result, expected, atol=2e-5)
    still = order >= turning
    assert_same_bits(result[..., still], heads[:, :, order][..., still])


def test_gradients_of_columns_that_do_not_turn_stay_as_they_are() -> None:
    partial = RotaryEmbedding(8, 500.0, YarnScaling(FACTOR, 64, attention_factor=2.0), rotary_dim=4)
    x, dy = (jax.random.normal(jax.random.key(seed), (3, 2, 8)) for seed in range(2))
    (dx,) = jax.vjp(lambda x: unchecked(rope)(x, jnp.asarray([0, 5, 90]), partial), x)[1](dy)
    still = np.array([False, False, True, True] * 2)
    assert_same_bits(dx[..., still], dy[..., still])
    np.testing.assert_array_equal(dx[0][..., ~still], 2 * dy[0][..., ~still])


@pytest.mark.parametrize("theta", [0.0, -1.0, math.inf, math.nan])
def test_a_base_that_has_no_powers_is_refused(theta: float) -> None:
    with pytest.raises(ValueError, match=r"RotaryEmbedding: theta is .*; accepted: finite numbers > 0"):
        RotaryEmbedding(HEAD_DIM, theta)


def test_frequencies_do_not_depend_on_the_hosts_powers_and_logarithms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their last bits differ between processors, and a GPU's fingerprint does not name the processor."""
    options = {"truncate": False, "mscale": 0.7, "mscale_all_dim": 1.1}
    expected = embedding(**options)
    frequencies, scale = expected.inverse_frequencies, expected.embedding_scale
    for module, name in ((math, "log"), (math, "pow"), (np, "log"), (np, "power"), (np, "exp"), (np, "float_power")):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, function=function: function(*args) * 1.5)
    other = embedding(**options)
    np.testing.assert_array_equal(other.inverse_frequencies, frequencies)
    assert other.embedding_scale == scale
