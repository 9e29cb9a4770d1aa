"""A call of each operation that has a fusion, small enough for Pallas' interpreter, on numbers where roundings show."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from detjax import ops
from detjax.operands.accumulated_weight import AccumulatedWeight
from detjax.operands.options import Clamp, Distribution
from detjax.operands.products import NormalizedRows
from tests.ops import delta_cases
from tests.support.append_cases import Append
from tests.support.attention_requests import Requests


class Case(NamedTuple):
    """A function of arrays, its arguments, and what gives its results and its gradients, if it has any."""

    fn: Callable[..., Any]
    arrays: tuple[Any, ...]
    with_gradients: Callable[..., Any] | None = None


def normal(*shape: int, dtype: str = "bfloat16", seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype)


def with_gradients(fn: Callable[..., Any], *arrays: jax.Array) -> Case:
    """A function's result, and its gradients for all of its arrays."""

    def both(*arrays: jax.Array) -> Any:
        results, pullback = jax.vjp(fn, *arrays)
        given = jax.tree.map(lambda y: normal(*y.shape, dtype=str(y.dtype), seed=9), results)
        return results, pullback(given)

    return Case(fn, arrays, both)


def _matmul(dtype: str, **options: Any) -> Case:
    """Sizes that are not multiples of a vector: CPUs compute the last elements with other instructions."""
    stacked = (2,) if options.get("gated") else ()
    shape = (*stacked, 70, 96) if options.get("layout") == "nk" else (*stacked, 96, 70)
    names = [name for name in ("bias", "residual") if options.pop(name, False)]
    more = {"bias": normal(*stacked, 70, dtype=dtype, seed=2), "residual": normal(19, 70, dtype=dtype, seed=3)}

    def fn(x: jax.Array, w: jax.Array, *rest: jax.Array) -> jax.Array:
        return ops.matmul(x, w, **dict(zip(names, rest, strict=True)), **options)

    return with_gradients(fn, normal(19, 96, dtype=dtype), normal(*shape, dtype=dtype), *(more[n] for n in names))


def _grouped(dtype: str) -> Case:
    sizes, rows = jnp.asarray([8, 0, 16], jnp.int32), 24

    def fn(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        return ops.grouped_matmul(x, w, sizes, bias=bias, activation="silu", gated=True, layout="nk", unit=8)

    weights = normal(3, 2, 72, 96, dtype=dtype), normal(3, 2, 72, dtype=dtype, seed=1)
    return with_gradients(fn, normal(rows, 96, dtype=dtype), *weights)


def _norm(dtype: str) -> Case:
    arrays = (normal(19, 80, dtype=dtype, seed=seed) for seed in (0, 1))
    return with_gradients(
        lambda x, residual, weight: ops.rms_norm(x, weight, eps=1e-5, residual=residual, weight_offset=1.0),
        *arrays,
        normal(80, dtype=dtype),
    )


def _norm_before_product(dtype: str, rows: int, width: int) -> Case:
    """A norm of whole groups, and a product with an fp8 weight."""
    random = np.random.default_rng(0)
    codes = random.standard_normal((72, width)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    scales = random.uniform(0.5, 2, (72, width // 128)).astype(np.float32)
    described = ops.QuantizedFormat("e4m3", width, 128, dtype, "group")
    w = ops.QuantizedWeight(jnp.asarray(codes), jnp.asarray(scales), format=described)

    def fn(x: jax.Array, weight: jax.Array) -> jax.Array:
        return ops.matmul(NormalizedRows(x, weight, eps=1e-5, weight_offset=1.0), w, layout="nk")

    return with_gradients(fn, normal(rows, width, dtype=dtype), normal(width, dtype=dtype))


def _rope(dtype: str) -> Case:
    positions = jnp.asarray(np.random.default_rng(0).integers(0, 9000, (2, 5)), jnp.int32)
    options: dict[str, Any] = {"heads": 3, "kv_heads": 1, "norm_eps": 1e-6, "norm_offset": 1.0}

    def fn(qkv: jax.Array, q_norm: jax.Array, k_norm: jax.Array) -> Any:
        return ops.qk_rope(qkv, positions, ops.RotaryEmbedding(32, 10_000.0), q_norm=q_norm, k_norm=k_norm, **options)

    return with_gradients(fn, normal(2, 5, 5, 32, dtype=dtype), *(normal(32, dtype=dtype, seed=s) for s in (1, 2)))


def _append(dtype: str) -> Case:
    append = Append.random((0, 120, 200), (9, 9, 0), 9, dtype=dtype)
    arrays = append.arrays

    def fn(qkv: jax.Array, q_norm: jax.Array, k_norm: jax.Array) -> Any:
        return append(qkv=qkv, q_norm=q_norm, k_norm=k_norm)

    def both(*given: jax.Array) -> Any:
        (q, k, v), pullback = jax.vjp(fn, *given)
        gradients = pullback((normal(*q.shape, dtype=dtype), jnp.ones_like(k), jnp.ones_like(v)))
        return q, k, v, gradients

    return Case(fn, tuple(arrays[name] for name in ("qkv", "q_norm", "k_norm")), both)


def _attention(kind: str | None, dtype: str) -> Case:
    requests = Requests.random((130, 33), dtype=dtype)
    requests = requests if kind is None else requests.quantized(kind)[0]
    kv = ops.KVPages(requests.k_pages, requests.v_pages)
    last = requests.last(1)
    queries = ops.Queries(requests.page_table, jnp.asarray(last, jnp.int32), jnp.asarray(requests.lengths, jnp.int32))
    q = jnp.asarray(requests.q[np.arange(len(last)), last][:, None])
    return Case(lambda q, kv: ops.attention(q, kv, queries), (q, kv))


def _packed_attention(dtype: str) -> Case:
    """One request that decodes, and one that prefills."""
    requests = Requests.random((130, 33), dtype=dtype)
    kv = ops.KVPages(requests.k_pages, requests.v_pages)
    starts, counts = np.array([129, 0], np.int32), np.array([1, 33], np.int32)
    queries = ops.Queries.packed(np.asarray(requests.page_table), starts, counts, decodes=1, rows=64)
    q = jnp.asarray(np.concatenate([requests.q[0, 129:130], requests.q[1, :33], np.zeros_like(requests.q[1, :31])]))
    present = np.asarray(queries.rows.present)[:, None, None] > 0  # pyright: ignore[reportOptionalMemberAccess]
    return Case(lambda q, kv: jnp.where(present, ops.attention(q, kv, queries), 0), (q, kv))


def _delta_rule(dtype: str) -> Case:
    shape = delta_cases.Shape(key_heads=1, heads=2, key_dim=64, value_dim=64)
    tokens = delta_cases.tokens(70, dtype=dtype, shape=shape)
    state = delta_cases.empty_state(1, dtype, shape)
    queries = delta_cases.queries([0], [70])
    arrays = tuple(jnp.asarray(x)[None] for x in tokens)
    return Case(lambda *arrays: ops.gated_delta_rule(*arrays, state, queries), arrays)  # pyright: ignore[reportCallIssue]


def _sampling(temperature: tuple[float, ...] = (0.7, 0.0, 1.0)) -> tuple[jax.Array, ops.SamplingArrays]:
    random, rows = np.random.default_rng(5), len(temperature)
    fields = {
        "noise_key": random.integers(0, 2**32, (rows, 4)).astype(np.uint32),
        "position": random.integers(0, 1000, rows).astype(np.int32),
        "temperature": np.array(temperature, np.float32),
        "top_k": np.zeros(rows, np.int32),
        "top_p": np.ones(rows, np.float32),
        "min_p": np.zeros(rows, np.float32),
    }
    return normal(rows, 1000, dtype="float32"), ops.SamplingArrays(*(jnp.asarray(x) for x in fields.values()))


def _sample() -> Case:
    logits, arrays = _sampling()
    return Case(lambda logits: ops.sample(logits, arrays, filtered=False), (logits,))


def _sampling_logprobs() -> Case:
    logits, arrays = _sampling()
    logits = logits.at[:, 3].set(-jnp.inf)
    tokens = jnp.asarray([3, 40, 999], jnp.int32)
    return Case(lambda logits: ops.sampling_logprobs(logits, tokens, arrays, filtered=False), (logits,))


def _softmax(dtype: str) -> Case:
    def fn(x: jax.Array) -> Any:
        return ops.softmax(x), ops.log_softmax(x), ops.logsumexp(x)

    return with_gradients(fn, 3 * normal(5, 1000, dtype=dtype))


def _token_logprobs(dtype: str, distribution: Distribution) -> Case:
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 300, 40), jnp.int32)

    def fn(hidden: jax.Array, head: jax.Array) -> jax.Array:
        return ops.token_logprobs(hidden, head, tokens, distribution=distribution, soft_cap=20.0, chunk=16)

    return with_gradients(fn, normal(40, 96, dtype=dtype), normal(300, 96, dtype=dtype) / 10)


def _token_logprobs_and_gradients(dtype: str) -> Case:
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 300, 40), jnp.int32)
    factors = normal(40, dtype="float32")

    def fn(hidden: jax.Array, head: jax.Array) -> Any:
        weight = AccumulatedWeight(head, jnp.ones(head.shape, jnp.float32))
        derivative = lambda logprobs, factors: factors * jnp.maximum(logprobs, -9.0)  # noqa: E731
        return ops.token_logprobs_and_gradients(hidden, weight, tokens, derivative, factors, chunk=16)

    return Case(fn, (normal(40, 96, dtype=dtype), normal(300, 96, dtype=dtype) / 10))


_EVERYTHING: dict[str, Any] = {"bias": True, "residual": True}
CASES: dict[str, dict[str, Callable[[str], Case]]] = {
    "matmul_epilogue": {
        "gated": functools.partial(_matmul, activation="silu", gated=True, layout="nk", **_EVERYTHING),
        "gelu": functools.partial(_matmul, activation="gelu", bias=True),
        "gelu_tanh": functools.partial(_matmul, activation="gelu_tanh", **_EVERYTHING),
        "clamp": functools.partial(_matmul, activation="silu", gated=True, clamp=Clamp(1.0, 1.7), bias=True),
        "soft cap": functools.partial(_matmul, soft_cap=3.0, residual=True, out_dtype=jnp.float32),
    },
    "grouped_matmul_epilogue": {"gated": _grouped},
    "rms_norm_residual": {"with an offset": _norm},
    "rms_norm_codes": {
        "a product": functools.partial(_norm_before_product, rows=9, width=256),
        "a product of a row": functools.partial(_norm_before_product, rows=1, width=1024),
    },
    "qk_rope": {"with norms": _rope},
    "qk_rope_append_kv": {"prefill": _append},
    "attention_dequantize": {kind: functools.partial(_attention, kind) for kind in ("int8", "q4_0")},
    "sampling_logprobs": {"temperatures": lambda _: _sampling_logprobs()},
    "token_logprobs": {
        "the model's": functools.partial(_token_logprobs, distribution=Distribution()),
        "a temperature": functools.partial(_token_logprobs, distribution=Distribution(0.7, top_k=5)),
        "at once": _token_logprobs_and_gradients,
    },
    "sample": {"temperatures": lambda _: _sample()},
    "softmax": {"all three": _softmax},
    "attention": {"decode": functools.partial(_attention, None), "packed": _packed_attention},
    "gated_delta_rule": {"a chunk and more": _delta_rule},
}
"""For each fusion by name, functions of a dtype."""

PAIRS = [(fusion, case) for fusion, cases in CASES.items() for case in cases]
