"""The TPU kernels of rows at the sizes of Qwen3-8B, to be compiled for every chip, and rows for their tests."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detjax.operands.sampling_arrays import SamplingArrays
from detjax.pallas.tpu import norm as tpu_norm
from detjax.pallas.tpu import sampling, softmax
from detjax.portable import sampling as portable_sampling
from tests.pallas.tpu.interpreter import normal

HIDDEN, HEADS, HEAD_DIM, VOCABULARY = 4096, 32, 128, 151936
TOKENS = {"decode of 1": 1, "decode of 64": 64, "prefill of 512": 512, "prefill of 4096": 4096}


def cases() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Functions and the shapes of their arguments, by name of the case."""
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
    norm = functools.partial(tpu_norm.forward, eps=1e-6, weight_offset=0.0)
    for name, tokens in TOKENS.items():
        for dtype in ("bfloat16", "float32"):
            x, weight = shape(tokens, HIDDEN, dtype=dtype), shape(HIDDEN, dtype=dtype)
            heads = shape(tokens, HEADS, HEAD_DIM, dtype=dtype)
            calls[f"rms_norm, {name}, {dtype}"] = norm, (x, weight, None)
            calls[f"rms_norm with residual, {name}, {dtype}"] = norm, (x, weight, x)
            calls[f"rms_norm of heads, {name}, {dtype}"] = norm, (heads, shape(HEAD_DIM, dtype=dtype), None)
    for name, tokens, dtype in (
        ("decode of 1", 1, "float32"),
        ("decode of 64", 64, "bfloat16"),
        ("decode of 64", 64, "float32"),
        ("prefill of 512", 512, "float32"),
    ):
        logits = shape(tokens, VOCABULARY, dtype=dtype)
        for operation in ("softmax", "log_softmax", "logsumexp"):
            calls[f"{operation}, {name}, {dtype}"] = getattr(softmax, operation), (logits,)
        calls[f"sample, {name}, {dtype}"] = functools.partial(sampling.sample, filtered=False), requests(logits)
        # Only the kernel that follows the filters: the portable backend's sorting takes XLA a minute to compile.
        kept = shape(tokens, VOCABULARY)
        keys, positions = shape(tokens, 4, dtype="uint32"), shape(tokens, dtype="int32")
        operands = logits, kept, keys, positions, shape(tokens)
        calls[f"sample of filtered logits, {name}, {dtype}"] = sampling.sample_kept, operands
    logprobs = shape(64, VOCABULARY)
    calls["softmax_backward, 64 rows"] = softmax.softmax_backward, (logprobs, logprobs)
    calls["log_softmax_backward, 64 rows"] = softmax.log_softmax_backward, (logprobs, logprobs)
    calls["logsumexp_backward, 64 rows"] = softmax.logsumexp_backward, (logprobs, shape(64), shape(64))
    calls["likeliest, 64 rows"] = functools.partial(portable_sampling.likeliest, count=20), (logprobs,)
    # Widths that are not whole registers.
    for width in (1, 80, 50257):
        logits = shape(3, width, dtype="bfloat16")
        calls[f"rms_norm of {width}"] = norm, (logits, shape(width), logits)
        calls[f"log_softmax of {width}"] = softmax.log_softmax, (logits,)
        calls[f"sample of {width}"] = functools.partial(sampling.sample, filtered=False), requests(logits)
    return calls


def requests(logits: jax.ShapeDtypeStruct) -> tuple[jax.ShapeDtypeStruct, SamplingArrays]:
    """Arguments of `sample` for these logits."""
    rows = logits.shape[0]
    integers, floats = shape(rows, dtype="int32"), shape(rows)
    keys = shape(rows, 4, dtype="uint32")
    return logits, SamplingArrays(keys, integers, floats, integers, floats, floats)


def rows_with_one_repeated(row: np.ndarray, count: int, positions: Sequence[int]) -> np.ndarray:
    """Rows that have this row at the positions, between others with numbers, NaN and infinities."""
    rows = normal(count, *row.shape, seed=count).astype(row.dtype)
    rows[1::3], rows[2::3] = np.nan, np.inf
    rows[list(positions)] = row
    return rows


def shape(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))
