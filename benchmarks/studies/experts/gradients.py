"""Gradients of experts' projections with accumulated sums, against XLA's ragged dot and dense products, and bits."""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from benchmarks.studies.experts.projections import Widths, chosen_experts, ragged_products, random_array, turned_weights
from detjax import ops
from detjax.bench import timing
from detjax.bench.bits import same_bits
from detjax.ops import AccumulatedWeight
from detjax.runtime import backends, compilation

TOKENS: Final = (1024, 8192, 32768)
SMALL_TOKENS: Final = (40,)

_SEQUENCE: Final = 1024
"""Tokens per sequence, if the batch has more than two sequences."""

type _Sums = tuple[Array, Array]
"""Float32 sums of the gradients of both weights."""


def measure(models: dict[str, Widths], tokens: tuple[int, ...], calls: int = 8) -> Iterator[dict[str, Any]]:
    """Yields each rival's seconds of both projections with their gradients, and the result of comparing bits.

    All rivals accumulate the weights' gradients in float32, in place, over many consecutive calls. Routing and the
    gather of rows are not measured. The rivals are JAX's own gradients of ragged dots, and dense products of experts
    with equal numbers of rows, which no router produces.
    """
    for name, widths in models.items():
        weights = (
            random_array(0, widths.experts, 2, widths.inner, widths.width),
            random_array(1, widths.experts, widths.width, widths.inner),
        )
        for count in tokens:
            yield {"model": name, "tokens": count} | _measured(widths, count, weights, calls)


def _measured(widths: Widths, tokens: int, weights: tuple[Array, Array], calls: int) -> dict[str, Any]:
    ids = chosen_experts(widths, tokens)
    x, dy = random_array(2, tokens, widths.width), random_array(3, tokens, widths.width)

    @compilation.jit
    def sorted_rows(x: Array, dy: Array, ids: Array) -> tuple[Any, ops.ExpertRows]:
        rows = ops.expert_rows(ids, widths.experts)
        return _operands(rows, x, dy, _sequence(tokens)), rows

    given, rows = sorted_rows(x, dy, ids)
    with backends.use_backend("stock"):
        plain, _ = sorted_rows(x, dy, ids)
    even = tokens * widths.chosen // widths.experts
    balanced = [random_array(seed, widths.experts, max(1, even), widths.width) for seed in (4, 5)]

    contracted = functools.partial(_carried, functools.partial(_contracted, unit=rows.unit))
    runs: dict[str, Callable[[], float]] = {
        "detjax": _timed(compilation.jit(contracted, donate_argnums=0), weights, given, calls),
        "ragged dot": _timed(jax.jit(functools.partial(_added, _ragged), donate_argnums=0), weights, plain, calls),
        "balanced dense": _timed(
            jax.jit(functools.partial(_added, _dense), donate_argnums=0), weights, balanced, calls
        ),
    }
    result = timing.in_turns(runs, 2, required=["detjax"])
    seconds = result.medians
    return {
        "seconds": seconds,
        "missing": result.missing,
        "over_the_rivals": {name: seconds["detjax"] / other for name, other in seconds.items() if name != "detjax"},
        "flops": 18 * ids.size * widths.width * widths.inner,
        "same_bits_in_microbatches": _bits_hold(x, dy, ids, weights, widths),
    }


def _sequence(tokens: int) -> int:
    return min(_SEQUENCE, tokens // 2)


def _operands(rows: ops.ExpertRows, x: Array, dy: Array, sequence: int) -> tuple[Array, ...]:
    """Rows sorted by expert, their output gradients, the number of rows per expert, and each row's sequence."""
    sequences = jnp.where(rows.token < len(x), rows.token // sequence, -1)
    return rows.gather(x), dy.at[rows.token].get(mode="fill", fill_value=0), rows.group_sizes, sequences


def _contracted(x: Array, gate_up: Any, down: Any, sizes: Array, sequences: Array, *, unit: int) -> Array:
    options: dict[str, Any] = {"layout": "nk", "sequences": sequences, "unit": unit}
    y = ops.grouped_matmul(x, gate_up, sizes, activation="silu", gated=True, **options)
    return ops.grouped_matmul(y, down, sizes, **options)


def _carried(fn: Any, sums: _Sums, weights: _Sums, x: Array, dy: Array, *rest: Array) -> tuple[_Sums, Array]:
    """The next sums, by an operation that accumulates them, and the gradients of rows."""

    def products(x: Array, sums: _Sums) -> Array:
        return fn(x, *map(AccumulatedWeight, weights, sums), *rest)

    dx, sums = jax.vjp(products, x, sums)[1](dy)
    return sums, dx


def _added(fn: Any, sums: _Sums, weights: _Sums, x: Array, dy: Array, *rest: Array) -> tuple[_Sums, Array]:
    """The sums plus JAX's gradients of weights, and the gradients of rows."""
    dx, *gradients = jax.vjp(lambda x, *weights: fn(x, *weights, *rest), x, *weights)[1](dy)
    gate_up, down = (total + gradient.astype(total.dtype) for total, gradient in zip(sums, gradients, strict=True))
    return (gate_up, down), dx


def _ragged(x: Array, gate_up: Array, down: Array, sizes: Array, sequences: Array) -> Array:
    del sequences
    return ragged_products(jax.lax.ragged_dot, x, *turned_weights(gate_up, down), sizes)


def _dense(x: Array, gate_up: Array, down: Array) -> Array:
    joined = gate_up.reshape(gate_up.shape[0], -1, gate_up.shape[-1])
    gate, up = jnp.split(jnp.einsum("erd,eid->eri", x, joined), 2, axis=2)
    return jnp.einsum("eri,edi->erd", jax.nn.silu(gate) * up, down)


def _timed(program: Callable[..., Any], weights: _Sums, rows: Any, calls: int) -> Callable[[], float]:
    """Seconds per call in a sequence of calls that accumulate into the same sums."""

    def run() -> float:
        sums = _zeros(weights)
        sums, _ = jax.block_until_ready(program(sums, weights, *rows))
        start = time.perf_counter()
        for _ in range(calls):
            sums, dx = program(sums, weights, *rows)
            del dx
        jax.block_until_ready(sums)
        return (time.perf_counter() - start) / calls

    return run


def _zeros(weights: _Sums) -> _Sums:
    gate_up, down = (jnp.zeros(weight.shape, jnp.float32) for weight in weights)
    return gate_up, down


def _bits_hold(x: Array, dy: Array, ids: Int32[Array, "N count"], weights: _Sums, widths: Widths) -> bool:
    """Compares the sums and gradients of two microbatches with a single one."""
    sequence, middle = _sequence(len(x)), _sequence(len(x)) * max(1, len(x) // _sequence(len(x)) // 2)

    @functools.partial(compilation.jit, donate_argnums=0)
    def added(sums: _Sums, weights: _Sums, x: Array, dy: Array, ids: Array) -> tuple[_Sums, Array]:
        rows = ops.expert_rows(ids, widths.experts)
        fn = functools.partial(_contracted, unit=rows.unit)
        sums, dx = _carried(fn, sums, weights, *_operands(rows, x, dy, sequence))
        return sums, dx.at[rows.place].get(mode="fill", fill_value=0)

    expected, together = added(_zeros(weights), weights, x, dy, ids)
    sums, parts = _zeros(weights), []
    for part in (slice(0, middle), slice(middle, len(x))):
        sums, dx = added(sums, weights, x[part], dy[part], ids[part])
        parts.append(dx)
    pairs = [*zip(sums, expected, strict=True), (jnp.concatenate(parts), together)]
    return all(bool(same_bits(one, other)) for one, other in pairs)
