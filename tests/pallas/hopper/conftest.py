"""What the tests of kernels share: a mark for those that need the GPU, and a model of its matrix unit."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory  # JAX has no public names for these

from detjax import backends
from detjax.contract import KV_BLOCK
from detjax.pallas.hopper import device
from detjax.pallas.hopper.attention import (
    backward,
    decode,
    decode_merge,
    dequantize,
    prefill,
    queries_on_columns,
    queries_on_rows,
    warpgroups,
)
from detjax.portable import quantized_kv
from detjax.portable.attention import block_sum


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "hopper: runs kernels on a Hopper GPU; skipped where there is none")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("hopper") and not backends.runs_here("hopper"):
        pytest.skip("needs a Hopper GPU")


class _Product:
    """`a @ b`, which meets the accumulator that it is added to one step of K after the other, in ascending order."""

    __array_ufunc__ = None  # so that NumPy leaves the addition to __radd__

    def __init__(self, a: np.ndarray, b: np.ndarray, dtype: Any) -> None:
        self.a, self.b = a.astype(dtype), b.astype(dtype)

    def __radd__(self, accumulator: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore", over="ignore"):
            for k in range(self.a.shape[1]):
                accumulator = accumulator + self.a[:, k : k + 1] * self.b[k]
        return accumulator


@pytest.fixture
def matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's `wgmma` adds in the order of the hardware's contract.

    Its own is a BLAS call for each stage, whose order of addition follows the tile: bits would tell schedules apart
    that a device does not. Here each element of the accumulator adds one product after another, K ascending, so that
    bits differ where, and only where, a schedule visits K in another order or starts a second sum.
    """
    numpy = SimpleNamespace(**vars(np) | {"matmul": lambda a, b, *, dtype: _Product(a, b, dtype)})
    monkeypatch.setattr(gpu_callbacks, "np", numpy)


@pytest.fixture
def two_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are built for a chip so small that each CTA takes several tiles."""
    monkeypatch.setattr(device, "multiprocessors", lambda: 2)


@pytest.fixture
def attention_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention's kernels run in Pallas' interpreter, where it is asked to model `inline_mgpu` as Tokamax uses it.

    What they say in the compiler's own terms is said in JAX's instead, in the same order; the interpreter learns to
    multiply a matrix that is in registers, and to let single warps meet warpgroups at a named barrier.
    """
    for name, replacement in (
        ("fma", _fma),
        ("issued_product", _product),
        ("clear_rows", queries_on_rows.scrub),
        ("store_lines", _store_lines),
        ("row_sums", lambda p: block_sum(p)[:, 0]),
        ("columns_kept", _columns_kept),
        ("bits_kept", _bits_kept),
        ("distances", lambda first: (first[:, None] + jnp.arange(KV_BLOCK)[None]).astype(jnp.float32)),
        ("column_maxima", lambda s, _: s.max(axis=0)),
        ("leave_sums", _leave_sums),
        ("column_sums", lambda exchange: exchange[0, :, 0, :].reshape(-1)),
        ("rows_kept", lambda s, *bounds: _columns_kept(s.T, *bounds).T),
        ("row_distances", lambda first: (first[None] + jnp.arange(KV_BLOCK)[:, None]).astype(jnp.float32)),
        ("load_queries", _load_queries),
        ("store_columns", _store_columns),
        ("store_column_numbers", _store_numbers),
        ("store_line", _store_line),
        ("running_maxima", _running_maxima),
        ("leave_changes", _leave_changes),
        ("meet", lambda: None),
        ("is_warp_in", lambda _first, _end, step, x: step(x)),
        ("load_line", _load_line),
        ("find_places", _find_places),
        ("prefetch", lambda *_: None),
        ("products", _products),
    ):
        for module in _ATTENTION:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, replacement)
    monkeypatch.setattr(warpgroups, "named_barrier", _barrier_operation)
    monkeypatch.setattr(gpu_callbacks, "wgmma", gpu_callbacks.fail_on_exception(_wgmma))
    monkeypatch.setattr(gpu_callbacks, "_named_barrier", gpu_callbacks.fail_on_exception(_named_barrier))


@pytest.fixture
def small_chip(two_multiprocessors: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill's tiles are many to a CTA, and decode's partial results many loads to a merge."""
    monkeypatch.setattr(decode_merge, "_AT_ONCE", 2)


_ATTENTION = (
    queries_on_rows,
    queries_on_columns,
    decode_merge,
    prefill,
    decode,
    backward,
    dequantize,
)


def _fma(x: Array, y: Array, z: Array, layout: Any = None) -> Array:
    """Rounded twice, as no primitive of JAX rounds once, but the same wherever it stands."""
    product, z = lax.optimization_barrier((x * y, z))
    return product + z


def _product(p: Array, v: Any) -> Array:
    def multiplied(accumulator: Any) -> Array:
        plgpu.wgmma(accumulator, p, v)
        return accumulator[...]

    return pl.run_scoped(multiplied, plgpu.ACC((p.shape[0], v.shape[1]), jnp.float32))  # pyright: ignore


def _store_lines(x: Array, ref: Any) -> None:
    ref[...] = x


def _columns_kept(s: Array, end: Array, first: Array | None = None) -> Array:
    columns = jnp.arange(s.shape[1])[None]
    kept = columns < end[:, None]
    return jnp.where(kept if first is None else kept & (columns >= first[:, None]), s, -jnp.inf)


def _bits_kept(s: Array, *words: Array) -> Array:
    tiles = []
    for word in words:
        bits = (word[:, None] >> jnp.arange(32)[None]) & 1
        # Of the threads' warp, row and column; of their bits half, group of columns, and one of two.
        bits = bits.reshape(4, 8, 4, 2, 8, 2).transpose(0, 3, 1, 4, 2, 5)
        tiles.append(bits.reshape(queries_on_rows.ROWS, queries_on_rows.ROWS))
    return jnp.where(jnp.concatenate(tiles, axis=1) == 1, s, -jnp.inf)


def _leave_sums(p: Array, exchange: Any) -> None:
    exchange[0, :, 0, :] = block_sum(p.T).reshape(exchange.shape[1], exchange.shape[3])


def _load_queries(source: Any, target: Any, first: Array, count: Array) -> None:
    target[...] = jnp.zeros(target.shape, target.dtype)
    heads = source.shape[1]
    for row in range(target.shape[0]):
        place = source.at[first + row // heads, row % heads]
        pl.when(row < count)(functools.partial(_copy, place, target.at[row]))


def _store_columns(x: Array, target: Any, first: Array | int, count: Array | int, **_: Any) -> None:
    heads = target.shape[1]
    for row in range(x.shape[1]):
        place = target.at[first + row // heads, row % heads]
        pl.when(row < count)(functools.partial(_copy, x[:, row], place))


def _running_maxima(x: Array, start: Array, _: Any) -> tuple[Array, Array]:
    after = jnp.maximum(lax.cummax(x), start)
    return jnp.concatenate([start[None], after[:-1]]), after


def _leave_changes(before: Array, after: Array, changes: Any) -> None:
    changes[...] = (before != after).reshape(changes.shape[0], -1).any(axis=1).astype(jnp.int32)


def _find_places(amount: Any, count: int, positions: Any) -> tuple[Array, list[tuple[Array, Array]]]:
    """One after the other, where a warp looks at 32 at once."""
    amounts = jnp.stack([amount(jnp.int32(index)) for index in range(count)])
    ends = jnp.cumsum(amounts)
    found = []
    for position in positions(ends[-1]):
        index = jnp.where(position < ends[-1], (ends <= position).sum(), 0)
        offset = jnp.where(position < ends[-1], position - (ends - amounts)[index], 0)
        found.append((index, offset))
    return ends[-1], found


def _copy(x: Any, target: Any) -> None:
    target[...] = x[...]


def _store_numbers(x: Array, target: Any) -> None:
    target[...] = x[: target.shape[0]]


def _load_line(source: Any) -> Array:
    return jnp.tile(source[...], decode_merge._THREADS // source.shape[0])


def _store_line(x: Array, target: Any, first: Array, count: int) -> None:
    for index in range(count):
        pl.when(first + index < target.shape[0])(functools.partial(_copy, x[index], target.at[first + index]))


def _products(kind: Any, codes: Array, scales: list[Array], layout: Any) -> Array:
    return quantized_kv._values(codes, jnp.stack(scales) if kind == "q4_0" else scales[0], kind, jnp.float32)


def _wgmma(*, token: Any, mesh_location: Any, thread: Any, source_info: Any = None, **operands: Any) -> Any:
    """The interpreter's, but that the left operand may be an array."""
    memory = gpu_callbacks._get_shared_memory()
    info = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)

    def place(name: str) -> tuple[Any, Any]:
        key = shared_memory.HostAllocationKey.from_array(operands[f"{name}_allocation_key_as_array"])
        transforms = gpu_callbacks._remove_noop_transforms(operands[f"{name}_transforms"])
        return key, memory.access(key, jax.tree.map(int, transforms))

    def content(name: str) -> Any:
        x = operands[f"{name}_allocation_key_as_array"]  # a key has one axis
        return np.asarray(x) if x.ndim == 2 else memory.get_buffer_content(*place(name), thread, logging_info=info)[0]

    accumulator = content("acc")
    # By the interpreter's own name for NumPy, of which `matrix_unit` makes another.
    result = accumulator + gpu_callbacks.np.matmul(content("a"), content("b"), dtype=accumulator.dtype)  # pyright: ignore[reportPrivateImportUsage]
    memory.store_buffer_content(*place("acc"), result, thread, logging_info=info)
    return token


def _barrier_operation(operation: str, barrier_id: Any, num_threads: int) -> None:
    """As the interpreter knows it: by its name and by what it closes over, which type checks would hide."""

    def bar_op(*_: Any) -> Any:
        return operation, num_threads

    inlined: Any = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))(bar_op)
    inlined(jnp.int32(barrier_id))


def _named_barrier(
    token: Any,
    mesh_location: Any,
    thread: Any,
    barrier_id: Any,
    *,
    num_threads: int,
    sync: bool,
    source_info: Any = None,
) -> Any:
    """The interpreter's, which counts warpgroups; this one counts warps."""
    memory = gpu_callbacks._get_shared_memory()
    barrier = memory.named_barrier(thread, int(barrier_id), num_threads // 32)
    clock = memory.incr_clock(thread) if memory.detect_races else None
    info = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)
    for _ in range(1 if isinstance(thread, shared_memory.Warp) else 4):
        barrier.arrive(thread, clock, info)
    if sync:
        barrier.wait(thread, info)
    return token
