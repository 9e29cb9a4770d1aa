"""Matmul on a TPU's matrix unit: one kernel whose tiles are the same for every number of tokens.

A tile of tokens meets weights that stay in VMEM while all tokens pass by, so each weight is read once for any number of
tokens, and a decode step costs what its weights take to arrive. K is visited inside, `TPU_K_STEP` after `TPU_K_STEP`,
onto one float32 accumulator in VMEM.

Nothing here follows the number of tokens but the length of the grid. On Hopper every schedule has the same bits, as its
accumulator meets K in hardware steps; what a TPU does inside one step is the compiler's choice for the step's shape, so
the tile and the step are part of what the bits are. Schedules by the number of tokens could follow where a device has
shown that they change no bit.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, DTypeLike

from detjax.contract import ACCUMULATOR, TPU_K_STEP, TPU_ROW_TILE, WEIGHT_GRADIENT_TOKENS
from detjax.options import Activation, Epilogue, WeightLayout
from detjax.pallas.tpu.device import LANES, SUBLANES, check_dtypes
from detjax.portable.matmul import activated
from detjax.portable.tiles import flat_rows
from detjax.rounding import rounded

EPILOGUE_ROWS: Final = 32
"""Lines that the epilogue takes at once, for what it computes with to stay in registers."""

TokenLayout = Literal["mk", "km"]

VMEM_LIMIT: Final = 56 * 2**20
"""Of the 64 MiB of a TPU7x, which has least; the others' default is 16 MiB of the 128 that are there."""
_VMEM_BUDGET: Final = 44 * 2**20
"""For the blocks of x and w, twice each as the next are loaded meanwhile. The rest is for sums and temporaries."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How much of x and w is in VMEM at once. It follows dtypes and weight shapes, never the number of tokens.

    Args:
        outputs: columns of a tile, a multiple of 128.
        slab: length of K that is loaded at once; all of K, or a multiple of the step and of 128.
        rows: lines of a tile: `TPU_ROW_TILE` where they are tokens.
    """

    outputs: int
    slab: int
    rows: int = TPU_ROW_TILE


WEIGHT_GRADIENT_SCHEDULE: Final = Schedule(outputs=512, slab=256, rows=256)
"""K is tokens here, filled up with zeros to whole slabs."""


def choose(n: int, k: int, parts: int, dtype: DTypeLike) -> Schedule:
    """The schedule of a `[K, N]` weight, or of two that are gated; K a multiple of 128.

    Tokens are read again for every tile of outputs: 512 of them are enough work for what is read. Where whole columns
    of such a tile don't fit, it gets narrower, then K is cut.
    """

    def size(outputs: int, slab: int) -> int:
        return 2 * jnp.dtype(dtype).itemsize * slab * (parts * outputs + TPU_ROW_TILE)

    for outputs in (512 // parts, 256 // parts):
        if size(outputs, k) <= _VMEM_BUDGET:
            return Schedule(min(outputs, -(-n // LANES) * LANES), k)
    return Schedule(512 // parts, 4096)


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
        NotImplementedError: a dtype, the result's among them, is none of `tpu.DTYPES`.
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
        NotImplementedError: a dtype is none of `tpu.DTYPES`.
    """
    flat_x, flat_dy = flat_rows(x), flat_rows(dy)
    halves = [w] if w.ndim == 2 else [w[0], w[1]]

    if epilogue == Epilogue():
        dz = [rounded(flat_dy, x.dtype)]
    else:
        dz = _accumulator_gradients(flat_x, w, bias, flat_dy, layout=layout, epilogue=epilogue)
    joined_dz = jnp.concatenate(dz, axis=1)
    # To contract both halves of a stacked "kn" weight at once takes a copy; "nk" halves follow each other already.
    joined = w.reshape(-1, w.shape[-1]) if layout == "nk" else jnp.concatenate(halves, axis=1)
    dx = product(joined_dz, joined, layout="kn" if layout == "nk" else "nk", out_dtype=x.dtype)

    over_tokens = functools.partial(product, token_layout="km", layout="kn", k_step=WEIGHT_GRADIENT_TOKENS)
    over_tokens = functools.partial(over_tokens, schedule=WEIGHT_GRADIENT_SCHEDULE)
    if layout == "nk":
        dw = over_tokens(joined_dz, flat_x, out_dtype=w.dtype)
    else:
        dw = jnp.stack([over_tokens(flat_x, part, out_dtype=w.dtype) for part in dz])
    dbias = None
    if bias is not None:
        ones = jnp.ones((flat_x.shape[0], LANES), x.dtype)
        narrow = dataclasses.replace(WEIGHT_GRADIENT_SCHEDULE, rows=LANES)
        dbias = over_tokens(ones, joined_dz, out_dtype=bias.dtype, schedule=narrow)[0].reshape(bias.shape)
    return dx.reshape(x.shape), dw.reshape(w.shape), dbias


def product(
    x: Array,
    w: Array,
    bias: Array | None = None,
    residual: Array | None = None,
    *,
    token_layout: TokenLayout = "mk",
    layout: WeightLayout,
    epilogue: Epilogue = Epilogue(),  # noqa: B008
    out_dtype: DTypeLike,
    k_step: int = TPU_K_STEP,
    schedule: Schedule | None = None,
) -> Array:
    """`[M, N]`: the epilogue of `x @ w`.

    Args:
        x: `[M, K]`, or `[K, M]` where `token_layout` is "km".
        w: `[K, N]`, or `[N, K]` where `layout` is "nk"; two of them, stacked, if gated.
        bias: `[N]`, or `[2, N]` if gated.
        residual: `[M, N]`.
        k_step: elements of K in one product of the matrix unit.
        schedule: default: `choose`'s.

    Raises:
        NotImplementedError: a dtype is none of `tpu.DTYPES`.
    """

    def finish(sums: Sequence[Array], residual: Array | None) -> list[Array]:
        y = activated(sums, epilogue, ACTIVATIONS)
        return [y if residual is None else y + residual.astype(ACCUMULATOR)]

    (y,) = _tiled(
        finish,
        [jnp.dtype(out_dtype)],
        x,
        w,
        bias,
        residual,
        token_layout=token_layout,
        layout=layout,
        k_step=k_step,
        schedule=schedule,
    )
    return y


def _accumulator_gradients(
    x: Array, w: Array, bias: Array | None, dy: Array, *, layout: WeightLayout, epilogue: Epilogue
) -> list[Array]:
    """`[M, N]` in x's dtype, of gate and up if gated, from sums that are computed again."""

    def finish(sums: Sequence[Array], dy: Array | None) -> list[Array]:
        assert dy is not None
        return list(jax.vjp(lambda *sums: activated(sums, epilogue, ACTIVATIONS), *sums)[1](dy.astype(ACCUMULATOR)))

    dtypes = [x.dtype] * (2 if epilogue.gated else 1)
    return _tiled(finish, dtypes, x, w, bias, dy, token_layout="mk", layout=layout, k_step=TPU_K_STEP, schedule=None)


ACTIVATIONS: Final[dict[Activation, Callable[[Array], Array]]] = {
    "silu": jax.nn.silu,
    "gelu": lambda z: 0.5 * z * (1.0 + lax.erf(0.7071067811865476 * z)),  # jax.nn's takes erfc, which Mosaic lacks
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}


def _tiled(
    finish: Callable[[Sequence[Array], Array | None], list[Array]],
    dtypes: Sequence[jnp.dtype],
    x: Array,
    w: Array,
    bias: Array | None,
    companion: Array | None,
    *,
    token_layout: TokenLayout,
    layout: WeightLayout,
    k_step: int,
    schedule: Schedule | None,
) -> list[Array]:
    """Arrays `[M, N]` of what `finish` makes of a tile's biased float32 sums and of the companion's tile `[M, N]`."""
    check_dtypes("matmul", x, w, bias, companion, *(jax.ShapeDtypeStruct((), dtype) for dtype in dtypes))
    w = w.reshape(-1, *w.shape[-2:])
    token_axis, x_axis = (0, 1) if token_layout == "mk" else (1, 0)
    w_axis = 1 if layout == "kn" else 2
    parts, n = w.shape[0], w.shape[3 - w_axis]
    m = x.shape[token_axis]

    # Zeros behind K add nothing. Tokens as K come in whole slabs, so that no constant of the kernel knows their number.
    multiple = LANES if token_layout == "mk" else WEIGHT_GRADIENT_SCHEDULE.slab
    x, w = filled(x, x_axis, multiple), filled(w, w_axis, multiple)
    k = x.shape[x_axis]
    schedule = schedule or choose(n, k, parts, x.dtype)
    if token_layout == "mk":
        # XLA lays out arrays of fewer lines in tiles of fewer lines: another kind of copy, which nothing has to trust.
        x = filled(x, 0, SUBLANES)
        companion = None if companion is None else filled(companion, 0, SUBLANES)
    rows, outputs, slab = schedule.rows, schedule.outputs, schedule.slab

    def out_spec() -> pl.BlockSpec:
        return pl.BlockSpec((rows, outputs), lambda n, m, k: (m, n))

    x_spec = (
        pl.BlockSpec((rows, slab), lambda n, m, k: (m, k))
        if token_layout == "mk"
        else pl.BlockSpec((slab, rows), lambda n, m, k: (k, m))
    )
    w_spec = (
        pl.BlockSpec((parts, slab, outputs), lambda n, m, k: (0, k, n))
        if layout == "kn"
        else pl.BlockSpec((parts, outputs, slab), lambda n, m, k: (0, n, k))
    )
    operands, specs = [x, w], [x_spec, w_spec]
    if bias is not None:
        operands.append(bias.reshape(parts, n))
        specs.append(pl.BlockSpec((parts, outputs), lambda n, m, k: (0, n)))
    if companion is not None:
        operands.append(companion)
        specs.append(out_spec())

    def body(*refs: Any) -> None:
        x_ref, w_ref, *others = refs[: len(operands)]
        bias_ref = None if bias is None else others.pop(0)
        companion_ref = others.pop(0) if others else None
        *outs, accumulators = refs[len(operands) :]
        index = pl.program_id(2)

        @pl.when(index == 0)
        def _() -> None:
            accumulators[...] = jnp.zeros(accumulators.shape, ACCUMULATOR)

        add = functools.partial(add_step, accumulators, x_ref, w_ref, token_layout, layout)

        # Slabs behind K's end are shorter; what their blocks hold beyond it is never read.
        steps = slab // k_step
        if k % slab:
            steps = jnp.minimum(steps, k // k_step - index * steps)
        lax.fori_loop(0, steps, lambda step, _: add(pl.multiple_of(step * k_step, k_step), k_step), None)

        def write() -> None:
            if k % k_step:
                add((k - 1) % slab // k_step * k_step, k % k_step)
            lax.fori_loop(0, rows // EPILOGUE_ROWS, lambda chunk, _: write_rows(chunk * EPILOGUE_ROWS), None)

        def write_rows(first: Array) -> None:
            span = pl.ds(pl.multiple_of(first, EPILOGUE_ROWS), EPILOGUE_ROWS)
            sums = [accumulators[part, span, :] for part in range(parts)]
            if bias_ref is not None:
                sums = [z + bias_ref[part : part + 1, :].astype(ACCUMULATOR) for part, z in enumerate(sums)]
            made = finish(sums, None if companion_ref is None else companion_ref[span, :])
            for out, tile in zip(outs, made, strict=True):
                out[span, :] = tile.astype(out.dtype)

        if token_layout == "mk":
            pl.when(index == pl.num_programs(2) - 1)(write)
        else:
            write()  # after every slab, as the last one's number, which follows the tokens, would be a constant here

    lines = m if token_layout == "km" else x.shape[0]
    results = pl.pallas_call(
        body,
        out_shape=[jax.ShapeDtypeStruct((lines, n), dtype) for dtype in dtypes],
        # Tokens pass by while a block of weights stays.
        grid=(-(-n // outputs), -(-lines // rows), -(-k // slab)),
        in_specs=specs,
        out_specs=[out_spec() for _ in dtypes],
        scratch_shapes=[pltpu.VMEM((parts, rows, outputs), ACCUMULATOR)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        name="matmul",
    )(*operands)
    return [result[:m] for result in results]


def add_step(
    accumulators: Any, x: Any, w: Any, token_layout: TokenLayout, layout: WeightLayout, first: Array | int, size: int
) -> None:
    """Adds the products of one step of K to the accumulators `[parts, rows, outputs]`, from a tile of x and of w."""
    span = pl.ds(first, size)
    a = x[:, span] if token_layout == "mk" else x[span, :]
    contracted = ((1 if token_layout == "mk" else 0,), (0 if layout == "kn" else 1,))
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    for part in range(w.shape[0]):
        b = w[part, span, :] if layout == "kn" else w[part, :, span]
        accumulators[part] += lax.dot_general(
            a, b, (contracted, ((), ())), precision=precision, preferred_element_type=ACCUMULATOR
        )


def filled(a: Array, axis: int, multiple: int) -> Array:
    """`a` with zeros behind it up to a multiple of lines along the axis."""
    padding = -a.shape[axis] % multiple
    if not padding:
        return a
    return jnp.pad(a, [(0, padding if i == axis else 0) for i in range(a.ndim)])
