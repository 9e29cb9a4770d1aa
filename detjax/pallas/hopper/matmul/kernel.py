"""Matmul on Hopper's `wgmma`: one kernel for tiles of 8 tokens in a decode step up to 256 in a training batch.

Every output element has one float32 accumulator that takes K in ascending steps of 16, so no field of a schedule can
change a bit. A schedule decides how many bytes each multiprocessor has to receive:

- Small M streams weights. They are the matrix unit's 64 rows, tokens its columns, as few as 8. A tile may fill
  only some of its 64 rows: a CTA loads and stores the rows of its tile and ignores the rest. So one wave of CTAs covers
  any N and each weight is read once, without a split of K.
- Medium M is bound by the bytes that a multiprocessor can receive. The CTAs of a cluster load a shared operand once, by
  multicast.
- Large M is bound by the matrix unit: tiles of 128 x 256, two warpgroups that multiply, persistent CTAs, and a producer
  that loads the next tile while the previous one is written.

Synchronization. A stage of the pipeline has two barriers:

    producer warp    --copies-->   loaded[slot]    --> consumer warpgroups wait, then issue `wgmma`
    consumer         --arrives-->  consumed[slot]  --> producer warps of all CTAs that copy into the slot wait

The copy engine itself arrives at `loaded`, once for each copy, so no thread waits for a copy before the consumers do.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, DTypeLike

from detjax.contract import ACCUMULATOR
from detjax.operands.numerics import activated
from detjax.operands.options import Epilogue, WeightLayout
from detjax.pallas.hopper.device import DTYPES, shared_registers
from detjax.pallas.hopper.exchange import Peers
from detjax.pallas.hopper.matmul.activations import ACTIVATIONS
from detjax.pallas.hopper.matmul.plan import BLOCK, Plan, Problem, Schedule, TokenLayout, addressable_rows
from detjax.pallas.hopper.matmul.tuning import default_schedule, shared_schedule
from detjax.pallas.hopper.mosaic.layouts import swizzled_lines
from detjax.pallas.hopper.mosaic.peers import close_results, open_results, send_chunk
from detjax.runtime import backends

# A CTA of three warpgroups starts with 168 registers per thread, 504 for one thread of each. The producer only computes
# addresses and keeps 40, so that each consumer gets 232: up to 176 for accumulators (`plan.MAX_ACCUMULATORS`), and the
# rest for the epilogue's temporaries, which would spill otherwise.
_CONSUMER_REGISTERS, _, _PRODUCER_REGISTERS = shared_registers(232, 232, 40)


class Operands(NamedTuple):
    """The arrays of a product, or references to them in the kernel."""

    x: Any
    """Tokens `[M, K]`, or `[K, M]` if the token layout is "km"."""
    w: Any
    """Weights `[N, K]`, or `[K, N]` if the layout is "kn"; gate and up, stacked, if gated."""
    bias: Any = None
    """`[N]`, or `[2, N]` if gated."""
    residual: Any = None
    """`[M, N]`."""
    start: Any = None
    """`[M, N]` float32: initial values of the accumulators; None: zeros."""
    peers: Peers | None = None
    """The devices that share the columns of one result; None: this device computes all of them."""
    experts: Any = None
    """`[tiles + 1]` int32: the expert of each tile of tokens, then the number of tiles that have one; None: there is
    one weight. Otherwise weights and biases are `[E, ...]`, and tiles without an expert are not written."""
    blocks: Any = None
    """`[tiles]` int32: the block of `BLOCK` rows of x that each tile of tokens is; None: the tiles of x, in their
    order."""


def product(
    operands: Operands,
    *,
    token_layout: TokenLayout = "mk",
    layout: WeightLayout,
    epilogue: Epilogue,
    out_dtype: DTypeLike,
    schedule: Schedule | None = None,
) -> Array:
    """Returns the epilogue of `x @ w`, `[M, N]`, computed by the given or the default schedule.

    With `operands.start`, the result is the next value of these running sums, without an epilogue. Donated sums are
    updated in place.

    Raises:
        NotImplementedError: the matrix unit does not take x's dtype.
        ValueError: the schedule does not fit.
    """
    problem, schedule, arrays, (m, n) = _prepared(operands, token_layout, layout, jnp.dtype(out_dtype), schedule)
    kernel = _kernel(Plan(problem, schedule), epilogue)
    if operands.start is None:
        return kernel(*arrays)[0][:m, :n]
    assert epilogue == Epilogue() and len(arrays) == 2 and problem.out_dtype == ACCUMULATOR
    sums = jax.new_ref(padded(operands.start, (problem.m, problem.n)))
    kernel(*arrays, sums)
    return jax.freeze(sums)[:m, :n]


def shared_product(
    operands: Operands,
    *,
    layout: WeightLayout,
    epilogue: Epilogue,
    out_dtype: DTypeLike,
    schedule: Schedule | None = None,
) -> Array | None:
    """Returns `[M, devices * N]`, the columns of all devices, or None if the schedule cannot write them.

    Each device computes its own columns and writes every chunk into the arrays of all devices as soon as it is
    computed, so the exchange overlaps with the products. `operands.residual` has the columns of all devices. Without a
    schedule, `shared_schedule` chooses one.

    Raises NotImplementedError like `product`.
    """
    peers = operands.peers
    assert peers is not None
    x, w, bias, residual = operands[:4]
    columns = None if residual is None else jax.ShapeDtypeStruct((residual.shape[0], w.shape[-2]), residual.dtype)
    given = problem_of(operands._replace(residual=columns, peers=None), "mk", layout, jnp.dtype(out_dtype))
    problem, n = given.addressable, given.n
    schedule = schedule or shared_schedule(problem)
    if problem.n != n or schedule is None or not Plan(problem, schedule).can_be_shared:
        return None
    stacked = w.reshape(-1, *w.shape[-2:])
    arrays = [padded(x, (problem.m, problem.k)), padded(stacked, (stacked.shape[0], n, problem.k))]
    if bias is not None:
        arrays.append(bias.reshape(-1, n))
    if residual is not None:
        arrays.append(padded(residual, (problem.m, peers.devices * n)))
    if operands.experts is not None:
        arrays.append(operands.experts)
    kernel = _kernel(Plan(problem, schedule), epilogue, peers)
    return kernel(*arrays, peers.addresses, peers.number)[0][: x.shape[0]]


def product_keeping_sums(
    operands: Operands,
    *,
    layout: WeightLayout,
    epilogue: Epilogue,
    out_dtype: DTypeLike | None = None,
    schedule: Schedule | None = None,
) -> tuple[Array, tuple[Array, ...]]:
    """Returns `product`, by default in x's dtype, and for each part the biased sums `[M, N]` that it consumed.

    Raises the errors of `product`.
    """
    dtype = jnp.dtype(operands.x.dtype if out_dtype is None else out_dtype)
    problem, schedule, arrays, (m, n) = _prepared(operands, "mk", layout, dtype, schedule, keeps=True)
    y, *z = (result[:m, :n] for result in _kernel(Plan(problem, schedule), epilogue)(*arrays))
    return y, tuple(z)


def problem_of(
    operands: Operands,
    token_layout: TokenLayout,
    layout: WeightLayout,
    out_dtype: jnp.dtype,
    *,
    keeps: bool = False,
    backend: str = "hopper",
) -> Problem:
    """Returns the problem of a product.

    Raises:
        NotImplementedError: the matrix unit does not take x's dtype.
    """
    x, w, bias, residual, start, _, experts, blocks = operands
    if str(x.dtype) not in DTYPES:
        raise NotImplementedError(
            f"matmul: x has dtype {x.dtype} on {backends.device_name()}; accepted by the backend {backend!r}: "
            f"{', '.join(DTYPES)}. Cast x and w, or choose the backend 'portable', which takes {x.dtype}."
        )
    count, weights = 0 if experts is None else w.shape[0], math.prod(w.shape[:-2])
    m, k = x.shape if token_layout == "mk" else x.shape[::-1]
    return Problem(
        m if blocks is None else len(blocks) * BLOCK,
        w.shape[-2 if layout == "nk" else -1],
        k,
        weights // max(1, count),
        x.dtype,
        out_dtype,
        None if residual is None else residual.dtype,
        None if bias is None else bias.dtype,
        token_layout,
        layout,
        start is not None,
        keeps,
        count,
        blocks is not None,
    )


def padded_operands(operands: Operands, problem: Problem, sizes: tuple[int, int, int]) -> list[Array]:
    """Returns a kernel's operands `x, w, bias?, residual?, experts?, blocks?`, padded to sizes of M, N and K."""
    x, w, bias, residual, _, _, experts, blocks = operands
    m, n, k = sizes
    stacked = w.reshape(-1, *w.shape[-2:])
    weights, rows = len(stacked), m if blocks is None else addressable_rows(len(x))
    arrays = [
        padded(x, (rows, k) if problem.token_layout == "mk" else (k, rows)),
        padded(stacked, (weights, n, k) if problem.layout == "nk" else (weights, k, n)),
    ]
    if bias is not None:
        arrays.append(padded(bias.reshape(weights, -1), (weights, n)))
    if residual is not None:
        arrays.append(padded(residual, (m, n)))
    arrays += [array for array in (experts, blocks) if array is not None]
    return arrays


def _prepared(
    operands: Operands,
    token_layout: TokenLayout,
    layout: WeightLayout,
    out_dtype: jnp.dtype,
    schedule: Schedule | None,
    *,
    keeps: bool = False,
) -> tuple[Problem, Schedule, list[Array], tuple[int, int]]:
    """Returns the problem, its schedule, the operands padded for the copy engine, and the result's unpadded shape."""
    given = problem_of(operands, token_layout, layout, out_dtype, keeps=keeps)
    problem = given.addressable
    schedule = schedule or default_schedule(problem)
    schedule.check(problem)
    return problem, schedule, padded_operands(operands, problem, (problem.m, problem.n, problem.k)), (given.m, given.n)


def padded(array: Array, shape: tuple[int, ...]) -> Array:
    """Returns the array with zeros appended up to the shape."""
    return jnp.pad(array, [(0, target - size) for size, target in zip(array.shape, shape, strict=True)])


def _kernel(plan: Plan, epilogue: Epilogue, peers: Peers | None = None) -> Callable[..., list[Array]]:
    """Returns the kernel `x, w, bias?, residual?, experts?, blocks? -> y, *z`; z are the kept biased sums of each part.

    If the product continues running sums, it is `x, w, y`, and updates y in place. If devices share the result, the
    last operands are `addresses, number`, and residual and y have the columns of all devices.
    """
    problem = plan.problem
    devices = 1 if peers is None else peers.devices

    def body(*refs: Any, **scratch: Any) -> None:
        x, w, *rest = refs
        z = [rest.pop() for _ in range(problem.kept_sums)][::-1]
        y = rest.pop()
        shared = None
        if peers is not None:
            addresses, number = rest[-2:]
            shared, rest = peers._replace(addresses=addresses, number=number), rest[:-2]
        blocks = rest.pop() if problem.in_blocks else None
        experts = rest.pop() if problem.experts else None
        bias = rest.pop(0) if problem.bias_dtype is not None else None
        residual = rest.pop(0) if problem.residual_dtype is not None else None
        operands = Operands(x, w, bias, residual, peers=shared, experts=experts, blocks=blocks)
        Cta(plan, epilogue, operands, (y, z), Scratch(**scratch)).run()

    results = 0 if problem.continues else 1 + problem.kept_sums
    return launched(plan, body, scratch_types(plan), "matmul", results=results, devices=devices)


def launched(  # noqa: PLR0913
    plan: Plan,
    body: Callable[..., None],
    scratch: Mapping[str, Any],
    name: str,
    *,
    results: int = 1,
    devices: int = 1,
    further_results: Sequence[jax.ShapeDtypeStruct] = (),
    further_clusters: int = 0,
    compiler_params: plgpu.CompilerParams | None = None,
) -> Callable[..., list[Array]]:
    """Returns a kernel with the clusters and the warpgroups of a plan.

    Args:
        plan: the plan.
        body: what each warpgroup runs. It takes references to operands and results, and to the scratch by name.
        scratch: buffers and barriers of a CTA.
        name: the kernel's name in profiles.
        results: the number of results, arrays like the product.
        devices: the number of devices whose columns the results have.
        further_results: shapes and dtypes of results after these.
        further_clusters: clusters after the plan's, which `body` gives other work.
        compiler_params: parameters of the compiler other than the default ones.
    """
    problem, schedule = plan.problem, plan.schedule
    out_type = [jax.ShapeDtypeStruct((problem.m, devices * problem.n), problem.out_dtype)] * results
    return plgpu.kernel(
        body,
        out_type=[*out_type, *further_results],
        grid=(plan.clusters + further_clusters,),
        grid_names=("cluster",),
        cluster=(schedule.cluster_m, schedule.cluster_n),
        cluster_names=("cm", "cn"),
        num_threads=plan.all_warpgroups,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=compiler_params,
        kernel_name=name,
    )


@dataclasses.dataclass(frozen=True)
class Scratch:
    """Buffers in a CTA's shared memory, and its barriers."""

    rows: Any
    """Stages of the row operand, `[stages, parts, ...]`."""
    columns: Any
    """Stages of the column operand, `[stages, parts, ...]`."""
    out: Any
    """Chunks of the result, `[warpgroups, slots, ...]`."""
    loaded: Any
    """A barrier for each stage: its copies have arrived."""
    consumed: Any
    """A barrier for each stage: it may be overwritten."""
    residual: Any = None
    """Chunks of the residual, `[warpgroups, slots, ...]`."""
    residual_loaded: Any = None
    """Barriers of the residual's chunks."""
    bias: Any = None
    """Biases, `[warpgroups, parts, elements]`."""
    bias_loaded: Any = None
    """Barriers of the biases, one for each warpgroup."""


def scratch_types(plan: Plan) -> dict[str, Any]:
    """Returns the types of buffers and barriers, by their names in `Scratch`."""
    problem, s = plan.problem, plan.schedule
    shared_axes = tuple(axis for axis, size in (("cm", s.cluster_m), ("cn", s.cluster_n)) if size > 1)
    # A multicast copy writes the same stage in every CTA that shares the operand. So before it is issued, the consumers
    # of all these CTAs must be done with the stage: each arrives at the `consumed` barrier of every CTA along the axes.
    # One thread arrives for its warpgroup. That is enough as only the matrix unit reads stages, for all four warps at
    # once: threads that read shared memory themselves would have to await their loads and to meet before.
    consumed = functools.partial(plgpu.ClusterBarrier, collective_axes=shared_axes) if shared_axes else plgpu.Barrier

    # The matrix unit reads blocks of 8 lines x 16 bytes. A line of 128 bytes spans all 32 banks, so without a swizzle
    # the 8 units of a block would share 4 banks. The swizzle XORs the line's number into the unit's, which spreads them
    # over all.
    def operand(stages: int, parts: int, size: int, contiguous_in_k: bool) -> Any:
        shape = (size, plan.tile_k) if contiguous_in_k else (plan.tile_k, size)
        transforms = swizzled_lines(plan.line, problem.dtype.itemsize)
        return plgpu.SMEM((stages, parts, *shape), problem.dtype, transforms=transforms)

    def staged(dtype: jnp.dtype) -> Any:
        shape = (s.warpgroups, plan.slots, *plan.staged_shape)
        return plgpu.SMEM(shape, dtype, transforms=swizzled_lines(plan.staged_line(dtype), dtype.itemsize))

    scratch = {
        "rows": operand(plan.stages, plan.row_parts, s.warpgroups * plan.padded_rows, plan.rows_contiguous_in_k),
        "columns": operand(plan.column_stages, plan.column_parts, plan.columns, plan.columns_contiguous_in_k),
        "out": staged(problem.out_dtype),
        "loaded": plgpu.Barrier(num_arrivals=plan.loads_per_stage, num_barriers=plan.stages),
        "consumed": consumed(num_arrivals=s.warpgroups, num_barriers=plan.stages),
    }
    if problem.residual_dtype is not None:
        scratch["residual"] = staged(problem.residual_dtype)
        # Each warpgroup has barriers of its own, so that warpgroups never wait for each other's epilogue.
        scratch["residual_loaded"] = plgpu.Barrier(num_barriers=s.warpgroups * plan.slots)
    if problem.bias_dtype is not None:
        scratch["bias"] = plgpu.SMEM((s.warpgroups, problem.parts, plan.bias_size), problem.bias_dtype)
        scratch["bias_loaded"] = plgpu.Barrier(num_arrivals=problem.parts, num_barriers=s.warpgroups)
    return scratch


class Cta:
    """One CTA: a producer warp that fills the pipeline, and warpgroups that multiply and store.

    It computes every `plan.clusters`-th tile, starting at its cluster's index.
    """

    def __init__(
        self, plan: Plan, epilogue: Epilogue, operands: Operands, results: tuple[Any, list[Any]], scratch: Scratch
    ) -> None:
        self.plan, self.epilogue = plan, epilogue
        self.operands = operands
        self.y, self.z = results
        self.scratch = scratch
        self.cluster = self.cluster_index()
        self.warpgroup = lax.axis_index("warpgroup")
        # With experts, only the device knows how many tiles have rows: the grid is sized for the worst case, and the
        # CTAs leave out the rest.
        work, clusters = plan.grid[0] * plan.grid[1], plan.clusters
        if operands.experts is not None:
            work = operands.experts[plan.grid[0]] * plan.grid[1]
            self.tiles = jnp.maximum(lax.div(work - self.cluster + (clusters - 1), jnp.int32(clusters)), 0)
        else:
            self.tiles = 1 if work == clusters else lax.div(work - self.cluster + (clusters - 1), jnp.int32(clusters))

    def cluster_index(self) -> Array:
        """Returns the number of this cluster in the plan."""
        return lax.axis_index("cluster")

    def run(self) -> None:
        """Runs the warpgroup's role: the last warpgroup produces, the others consume."""
        warpgroups = self.plan.schedule.warpgroups

        @pl.when(self.warpgroup == warpgroups)
        def _producer() -> None:
            self.run_producer(_PRODUCER_REGISTERS)

        @pl.when(self.warpgroup < warpgroups)
        def _consumer() -> None:
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            self.consume()

    def run_producer(self, registers: int) -> None:
        """Runs the producer, whose threads keep a number of registers."""
        plgpu.set_max_registers(registers, action="decrease")

        # One warp issues all copies. Synchronizing the whole warpgroup at each copy takes as long as a small tile.
        @plgpu.warp_map
        def _(warp: Array) -> None:
            pl.when(warp == 0)(self.produce)

    def origin(self, tile: Array | int) -> tuple[Array, Array]:
        """Returns the first token and the first output of a tile of this CTA."""
        schedule = self.plan.schedule
        index = self.cluster + tile * self.plan.clusters
        if self.operands.experts is not None:
            # Outputs vary fastest: neighbouring tiles of tokens often have the same expert, whose weights are then
            # still in L2.
            outputs = jnp.int32(self.plan.grid[1])
            return lax.div(index, outputs) * schedule.tile_m, lax.rem(index, outputs) * schedule.tile_n
        # CTAs that run at the same time work on `panel` rows of tiles, and reverse direction from panel to panel, so
        # that both operands of the last tiles are still in L2.
        m, n = plgpu.planar_snake(index, self.plan.grid, 0, schedule.panel)
        m = m * schedule.cluster_m + lax.axis_index("cm")
        n = n * schedule.cluster_n + lax.axis_index("cn")
        return m * schedule.tile_m, n * schedule.tile_n

    def slot(self, step: Array) -> Array:
        """Returns the stage of a step of K. Steps are counted over all tiles: the pipeline never drains in between."""
        return lax.rem(step, jnp.int32(self.plan.stages))

    # --- the producer ---------------------------------------------------------------------------------------------

    def produce(self) -> None:
        """Loads the stages in order, each as soon as it is empty."""
        plan, consumed = self.plan, self.scratch.consumed

        @pl.loop(0, self.tiles)
        def _(tile: Array) -> None:
            m, n = self.origin(tile)

            @pl.loop(0, plan.steps)
            def _(k_step: Array) -> None:
                step = tile * plan.steps + k_step
                slot = self.slot(step)

                # The first round fills empty stages. Later ones wait for the consumers, in whatever CTA they are.
                @pl.when(step >= plan.stages)
                def _() -> None:
                    plgpu.barrier_wait(consumed.at[slot])

                self.load_stage(m, n, k_step, slot)

        steps = self.tiles * plan.steps

        # A CTA may not exit while others of its cluster still copy into its shared memory or arrive at its barriers, so
        # it waits until its last stages are consumed. With experts it may have fewer steps than stages.
        @pl.loop(jnp.maximum(steps - plan.stages, 0), steps)
        def _(step: Array) -> None:
            plgpu.barrier_wait(consumed.at[self.slot(step)])

    def weight(self, m: Array | int, part: int) -> Array | int:
        """Returns the index of a part of the weight for the tile of tokens that starts at m."""
        if self.operands.experts is None:
            return part
        return self.operands.experts[lax.div(m, jnp.int32(self.plan.schedule.tile_m))] * self.plan.problem.parts + part

    def load_stage(self, m: Array, n: Array, k_step: Array, slot: Array) -> None:
        """Starts the copies of one step of K: one for each part of both operands, or one per warpgroup."""
        self.load_rows(m, n, k_step, slot)
        self.load_columns(m, n, k_step, slot)

    def load_rows(self, m: Array, n: Array, k_step: Array, slot: Array) -> None:
        """Starts the copies of the row operand."""
        plan = self.plan
        axis, first = ("cm", n) if plan.weights_on_rows else ("cn", m)
        axis = axis if plan.rows_shared_by > 1 else None
        for part in range(plan.row_parts):
            # With padded rows, the rows of two warpgroups are not adjacent in shared memory, so each takes a copy.
            for piece in range(plan.row_pieces):
                place, size = first + piece * plan.rows, plan.row_tile // plan.row_pieces
                source = self.source(m, k_step, part, place, size, weights=plan.weights_on_rows)
                target = self.scratch.rows.at[slot, part]
                if plan.rows != plan.padded_rows:
                    target = self.scratch.rows.at[slot, part, pl.ds(piece * plan.padded_rows, plan.rows)]
                plgpu.copy_gmem_to_smem(source, target, self.scratch.loaded.at[slot], collective_axes=axis)

    def load_columns(self, m: Array, n: Array, k_step: Array, slot: Array) -> None:
        """Starts the copies of the column operand."""
        plan = self.plan
        axis, first = ("cn", m) if plan.weights_on_rows else ("cm", n)
        axis = axis if plan.columns_shared_by > 1 else None
        for part in range(plan.column_parts):
            source = self.source(m, k_step, part, first, plan.columns, weights=not plan.weights_on_rows)
            target = self.scratch.columns.at[slot, part]
            plgpu.copy_gmem_to_smem(source, target, self.scratch.loaded.at[slot], collective_axes=axis)

    def source(self, m: Array, k_step: Array, part: int, first: Array, size: int, *, weights: bool) -> Any:
        """Returns `size` weights or tokens from `first` on, in a step of K, for the tile of tokens that starts at m."""
        problem, x, w, blocks = self.plan.problem, self.operands.x, self.operands.w, self.operands.blocks
        k_slice = pl.ds(k_step * self.plan.tile_k, self.plan.tile_k)
        if weights:
            outputs, index = pl.ds(first, size), self.weight(m, part)
            return w.at[index, outputs, k_slice] if problem.layout == "nk" else w.at[index, k_slice, outputs]
        tokens = pl.ds(first if blocks is None else blocks[lax.div(first, jnp.int32(BLOCK))] * BLOCK, size)
        return x.at[tokens, k_slice] if problem.token_layout == "mk" else x.at[k_slice, tokens]

    # --- a consumer -----------------------------------------------------------------------------------------------

    def consume(self) -> None:
        """Computes this warpgroup's part of each tile, and writes it to all devices that share the result."""
        peers = self.operands.peers
        if peers is None:
            self._consume(())
            return
        # Each warpgroup has its own channel to the warpgroup with the same number on the other devices. It opens the
        # channel before its first store, since until the peer's kernel runs, the peer's array may still be other
        # memory, and closes it after its last one, so that no device returns before all columns have arrived.
        schedule, exchange = self.plan.schedule, {"devices": peers.devices, "first": peers.first}
        cta = (self.cluster * schedule.cluster_m + lax.axis_index("cm")) * schedule.cluster_n + lax.axis_index("cn")
        channel = cta * schedule.warpgroups + self.warpgroup
        self._consume(open_results(self.y, peers.addresses, peers.number, channel, **exchange))
        close_results(peers.addresses, peers.number, channel, **exchange)

    def _consume(self, arrays: tuple[Array, ...]) -> None:
        """Computes the tiles, and writes them also to the other devices' `arrays`."""
        plan = self.plan

        @pl.loop(0, self.tiles)
        def _(tile: Array) -> None:
            m, n = self.origin(tile)
            first = self.first_row()
            m, n = (m, n + first) if plan.weights_on_rows else (m + first, n)
            self.compute(tile, Output(self, m, n, arrays))

        # Shared memory must outlive the reads of copies out of it; the kernel's end waits for their writes.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def first_row(self) -> Array | int:
        """Returns the first row of a tile that this warpgroup computes."""
        return self.warpgroup * self.plan.rows

    def compute(self, tile: Array, output: "Output") -> None:
        """Computes this warpgroup's part of a tile, and starts to store it."""
        output.prefetch()  # bias and residual arrive while the products run
        output.store(self.accumulate(tile, output.sums()))

    def accumulate(self, tile: Array, start: Array | None) -> list[Array]:
        """Returns this warpgroup's accumulators, `[rows, columns]` float32 for each part, which begin with `start`."""
        plan, parts = self.plan, self.plan.problem.parts
        loaded, consumed = self.scratch.loaded, self.scratch.consumed
        warpgroup = lax.axis_index("warpgroup")

        def add_all(*sums: Any) -> tuple[Array, ...]:
            if start is not None:
                sums[0][...] = start

            @pl.loop(0, plan.k_steps)
            def _(k_step: Array) -> None:
                step = tile * plan.steps + k_step
                slot = self.slot(step)
                plgpu.barrier_wait(loaded.at[slot])
                for part in range(parts):
                    self.multiply(sums[part], part, slot, warpgroup)
                # `wgmma` is asynchronous: with this step's products left in flight, the matrix unit is busy while the
                # warpgroup waits for the next stage. The previous step's products are done, so its stage is free.
                plgpu.wgmma_wait(parts)

                @pl.when(k_step >= 1)
                def _() -> None:
                    plgpu.barrier_arrive(consumed.at[self.slot(step + (plan.stages - 1))])

            plgpu.wgmma_wait(0)
            last = tile * plan.steps + (plan.k_steps - 1)
            plgpu.barrier_arrive(consumed.at[self.slot(last)])
            return tuple(total[...] for total in sums)

        shape = plan.padded_rows, plan.columns
        accumulator = plgpu.ACC(shape, jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
        return list(pl.run_scoped(add_all, *[accumulator] * parts))

    def multiply(self, total: Any, part: int, slot: Array, warpgroup: Array) -> None:
        """Starts to add one part's product of a stage to an accumulator."""
        plan, rows = self.plan, self.scratch.rows
        row_part, column_part = (part, 0) if plan.weights_on_rows else (0, part)
        rows_of_warpgroup = pl.ds(warpgroup * plan.padded_rows, plan.padded_rows)
        if plan.rows_contiguous_in_k:
            a = rows.at[slot, row_part, rows_of_warpgroup]
        else:
            a = rows.at[slot, row_part, :, rows_of_warpgroup].T
        b = self.scratch.columns.at[slot, column_part]
        plgpu.wgmma(total, a, b.T if plan.columns_contiguous_in_k else b)


class Output:
    """A warpgroup's part of a tile of the result, from token m and output n on, which passes the epilogue in chunks.

    `arrays` are the other devices' results, if they share it; see `open_results`.
    """

    def __init__(self, cta: Cta, m: Array, n: Array, arrays: tuple[Array, ...]) -> None:
        self.plan, self.epilogue, self.scratch = cta.plan, cta.epilogue, cta.scratch
        self.bias, self.residual = cta.operands.bias, cta.operands.residual
        self.y, self.z, self.weight = cta.y, cta.z, cta.weight
        self.stored = 0  # chunks of this tile that were staged; they use the slots round robin
        self.arrays, peers = arrays, cta.operands.peers
        self.devices = 1 if peers is None else peers.devices
        self.first: Any = 0 if peers is None else peers.number[0] * self.plan.problem.n
        """First column of this device in the result."""
        self.m, self.n = m, n
        self.warpgroup = lax.axis_index("warpgroup")

    def prefetch(self) -> None:
        """Starts the epilogue's loads: the bias, and one chunk of the residual for each slot."""
        plan, scratch = self.plan, self.scratch
        if self.bias is not None:
            size = plan.rows if plan.weights_on_rows else plan.columns
            for part in range(plan.problem.parts):
                target = scratch.bias.at[self.warpgroup, part, pl.ds(0, size)]
                source = self.bias.at[self.weight(self.m, part), pl.ds(self.n, size)]
                plgpu.copy_gmem_to_smem(source, target, scratch.bias_loaded.at[self.warpgroup])
        if self.residual is not None:
            for chunk in range(plan.slots):
                self._load_residual(chunk)

    def sums(self) -> Array | None:
        """Returns the accumulator's initial values from device memory; None: zeros."""
        plan = self.plan
        if not plan.problem.continues:
            return None
        # Threads read the sums themselves, so no tile may reach beyond the array; see `Plan.unmet_requirements`.
        tile = self.y.at[pl.ds(self.m, plan.rows), pl.ds(self.n, plan.columns)]
        return plgpu.load(tile, layout=plgpu.Layout.WGMMA, optimized=False)

    def store(self, sums: Sequence[Array]) -> None:
        """Applies the epilogue and starts the result's copies to device memory."""
        if self.bias is not None:
            plgpu.barrier_wait(self.scratch.bias_loaded.at[self.warpgroup])
        for chunk in range(self.plan.chunks):
            # One chunk at a time, because the temporaries of an activation for all accumulators would not fit into the
            # registers that the accumulators leave.
            biased = [self._add_bias(z, part, chunk) for part, z in enumerate(sums)]
            # The backward pass takes the epilogue's derivative at these biased sums.
            for part, array in enumerate(self.z):
                self._store_chunk(biased[part], chunk, array)
            z = activated(biased, self.epilogue, ACTIVATIONS)
            if self.residual is not None:
                z = self._add_residual(z, chunk)
            self._store_chunk(z, chunk, self.y)

    def _add_bias(self, z: Array, part: int, chunk: int) -> Array:
        """Returns a chunk of one part's sums plus its bias."""
        plan, first, size = self.plan, chunk * self.plan.chunk, self._width(chunk)
        z = z[:, first : first + size] if plan.chunks > 1 else z
        if self.bias is None:
            return z
        along = pl.ds(0, plan.padded_rows) if plan.weights_on_rows else pl.ds(first, size)
        bias = self.scratch.bias[self.warpgroup, part, along].astype(ACCUMULATOR)
        return z + lax.broadcast_in_dim(bias, z.shape, [0 if plan.weights_on_rows else 1])

    def _add_residual(self, z: Array, chunk: int) -> Array:
        """Returns a chunk plus its residual, and starts the load of the next chunk for the residual's slot."""
        plan = self.plan
        plgpu.barrier_wait(self.scratch.residual_loaded.at[self._slot_index(chunk)])
        z = z + self._residual_chunk(chunk).astype(ACCUMULATOR)
        if chunk + plan.slots < plan.chunks:
            # All threads must have read the slot before the copy engine overwrites it.
            plgpu.commit_smem()
            self._load_residual(chunk + plan.slots)
        return z

    def _store_chunk(self, z: Array, chunk: int, array: Any) -> None:
        """Rounds a chunk and starts its copy to an array in device memory."""
        plan, dtype = self.plan, self.plan.problem.out_dtype
        slot, in_flight = self.stored % plan.slots, plan.copies_in_flight(self.stored)
        self.stored += 1
        # The slot is free as soon as the copy engine has read it; whether its writes have landed does not matter.
        plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
        if plan.weights_on_rows and dtype.itemsize == 4:
            # Outputs are rows of the accumulator and columns of the result. A shuffle between two lanes transposes
            # pairs of numbers, so that a thread has two neighbours of a result's row and stores them at once.
            z = plgpu.layout_cast(z, plgpu.Layout.WGMMA_TRANSPOSED)
        self._staged_as_rows(self.scratch.out, chunk, slot)[...] = z.astype(dtype)
        # The copy engine reads through another proxy: without the fence it could read what was in the slot before.
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self._staged(self.scratch.out, chunk, slot), self._in_memory(array, chunk))
        if self.arrays:
            self._send_chunk(chunk, slot)

    def _send_chunk(self, chunk: int, slot: int) -> None:
        """Writes a chunk of the result into the other devices' arrays."""
        plan, first, size = self.plan, chunk * self.plan.chunk, self._width(chunk)
        m, n, shape = (
            (self.m + first, self.n, (size, plan.rows))
            if plan.weights_on_rows
            else (self.m, self.n + first, (plan.rows, size))
        )
        dtype = plan.problem.out_dtype
        send_chunk(
            self.scratch.out.at[self.warpgroup, slot],
            m,
            self.first + n,
            *self.arrays,
            line=plan.staged_line(dtype),
            itemsize=dtype.itemsize,
            shape=shape,
            bounds=(plan.problem.m, self.devices * plan.problem.n),
        )

    def _load_residual(self, chunk: int) -> None:
        barrier = self.scratch.residual_loaded.at[self._slot_index(chunk)]
        target = self._staged(self.scratch.residual, chunk, chunk % self.plan.slots)
        plgpu.copy_gmem_to_smem(self._in_memory(self.residual, chunk), target, barrier)

    def _slot_index(self, chunk: int) -> Array:
        return self.warpgroup * self.plan.slots + chunk % self.plan.slots

    def _width(self, chunk: int) -> int:
        """Columns of a chunk; the last one may have fewer."""
        return min(self.plan.chunk, self.plan.columns - chunk * self.plan.chunk)

    def _in_memory(self, array: Any, chunk: int) -> Any:
        """The part `[tokens, outputs]` of an array in device memory that a chunk covers."""
        plan, first, size = self.plan, chunk * self.plan.chunk, self._width(chunk)
        if plan.weights_on_rows:
            return array.at[pl.ds(self.m + first, size), pl.ds(self.first + self.n, plan.rows)]
        return array.at[pl.ds(self.m, plan.rows), pl.ds(self.first + self.n + first, size)]

    def _staged(self, buffer: Any, chunk: int, slot: int) -> Any:
        """A chunk in a slot of shared memory, `[tokens, outputs]`, without padding rows."""
        plan, size = self.plan, self._width(chunk)
        tokens, outputs = (size, plan.rows) if plan.weights_on_rows else (plan.rows, size)
        ref = buffer.at[self.warpgroup, slot]
        return ref if (tokens, outputs) == plan.staged_shape else ref.at[pl.ds(0, tokens), pl.ds(0, outputs)]

    def _staged_as_rows(self, buffer: Any, chunk: int, slot: int) -> Any:
        """A chunk in a slot of shared memory, in the accumulator's shape `[rows, columns]`."""
        plan, size = self.plan, self._width(chunk)
        ref = buffer.at[self.warpgroup, slot]
        if not plan.weights_on_rows:
            return ref
        return (ref if size == plan.chunk else ref.at[pl.ds(0, size)]).T

    def _residual_chunk(self, chunk: int) -> Array:
        """A chunk of the residual from shared memory, in the accumulator's layout."""
        return self._loaded_chunk(self.scratch.residual, chunk, chunk % self.plan.slots)

    def _loaded_chunk(self, buffer: Any, chunk: int, slot: int) -> Array:
        """A chunk of an array like the result from a slot of shared memory, in the accumulator's layout."""
        array = self._staged_as_rows(buffer, chunk, slot)[...]
        if self.plan.weights_on_rows and array.dtype.itemsize == 4:
            array = plgpu.layout_cast(plgpu.layout_cast(array, plgpu.Layout.WGMMA_TRANSPOSED), plgpu.Layout.WGMMA)
        return array
