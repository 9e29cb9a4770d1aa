"""Matmul on a TPU's matrix unit: one kernel, with the same tiles for any number of tokens.

A block of weights stays in VMEM while all tiles of tokens pass. So each weight is read once for any number of tokens,
and a decode step is bound by the arrival of its weights. Within a block, K is visited in steps of `TPU_K_STEP`, which
are added to one float32 accumulator in VMEM.

Only the length of the grid depends on the number of tokens. On Hopper all schedules have the same bits, because the
accumulator takes K in hardware steps. On a TPU the compiler chooses by the shape of a step what the matrix unit does
within it, so that shape is part of the contract (`StepShape`). Schedules that depend on the number of tokens could be
added once a device has shown that they change no bit.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, DTypeLike

from detjax.contract import ACCUMULATOR, TPU_K_STEP, TPU_ROW_TILE, WEIGHT_GRADIENT_TOKENS
from detjax.operands.numerics import activated, ceil_div, flat_rows, round_up
from detjax.operands.options import Activation, Epilogue, WeightLayout
from detjax.operands.products import NO_SUMS, Gradients, MatmulOperands, WeightSums
from detjax.operands.rounding import rounded
from detjax.pallas.tpu.device import LANES, SUBLANES, VMEM_LIMIT, check_dtypes
from detjax.portable.matmul import apply_epilogue as apply_epilogue

EPILOGUE_ROWS: Final = 32
"""Rows that pass the epilogue at once: with 512 outputs, 16 registers of 8 x 128 for each intermediate result."""

OPERAND_BYTES: Final = 44 * 2**20
"""Bytes of VMEM for the blocks of x and w, two of each because the next ones are loaded during the computation. The
rest of `VMEM_LIMIT` is for sums and temporaries."""


# --- what the bits depend on ------------------------------------------------------------------------------------------

XLayout = Literal["mk", "km"]


@dataclasses.dataclass(frozen=True)
class StepShape:
    """The rows of x and the elements of K in one product, which belong to the contract; see `contract.TPU_K_STEP`."""

    rows: int
    k: int


TOKEN_STEP: Final = StepShape(TPU_ROW_TILE, TPU_K_STEP)
"""Step of products whose rows are tokens."""
WEIGHT_GRADIENT_STEP: Final = StepShape(256, WEIGHT_GRADIENT_TOKENS)
"""Step of weight gradients, whose K is tokens."""
BIAS_GRADIENT_STEP: Final = StepShape(LANES, WEIGHT_GRADIENT_TOKENS)
"""Step of bias gradients, which are products with a tile of ones."""


@dataclasses.dataclass(frozen=True)
class Contraction:
    """The layouts and the step of a product.

    Attributes:
        x_layout: "mk" if x is `[M, K]`, "km" if it is `[K, M]`.
        w_layout: "kn" if w is `[K, N]`, "nk" if it is `[N, K]`.
        step: the shape of one product.
    """

    x_layout: XLayout
    w_layout: WeightLayout
    step: StepShape

    @property
    def x_axis(self) -> int:
        """The axis of K in x."""
        return 1 if self.x_layout == "mk" else 0

    @property
    def w_axis(self) -> int:
        """The axis of K in stacked weights `[parts, ..., ...]`."""
        return 1 if self.w_layout == "kn" else 2

    def add_step(self, accumulators: Any, x: Any, w: Any, first: Array | int, size: int) -> None:
        """Adds the products of one step of K to the accumulators.

        Args:
            accumulators: a reference to `[parts, rows, outputs]` float32.
            x: a reference to a block of x.
            w: a reference to a block of the stacked weights.
            first: the first element of K in the blocks.
            size: elements of K in the step.
        """
        span = pl.ds(first, size)
        a = x[:, span] if self.x_layout == "mk" else x[span, :]
        contracted = (self.x_axis,), (self.w_axis - 1,)
        # With the default precision the matrix unit rounds float32 operands to bfloat16.
        precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
        for part in range(w.shape[0]):
            b = w[part, span, :] if self.w_layout == "kn" else w[part, :, span]
            accumulators[part] += lax.dot_general(
                a, b, (contracted, ((), ())), precision=precision, preferred_element_type=ACCUMULATOR
            )


ACTIVATIONS: Final[dict[Activation, Callable[[Array], Array]]] = {
    "silu": jax.nn.silu,
    "gelu": lambda z: 0.5 * z * (1.0 + lax.erf(0.7071067811865476 * z)),  # jax.nn's uses erfc, which Mosaic lacks
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}

Finish = Callable[[Sequence[Array], Array | None], list[Array]]
"""Computes the results of some rows from their biased float32 sums, one for each stacked weight, and from the same rows
of `Operands.elementwise`."""


def _finish_forward(epilogue: Epilogue, sums: Sequence[Array], residual: Array | None) -> list[Array]:
    y = activated(sums, epilogue, ACTIVATIONS)
    return [y if residual is None else y + residual.astype(ACCUMULATOR)]


def _finish_backward(epilogue: Epilogue, dtype: DTypeLike, sums: Sequence[Array], dy: Array | None) -> list[Array]:
    """Returns the gradients of the sums, at the sums rounded to a dtype."""
    assert dy is not None
    sums = [total.astype(dtype).astype(ACCUMULATOR) for total in sums]
    return list(jax.vjp(lambda *sums: activated(sums, epilogue, ACTIVATIONS), *sums)[1](dy.astype(ACCUMULATOR)))


# --- schedules --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Problem:
    """A product, without the number of tokens, on which no schedule depends.

    Attributes:
        contraction: the layouts and the step.
        parts: stacked weights: 1, or 2 if gated.
        n: columns of the result.
        k: elements of K, a multiple of 128; None if K is tokens.
        dtype: the dtype of x and w.
    """

    contraction: Contraction
    parts: int
    n: int
    k: int | None
    dtype: jnp.dtype


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The parts of x and w that are in VMEM at once.

    Attributes:
        outputs: columns of a tile of the result, a multiple of 128.
        slab: elements of K that are loaded at once: all of K, or a multiple of the step and of 128.
    """

    outputs: int
    slab: int

    def __post_init__(self) -> None:
        if self.outputs < 1 or self.outputs % LANES or self.slab < 1:
            raise ValueError(
                f"matmul: the schedule has {self.outputs} outputs and slabs of {self.slab}; accepted: positive "
                f"multiples of {LANES} outputs and positive slabs. Round them up."
            )

    def check(self, problem: Problem) -> None:
        """Raises ValueError if a slab is neither all of K nor a multiple of the step and of a register."""
        step = problem.contraction.step.k
        if self.slab != problem.k and (self.slab % step or self.slab % LANES):
            raise ValueError(
                f"matmul: the schedule has slabs of {self.slab}, with K being {problem.k or 'tokens'}; accepted: all "
                f"of K, or multiples of {step} and {LANES}. Round it up."
            )


def default_schedule(problem: Problem) -> Schedule:
    """Returns the schedule of a product.

    Tokens are read once for every tile of outputs, and a tile of 512 outputs is enough work per token read. If all of K
    of such a tile does not fit into VMEM, the tile has 256 outputs; if that does not fit either, K is loaded in slabs.
    In bfloat16, 512 outputs fit up to a K of about 18,000 and 256 up to 30,000; a slab of 4096 takes 10 MiB.
    """
    if problem.k is None:
        return Schedule(outputs=512, slab=256)
    rows = problem.contraction.step.rows
    for outputs in (512 // problem.parts, 256 // problem.parts):
        if 2 * problem.dtype.itemsize * problem.k * (problem.parts * outputs + rows) <= OPERAND_BYTES:
            return Schedule(min(outputs, round_up(problem.n, LANES)), problem.k)
    return Schedule(512 // problem.parts, 4096)


# --- the operation ----------------------------------------------------------------------------------------------------


def forward(operands: MatmulOperands, *, layout: WeightLayout, epilogue: Epilogue, out_dtype: DTypeLike) -> Array:
    """Returns `[*B, N]` for rows `[*B, K]`; see `detjax.ops.matmul` for the arguments.

    Raises:
        NotImplementedError: a dtype, including the result's, is not one of `device.DTYPES`.
    """
    x, w, bias, residual = operands
    flat = Operands(flat_rows(x), w, bias, None if residual is None else flat_rows(residual))
    (y,) = multiply(
        flat, Contraction("mk", layout, TOKEN_STEP), [out_dtype], functools.partial(_finish_forward, epilogue)
    )
    return y.reshape(*x.shape[:-1], y.shape[-1])


def backward(
    operands: MatmulOperands, dy: Array, sums: WeightSums = NO_SUMS, *, layout: WeightLayout, epilogue: Epilogue
) -> Gradients:
    """Returns the gradients of x, w and bias; for a w or bias with a running sum, the next sum instead.

    `dx` adds N in ascending order, gate's before up's; `dw` and `dbias` add tokens in ascending order. The gradient of
    the sums before the epilogue is rounded to x's dtype before it is multiplied.

    Raises:
        NotImplementedError: a dtype is not one of `device.DTYPES`.
    """
    (x, w, bias, _), (w_sum, bias_sum) = operands, sums
    flat_x, flat_dy = flat_rows(x), flat_rows(dy)
    weights = [w] if w.ndim == 2 else [w[0], w[1]]

    if epilogue == Epilogue():
        dz = [rounded(flat_dy, x.dtype)]
    else:
        # The sums are recomputed.
        forward_operands = Operands(flat_x, w, bias, flat_dy)
        finish = functools.partial(_finish_backward, epilogue, x.dtype)
        dz = multiply(forward_operands, Contraction("mk", layout, TOKEN_STEP), [x.dtype] * len(weights), finish)
    joined_dz = jnp.concatenate(dz, axis=1)
    # Stacked "nk" weights are already contiguous along N; contracting both "kn" weights at once takes a copy.
    joined_w = w.reshape(-1, w.shape[-1]) if layout == "nk" else jnp.concatenate(weights, axis=1)
    dx = product(joined_dz, joined_w, Contraction("mk", "kn" if layout == "nk" else "nk", TOKEN_STEP), x.dtype)

    def over_tokens(x: Array, dz: Array, start: Array | None, dtype: DTypeLike, step: StepShape) -> Array:
        out_dtype = dtype if start is None else ACCUMULATOR
        return product(x, dz, Contraction("km", "kn", step), out_dtype, start=start)

    if layout == "nk":
        start = None if w_sum is None else w_sum.reshape(joined_w.shape)
        dw = over_tokens(joined_dz, flat_x, start, w.dtype, WEIGHT_GRADIENT_STEP)
    else:
        starts = [None] * len(weights) if w_sum is None else list(w_sum.reshape(len(weights), *weights[0].shape))
        pairs = zip(dz, starts, strict=True)
        dw = jnp.stack([over_tokens(flat_x, part, start, w.dtype, WEIGHT_GRADIENT_STEP) for part, start in pairs])
    dbias = None
    if bias is not None:
        # All rows of this product are the gradient; the matrix unit needs a whole tile of them.
        ones = jnp.ones((flat_x.shape[0], LANES), x.dtype)
        start = None if bias_sum is None else jnp.broadcast_to(bias_sum.reshape(1, -1), (LANES, bias.size))
        dbias = over_tokens(ones, joined_dz, start, bias.dtype, BIAS_GRADIENT_STEP)[0].reshape(bias.shape)
    return dx.reshape(x.shape), dw.reshape(w.shape), dbias


def product(
    x: Array,
    w: Array,
    contraction: Contraction,
    out_dtype: DTypeLike,
    schedule: Schedule | None = None,
    start: Array | None = None,
) -> Array:
    """Returns `x @ w`, `[M, N]`, without an epilogue; see `multiply`."""
    finish = functools.partial(_finish_forward, Epilogue())
    (y,) = multiply(Operands(x, w, start=start), contraction, [out_dtype], finish, schedule)
    return y


class Operands(NamedTuple):
    """The operands of a product, or references to their blocks in VMEM.

    Attributes:
        x: `[M, K]` or `[K, M]`.
        w: `[K, N]` or `[N, K]`; two of them, stacked, if gated.
        bias: `[N]`, or `[2, N]` if gated; None: no bias.
        elementwise: `[M, N]`, an elementwise operand of the epilogue: the residual, or the result's gradient.
        start: `[M, N]` float32: initial values of the accumulators; None: zeros. If it was donated and blocks divide it
            evenly, the only result overwrites it.
    """

    x: Any
    w: Any
    bias: Any = None
    elementwise: Any = None
    start: Any = None


def multiply(
    operands: Operands,
    contraction: Contraction,
    out_dtypes: Sequence[DTypeLike],
    finish: Finish,
    schedule: Schedule | None = None,
) -> list[Array]:
    """Returns results `[M, N]` of the given dtypes, which `finish` computes from the biased sums of `x @ w`.

    Args:
        operands: the arrays.
        contraction: the layouts and the step.
        out_dtypes: dtypes of the results.
        finish: computes the results of some rows.
        schedule: default: `default_schedule`'s.

    Raises:
        NotImplementedError: a dtype is not one of `device.DTYPES`.
        ValueError: the schedule does not fit the problem.
    """
    check_dtypes("matmul", *operands, *(jax.ShapeDtypeStruct((), dtype) for dtype in out_dtypes))
    m = operands.x.shape[1 - contraction.x_axis]
    operands, problem, schedule = _prepared(operands, contraction, schedule)
    padded_m, k = (operands.x.shape[axis] for axis in (1 - contraction.x_axis, contraction.x_axis))
    rows, outputs, slab = contraction.step.rows, schedule.outputs, schedule.slab

    # `start` is the last operand, and each of its blocks is read before the result's block is written. Pallas'
    # interpreter does not support in-place results whose last blocks reach beyond the array.
    in_place = operands.start is not None and padded_m % rows == 0 and problem.n % outputs == 0

    def kernel(operands: Operands, results: Sequence[Any], accumulators: Any) -> None:
        _Kernel(problem, schedule, finish, operands, results, accumulators).run()

    (results,) = pl.pallas_call(
        kernel,
        out_shape=[[jax.ShapeDtypeStruct((padded_m, problem.n), dtype) for dtype in out_dtypes]],
        # The order of axes decides the traffic: with all of K in one slab, a block of weights has the same index for
        # all tiles of tokens, and Pallas copies it only once.
        grid=(ceil_div(problem.n, outputs), ceil_div(padded_m, rows), ceil_div(k, slab)),
        in_specs=[_operand_specs(operands, contraction, schedule)],
        out_specs=[[_result_spec(rows, outputs) for _ in out_dtypes]],
        scratch_shapes=[pltpu.VMEM((problem.parts, rows, outputs), ACCUMULATOR)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        input_output_aliases={len(jax.tree.leaves(operands)) - 1: 0} if in_place else {},
        name="matmul",
    )(operands)
    return [result[:m] for result in results]


def padded(array: Array, axis: int, multiple: int) -> Array:
    """Returns the array with zeros appended along the axis up to a multiple of `multiple`."""
    padding = -array.shape[axis] % multiple
    if not padding:
        return array
    return jnp.pad(array, [(0, padding if i == axis else 0) for i in range(array.ndim)])


def _prepared(
    operands: Operands, contraction: Contraction, schedule: Schedule | None
) -> tuple[Operands, Problem, Schedule]:
    """Returns the kernel's operands: K padded with zeros, which add nothing, and weights and biases stacked."""
    x, w, bias, elementwise, start = operands
    w = w.reshape(-1, *w.shape[-2:])
    parts, n = w.shape[0], w.shape[3 - contraction.w_axis]
    over_tokens = contraction.x_layout == "km"
    k = None if over_tokens else round_up(x.shape[contraction.x_axis], LANES)
    problem = Problem(contraction, parts, n, k, x.dtype)
    schedule = schedule or default_schedule(problem)
    schedule.check(problem)

    # If K is tokens, it is padded to whole slabs, so that no constant of the kernel depends on the number of tokens.
    multiple = schedule.slab if over_tokens else LANES
    x, w = padded(x, contraction.x_axis, multiple), padded(w, contraction.w_axis, multiple)
    if not over_tokens:
        # XLA lays out arrays of fewer than 8 rows in smaller tiles, so few tokens would be copied in another way.
        x = padded(x, 0, SUBLANES)
        elementwise = None if elementwise is None else padded(elementwise, 0, SUBLANES)
    bias = None if bias is None else bias.reshape(parts, n)
    return Operands(x, w, bias, elementwise, start), problem, schedule


def _operand_specs(operands: Operands, contraction: Contraction, schedule: Schedule) -> Operands:
    """Returns the blocks of the operands for a grid step (n, m, k); None for absent operands."""
    parts, rows, outputs, slab = operands.w.shape[0], contraction.step.rows, schedule.outputs, schedule.slab
    if contraction.x_layout == "mk":
        x = pl.BlockSpec((rows, slab), lambda n, m, k: (m, k))
    else:
        x = pl.BlockSpec((slab, rows), lambda n, m, k: (k, m))
    if contraction.w_layout == "kn":
        w = pl.BlockSpec((parts, slab, outputs), lambda n, m, k: (0, k, n))
    else:
        w = pl.BlockSpec((parts, outputs, slab), lambda n, m, k: (0, n, k))
    bias = None if operands.bias is None else pl.BlockSpec((parts, outputs), lambda n, m, k: (0, n))
    elementwise = None if operands.elementwise is None else _result_spec(rows, outputs)
    start = None if operands.start is None else _result_spec(rows, outputs)
    return Operands(x, w, bias, elementwise, start)


def _result_spec(rows: int, outputs: int) -> pl.BlockSpec:
    return pl.BlockSpec((rows, outputs), lambda n, m, k: (m, n))


@dataclasses.dataclass(frozen=True, eq=False)
class _Kernel:
    """One slab of K for one tile of the result, with references to the blocks in VMEM."""

    problem: Problem
    schedule: Schedule
    finish: Finish
    operands: Operands
    results: Sequence[Any]
    accumulators: Any

    def run(self) -> None:
        slab_index = pl.program_id(2)
        pl.when(slab_index == 0)(self.clear)
        self.add_whole_steps(slab_index)
        if self.problem.k is not None:
            pl.when(slab_index == pl.num_programs(2) - 1)(self.store)
        else:
            # The index of the last slab depends on the number of tokens and would be a constant of the kernel, so the
            # result is written after every slab.
            self.store()

    def clear(self) -> None:
        start = self.operands.start
        if start is None:
            self.accumulators[...] = jnp.zeros(self.accumulators.shape, ACCUMULATOR)
        else:
            self.accumulators[0] = start[...]

    def add_whole_steps(self, slab_index: Array) -> None:
        k, slab, step = self.problem.k, self.schedule.slab, self.problem.contraction.step.k
        steps = slab // step
        # K may end within the last slab; the rest of that slab's blocks is undefined and never read.
        if k is not None and k % slab:
            steps = jnp.minimum(steps, k // step - slab_index * steps)
        lax.fori_loop(0, steps, lambda index, _: self.add_step(pl.multiple_of(index * step, step), step), None)

    def add_step(self, first: Array | int, size: int) -> None:
        x, w, *_ = self.operands
        self.problem.contraction.add_step(self.accumulators, x, w, first, size)

    def store(self) -> None:
        """Adds the shorter last step of K, if there is one, and writes the results."""
        k, slab, step = self.problem.k, self.schedule.slab, self.problem.contraction.step.k
        if k is not None and k % step:
            self.add_step((k - 1) % slab // step * step, k % step)
        chunks = self.problem.contraction.step.rows // EPILOGUE_ROWS
        lax.fori_loop(0, chunks, lambda chunk, _: self.store_rows(chunk * EPILOGUE_ROWS), None)

    def store_rows(self, first: Array) -> None:
        rows = pl.ds(pl.multiple_of(first, EPILOGUE_ROWS), EPILOGUE_ROWS)
        sums = [self.accumulators[part, rows, :] for part in range(self.problem.parts)]
        bias, elementwise = self.operands.bias, self.operands.elementwise
        if bias is not None:
            sums = [z + bias[part : part + 1, :].astype(ACCUMULATOR) for part, z in enumerate(sums)]
        tiles = self.finish(sums, None if elementwise is None else elementwise[rows, :])
        for result, tile in zip(self.results, tiles, strict=True):
            result[rows, :] = tile.astype(result.dtype)
