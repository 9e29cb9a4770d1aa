"""Compiles products: detjax's, with the pinned options, and XLA's own, autotuned."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import jax

from benchmarks.rivals import xla_dot
from benchmarks.studies.matmul.cases import BF16, Sizes
from detjax import ops
from detjax.operands.options import Epilogue, WeightLayout
from detjax.pallas.hopper.matmul.kernel import Operands, product
from detjax.pallas.hopper.matmul.plan import Schedule
from detjax.runtime import backends, compilation

BUILDERS: Final = 4
"""Threads that compile our kernels while XLA autotunes."""


def matmul(layout: WeightLayout, **epilogue: Any) -> Callable[..., jax.Array]:
    """Returns `ops.matmul` as a function of tokens, weights and optionally a residual."""

    def call(x: jax.Array, w: jax.Array, residual: jax.Array | None = None) -> jax.Array:
        return ops.matmul(x, w, layout=layout, residual=residual, **epilogue)

    return call


def scheduled(schedule: Schedule) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns the Hopper kernel under a schedule, a function of tokens `[M, K]` and weights `[N, K]`."""

    def call(x: jax.Array, w: jax.Array) -> jax.Array:
        return product(Operands(x, w), layout="nk", epilogue=Epilogue(), out_dtype=BF16, schedule=schedule)

    return call


def build(fn: Callable[..., Any], backend: str, *arguments: Any) -> Callable[..., Any]:
    """Compiles `fn` for the arguments' shapes, with the pinned options, or with JAX's defaults under `stock`."""
    options = None if backend == backends.STOCK else compilation.compiler_options()
    with backends.use_backend(backend):
        return jax.jit(fn, compiler_options=options).lower(*arguments).compile()


@dataclasses.dataclass(frozen=True)
class Programs:
    """The programs of one [N, K].

    Attributes:
        ours: by layout of the weights and number of tokens.
        xla: XLA's, by number of tokens.
    """

    ours: dict[tuple[WeightLayout, int], Callable[..., Any]]
    xla: dict[int, Callable[..., Any]]


def build_all(sizes: Sizes, linear: tuple[int, int], layouts: Iterable[WeightLayout], backend: str) -> Programs:
    """Builds all programs of one [N, K]. XLA's are built in sequence, since XLA times candidates."""
    n, k = linear
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=BF16)
    ours: dict[tuple[WeightLayout, int], Future] = {}
    with ThreadPoolExecutor(BUILDERS) as pool:
        for layout in layouts:
            w = shape((n, k) if layout == "nk" else (k, n))
            for m in sizes.tokens:
                ours[layout, m] = pool.submit(build, matmul(layout), backend, shape((m, k)), w)
        xla = {m: build(xla_dot, backends.STOCK, shape((m, k)), shape((n, k))) for m in sizes.tokens}
    return Programs({name: future.result() for name, future in ours.items()}, xla)
