"""Frequencies of rotary embeddings: YaRN's options, by the formulas of the paper and of transformers, in float64."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax.ops import LinearScaling, Queries, RotaryEmbedding, YarnScaling, rope
from tests.ops import references
from tests.ops.cases import ROPE_SCALINGS
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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 1.0),
        ({"mscale": 0.7}, 1.0),
        ({"mscale_all_dim": 1.1}, (0.11 * math.log(FACTOR) + 1) ** 2),
        ({"mscale": 0.7, "mscale_all_dim": 0.7, "attention_factor": 1.5}, (0.07 * math.log(FACTOR) + 1) ** 2),
    ],
    ids=str,
)
def test_scores_have_yarns_factor_for_all_columns(options: dict[str, float], expected: float) -> None:
    assert embedding(**options).score_scale == pytest.approx(expected, rel=1e-15)


def test_a_context_that_is_not_longer_has_no_factor() -> None:
    for factor in (1.0, 0.5):
        same = RotaryEmbedding(HEAD_DIM, THETA, YarnScaling(factor, CONTEXT, mscale_all_dim=1.1))
        assert (same.embedding_scale, same.score_scale) == (1.0, 1.0)
    assert RotaryEmbedding(HEAD_DIM, THETA, LinearScaling(8.0)).score_scale == 1.0
    assert RotaryEmbedding(HEAD_DIM, THETA, LinearScaling(8.0)).embedding_scale == 1.0


@pytest.mark.parametrize(
    ("name", "scaling"),
    [
        ("default", None),
        ("linear", {"rope_type": "linear", "factor": 4.0}),
        (
            "llama3",
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original": 8192},
        ),
    ],
)
def test_frequencies_are_those_of_the_formulas(name: str, scaling: dict[str, Any] | None) -> None:
    expected, _ = references.frequencies(126, 500_000.0, scaling)
    result = RotaryEmbedding(126, 500_000.0, ROPE_SCALINGS[name]).inverse_frequencies
    assert result.dtype == np.float32
    # Exponents and powers are rounded to float32, and the ramp of llama3 has a difference of such numbers.
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def turned_by(partial: RotaryEmbedding) -> list[int]:
    """The coordinate that turns each pair of columns."""
    axes = len(partial.sections or ())
    return np.asarray(partial.pair_positions(jnp.arange(axes, dtype=jnp.int32))).tolist()


def test_sections_turn_by_their_coordinates() -> None:
    assert turned_by(RotaryEmbedding(16, THETA, sections=(1, 2, 5))) == [0, 1, 1, 2, 2, 2, 2, 2]
    assert turned_by(RotaryEmbedding(16, THETA, sections=(5, 1, 2), interleaved=True)) == [0, 1, 2, 0, 0, 2, 0, 0]
    # Columns that do not turn have the last coordinate.
    assert turned_by(RotaryEmbedding(16, THETA, rotary_dim=8, sections=(1, 3))) == [0, 1, 1, 1, 1, 1, 1, 1]
    plain = RotaryEmbedding(16, THETA)
    positions = jnp.asarray([3, 9], jnp.int32)
    assert plain.pair_positions(positions).tolist() == [[3], [9]]
    assert plain.all_coordinates(positions) is positions
    assert RotaryEmbedding(8, THETA, sections=(1, 3)).all_coordinates(positions).tolist() == [[3, 3], [9, 9]]


def test_axial_sections_have_the_frequencies_of_their_own_heads() -> None:
    axial = RotaryEmbedding(16, THETA, sections=(3, 5), axial=True).inverse_frequencies
    heads = [RotaryEmbedding(2 * pairs, THETA).inverse_frequencies for pairs in (3, 5)]
    assert_same_bits(axial, np.concatenate(heads))
    assert axial[0] == axial[3] == 1


def test_coordinates_of_queries_turn_where_there_are_sections() -> None:
    table, start = jnp.zeros((2, 1), jnp.int32), jnp.asarray([4, 0], jnp.int32)
    coordinates = jnp.arange(12, dtype=jnp.int32).reshape(2, 3, 2)
    queries = Queries(table, start, start + 3, coordinates=coordinates)
    assert_same_bits(RotaryEmbedding(8, THETA, sections=(1, 3)).positions_of(queries, 3), coordinates)
    assert RotaryEmbedding(8, THETA).positions_of(queries, 3).tolist() == [[4, 5, 6], [0, 1, 2]]
    equal = RotaryEmbedding(8, THETA, sections=(1, 3)).positions_of(Queries(table, start, start + 3), 3)
    assert equal.tolist() == [[[4] * 2, [5] * 2, [6] * 2], [[0] * 2, [1] * 2, [2] * 2]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotary_dim": 16}, "rotary_dim is 16; accepted: even numbers from 0 to below 16"),
        ({"rotary_dim": -2}, "rotary_dim is -2; accepted: even numbers from 0"),
        ({"rotary_dim": 5}, "rotary_dim is 5; accepted: even numbers from 0"),
        ({"sections": (3, 4)}, "numbers >= 1 that add up to 8"),
        ({"sections": (0, 8)}, "numbers >= 1 that add up to 8"),
        ({"sections": (4, 4), "rotary_dim": 8}, "numbers >= 1 that add up to 4"),
        ({"axial": True}, "accepted: sections without scaling and rotary_dim"),
        ({"axial": True, "sections": (4, 4), "scaling": LinearScaling(2.0)}, "accepted: sections without scaling"),
        ({"axial": True, "sections": (2, 2), "rotary_dim": 8}, "accepted: sections without scaling and rotary_dim"),
        ({"interleaved": True}, "accepted: sections, and not axial"),
        ({"interleaved": True, "axial": True, "sections": (4, 4)}, "accepted: sections, and not axial"),
    ],
    ids=str,
)
def test_embeddings_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"RotaryEmbedding: .*{message}"):
        RotaryEmbedding(16, THETA, **options)


def test_an_embedding_is_named_by_the_fields_that_are_set() -> None:
    assert repr(RotaryEmbedding(8, 1e4)) == "RotaryEmbedding(head_dim=8, theta=10000.0, scaling=None)"
    sectioned = RotaryEmbedding(8, 1e4, rotary_dim=4, sections=(1, 1), interleaved=True)
    end = "scaling=None, rotary_dim=4, sections=(1, 1), interleaved=True)"
    assert repr(sectioned) == f"RotaryEmbedding(head_dim=8, theta=10000.0, {end}"
    assert repr(RotaryEmbedding(8, 1e4, sections=(1, 3), axial=True)).endswith("sections=(1, 3), axial=True)")
