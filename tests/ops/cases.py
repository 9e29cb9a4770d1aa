"""The operations on rows as one table: what the tests of invariance run, each with arguments made from a seed."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detjax import ops

DTYPES = ("float32", "bfloat16", "float16")

ROPE_SCALINGS = {
    "default": None,
    "linear": ops.LinearScaling(4.0),
    "llama3": ops.Llama3Scaling(8.0, 1.0, 4.0, 8192),
    "yarn": ops.YarnScaling(4.0, 4096),
}

type Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class RowOp:
    """An operation `fn(rows, shared)` on M rows, where `shared` are the arrays that all rows meet.

    `make(random, count, width)` gives both as NumPy arrays. The rows called `x`, `residual` and `tokens` are content.
    """

    name: str
    fn: Callable[[Arrays, Arrays], Any]
    make: Callable[[np.random.Generator, int, int], tuple[Arrays, Arrays]]
    width: int = 80
    even: bool = False
    """True if the width must be even."""
    dtypes: tuple[str, ...] = DTYPES
    """One for a variant whose arithmetic is mostly covered by another operation, which runs in all."""

    def __call__(self, rows: Arrays, shared: Arrays) -> Any:
        return self.fn(*jax.tree.map(jnp.asarray, (rows, shared)))

    def arguments(self, count: int, dtype: str, width: int | None = None, seed: int = 0) -> tuple[Arrays, Arrays]:
        """`rows` and `shared` as NumPy arrays, which are cut without compiling anything; floats in the dtype given."""
        made = self.make(np.random.default_rng([seed, len(self.name)]), count, width or self.width)
        return jax.tree.map(lambda x: in_dtype(x, dtype), made)

    def __repr__(self) -> str:
        return self.name


def in_dtype(x: np.ndarray, dtype: str) -> np.ndarray:
    """`x`; where it is float64, NumPy's default, in the dtype given."""
    return x.astype(jnp.dtype(dtype)) if x.dtype == np.float64 else x


def at(tree: Any, index: Any) -> Any:
    """The rows at the indices given of every array, as NumPy arrays."""
    return jax.tree.map(lambda x: np.asarray(x)[index], tree)


def stacked(trees: Sequence[Any]) -> Any:
    """Arrays of the trees' arrays."""
    return jax.tree.map(lambda *x: np.stack([np.asarray(leaf) for leaf in x]), *trees)


def _matmul(*, outputs: int = 72, bias: bool = False, residual: bool = False, gated: bool = False, layout: str = "kn"):
    def make(random: np.random.Generator, count: int, width: int) -> tuple[Arrays, Arrays]:
        stacked = (2,) if gated else ()
        shape = (width, outputs) if layout == "kn" else (outputs, width)
        rows = {"x": random.standard_normal((count, width))}
        shared = {"w": random.standard_normal((*stacked, *shape)) * width**-0.5}
        if residual:
            rows["residual"] = random.standard_normal((count, outputs))
        if bias:
            shared["bias"] = random.standard_normal((*stacked, outputs))
        return rows, shared

    return make


def _rows_alone(random: np.random.Generator, count: int, width: int) -> tuple[Arrays, Arrays]:
    return {"x": random.standard_normal((count, width)) * 3}, {}


def _norm(residual: bool):
    def make(random: np.random.Generator, count: int, width: int) -> tuple[Arrays, Arrays]:
        rows = {"x": random.standard_normal((count, width))}
        if residual:
            rows["residual"] = random.standard_normal((count, width))
        return rows, {"weight": 1 + random.standard_normal(width) / 4}

    return make


def _heads(random: np.random.Generator, count: int, width: int) -> tuple[Arrays, Arrays]:
    positions = random.integers(0, 100_000, count).astype(np.int32)
    return {"x": random.standard_normal((count, 3, width)), "positions": positions}, {}


def _tokens(random: np.random.Generator, count: int, width: int) -> tuple[Arrays, Arrays]:
    return {"tokens": random.integers(0, 40, count).astype(np.int32)}, {"table": random.standard_normal((40, width))}


def _requests(random: np.random.Generator, count: int, width: int) -> tuple[Arrays, Arrays]:
    rows = {
        "x": random.standard_normal((count, width)) * 3,
        "noise_key": random.integers(0, 2**32, (count, 4)).astype(np.uint32),
        "position": random.integers(0, 1000, count).astype(np.int32),
        "temperature": np.resize([0.7, 1.0, 0.0], count).astype(np.float32),
        "top_k": np.resize([0, 40, 5], count).astype(np.int32),
        "top_p": np.resize([0.9, 1.0, 0.95, 0.5], count).astype(np.float32),
        "min_p": np.resize([0.0, 0.05], count).astype(np.float32),
    }
    return rows, {}


def _sample(rows: Arrays, *, filtered: bool) -> Any:
    arrays = ops.SamplingArrays(*(rows[name] for name in ops.SamplingArrays._fields))
    return ops.sample(rows["x"], arrays, filtered=filtered)


def _requests_with_tokens(random: np.random.Generator, count: int, width: int) -> tuple[Arrays, Arrays]:
    rows, shared = _requests(random, count, width)
    # Half of the tokens are the likeliest ones, which no filter removes.
    some = random.integers(0, width, count)
    rows["tokens"] = np.where(np.arange(count) % 2, some, rows["x"].argmax(axis=1)).astype(np.int32)
    return rows, shared


def _sampling_logprobs(rows: Arrays, *, filtered: bool) -> Any:
    arrays = ops.SamplingArrays(*(rows[name] for name in ops.SamplingArrays._fields))
    return ops.sampling_logprobs(rows["x"], rows["tokens"], arrays, filtered=filtered)


def _filter_logits(rows: Arrays, _: Arrays) -> Any:
    return ops.filter_logits(rows["x"], ops.SamplingArrays(*(rows[name] for name in ops.SamplingArrays._fields)))


def _adjusted_requests(random: np.random.Generator, count: int, width: int) -> tuple[Arrays, Arrays]:
    repetition = np.resize([1.0, 1.2, 0.7], count).astype(np.float32)
    rows = {
        "x": random.standard_normal((count, width)) * 3,
        "generated": random.integers(0, 4, (count, width)).astype(np.uint16),
        "in_prompt": random.random((count, width)) < 0.3,
        "repetition": repetition,
        "reciprocal": 1 / repetition,
        "frequency": np.resize([0.0, 0.7, -0.3, 1.1], count).astype(np.float32),
        "presence": np.resize([0.9, 0.0], count).astype(np.float32),
        "biased": np.stack([random.permutation(width + 2)[:5] for _ in range(count)]).astype(np.int32),
        "bias": np.where(random.random((count, 5)) < 0.3, -np.inf, 2.3).astype(np.float32),
        "allowed": random.integers(0, 2**32, (count, -(-width // 32))).astype(np.uint32),
    }
    return rows, {}


def _adjust_logits(rows: Arrays, *, masked: bool) -> Any:
    nouns = (noun(*(rows[name] for name in noun._fields)) for noun in (ops.SeenTokens, ops.LogitAdjustments))
    return ops.adjust_logits(rows["x"], *nouns, *((rows["allowed"],) if masked else ()))


def _rope(name: str) -> RowOp:
    def fn(rows: Arrays, _: Arrays) -> Any:
        embedding = ops.RotaryEmbedding(rows["x"].shape[-1], 10_000.0, ROPE_SCALINGS[name])
        return ops.rope(rows["x"], rows["positions"], embedding)

    return RowOp(f"rope {name}", fn, _heads, even=True, dtypes=DTYPES if name == "yarn" else ("bfloat16",))


def _qkv(random: np.random.Generator, count: int, width: int) -> tuple[Arrays, Arrays]:
    positions = random.integers(0, 100_000, count).astype(np.int32)
    rows = {"x": random.standard_normal((count, 6, width)), "positions": positions}
    return rows, {name: 1 + random.standard_normal(width) / 4 for name in ("q_norm", "k_norm")}


def _qk_rope(rows: Arrays, shared: Arrays) -> Any:
    embedding = ops.RotaryEmbedding(rows["x"].shape[-1], 10_000.0)
    norms = {**shared, "norm_eps": 1e-6}
    return ops.qk_rope(rows["x"], rows["positions"], embedding, heads=3, kv_heads=2, **norms)


def _qk_rope_with_offset(rows: Arrays, shared: Arrays) -> Any:
    embedding = ops.RotaryEmbedding(rows["x"].shape[-1], 10_000.0)
    norms = {**shared, "norm_eps": 1e-6, "norm_offset": 1.0}
    return ops.qk_rope(rows["x"], rows["positions"], embedding, heads=3, kv_heads=2, **norms)


def _with_activation(activation: str) -> RowOp:
    def fn(rows: Arrays, shared: Arrays) -> Any:
        return ops.matmul(rows["x"], shared["w"], bias=shared["bias"], activation=activation, residual=rows["residual"])

    make = _matmul(bias=True, residual=True)
    return RowOp(f"matmul {activation}", fn, make, dtypes=DTYPES if activation == "silu" else ("float32",))


ROW_OPS = (
    RowOp("matmul", lambda r, s: ops.matmul(r["x"], s["w"]), _matmul()),
    RowOp("matmul nk", lambda r, s: ops.matmul(r["x"], s["w"], layout="nk"), _matmul(layout="nk")),
    RowOp(
        "matmul to float32",
        lambda r, s: ops.matmul(r["x"], s["w"], layout="nk", out_dtype="float32"),
        _matmul(layout="nk"),
        dtypes=("bfloat16", "float16"),
    ),
    *(_with_activation(activation) for activation in ("silu", "gelu", "gelu_tanh", "relu")),
    RowOp(
        "matmul nk residual",
        lambda r, s: ops.matmul(r["x"], s["w"], layout="nk", residual=r["residual"]),
        _matmul(layout="nk", residual=True),
        dtypes=("bfloat16",),
    ),
    RowOp(
        "matmul gated",
        lambda r, s: ops.matmul(r["x"], s["w"], gated=True, activation="gelu_tanh"),
        _matmul(gated=True),
        dtypes=("float32",),
    ),
    RowOp(
        "matmul gated nk",
        lambda r, s: ops.matmul(
            r["x"], s["w"], layout="nk", bias=s["bias"], gated=True, activation="silu", residual=r["residual"]
        ),
        _matmul(layout="nk", bias=True, residual=True, gated=True),
    ),
    RowOp(
        "rms_norm", lambda r, s: ops.rms_norm(r["x"], s["weight"], eps=1e-6), _norm(residual=False), dtypes=("float32",)
    ),
    RowOp(
        "rms_norm residual",
        lambda r, s: ops.rms_norm(r["x"], s["weight"], eps=1e-6, weight_offset=1.0, residual=r["residual"]),
        _norm(residual=True),
    ),
    RowOp("softmax", lambda r, _: ops.softmax(r["x"]), _rows_alone),
    RowOp("log_softmax", lambda r, _: ops.log_softmax(r["x"]), _rows_alone),
    RowOp("logsumexp", lambda r, _: ops.logsumexp(r["x"]), _rows_alone),
    *(_rope(name) for name in ROPE_SCALINGS),
    RowOp("qk_rope", _qk_rope, _qkv, even=True, dtypes=("float32", "bfloat16")),
    RowOp("qk_rope offset", _qk_rope_with_offset, _qkv, even=True, dtypes=("bfloat16",)),
    RowOp("add", lambda r, _: ops.add(r["x"], r["x"][..., ::-1]), _rows_alone),
    RowOp("add masked", lambda r, _: ops.add(r["x"], r["x"][..., ::-1], mask=r["x"][..., 0] > 0), _rows_alone),
    RowOp("scale", lambda r, _: ops.scale(r["x"], 0.3), _rows_alone),
    RowOp("multiply", lambda r, _: ops.multiply(r["x"], r["x"][..., ::-1]), _rows_alone),
    RowOp(
        "multiply by a number",
        lambda r, _: ops.multiply(r["x"], jnp.full(1, 0.3)),
        _rows_alone,
        dtypes=("bfloat16", "float32"),
    ),
    RowOp("embed", lambda r, s: ops.embed(r["tokens"], s["table"]), _tokens),
    RowOp("sample", lambda r, _: _sample(r, filtered=True), _requests),
    RowOp("sample unfiltered", lambda r, _: _sample(r, filtered=False), _requests, dtypes=("float32",)),
    RowOp("sampling_logprobs", lambda r, _: _sampling_logprobs(r, filtered=True), _requests_with_tokens),
    RowOp(
        "sampling_logprobs unfiltered",
        lambda r, _: _sampling_logprobs(r, filtered=False),
        _requests_with_tokens,
        dtypes=("float32",),
    ),
    RowOp("filter_logits", _filter_logits, _requests, dtypes=("bfloat16",)),
    RowOp("adjust_logits", lambda r, _: _adjust_logits(r, masked=False), _adjusted_requests, dtypes=("bfloat16",)),
    RowOp("adjust_logits masked", lambda r, _: _adjust_logits(r, masked=True), _adjusted_requests, dtypes=("float32",)),
    RowOp(
        "constrain_logits",
        lambda r, _: ops.constrain_logits(r["x"], r["allowed"]),
        _adjusted_requests,
        dtypes=("bfloat16",),
    ),
    RowOp("top_logprobs", lambda r, _: ops.top_logprobs(r["x"], min(5, r["x"].shape[-1])), _rows_alone),
)

MAIN_OPS = tuple(op for op in ROW_OPS if op.dtypes == DTYPES)
"""One of each kind."""
