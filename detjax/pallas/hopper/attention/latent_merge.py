"""Merges the spans of latent attention's split sequences in order (Pallas Mosaic GPU for Hopper)."""

from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR
from detjax.pallas.hopper.attention.latent_schedule import PART, Problem
from detjax.pallas.hopper.attention.online_softmax import merged, normalized, rescaling
from detjax.pallas.hopper.attention.queries_on_rows import along_rows
from detjax.pallas.hopper.attention.warpgroups import COMPILER_PARAMS
from detjax.pallas.hopper.mosaic.layouts import PER_ROW, ROWS, UNIT
from detjax.pallas.hopper.mosaic.tiles import by_thread, load_by_thread

_COLUMNS: Final = 16
"""Columns that a CTA merges of all rows: few, so that many CTAs merge even a single sequence."""
_SPANS_AHEAD: Final = 4
"""Spans in flight while one is merged, since memory latency is longer than a merge."""


def merge(problem: Problem, o: Array, sums: Array, statistics: Array, splits: Array) -> Array:
    """Writes the split sequences into the output in place, and returns it; see `latent_kernel.Results`."""
    groups = _COLUMNS // UNIT

    def body(o_gmem: Any, sums: Any, statistics: Any, splits: Any) -> None:
        record, columns = lax.axis_index("record"), lax.axis_index("columns")
        first, end, place = splits[record, 0], splits[record, 1], record * problem.most_spans
        part, in_part = (f(columns, jnp.int32(PART // _COLUMNS)) for f in (lax.div, lax.rem))

        def load(span: Array) -> tuple[Array, ...]:
            """Loads values, maxima and sums of a span; past the end, of the last one again."""
            span_place = place + lax.min(span, end - 1)
            numbers = (
                plgpu.load(statistics.at[span_place, index], layout=PER_ROW, optimized=False) for index in range(2)
            )
            return load_by_thread(sums.at[span_place, part, pl.ds(in_part * groups, groups)]), *numbers

        def merge_span(span: Array, carry: Any) -> Any:
            (x, m, total), ((x_b, m_b, total_b), *ahead) = carry
            ahead.append(load(span + _SPANS_AHEAD))
            m_new, a, b = rescaling(m, m_b)
            x = merged(x, along_rows(a, x.shape), x_b, along_rows(b, x.shape))
            return (x, m_new, merged(total, a, total_b, b)), tuple(ahead)

        @pl.when(end > first)
        def _() -> None:
            ahead = tuple(load(first + i) for i in range(_SPANS_AHEAD))
            (x, _, total), _ = lax.fori_loop(first, end, merge_span, (load(jnp.int32(0)), ahead))
            sequence = lax.rem(record, jnp.int32(problem.sequences))
            target = o_gmem.at[lax.div(record, jnp.int32(problem.sequences)), sequence]
            target.at[:, pl.ds(columns * _COLUMNS, _COLUMNS)][...] = normalized(x, total, problem.dtype)

    kernel = plgpu.kernel(
        body,
        out_type=(),
        grid=(problem.batch * problem.sequences, problem.value_width // _COLUMNS),
        grid_names=("record", "columns"),
        compiler_params=COMPILER_PARAMS,
        kernel_name="attention_merge_latent",
    )
    result = jax.new_ref(o)
    kernel(result, sums, statistics, splits)
    return jax.freeze(result)


def out_types(problem: Problem, places: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns shapes and dtypes of sums, statistics and splits; see `latent_kernel.Results`."""
    return (
        jax.ShapeDtypeStruct((places, problem.value_parts, *by_thread(PART)), ACCUMULATOR),
        jax.ShapeDtypeStruct((places, 2, ROWS), ACCUMULATOR),
        jax.ShapeDtypeStruct((problem.batch * problem.sequences, 2), jnp.int32),
    )
