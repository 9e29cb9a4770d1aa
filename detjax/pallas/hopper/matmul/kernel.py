"""Matmul on Hopper's `wgmma`: one kernel, from the 8 tokens of a decode step's tile to the 256 of a training batch's.

Every output element has one float32 accumulator that meets K in ascending steps of 16, so no field of a schedule
reaches the bits. What a schedule decides is how few bytes each multiprocessor has to be sent:

- Small M streams weights. They sit on the matrix unit's 64 rows, tokens on its columns, which may be as few as 8. A
  tile may fill its 64 rows by half: a CTA loads and stores the rows it owns, whatever the others hold. So one wave of
  CTAs covers any N and each weight is read once, without a split of K.
- Medium M is bound by what a multiprocessor can be sent. CTAs of a cluster load what they have in common once, by
  multicast.
- Large M is bound by the matrix unit: tiles of 128 x 256, two warpgroups that multiply, CTAs that take tile after tile,
  and a producer that loads the next tile while the last one is written.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, DTypeLike

from detjax import backends
from detjax.contract import ACCUMULATOR
from detjax.options import Epilogue, WeightLayout
from detjax.pallas.hopper.matmul.activations import ACTIVATIONS
from detjax.pallas.hopper.matmul.plan import Plan, Problem, Schedule, TokenLayout, choose
from detjax.portable.matmul import activated, parts
from detjax.portable.tiles import flat_rows
from detjax.rounding import rounded

DTYPES: Final = ("bfloat16", "float16")

_PRODUCER_REGISTERS = 40
_CONSUMER_REGISTERS = 232


def forward(
    x: Array,
    w: Array,
    bias: Array | None,
    residual: Array | None,
    *,
    layout: WeightLayout,
    epilogue: Epilogue,
    out_dtype: DTypeLike,
) -> Array:
    """`[*B, N]` of `[*B, K]` rows; see `detjax.ops.matmul` for the rest.

    Raises:
        NotImplementedError: x's dtype is none of `DTYPES`.
    """
    flat_residual = None if residual is None else flat_rows(residual)
    y = product(flat_rows(x), w, bias, flat_residual, layout=layout, epilogue=epilogue, out_dtype=out_dtype)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def backward(
    x: Array,
    w: Array,
    bias: Array | None,
    dy: Array,
    *,
    layout: WeightLayout,
    epilogue: Epilogue,
) -> tuple[Array, Array, Array | None]:
    """Gradients of x, w and bias: `dx` with N ascending (gate's, then up's), `dw` and `dbias` with tokens ascending.

    The gradient of the accumulator is rounded to x's dtype before it meets the matrix unit.

    Raises:
        NotImplementedError: x's dtype is none of `DTYPES`.
    """
    flat_x, flat_dy = flat_rows(x), flat_rows(dy)
    halves = [w] if w.ndim == 2 else [w[0], w[1]]
    plain = functools.partial(product, bias=None, residual=None, epilogue=Epilogue())

    if epilogue == Epilogue():
        dz = rounded(flat_dy, x.dtype)
    else:
        z = jnp.stack([plain(flat_x, half, layout=layout, out_dtype=ACCUMULATOR) for half in halves], axis=1)
        if bias is not None:
            z = z + bias.astype(ACCUMULATOR).reshape(1, *z.shape[1:])
        (dz,) = jax.vjp(lambda z: activated(parts(z), epilogue), z)[1](flat_dy.astype(ACCUMULATOR))
        dz = rounded(dz, x.dtype).reshape(dz.shape[0], -1)

    # To contract both halves of a stacked "kn" weight at once takes a copy; "nk" halves follow each other already.
    joined = w.reshape(-1, w.shape[-1]) if layout == "nk" else jnp.concatenate(halves, axis=1)
    dx = plain(dz, joined, layout="kn" if layout == "nk" else "nk", out_dtype=x.dtype)

    over_tokens = functools.partial(plain, token_layout="km", layout="kn")
    if layout == "nk":
        dw = over_tokens(dz, flat_x, out_dtype=w.dtype)
    else:
        dw = jnp.stack([over_tokens(flat_x, part, out_dtype=w.dtype) for part in jnp.split(dz, len(halves), axis=1)])
    dbias = None
    if bias is not None:
        ones = jnp.ones((flat_x.shape[0], 8), x.dtype)
        dbias = over_tokens(dz, ones, out_dtype=bias.dtype)[:, 0].reshape(bias.shape)
    return dx.reshape(x.shape), dw.reshape(w.shape), dbias


def product(
    x: Array,
    w: Array,
    bias: Array | None,
    residual: Array | None,
    *,
    token_layout: TokenLayout = "mk",
    layout: WeightLayout,
    epilogue: Epilogue,
    out_dtype: DTypeLike,
    schedule: Schedule | None = None,
) -> Array:
    """`[M, N]`: the epilogue of `x @ w`, by the schedule given or the one that the tables name.

    Args:
        x: `[M, K]`, or `[K, M]` where `token_layout` is "km".
        w: `[N, K]`, or `[K, N]` where `layout` is "kn"; two of them, stacked, if gated.
        bias: `[N]`, or `[2, N]` if gated.
        residual: `[M, N]`.

    Raises:
        NotImplementedError: x's dtype is none of `DTYPES`.
        ValueError: the schedule does not fit.
    """
    if str(x.dtype) not in DTYPES:
        raise NotImplementedError(
            f"matmul: x has dtype {x.dtype} on {backends.device_name()}; accepted by the backend 'hopper': "
            f"{', '.join(DTYPES)}. Cast x and w, or choose the backend 'portable', which takes {x.dtype}."
        )
    stacked = w.reshape(-1, *w.shape[-2:])
    parts, n = stacked.shape[0], stacked.shape[1 if layout == "nk" else 2]
    m, k = x.shape if token_layout == "mk" else x.shape[::-1]
    problem = Problem(
        m,
        n,
        k,
        parts,
        x.dtype,
        jnp.dtype(out_dtype),
        None if residual is None else residual.dtype,
        None if bias is None else bias.dtype,
        token_layout,
        layout,
    ).addressable
    plan = Plan(problem, schedule or choose(problem, backends.device_kind()))
    if faults := plan.faults():
        raise ValueError(f"matmul: {plan.schedule} for {problem}; accepted: {'; '.join(faults)}")
    operands = [
        _padded(x, (problem.m, problem.k) if token_layout == "mk" else (problem.k, problem.m)),
        _padded(stacked, (parts, problem.n, problem.k) if layout == "nk" else (parts, problem.k, problem.n)),
    ]
    if bias is not None:
        operands.append(_padded(bias.reshape(parts, n), (parts, problem.n)))
    if residual is not None:
        operands.append(_padded(residual, (problem.m, problem.n)))
    return _kernel(plan, epilogue)(*operands)[:m, :n]


def _padded(a: Array, shape: tuple[int, ...]) -> Array:
    """`a` with zeros behind it up to the shape; `a` itself where it has that shape."""
    return jnp.pad(a, [(0, size - own) for own, size in zip(a.shape, shape, strict=True)])


def _kernel(plan: Plan, epilogue: Epilogue) -> Callable[..., Array]:
    """The kernel of `x, w, bias?, residual? -> y`."""
    problem, s = plan.problem, plan.schedule
    shared_axes = tuple(axis for axis, size in (("cm", s.cluster_m), ("cn", s.cluster_n)) if size > 1)
    # A slot that others send to is free when all of them have read theirs.
    consumed = functools.partial(plgpu.ClusterBarrier, collective_axes=shared_axes) if shared_axes else plgpu.Barrier

    def operand(parts: int, size: int, contiguous_in_k: bool) -> Any:
        shape = (size, plan.tile_k) if contiguous_in_k else (plan.tile_k, size)
        transforms = _swizzled(plan.line, problem.dtype)
        return plgpu.SMEM((plan.stages, parts, *shape), problem.dtype, transforms=transforms)

    def staged(dtype: jnp.dtype) -> Any:
        shape = (s.warpgroups, plan.slots, *plan.staged_shape)
        return plgpu.SMEM(shape, dtype, transforms=_swizzled(plan.staged_line(dtype), dtype))

    scratch = {
        "rows": operand(plan.row_parts, s.warpgroups * plan.padded_rows, plan.rows_contiguous_in_k),
        "columns": operand(plan.column_parts, plan.columns, plan.columns_contiguous_in_k),
        "out": staged(problem.out_dtype),
        "loaded": plgpu.Barrier(num_arrivals=plan.loads_per_stage, num_barriers=plan.stages),
        "consumed": consumed(num_arrivals=s.warpgroups, num_barriers=plan.stages),
    }
    if problem.residual_dtype is not None:
        scratch["residual"] = staged(problem.residual_dtype)
        scratch["residual_loaded"] = plgpu.Barrier(num_barriers=s.warpgroups * plan.slots)
    if problem.bias_dtype is not None:
        scratch["bias"] = plgpu.SMEM((s.warpgroups, problem.parts, plan.bias_size), problem.bias_dtype)
        scratch["bias_loaded"] = plgpu.Barrier(num_arrivals=problem.parts, num_barriers=s.warpgroups)
    return plgpu.kernel(
        functools.partial(_body, plan, epilogue),
        out_type=jax.ShapeDtypeStruct((problem.m, problem.n), problem.out_dtype),
        grid=(plan.clusters,),
        grid_names=("cluster",),
        cluster=(s.cluster_m, s.cluster_n),
        cluster_names=("cm", "cn"),
        num_threads=s.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name="matmul",
    )


def _swizzled(line: int, dtype: jnp.dtype) -> tuple[Any, ...]:
    """Tiles of 8 lines, swizzled where a line is long enough to have banks to spread over."""
    tiling = plgpu.TilingTransform((8, line))  # pyright: ignore[reportAbstractUsage]
    size = line * dtype.itemsize
    if size < 32:
        return (tiling,)
    return tiling, plgpu.SwizzleTransform(size)  # pyright: ignore[reportAbstractUsage]


def _body(plan: Plan, epilogue: Epilogue, *operands: Any, **scratch: Any) -> None:
    problem, s = plan.problem, plan.schedule
    x, w, *others = operands[:-1]
    bias = others.pop(0) if problem.bias_dtype is not None else None
    residual = others.pop(0) if problem.residual_dtype is not None else None
    cluster = lax.axis_index("cluster")
    warpgroup = lax.axis_index("warpgroup")
    work = plan.grid[0] * plan.grid[1]
    tiles = 1 if work == plan.clusters else lax.div(work - cluster + (plan.clusters - 1), jnp.int32(plan.clusters))

    def origin(tile: Array | int) -> tuple[Array, Array]:
        """First token and first output of this CTA's tile."""
        index = cluster + tile * plan.clusters
        m, n = plgpu.planar_snake(index, plan.grid, 0, s.panel)
        m = m * s.cluster_m + lax.axis_index("cm")
        n = n * s.cluster_n + lax.axis_index("cn")
        return m * s.tile_m, n * s.tile_n

    def produce() -> None:
        @pl.loop(0, tiles)
        def _(tile: Array) -> None:
            m, n = origin(tile)

            @pl.loop(0, plan.k_steps)
            def _(k_step: Array) -> None:
                step = tile * plan.k_steps + k_step
                slot = lax.rem(step, jnp.int32(plan.stages))

                @pl.when(step >= plan.stages)
                def _() -> None:
                    plgpu.barrier_wait(scratch["consumed"].at[slot])

                _load_stage(plan, x, w, m, n, k_step * plan.tile_k, slot, **scratch)

        # No CTA leaves while another may still send to it or arrive at its barriers.
        @pl.loop(0, plan.stages)
        def _(index: Array) -> None:
            plgpu.barrier_wait(scratch["consumed"].at[lax.rem(tiles * plan.k_steps + index, jnp.int32(plan.stages))])

    @pl.when(warpgroup == s.warpgroups)
    def _producer() -> None:
        plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

        # One warp loads: to have the whole warpgroup meet at each copy took longer than small tiles do.
        @plgpu.warp_map
        def _(warp: Array) -> None:
            pl.when(warp == 0)(produce)

    @pl.when(warpgroup < s.warpgroups)
    def _consumer() -> None:
        plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")

        @pl.loop(0, tiles)
        def _(tile: Array) -> None:
            m, n = origin(tile)
            # This warpgroup's part of the tile.
            m, n = (m, n + warpgroup * plan.rows) if plan.weights_on_rows else (m + warpgroup * plan.rows, n)
            output = _Output(plan, epilogue, bias, residual, operands[-1], m, n, scratch)
            output.prefetch()
            output.write(_sums(plan, tile, **scratch))

        plgpu.wait_smem_to_gmem(0)


def _load_stage(
    plan: Plan,
    x: Any,
    w: Any,
    m: Array,
    n: Array,
    k: Array,
    slot: Array,
    *,
    rows: Any,
    columns: Any,
    loaded: Any,
    **_: Any,
) -> None:
    """Starts the copies of one step of K: each operand's tile, in as many pieces as it has parts and warpgroups."""
    k_slice = pl.ds(k, plan.tile_k)

    def of_weights(part: int, first: Array, size: int) -> Any:
        outputs = pl.ds(first, size)
        return w.at[part, outputs, k_slice] if plan.problem.layout == "nk" else w.at[part, k_slice, outputs]

    def of_tokens(part: int, first: Array, size: int) -> Any:
        tokens = pl.ds(first, size)
        return x.at[tokens, k_slice] if plan.problem.token_layout == "mk" else x.at[k_slice, tokens]

    row_source, row_axis, first_row = (of_weights, "cm", n) if plan.weights_on_rows else (of_tokens, "cn", m)
    column_source, column_axis, first_column = (of_tokens, "cn", m) if plan.weights_on_rows else (of_weights, "cm", n)
    row_axis = row_axis if plan.rows_shared_by > 1 else None
    column_axis = column_axis if plan.columns_shared_by > 1 else None
    for part in range(plan.row_parts):
        for piece in range(plan.row_pieces):
            source = row_source(part, first_row + piece * plan.rows, plan.row_tile // plan.row_pieces)
            target = rows.at[slot, part]
            if plan.rows != plan.padded_rows:
                target = rows.at[slot, part, pl.ds(piece * plan.padded_rows, plan.rows)]
            plgpu.copy_gmem_to_smem(source, target, loaded.at[slot], collective_axes=row_axis)
    for part in range(plan.column_parts):
        source = column_source(part, first_column, plan.columns)
        plgpu.copy_gmem_to_smem(source, columns.at[slot, part], loaded.at[slot], collective_axes=column_axis)


def _sums(plan: Plan, tile: Array, *, rows: Any, columns: Any, loaded: Any, consumed: Any, **_: Any) -> list[Array]:
    """The accumulators of this warpgroup, `[rows, columns]` float32; gate's and up's if gated."""
    parts = plan.problem.parts
    warpgroup = lax.axis_index("warpgroup")

    def accumulate(*sums: Any) -> tuple[Array, ...]:
        @pl.loop(0, plan.k_steps)
        def _(k_step: Array) -> None:
            step = tile * plan.k_steps + k_step
            slot = lax.rem(step, jnp.int32(plan.stages))
            plgpu.barrier_wait(loaded.at[slot])
            for part in range(parts):
                row_part, column_part = (part, 0) if plan.weights_on_rows else (0, part)
                own = pl.ds(warpgroup * plan.padded_rows, plan.padded_rows)
                a = rows.at[slot, row_part, own] if plan.rows_contiguous_in_k else rows.at[slot, row_part, :, own].T
                b = columns.at[slot, column_part]
                plgpu.wgmma(sums[part], a, b.T if plan.columns_contiguous_in_k else b)
            # What was issued last may still run; what was issued in the step before is done with its slot.
            plgpu.wgmma_wait(parts)

            @pl.when(k_step >= 1)
            def _() -> None:
                plgpu.barrier_arrive(consumed.at[lax.rem(step + (plan.stages - 1), jnp.int32(plan.stages))])

        plgpu.wgmma_wait(0)
        last = (tile + 1) * plan.k_steps - 1
        plgpu.barrier_arrive(consumed.at[lax.rem(last, jnp.int32(plan.stages))])
        return tuple(total[...] for total in sums)

    accumulator = plgpu.ACC((plan.padded_rows, plan.columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    return list(pl.run_scoped(accumulate, *[accumulator] * parts))


class _Output:
    """A warpgroup's part of the result: what its accumulators become, chunk by chunk."""

    def __init__(
        self,
        plan: Plan,
        epilogue: Epilogue,
        bias: Any,
        residual: Any,
        y: Any,
        m: Array,
        n: Array,
        scratch: dict[str, Any],
    ) -> None:
        self.plan, self.epilogue = plan, epilogue
        self.bias, self.residual, self.y = bias, residual, y
        self.m, self.n = m, n
        self.scratch = scratch
        self.warpgroup = lax.axis_index("warpgroup")

    def prefetch(self) -> None:
        """Starts what the epilogue will read: the bias, and as much of the residual as there is room for."""
        plan = self.plan
        if self.bias is not None:
            size = plan.rows if plan.weights_on_rows else plan.columns
            for part in range(plan.problem.parts):
                target = self.scratch["bias"].at[self.warpgroup, part, pl.ds(0, size)]
                source = self.bias.at[part, pl.ds(self.n, size)]
                plgpu.copy_gmem_to_smem(source, target, self.scratch["bias_loaded"].at[self.warpgroup])
        if self.residual is not None:
            for chunk in range(plan.slots):
                self._load_residual(chunk)

    def write(self, sums: Sequence[Array]) -> None:
        """Applies the epilogue and starts the result's copies to memory."""
        plan, dtype = self.plan, self.plan.problem.out_dtype
        if self.bias is not None:
            plgpu.barrier_wait(self.scratch["bias_loaded"].at[self.warpgroup])
        for chunk in range(plan.chunks):
            # Chunk by chunk from the start: what an activation computes with would not fit beside all accumulators.
            biased = [self._biased(z, part, chunk) for part, z in enumerate(sums)]
            z = activated(biased, self.epilogue, ACTIVATIONS)
            if self.residual is not None:
                plgpu.barrier_wait(self.scratch["residual_loaded"].at[self._slot_index(chunk)])
                z = z + self._loaded("residual", chunk).astype(ACCUMULATOR)
                if chunk + plan.slots < plan.chunks:
                    plgpu.commit_smem()
                    self._load_residual(chunk + plan.slots)
            plgpu.wait_smem_to_gmem(plan.slots - 1, wait_read_only=True)
            if plan.weights_on_rows and dtype.itemsize == 4:
                z = plgpu.layout_cast(z, plgpu.Layout.WGMMA_TRANSPOSED)
            self._staged("out", chunk)[...] = z.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(self._owned("out", chunk), self._part_of(self.y, chunk))

    def _biased(self, z: Array, part: int, chunk: int) -> Array:
        """A chunk of the sums of gate or up, its bias added."""
        plan, first, size = self.plan, chunk * self.plan.chunk, self._width(chunk)
        z = z[:, first : first + size] if plan.chunks > 1 else z
        if self.bias is None:
            return z
        along = pl.ds(0, plan.padded_rows) if plan.weights_on_rows else pl.ds(first, size)
        bias = self.scratch["bias"][self.warpgroup, part, along].astype(ACCUMULATOR)
        return z + lax.broadcast_in_dim(bias, z.shape, [0 if plan.weights_on_rows else 1])

    def _load_residual(self, chunk: int) -> None:
        barrier = self.scratch["residual_loaded"].at[self._slot_index(chunk)]
        plgpu.copy_gmem_to_smem(self._part_of(self.residual, chunk), self._owned("residual", chunk), barrier)

    def _slot_index(self, chunk: int) -> Array:
        return self.warpgroup * self.plan.slots + chunk % self.plan.slots

    def _width(self, chunk: int) -> int:
        return min(self.plan.chunk, self.plan.columns - chunk * self.plan.chunk)

    def _part_of(self, array: Any, chunk: int) -> Any:
        """The `[tokens, outputs]` of an array in memory that a chunk stands for."""
        plan, first, size = self.plan, chunk * self.plan.chunk, self._width(chunk)
        if plan.weights_on_rows:
            return array.at[pl.ds(self.m + first, size), pl.ds(self.n, plan.rows)]
        return array.at[pl.ds(self.m, plan.rows), pl.ds(self.n + first, size)]

    def _owned(self, name: str, chunk: int) -> Any:
        """A chunk in shared memory without the rows that are not this CTA's."""
        plan, size = self.plan, self._width(chunk)
        tokens, outputs = (size, plan.rows) if plan.weights_on_rows else (plan.rows, size)
        ref = self.scratch[name].at[self.warpgroup, chunk % plan.slots]
        return ref if (tokens, outputs) == plan.staged_shape else ref.at[pl.ds(0, tokens), pl.ds(0, outputs)]

    def _loaded(self, name: str, chunk: int) -> Array:
        """A chunk from shared memory, in the accumulator's layout."""
        array = self._staged(name, chunk)[...]
        if self.plan.weights_on_rows and array.dtype.itemsize == 4:
            array = plgpu.layout_cast(plgpu.layout_cast(array, plgpu.Layout.WGMMA_TRANSPOSED), plgpu.Layout.WGMMA)
        return array

    def _staged(self, name: str, chunk: int) -> Any:
        """A chunk in shared memory as the accumulator has it: rows by columns."""
        plan, size = self.plan, self._width(chunk)
        ref = self.scratch[name].at[self.warpgroup, chunk % plan.slots]
        if not plan.weights_on_rows:
            return ref
        return (ref if size == plan.chunk else ref.at[pl.ds(0, size)]).T
