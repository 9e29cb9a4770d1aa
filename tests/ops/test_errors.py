"""Bad input: the error says what was given, what is accepted, and where."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from detjax import ops
from tests.support.unchecked import unchecked, without_checks

X = jnp.ones((4, 8))
W = jnp.ones((8, 6))
FLOAT8 = jnp.ones((4, 8), jnp.float8_e4m3fn)
ROPE = ops.RotaryEmbedding(8, 10_000.0)
ROWS = jnp.zeros(4, jnp.int32)


def attention(op: Callable[..., jax.Array] = ops.attention, **changed: Any) -> jax.Array:
    arguments = {"q": jnp.ones((1, 3, 4, 8))} | changed
    return op(**_with_nouns(arguments))


def _with_nouns(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operation over pages, with fields of `KVPages` and `Queries` among them, in their nouns."""
    pages = {name: arguments.pop(name, jnp.ones((2, 2, 128, 8))) for name in ("k", "v")}
    integers = {"page_table": jnp.zeros((1, 2), jnp.int32), "start": jnp.zeros(1, jnp.int32)}
    integers |= {"length": jnp.full(1, 3, jnp.int32), "count": jnp.full(1, 3, jnp.int32)}
    integers |= {"first_row": None, "rows": None}
    queries = {name: arguments.pop(name, default) for name, default in integers.items()}
    return arguments | {"kv": ops.KVPages(**pages), "queries": without_checks(ops.Queries, **queries)}


def append(op: Callable[..., Any] = ops.qk_rope_append_kv, **changed: Any) -> Any:
    arguments = {"qkv": jnp.ones((1, 3, 8, 8)), "embedding": ROPE} | changed
    return op(**_with_nouns(arguments))


def sample(op: Callable[..., Any] = ops.sample, **changed: Any) -> Any:
    whole = jnp.ones(4)
    arguments: dict[str, Any] = {"noise_key": jnp.zeros((4, 4), jnp.uint32), "position": ROWS}
    arguments |= {"temperature": whole, "top_k": ROWS, "top_p": whole, "min_p": whole}
    logits = changed.pop("logits", X)
    return op(logits, ops.SamplingArrays(**(arguments | changed)))


def sampling_logprobs(op: Callable[..., Any] = ops.sampling_logprobs, tokens: Any = ROWS, **changed: Any) -> Any:
    return sample(lambda logits, arrays: op(logits, tokens, arrays), **changed)


def adjust_logits(op: Callable[..., Any] = ops.adjust_logits, **changed: Any) -> Any:
    whole, pairs = jnp.ones(4), (4, 3)
    seen: dict[str, Any] = {"generated": jnp.zeros((4, 8), jnp.int32), "in_prompt": jnp.zeros((4, 8), bool)}
    rows: dict[str, Any] = {"repetition": whole, "reciprocal": whole, "frequency": 0 * whole, "presence": 0 * whole}
    rows |= {"biased": jnp.zeros(pairs, jnp.int32), "bias": jnp.zeros(pairs)}
    given = {"logits": X, "allowed": None} | seen | rows | changed
    seen_tokens = ops.SeenTokens(*(given[name] for name in seen))
    adjustments = ops.LogitAdjustments(*(given[name] for name in rows))
    return op(given["logits"], seen_tokens, adjustments, given["allowed"])


CASES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: ops.rms_norm(FLOAT8, jnp.ones(8), eps=1e-6),
        TypeError,
        "rms_norm: x has dtype float8_e4m3fn on cpu:0 (*); accepted: bfloat16, float16, float32. Convert it first.",
    ),
    (lambda: ops.rms_norm(X, jnp.ones(8), eps=1e-6, residual=X.astype(jnp.bfloat16)), TypeError, "residual has dtype"),
    (lambda: ops.rms_norm(jnp.ones((0, 8)), jnp.ones(8), eps=1e-6), ValueError, "rms_norm: x has shape (0, 8)"),
    (lambda: ops.matmul(FLOAT8, W), TypeError, "matmul: x has dtype float8_e4m3fn"),
    (lambda: ops.matmul(X, W.astype(jnp.bfloat16)), TypeError, "matmul: w has dtype bfloat16 * accepted: float32."),
    (lambda: ops.matmul(X, W, bias=jnp.ones(6, jnp.float8_e5m2)), TypeError, "matmul: bias has dtype float8_e5m2"),
    (lambda: ops.matmul(X, W, out_dtype="int8"), TypeError, "matmul: out_dtype is int8; accepted: bfloat16, float16"),
    (lambda: ops.matmul(X, W.T), ValueError, "matmul: w has shape (6, 8); accepted: (8, 8), x being (4, 8) and the *"),
    (lambda: ops.matmul(X, W, layout="nk"), ValueError, "matmul: w has shape (8, 6); accepted: (8, 8)"),
    (lambda: ops.matmul(X, W, bias=jnp.ones(5)), ValueError, "matmul: bias has shape (5,); accepted: (6,)"),
    (lambda: ops.matmul(X, W, residual=jnp.ones((4, 1))), ValueError, "matmul: residual has shape (4, 1)"),
    (lambda: ops.matmul(X, W, gated=True), ValueError, "matmul: gated without an activation"),
    (
        lambda: ops.matmul(X, W, gated=True, activation="silu"),
        ValueError,
        "matmul: w has shape (8, 6); accepted: 3 axes if gated is True",
    ),
    (lambda: ops.matmul(X, jnp.stack([W, W])), ValueError, "accepted: 2 axes if gated is False"),
    (lambda: ops.matmul(jnp.ones((0, 8)), W), ValueError, "matmul: x has shape (0, 8); accepted: at least one element"),
    (lambda: ops.softmax(FLOAT8), TypeError, "softmax: x has dtype float8_e4m3fn"),
    (lambda: ops.log_softmax(jnp.ones((3, 0))), ValueError, "log_softmax: x has shape (3, 0)"),
    (lambda: ops.logsumexp(FLOAT8), TypeError, "logsumexp: x has dtype"),
    (
        lambda: ops.rope(jnp.ones((4, 2, 6)), ROWS, ROPE),
        ValueError,
        "rope: x has shape (4, 2, 6); accepted: a last axis",
    ),
    (lambda: ops.rope(FLOAT8.reshape(4, 1, 8), ROWS, ROPE), TypeError, "rope: x has dtype"),
    (
        lambda: ops.qk_rope(X[:, None], ROWS, ROPE, heads=1, kv_heads=1),
        ValueError,
        "qk_rope: heads is 1 and kv_heads 1; accepted: at least 1 each and, qkv being (4, 1, 8), at most 1 together",
    ),
    (
        lambda: ops.qk_rope(jnp.ones((4, 2, 8)), ROWS, ROPE, heads=1, kv_heads=1, q_norm=X[0], norm_eps=1e-6),
        ValueError,
        "qk_rope: k_norm not given; accepted: q_norm, k_norm, norm_eps all together, or none of them",
    ),
    (
        lambda: ops.qk_rope(jnp.ones((4, 2, 8)), ROWS, ROPE, heads=1, kv_heads=1, norm_offset=1.0),
        ValueError,
        "qk_rope: norm_offset is 1.0; accepted: 0.0 without norms",
    ),
    (lambda: unchecked(ops.add)(X, X[:2]), ValueError, "add: y has shape (2, 8); accepted: (4, 8), x's shape"),
    (
        lambda: ops.add(X, X, mask=jnp.ones(3, bool)),
        ValueError,
        "add: mask has shape (3,); accepted: (4,), x's shape without its last axis",
    ),
    (lambda: unchecked(ops.add)(X, X, mask=ROWS), TypeError, "add: mask has dtype int32; accepted: bool"),
    (lambda: ops.multiply(X, X[:2]), ValueError, "multiply: y has shape (2, 8); accepted: (1,), or x's shape"),
    (lambda: ops.multiply(X, FLOAT8), TypeError, "multiply: y has dtype float8_e4m3fn"),
    (lambda: ops.scale(X, float("inf")), ValueError, "scale: factor is inf; accepted: finite numbers"),
    (lambda: ops.scale(FLOAT8, 2.0), TypeError, "scale: x has dtype float8_e4m3fn"),
    (
        lambda: ops.scale(X, 2.0, factor_dtype="float64"),
        TypeError,
        "scale: factor_dtype is float64; accepted: bfloat16",
    ),
    (
        lambda: ops.token_logprobs(X, X, ROWS, soft_cap=0.0),
        ValueError,
        "token_logprobs: soft_cap is 0.0; accepted: positive numbers, or None for no cap",
    ),
    (lambda: append(qkv=jnp.ones((1, 3, 8, 8), jnp.float8_e5m2)), TypeError, "qk_rope_append_kv: qkv has dtype float8"),
    (
        lambda: append(v=jnp.ones((2, 2, 128, 8), jnp.bfloat16)),
        TypeError,
        "qk_rope_append_kv: kv.v has dtype bfloat16 *accepted: float32",
    ),
    (
        lambda: append(qkv=jnp.ones((1, 3, 4, 8))),
        ValueError,
        "qk_rope_append_kv: qkv has 4 heads; accepted: at least 5, one query head and, kv.k being (2, 2, 128, 8), 2 "
        "each for keys and values",
    ),
    (
        lambda: append(k=jnp.ones((2, 2, 64, 8)), v=jnp.ones((2, 2, 64, 8))),
        ValueError,
        "qk_rope_append_kv: kv.k has shape (2, 2, 64, 8); accepted: (2, 2, 128, 8)",
    ),
    (
        lambda: append(embedding=ops.RotaryEmbedding(16, 1e4)),
        ValueError,
        "qk_rope_append_kv: qkv has shape (1, 3, 8, 8); accepted: a last axis of 16, its embedding's",
    ),
    (
        lambda: append(q_norm=jnp.ones(8), k_norm=jnp.ones(8)),
        ValueError,
        "qk_rope_append_kv: norm_eps not given; accepted: q_norm, k_norm, norm_eps all together, or none of them",
    ),
    (
        lambda: append(page_table=jnp.zeros((1, 0), jnp.int32)),
        ValueError,
        "qk_rope_append_kv: queries.page_table has shape (1, 0); accepted: at least one element",
    ),
    (lambda: ops.RotaryEmbedding(7, 1e4), ValueError, "RotaryEmbedding: head_dim is 7; accepted: even numbers >= 2"),
    (lambda: ops.embed(ROWS, FLOAT8), TypeError, "embed: table has dtype"),
    (lambda: ops.embed(ROWS[:0], X), ValueError, "embed: tokens has shape (0,)"),
    (lambda: attention(q=FLOAT8.reshape(1, 1, 4, 8)), TypeError, "attention: q has dtype"),
    (
        lambda: attention(k=jnp.ones((2, 2, 128, 8), jnp.bfloat16)),
        TypeError,
        "kv.k has dtype bfloat16 *float32",
    ),
    (
        lambda: attention(q=jnp.ones((1, 3, 3, 8))),
        ValueError,
        "attention: q has 3 heads and kv.k 2; accepted: a mult",
    ),
    (
        lambda: attention(k=jnp.ones((2, 2, 64, 8)), v=jnp.ones((2, 2, 64, 8))),
        ValueError,
        "attention: kv.k has shape (2, 2, 64, 8); accepted: (2, 2, 128, 8)",
    ),
    (lambda: attention(sinks=jnp.ones(4, jnp.float8_e5m2)), TypeError, "attention: sinks has dtype float8_e5m2"),
    (lambda: attention(page_table=jnp.zeros((1, 0), jnp.int32)), ValueError, "attention: queries.page_table has shape"),
    (
        lambda: attention(q=jnp.ones((3, 4, 8))),
        ValueError,
        "attention: q has shape (3, 4, 8); accepted: 4 axes if queries.first_row is None",
    ),
    (
        lambda: attention(first_row=ROWS[:1]),
        ValueError,
        "attention: q has shape (1, 3, 4, 8); accepted: 3 axes if queries.first_row is given",
    ),
    (
        lambda: attention(q=jnp.ones((3, 4, 8)), first_row=ROWS[:1], count=None),
        ValueError,
        "attention: queries.count is None; accepted: integers, because the queries are packed",
    ),
    (
        lambda: attention(q=jnp.ones((3, 4, 8)), first_row=ROWS[:2]),
        ValueError,
        "attention: queries.first_row has shape (2,); accepted: from (0,) to (1,), queries.page_table being (1, 2) and "
        "q (3, 4, 8)",
    ),
    (
        lambda: attention(q=jnp.ones((3, 4, 8)), first_row=ROWS[:1], mask=jnp.ones((1, 1, 3, 9), bool)),
        ValueError,
        "attention: mask has shape (1, 1, 3, 9); accepted: None, because the queries are packed",
    ),
    (
        lambda: append(qkv=jnp.ones((3, 8, 8)), first_row=ROWS[:1]),
        ValueError,
        "qk_rope_append_kv: queries.rows is None; accepted: what Queries.packed makes",
    ),
    (lambda: attention(scale=0.0), ValueError, "attention: scale is 0.0; accepted: None, or a positive number"),
    (
        lambda: ops.dot_product_attention(*[jnp.ones((1, 3, 4, 8))] * 3, window=-1),
        ValueError,
        "attention: window is -1; accepted: None, or at least 1 token",
    ),
    (lambda: attention(window=0), ValueError, "attention: window is 0; accepted: None, or at least 1 token"),
    (lambda: attention(soft_cap=-1.0), ValueError, "attention: soft_cap is -1.0; accepted: None, or a positive number"),
    (lambda: attention(alibi_slopes=(1.0,)), ValueError, "attention: 1 alibi_slopes; accepted: 4, one per head of q"),
    (lambda: sample(logits=FLOAT8), TypeError, "sample: logits has dtype"),
    (lambda: ops.top_logprobs(X, 9), ValueError, "top_logprobs: count is 9; accepted: 1 to 8, the vocabulary's size"),
    (lambda: ops.top_logprobs(X, 0), ValueError, "top_logprobs: count is 0"),
    (lambda: ops.top_logprobs(X[:0], 1), ValueError, "top_logprobs: logits has shape (0, 8)"),
    (lambda: sample(logits=X[:, :0]), ValueError, "sample: logits has shape (4, 0); accepted: at least one element"),
    (lambda: sampling_logprobs(logits=FLOAT8), TypeError, "sampling_logprobs: logits has dtype"),
    (lambda: sampling_logprobs(logits=X[:, :0]), ValueError, "sampling_logprobs: logits has shape (4, 0); accepted"),
    (lambda: sample(ops.filter_logits, logits=FLOAT8), TypeError, "filter_logits: logits has dtype"),
]


@pytest.mark.parametrize(("call", "error", "message"), CASES, ids=[message for _, _, message in CASES])
def test_bad_input_is_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    pattern = re.escape(message).replace(r"\*", ".*")
    with pytest.raises(error, match=pattern):
        call()


FLOATS = jnp.zeros(4)
INTEGERS_ACCEPTED = "has dtype float32; accepted: integers"

BEHIND_ANNOTATIONS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: unchecked(ops.matmul)(X, W, layout="mn"), ValueError, "matmul: layout is 'mn'; accepted: kn, nk"),
    (
        lambda: unchecked(ops.matmul)(X, W, activation="tanh"),
        ValueError,
        "matmul: activation is 'tanh'; accepted: None, silu, gelu, gelu_tanh, relu",
    ),
    (lambda: unchecked(ops.matmul)(X.astype("int32"), W), TypeError, "matmul: x has dtype int32 on cpu:0"),
    (
        lambda: unchecked(ops.rms_norm)(X, jnp.ones(7), eps=1e-6),
        ValueError,
        "rms_norm: weight has shape (7,); accepted: (8,), x being (4, 8)",
    ),
    (
        lambda: unchecked(ops.rms_norm)(X, jnp.ones(8), eps=1e-6, residual=X[:2]),
        ValueError,
        "rms_norm: residual has shape (2, 8); accepted: (4, 8), x's shape",
    ),
    (lambda: unchecked(ops.rms_norm)(X, ROWS, eps=1e-6), TypeError, "rms_norm: weight has dtype int32"),
    (lambda: unchecked(ops.softmax)(ROWS), TypeError, "softmax: x has dtype int32"),
    (lambda: unchecked(ops.embed)(FLOATS, X), TypeError, f"embed: tokens {INTEGERS_ACCEPTED}"),
    (lambda: unchecked(ops.rope)(X[:, None], FLOATS, ROPE), TypeError, f"rope: positions {INTEGERS_ACCEPTED}"),
    (
        lambda: unchecked(ops.rope)(X[:, None], ROWS[:3], ROPE),
        ValueError,
        "rope: positions has shape (3,); accepted: (4,), x being (4, 1, 8)",
    ),
    *(
        (
            lambda name=name: attention(unchecked(ops.attention), **{name: jnp.ones((7, 7))}),
            TypeError,
            f"attention: queries.{name} {INTEGERS_ACCEPTED}",
        )
        for name in ("page_table", "start", "length")
    ),
    *(
        (
            lambda name=name, shape=shape: attention(unchecked(ops.attention), **{name: jnp.zeros(shape, jnp.int32)}),
            ValueError,
            f"attention: queries.{name} has shape {shape}; accepted: {accepted}, q being (1, 3, 4, 8)",
        )
        for name, shape, accepted in (
            ("page_table", (2, 2), (1, 2)),
            ("start", (2,), (1,)),
            ("length", (2,), (1,)),
        )
    ),
    (
        lambda: attention(unchecked(ops.attention), mask=jnp.ones((1, 1, 3, 9))),
        TypeError,
        "attention: mask has dtype float32; accepted: bool",
    ),
    *(
        (
            lambda shape=shape: attention(unchecked(ops.attention), mask=jnp.ones(shape, bool)),
            ValueError,
            f"attention: mask has shape {shape}; accepted: (1 or 1, 1 or 4, 3, 1 to 256), q being (1, 3, 4, 8) and "
            "queries.page_table being (1, 2)",
        )
        for shape in ((3, 9), (2, 1, 3, 9), (1, 2, 3, 9), (1, 1, 1, 9), (1, 1, 3, 257), (1, 1, 3, 0))
    ),
    (
        lambda: ops.dot_product_attention(*[jnp.ones((1, 3, 4, 8))] * 3, mask=jnp.ones((1, 1, 3, 4), bool)),
        ValueError,
        "dot_product_attention: mask has shape (1, 1, 3, 4); accepted: (1 or 1, 1 or 4, 3, 1 to 3), q being (1, 3, 4, "
        "8) and k being (1, 3, 4, 8)",
    ),
    (
        lambda: attention(unchecked(ops.attention), sinks=jnp.ones(3)),
        ValueError,
        "attention: sinks has shape (3,); accepted: (4,), q being (1, 3, 4, 8)",
    ),
    (
        lambda: attention(unchecked(ops.attention), v=jnp.ones((2, 1, 128, 8))),
        ValueError,
        "attention: kv.v has shape (2, 1, 128, 8); accepted: (2, 2, 128, 8), kv.k being",
    ),
    *(
        (
            lambda name=name: append(unchecked(ops.qk_rope_append_kv), **{name: jnp.ones((7, 7))}),
            TypeError,
            f"qk_rope_append_kv: queries.{name} {INTEGERS_ACCEPTED}",
        )
        for name in ("page_table", "start", "count")
    ),
    *(
        (
            lambda name=name, shape=shape: append(
                unchecked(ops.qk_rope_append_kv), **{name: jnp.zeros(shape, jnp.int32)}
            ),
            ValueError,
            f"qk_rope_append_kv: queries.{name} has shape {shape}; accepted: {accepted}, qkv being (1, 3, 8, 8)",
        )
        for name, shape, accepted in (
            ("page_table", (2, 2), (1, 2)),
            ("start", (2,), (1,)),
            ("count", (2,), (1,)),
        )
    ),
    (
        lambda: append(unchecked(ops.qk_rope_append_kv), v=jnp.ones((2, 1, 128, 8))),
        ValueError,
        "qk_rope_append_kv: kv.v has shape (2, 1, 128, 8); accepted: (2, 2, 128, 8), kv.k's shape",
    ),
    (
        lambda: sampling_logprobs(unchecked(ops.sampling_logprobs), FLOATS),
        TypeError,
        f"sampling_logprobs: tokens {INTEGERS_ACCEPTED}",
    ),
    (
        lambda: sampling_logprobs(unchecked(ops.sampling_logprobs), ROWS[:3]),
        ValueError,
        "sampling_logprobs: tokens has shape (3,); accepted: (4,), logits being (4, 8)",
    ),
    (
        lambda: sampling_logprobs(unchecked(ops.sampling_logprobs), temperature=FLOATS[:3]),
        ValueError,
        "sampling_logprobs: temperature has shape (3,); accepted: (4,), logits being (4, 8)",
    ),
    (
        lambda: sample(unchecked(ops.filter_logits), top_k=FLOATS),
        TypeError,
        f"filter_logits: top_k {INTEGERS_ACCEPTED}",
    ),
    (lambda: adjust_logits(logits=FLOAT8), TypeError, "adjust_logits: logits has dtype"),
    (lambda: adjust_logits(generated=jnp.ones((4, 8))), TypeError, f"adjust_logits: generated {INTEGERS_ACCEPTED}"),
    (lambda: adjust_logits(biased=jnp.ones((4, 3))), TypeError, f"adjust_logits: biased {INTEGERS_ACCEPTED}"),
    (
        lambda: adjust_logits(in_prompt=jnp.zeros((4, 7), bool)),
        ValueError,
        "adjust_logits: in_prompt has shape (4, 7); accepted: (4, 8), logits being (4, 8)",
    ),
    (
        lambda: adjust_logits(frequency=jnp.zeros(3)),
        ValueError,
        "adjust_logits: frequency has shape (3,); accepted: (4,), logits being (4, 8)",
    ),
    (
        lambda: adjust_logits(bias=jnp.zeros((4, 2))),
        ValueError,
        "adjust_logits: bias has shape (4, 2); accepted: (4, 3), logits being (4, 8)",
    ),
    (
        lambda: adjust_logits(unchecked(ops.adjust_logits), allowed=jnp.zeros((4, 2), jnp.uint32)),
        ValueError,
        "adjust_logits: allowed has shape (4, 2); accepted: (4, 1), logits being (4, 8)",
    ),
    (lambda: sample(unchecked(ops.sample), top_k=FLOATS), TypeError, f"sample: top_k {INTEGERS_ACCEPTED}"),
    (
        lambda: sample(unchecked(ops.sample), noise_key=jnp.zeros((3, 4), jnp.uint32)),
        ValueError,
        "sample: noise_key has shape (3, 4); accepted: (4, 4), logits being (4, 8)",
    ),
    (
        lambda: sample(unchecked(ops.sample), temperature=jnp.ones(1)),
        ValueError,
        "sample: temperature has shape (1,); accepted: (4,), logits being (4, 8)",
    ),
]


@pytest.mark.parametrize(
    ("call", "error", "message"), BEHIND_ANNOTATIONS, ids=[message for _, _, message in BEHIND_ANNOTATIONS]
)
def test_bad_input_is_refused_without_a_type_checker(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()


@pytest.mark.parametrize("inside", [jax.jit, jax.vmap, jax.grad], ids=["jit", "vmap", "grad"])
def test_bad_input_is_refused_inside_transformations_too(inside: Callable) -> None:
    with pytest.raises(ValueError, match="attention: window is -2"):
        inside(lambda scale: attention(window=-2).sum() * scale.sum())(jnp.ones(1))
