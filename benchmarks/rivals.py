"""Rivals of detjax's kernels: XLA's own dot, cuDNN, PyTorch and tokamax.

PyTorch and tokamax are optional; functions that need them raise `ModuleNotFoundError`.
"""

import importlib.util
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
from jax import lax

OURS: Final = "detjax"
XLA: Final = "xla"
CUDNN: Final = "cudnn"
TORCH: Final = "torch"
TOKAMAX: Final = "tokamax"


def xla_dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns XLA's product of tokens `[M, K]` and weights `[N, K]`."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())))


def cudnn(causal: bool) -> Callable[..., jax.Array]:
    """Returns JAX's cuDNN attention: a function of queries, keys, values and optionally each request's key count."""

    def call(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=causal, key_value_seq_lengths=lengths, implementation="cudnn"
        )

    return call


def _tokamax() -> Any:
    import tokamax  # pyright: ignore[reportMissingImports]
    from absl import flags

    if not flags.FLAGS.is_parsed():
        # Otherwise absl parses the benchmark's arguments.
        flags.FLAGS(sys.argv[:1])
    return tokamax


def tokamax(causal: bool) -> Callable[..., jax.Array]:
    """Returns tokamax's attention kernels, as `cudnn` does, but never XLA's, which materializes all scores."""

    def call(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        return _tokamax().dot_product_attention(
            q, k, v, is_causal=causal, key_value_seq_lengths=lengths, implementation=("mosaic", "triton")
        )

    return call


def tokamax_ragged_dot(implementation: str) -> Callable[..., jax.Array]:
    """Returns one of tokamax's products of rows sorted by group `[M, K]` and weights `[G, K, N]`."""

    def call(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
        return _tokamax().ragged_dot(x, w, group_sizes, implementation=implementation)

    return call


def torch_is_installed() -> bool:
    """Returns whether PyTorch can be imported."""
    return importlib.util.find_spec("torch") is not None


def torch_attention(
    causal: bool, q: jax.Array, pairs: Sequence[tuple[jax.Array, jax.Array]], *, ragged: bool, replays: int
) -> float:
    """Returns the seconds of PyTorch's attention on the same arrays, shared with JAX.

    Raises:
        NotImplementedError: requests have different lengths, which PyTorch's attention does not support.
        ModuleNotFoundError: PyTorch is not installed.
    """
    if ragged:
        raise NotImplementedError("scaled_dot_product_attention takes no lengths of requests, only a mask of all keys")
    import torch  # pyright: ignore[reportMissingImports]

    def attend(q: Any, k: Any, v: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    # [B, S, H, K] viewed as [B, H, S, K], the fastest memory order of PyTorch's kernels.
    shared = [tuple(torch.from_dlpack(x).transpose(1, 2) for x in (q, k, v)) for k, v in pairs]
    return _torch_time(attend, shared, replays=replays)


def torch_product(sets: Sequence[tuple[jax.Array, jax.Array]], *, replays: int) -> Callable[[], float]:
    """Returns a measurement of `torch.mm` on the same arrays, shared with JAX.

    Raises:
        ModuleNotFoundError: PyTorch is not installed.
    """
    import torch  # pyright: ignore[reportMissingImports]

    shared = [tuple(torch.from_dlpack(array) for array in arguments) for arguments in sets]
    return lambda: _torch_time(lambda x, w: torch.mm(x, w.t()), shared, replays=replays)


def free_torch_memory() -> None:
    """Frees PyTorch's cached device memory for JAX."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def _torch_time(fn: Callable[..., Any], argument_sets: Sequence[tuple[Any, ...]], *, replays: int = 7) -> float:
    """Seconds per call of a PyTorch function, in a CUDA graph that calls it once per argument set.

    Raises:
        ModuleNotFoundError: PyTorch is not installed.
    """
    import torch  # pyright: ignore[reportMissingImports]

    argument_sets = [*argument_sets, *argument_sets[: max(0, 4 - len(argument_sets))]]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for arguments in argument_sets:
            fn(*arguments)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        alive = [fn(*arguments) for arguments in argument_sets]
    graph.replay()
    torch.cuda.synchronize()
    milliseconds = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        milliseconds.append(start.elapsed_time(end) / len(argument_sets))
    del graph, alive
    return statistics.median(milliseconds) / 1e3
