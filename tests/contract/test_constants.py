"""The contract's constants fit together, and its rounding is the IEEE one."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from detjax import contract
from detjax.operands import rounding
from tests.support.bits import assert_same_bits

_LARGE = [65504, 65519.99, 65520, 3.3e38, np.inf, -np.inf, np.nan]
_TIES = [0.0, -0.0, 1.0, 1 + 2**-8, 1 + 2**-9, 1 + 3 * 2**-8, 1 + 2**-11]
_SUBNORMAL = [1e-40, 2**-24, 2**-25, 3 * 2**-25, 5.96e-8, 6.1e-5, 6.09e-5]
AWKWARD = np.float32([*_TIES, *_LARGE, *_SUBNORMAL])


def _many() -> np.ndarray:
    """Numbers of every exponent, ties between neighbours among them."""
    words = np.random.default_rng(0).integers(0, 2**32, 50_000, np.uint32)
    words[::2] &= np.uint32(0xFFFF8000)
    words[::3] &= np.uint32(0xFFFFF000)
    numbers = words.view(np.float32)
    return np.concatenate([AWKWARD, -AWKWARD, numbers[~np.isnan(numbers)]])


@pytest.mark.parametrize("excess_precision", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_is_to_nearest_even_and_survives_the_compiler(dtype: str, excess_precision: bool) -> None:
    numbers = _many()

    def there_and_back(x: jax.Array) -> jax.Array:
        return rounding.rounded(x, dtype).astype(jnp.float32)

    options = {"xla_allow_excess_precision": excess_precision}
    result = np.asarray(jax.jit(there_and_back, compiler_options=options)(jnp.asarray(numbers)))
    with np.errstate(over="ignore"):
        expected = numbers.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16).astype(np.float32)
    same = ~np.isnan(expected)
    assert_same_bits(result[same], expected[same])
    assert np.isnan(result[~same]).all()


def test_widening_is_exact_and_the_same_dtype_is_left_alone() -> None:
    x = jnp.asarray([1.5, -0.0, np.inf], jnp.bfloat16)
    assert rounding.rounded(x, "bfloat16") is x
    assert_same_bits(rounding.rounded(x, "float32"), np.float32([1.5, -0.0, np.inf]))


def test_blocks_are_whole_numbers_of_lanes_and_tiles() -> None:
    assert contract.LANES % contract.LANE_GROUP == 0
    assert contract.SOFTMAX_BLOCK % contract.LANES == 0
    assert contract.KV_BLOCK % contract.PORTABLE_ROWS == 0
    assert contract.LANES & (contract.LANES - 1) == 0


def test_the_lowest_maximum_is_below_all_scores_and_finite_in_float32() -> None:
    assert np.isfinite(np.float32(contract.LOWEST_MAXIMUM))
    assert np.exp2(np.float32(contract.LOWEST_MAXIMUM)) == 0


def test_exponents_are_those_of_e() -> None:
    scale = 0.125
    assert np.exp2(np.float64(rounding.log2_scale(scale)) * 3) == pytest.approx(np.exp(scale * 3), rel=1e-6)
