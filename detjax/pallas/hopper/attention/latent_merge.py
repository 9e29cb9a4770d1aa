"""Merges the spans that several CTAs computed of one sequence, in order (Pallas Mosaic GPU for Hopper)."""

from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR
from detjax.pallas.hopper.attention.latent_schedule import Problem
from detjax.pallas.hopper.attention.online_softmax import merged, normalized, rescaling
from detjax.pallas.hopper.attention.warpgroups import COMPILER_PARAMS
from detjax.pallas.hopper.device import WARPGROUP
from detjax.pallas.hopper.mosaic.layouts import ROWS

_ROWS_AT_ONCE: Final = 4
"""Rows that a CTA merges."""


def merge(problem: Problem, o: Array, sums: Array, statistics: Array, splits: Array) -> Array:
    """The output, with the split sequences written into it; see `latent_kernel.Results`."""
    width = problem.value_width
    layout = plgpu.Layout.WG_STRIDED(shape=(width,), vec_size=width // WARPGROUP)

    def spread(x: Array) -> Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(x, (width,), ()), layout)

    def body(o_gmem: Any, sums: Any, statistics: Any, splits: Any) -> None:
        record, first_row = lax.axis_index("record"), lax.axis_index("rows") * _ROWS_AT_ONCE
        first, end, place = splits[record, 0], splits[record, 1], record * problem.most_spans

        def load(span: Array) -> list[tuple[Array, Array, Array]]:
            """Values, maxima and sums of the rows of a span."""
            rows = []
            for row in range(_ROWS_AT_ONCE):
                x = plgpu.load(sums.at[place + span, first_row + row], layout=layout, optimized=False)
                m, total = (statistics[place + span, index, first_row + row] for index in range(2))
                rows.append((x, spread(m), spread(total)))
            return rows

        def merge_span(span: Array, carry: Any) -> Any:
            rows, parts = carry
            # The next span is on its way while this one is merged.
            following = load(lax.min(span + 1, end - 1))
            merged_rows = []
            for (x, m, total), (x_b, m_b, total_b) in zip(rows, parts, strict=True):
                m_new, a, b = rescaling(m, m_b)
                x, total = merged(x, a, x_b, b, layout), merged(total, a, total_b, b, layout)
                merged_rows.append((x, m_new, total))
            return merged_rows, following

        @pl.when(end > first)
        def _() -> None:
            rows, _ = lax.fori_loop(first, end, merge_span, (load(jnp.int32(0)), load(first)))
            sequence = lax.rem(record, jnp.int32(problem.sequences))
            target = o_gmem.at[lax.div(record, jnp.int32(problem.sequences)), sequence]
            for row, (x, _, total) in enumerate(rows):
                y = normalized(x, total, problem.dtype, spread=lambda x, _: x)
                target.at[first_row + row][...] = y

    kernel = plgpu.kernel(
        body,
        out_type=(),
        grid=(problem.batch * problem.sequences, ROWS // _ROWS_AT_ONCE),
        grid_names=("record", "rows"),
        compiler_params=COMPILER_PARAMS,
        kernel_name="attention_merge_latent",
    )
    result = jax.new_ref(o)
    kernel(result, sums, statistics, splits)
    return jax.freeze(result)


def out_types(problem: Problem, places: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and dtypes of sums, statistics and splits; see `latent_kernel.Results`."""
    return (
        jax.ShapeDtypeStruct((places, ROWS, problem.value_width), ACCUMULATOR),
        jax.ShapeDtypeStruct((places, 2, ROWS), ACCUMULATOR),
        jax.ShapeDtypeStruct((problem.batch * problem.sequences, 2), jnp.int32),
    )
