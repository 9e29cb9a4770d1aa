"""The measured operations on rows, and their inputs."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.bits import anchor_positions
from detjax import ops

EPS: Final = 1e-6
FREQUENCY_BASE: Final = 1e6


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of all measurements; by default of Qwen3-8B's layers and sampler.

    Attributes:
        rows: numbers of rows.
        swept_rows: numbers of rows at which schedules are timed.
        width: the width of a norm.
        vocabulary: the width of softmax and sampling.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: head size.
        calls: calls per measurement, which is their median.
        repeats: repetitions of a run to compare its bits.
    """

    rows: Sequence[int] = (1, 16, 64, 1024, 4096)
    swept_rows: Sequence[int] = (1, 16, 64, 256, 1024, 4096, 16384)
    width: int = 4096
    vocabulary: int = 151936
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    calls: int = 20
    repeats: int = 100


SMALL: Final = Sizes(rows=(1, 17), width=256, vocabulary=1000, heads=4, kv_heads=2, head_dim=64, calls=3, repeats=3)
"""Sizes that run on a CPU in seconds."""


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation on rows: `run(*rows, *shared)`, whose results have a leading axis of rows.

    Attributes:
        name: the operation's name in tables.
        run: the operation.
        row_shapes: the shapes of its rows.
        shared: arguments that all rows share.
        dtype: the dtype of the rows.
        read_share: the share of the rows that the operation must read.
    """

    name: str
    run: Callable[..., Any]
    row_shapes: tuple[tuple[int, ...], ...]
    shared: tuple[Any, ...] = ()
    dtype: str = "bfloat16"
    read_share: float = 1.0

    def rows(self, count: int, seed: int) -> tuple[jax.Array, ...]:
        """Returns random rows. The first, middle and last one are the same for every seed."""
        return _rows_program(self.row_shapes, self.dtype, count)(jax.random.key(1 + seed))

    def traffic(self, rows: tuple[jax.Array, ...]) -> int:
        """Returns the bytes that must be read and written, including results."""
        results = jax.tree.leaves(jax.eval_shape(self.run, *rows, *self.shared))
        written = sum(leaf.size * leaf.dtype.itemsize for leaf in results)
        return int(sum(x.nbytes for x in rows) * self.read_share) + written


@functools.cache
def _rows_program(
    shapes: tuple[tuple[int, ...], ...], dtype: str, count: int
) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
    @jax.jit
    def draw(key: jax.Array) -> tuple[jax.Array, ...]:
        arrays = []
        for index, shape in enumerate(shapes):
            anchor = jax.random.normal(jax.random.fold_in(jax.random.key(0), index), shape, jnp.float32)
            x = jax.random.normal(jax.random.fold_in(key, index), (count, *shape), jnp.float32)
            arrays.append(x.at[jnp.asarray(anchor_positions(count))].set(anchor[None]).astype(dtype))
        return tuple(arrays)

    return draw


def norm_weights(*sizes: int) -> list[jax.Array]:
    """Returns weights of norms, near 1."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(1 + rng.standard_normal(size) / 4, "bfloat16") for size in sizes]


def cases(sizes: Sizes) -> list[Case]:
    """Returns the memory-bound operations of a decoder layer and of its sampler."""
    width, vocabulary, heads = sizes.width, sizes.vocabulary, sizes.heads + 2 * sizes.kv_heads
    weight, q_norm, k_norm = norm_weights(width, sizes.head_dim, sizes.head_dim)
    read_share = (sizes.heads + sizes.kv_heads) / heads
    return [
        Case("rms_norm", lambda x, w: ops.rms_norm(x, w, eps=EPS), ((width,),), (weight,)),
        Case(
            "rms_norm, residual",
            lambda x, r, w: ops.rms_norm(x, w, eps=EPS, residual=r),
            ((width,), (width,)),
            (weight,),
        ),
        Case(
            "q/k norm, rope",
            _qk_rope(sizes),
            ((heads, sizes.head_dim),),
            (q_norm, k_norm),
            read_share=read_share,
        ),
        Case("log_softmax", ops.log_softmax, ((vocabulary,),), dtype="float32"),
        Case("logsumexp", ops.logsumexp, ((vocabulary,),), dtype="float32"),
        Case("sample, greedy", _sample(0.0), ((vocabulary,),), dtype="float32"),
        Case("sample, temperature 1", _sample(1.0), ((vocabulary,),), dtype="float32"),
    ]


def _qk_rope(sizes: Sizes) -> Callable[..., Any]:
    embedding = ops.RotaryEmbedding(sizes.head_dim, FREQUENCY_BASE)

    def qk_rope(qkv: jax.Array, q_norm: jax.Array, k_norm: jax.Array) -> Any:
        # All rows are at one position, so that anchor rows are equal; the barrier prevents constant folding of angles.
        positions = jax.lax.optimization_barrier(jnp.full(len(qkv), 1234, jnp.int32))
        norms = {"q_norm": q_norm, "k_norm": k_norm, "norm_eps": EPS}
        return ops.qk_rope(qkv, positions, embedding, heads=sizes.heads, kv_heads=sizes.kv_heads, **norms)

    return qk_rope


def _sample(temperature: float) -> Callable[[jax.Array], Any]:
    def sample(logits: jax.Array) -> Any:
        ones = jnp.ones(len(logits), jnp.int32)
        whole = ones.astype(jnp.float32)
        keys = jnp.stack([ones] * 4, axis=1).astype(jnp.uint32)
        arrays = ops.SamplingArrays(keys, ones, whole * temperature, 0 * ones, whole, 0 * whole)
        return ops.sample(logits, arrays, filtered=False)

    return sample
