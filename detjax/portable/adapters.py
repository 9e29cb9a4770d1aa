"""Products of adapters in plain JAX, and the fused multiply-add that joins them to a weight's sums."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from detjax.contract import ACCUMULATOR, PORTABLE_ROWS, RANK_STEP
from detjax.operands.rounding import rounded
from detjax.portable.tiles import dot, each_row, group_tiles, map_groups, sealed
from detjax.runtime import varying


def adapter_sums(
    x: Float[Array, "M K"], a: Float[Array, "G R K"], b: Float[Array, "G N R"], group_sizes: Int[Array, "G"]
) -> Float32[Array, "M N"]:
    """Returns `rnd(x A^T) B^T` for rows sorted by group, each with its group's factors; see `contract.RANK_STEP`.

    XLA's products depend on the shapes of their operands. Here each has `RANK_STEP` ranks, so the number of padding
    ranks, which depends on the largest adapter, changes no bit.
    """

    def tile(x: Array, group: Array, factors: tuple[Array, Array]) -> Array:
        a, b = factors

        def step(index: Array, total: Array) -> Array:
            first = index * RANK_STEP
            some_a = lax.dynamic_slice(a, (group, first, jnp.int32(0)), (1, RANK_STEP, a.shape[2]))[0]
            some_b = lax.dynamic_slice(b, (group, jnp.int32(0), first), (1, b.shape[1], RANK_STEP))[0]
            u = rounded(dot(x, some_a, (1, 1)), x.dtype)
            return total + lax.optimization_barrier(dot(u, some_b, (1, 1)))

        # The barrier keeps a loop of one step a loop.
        steps = lax.optimization_barrier(jnp.int32(a.shape[1] // RANK_STEP))
        return varying.fori_loop(0, steps, step, jnp.zeros((x.shape[0], b.shape[1]), ACCUMULATOR))

    return map_groups(tile, x, (a, b), group_tiles(group_sizes, len(x), PORTABLE_ROWS))


def added_to_sums(
    factors: Float32[Array, "M N"], products: Float32[Array, "M N"], sums: Float32[Array, "M N"]
) -> Float32[Array, "M N"]:
    """Returns `fma(factors, products, sums)`."""
    return each_row(lambda rows, _: fma(*rows), (factors, products, sums), None)


def fma(x: Float32[Array, "*N"], y: Float32[Array, "*N"], z: Float32[Array, "*N"]) -> Float32[Array, "*N"]:
    """Returns `x * y + z` with one rounding, whether or not the compiler fuses products with sums.

    The product is the exact sum of two numbers (Dekker 1971), and the sum of three numbers is rounded once by way of a
    rounding to odd (Boldo and Melquiond 2008). Products below the smallest normal number are not exact.
    """
    product = sealed(x * y)
    (x_high, x_low), (y_high, y_low) = _halves(x), _halves(y)
    # All of these products and differences are exact.
    error = x_low * y_low - (((product - x_high * y_high) - x_low * y_high) - x_high * y_low)
    low, lowest = _two_sum(z, error)
    high, middle = _two_sum(product, low)
    exact = high + _sum_to_odd(middle, lowest)
    plain = product + z  # exact for a product of zero, and for numbers that are not finite
    return jnp.where((x == 0) | (y == 0) | ~jnp.isfinite(plain), plain, exact)


def _halves(x: Array) -> tuple[Array, Array]:
    """Splits numbers into their leading 12 bits and the others."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFF000)
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return high, x - high


def _two_sum(x: Array, y: Array) -> tuple[Array, Array]:
    """Returns the rounded sum and its error (Knuth 1969)."""
    total = sealed(x + y)
    from_y = sealed(total - x)
    return total, (x - sealed(total - from_y)) + (y - from_y)


def _sum_to_odd(x: Array, y: Array) -> Array:
    """Returns the sum, rounded to the neighbour with an odd last bit unless it is exact."""
    total, error = _two_sum(x, y)
    bits = lax.bitcast_convert_type(total, jnp.int32)
    # The exact sum lies farther from zero than `total` if the error has its sign.
    outward = jnp.where(jnp.signbit(error) == jnp.signbit(total), jnp.int32(1), jnp.int32(-1))
    odd = lax.bitcast_convert_type(bits + outward, jnp.float32)
    return jax.lax.select((error != 0) & (bits & 1 == 0), odd, total)
