"""Bad input: the error says what was given, what is accepted, and where."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from detjax import ops

X = jnp.ones((4, 8))
W = jnp.ones((8, 6))
FLOAT8 = jnp.ones((4, 8), jnp.float8_e4m3fn)
ROPE = ops.RotaryEmbedding(8, 10_000.0)
ROWS = jnp.zeros(4, jnp.int32)


def attention(**changed: Any) -> jax.Array:
    arguments: dict[str, Any] = {
        "q": jnp.ones((1, 3, 4, 8)),
        "k_pages": jnp.ones((2, 2, 128, 8)),
        "v_pages": jnp.ones((2, 2, 128, 8)),
        "page_table": jnp.zeros((1, 2), jnp.int32),
        "q_start": jnp.zeros(1, jnp.int32),
        "kv_length": jnp.full(1, 3, jnp.int32),
    }
    return ops.attention(**(arguments | changed))


def sample(**changed: Any) -> Any:
    whole = jnp.ones(4)
    arguments: dict[str, Any] = {"logits": X, "seed": jnp.zeros((4, 2), jnp.uint32), "position": ROWS}
    arguments |= {"sample_index": ROWS, "temperature": whole, "top_k": ROWS, "top_p": whole, "min_p": whole}
    return ops.sample(**(arguments | changed))


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
        "matmul: w has shape (8, 6); accepted: 3 axes where gated is True",
    ),
    (lambda: ops.matmul(X, jnp.stack([W, W])), ValueError, "accepted: 2 axes where gated is False"),
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
    (lambda: ops.RotaryEmbedding(7, 1e4), ValueError, "RotaryEmbedding: head_dim is 7; accepted: even numbers >= 2"),
    (lambda: ops.embed(ROWS, FLOAT8), TypeError, "embed: table has dtype"),
    (lambda: ops.embed(ROWS[:0], X), ValueError, "embed: tokens has shape (0,)"),
    (lambda: attention(q=FLOAT8.reshape(1, 1, 4, 8)), TypeError, "attention: q has dtype"),
    (
        lambda: attention(k_pages=jnp.ones((2, 2, 128, 8), jnp.bfloat16)),
        TypeError,
        "k_pages has dtype bfloat16 *float32",
    ),
    (
        lambda: attention(q=jnp.ones((1, 3, 3, 8))),
        ValueError,
        "attention: q has 3 heads and k_pages 2; accepted: a mult",
    ),
    (
        lambda: attention(k_pages=jnp.ones((2, 2, 64, 8)), v_pages=jnp.ones((2, 2, 64, 8))),
        ValueError,
        "attention: k_pages has shape (2, 2, 64, 8); accepted: (2, 2, 128, 8)",
    ),
    (lambda: attention(window=0), ValueError, "attention: window is 0; accepted: None, or at least 1 token"),
    (lambda: attention(soft_cap=-1.0), ValueError, "attention: soft_cap is -1.0; accepted: None, or a positive number"),
    (lambda: attention(alibi_slopes=(1.0,)), ValueError, "attention: 1 alibi_slopes; accepted: 4, one per head of q"),
    (lambda: sample(logits=FLOAT8), TypeError, "sample: logits has dtype"),
    (lambda: ops.top_logprobs(X, 9), ValueError, "top_logprobs: count is 9; accepted: 1 to 8, the vocabulary's size"),
    (lambda: ops.top_logprobs(X, 0), ValueError, "top_logprobs: count is 0"),
]


@pytest.mark.parametrize(("call", "error", "message"), CASES, ids=[message for _, _, message in CASES])
def test_bad_input_is_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    pattern = re.escape(message).replace(r"\*", ".*")
    with pytest.raises(error, match=pattern):
        call()


@pytest.mark.parametrize("inside", [jax.jit, jax.vmap, jax.grad], ids=["jit", "vmap", "grad"])
def test_bad_input_is_refused_inside_transformations_too(inside: Callable) -> None:
    with pytest.raises(ValueError, match="attention: window is -2"):
        inside(lambda scale: attention(window=-2).sum() * scale.sum())(jnp.ones(1))
