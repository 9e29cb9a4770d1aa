"""The portable backend has the bits of the contracts as NumPy computes them, in code that shares nothing with it."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import detjax
from detjax import ops
from tests.contract import emulation
from tests.contract.emulation import LOG2_E, AttentionOptions, DeviceFunctions, Products, fused, unfused
from tests.support.bits import assert_same_bits, same_bits

WIDTHS = (5, 129, 512, 4100, 9216)
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def by_vectors(function: Callable[[jax.Array], jax.Array]) -> emulation.Elementwise:
    """A function of JAX for NumPy arrays, filled up to a length at which XLA uses vector instructions alone."""
    compiled = jax.jit(function)

    def call(x: np.ndarray) -> np.ndarray:
        x = np.asarray(x, np.float32)
        flat = np.ones(-(-x.size // 4096) * 4096, np.float32)
        flat[: x.size] = x.reshape(-1)
        return np.asarray(compiled(flat))[: x.size].reshape(x.shape)

    return call


def exp2_of_product(x: np.ndarray, factor: np.float32) -> np.ndarray:
    """`exp2(x * factor)` as XLA's CPU compiler makes it of one expression."""
    return _exp2_of_product(factor.item())(x)


@functools.cache
def _exp2_of_product(factor: float) -> emulation.Elementwise:
    return by_vectors(lambda x: jnp.exp2(x * np.float32(factor)))


DEVICE = DeviceFunctions(by_vectors(jnp.exp2), exp2_of_product, by_vectors(jnp.log), by_vectors(jax.lax.rsqrt))
"""The functions as XLA's CPU compiler makes them of vector instructions. Inside of other loops their last bit may
differ, which the contract leaves to the device: tests allow it where such a function enters, and nowhere else."""


def neighbours(x: np.ndarray) -> list[np.ndarray]:
    """The numbers given, and those one or two units in the last place away."""
    bits = np.asarray(x, np.float32).view(np.int32)
    return [(bits + units).view(np.float32) for units in (0, 1, -1, 2, -2)]


def assert_has_the_bits_of_one(result: Any, candidates: Iterable[Any]) -> None:
    """Asserts that the result equals one of the candidates in every bit; names the first difference from the first."""
    candidates = list(candidates)
    if not any(same_bits(result, candidate) for candidate in candidates):
        assert_same_bits(result, candidates[0])


@pytest.fixture(autouse=True)
def portable_backend() -> Iterator[None]:
    with detjax.use_backend("portable"):
        yield


def rows(width: int, dtype: str, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((3, width)).astype(np.float32) * 3
    return x.astype(DTYPES[dtype])


@pytest.mark.parametrize(
    ("dtype", "with_residual", "widths"),
    [
        ("float32", False, (5, 4100)),
        ("bfloat16", True, (129,)),
        ("float16", True, (513,)),
        *(
            pytest.param(dtype, with_residual, WIDTHS, marks=pytest.mark.nightly)
            for dtype in DTYPES
            for with_residual in (False, True)
        ),
    ],
)
def test_rms_norm(dtype: str, with_residual: bool, widths: tuple[int, ...]) -> None:
    for width in widths:
        x, residual = rows(width, dtype), rows(width, dtype, 1) if with_residual else None
        weight = rows(width, dtype, 2)[0]
        given = None if residual is None else jnp.asarray(residual)
        result = ops.rms_norm(jnp.asarray(x), jnp.asarray(weight), eps=1e-6, weight_offset=0.5, residual=given)
        h = x if residual is None else emulation.added(x, residual)
        if residual is not None:
            assert_same_bits(result[1], h)
            result = result[0]
        scale = emulation.rms_scale(h, 1e-6, DEVICE)
        for row in range(len(x)):
            scaled = (emulation.scaled_rows(h[row], weight, candidate, 0.5) for candidate in neighbours(scale[row]))
            assert_has_the_bits_of_one(result[row], scaled)


@pytest.mark.parametrize(
    ("dtype", "widths"),
    [
        ("float32", (5, 4097)),
        ("bfloat16", (9216,)),
        *(pytest.param(dtype, WIDTHS, marks=pytest.mark.nightly) for dtype in DTYPES),
    ],
)
def test_the_softmax_family(dtype: str, widths: tuple[int, ...]) -> None:
    for width in widths:
        x = rows(width, dtype)
        x[0] *= x.dtype.type(4)  # blocks with very different maxima
        m, total = emulation.softmax_statistics(x, DEVICE)
        log_total = DEVICE.log(total)
        logsumexp, log_softmax, softmax = (
            np.asarray(fn(jnp.asarray(x))) for fn in (ops.logsumexp, ops.log_softmax, ops.softmax)
        )
        assert_has_the_bits_of_one(logsumexp, ((m + candidate)[:, 0] for candidate in neighbours(log_total)))
        for row in range(len(x)):
            difference = x[row].astype(np.float32) - m[row]
            assert_has_the_bits_of_one(log_softmax[row], (difference - log for log in neighbours(log_total[row])))
            largest = np.argmax(x[row])
            assert_same_bits(softmax[row, largest], (np.float32(1) / total[row])[0])
            units = softmax[row].view(np.int32) - (DEVICE.exp2_of_product(difference, LOG2_E) / total[row]).view(
                np.int32
            )
            assert abs(units).max() <= 2


def test_softmax_in_another_order_has_other_bits() -> None:
    x = rows(9216, "float32")
    result = np.asarray(ops.softmax(jnp.asarray(x))).max(axis=1, keepdims=True)  # the reciprocals of the sums
    assert_same_bits(result, 1 / emulation.softmax_statistics(x, DEVICE)[1])
    assert not same_bits(result, 1 / emulation.softmax_statistics(x[:, ::-1], DEVICE)[1])


def test_softmax_is_by_the_exponential_of_base_two() -> None:
    # XLA's CPU compiler gives exp the bits of exp2 of the product, so that only the program shows which one it is.
    program = str(jax.make_jaxpr(ops.softmax)(jnp.ones((1, 8))))
    assert " exp2 " in program
    assert " exp " not in program


def unordered_dot(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Products of matrices that are the same in every order: sums of integers, or of one term that is not zero."""
    terms = x[:, :, None] * y[None]
    is_single = ((terms != 0).sum(axis=1) <= 1).all()
    assert is_single or (terms == np.rint(terms)).all(), "the order of these sums matters"
    return terms.sum(axis=1, dtype=np.float32)


def attention_inputs(keys: int, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries and keys of small integers, and in each block one value that is not zero for each column."""
    random = np.random.default_rng(keys)
    q = random.integers(-3, 4, (3, 8)).astype(np.float32)
    k = random.integers(-3, 4, (keys, 8)).astype(np.float32)
    v = np.zeros((keys, 16), np.float32)
    for first in range(0, keys, 128):
        count = min(128, keys - first)
        for column in range(16):
            v[first + random.integers(count), column] = random.standard_normal()
    return tuple(x.astype(DTYPES[dtype]) for x in (q, k, v))  # pyright: ignore[reportReturnType]


OPTIONS = {
    "causal": AttentionOptions(0.3),
    "bidirectional": AttentionOptions(0.3, causal=False),
    "window": AttentionOptions(0.3, window=130),
    "soft cap": AttentionOptions(0.3, soft_cap=5.0),
    "alibi": AttentionOptions(0.3, alibi_slope=0.125),
    "sink": AttentionOptions(0.3, sink=1.5),
}


IN_BFLOAT16 = ("window", "alibi", "sink")


@pytest.mark.parametrize(
    ("name", "dtype", "lengths"),
    [
        *((name, "bfloat16" if name in IN_BFLOAT16 else "float32", (300,)) for name in OPTIONS),
        ("causal", "float32", (3,)),
        *(
            pytest.param(name, dtype, (3, 300, 513), marks=pytest.mark.nightly)
            for name in OPTIONS
            for dtype in ("float32", "bfloat16")
        ),
    ],
)
def test_attention(name: str, dtype: str, lengths: tuple[int, ...]) -> None:
    options = OPTIONS[name]
    for keys in lengths:
        q, k, v = attention_inputs(keys, dtype)
        start = keys - len(q)

        result = ops.dot_product_attention(
            *(jnp.asarray(x)[None, :, None, :] for x in (q, k, v)),
            scale=options.scale,
            causal=options.causal,
            window=options.window,
            soft_cap=options.soft_cap,
            alibi_slopes=None if options.alibi_slope is None else (options.alibi_slope,),
            sinks=None if options.sink is None else jnp.asarray([options.sink], q.dtype),
        )[0, :, 0]
        # Each multiply-add rounds once under the contract. XLA's CPU compiler fuses those that it chooses to.
        expected = []
        for roundings in itertools.product((fused, unfused), repeat=3):
            products = Products(unordered_dot, *roundings)
            attend = functools.partial(emulation.attention, options=options, device=DEVICE, products=products)
            expected.append(np.stack([attend(row, k, v, start + t)[0] for t, row in enumerate(q)]).astype(q.dtype))
        assert_has_the_bits_of_one(result, expected)


def test_attention_of_wide_values() -> None:
    """Blocks of more than 256 columns merge within spans of 1024 keys, and spans then."""
    q, k, v = attention_inputs(2300, "float32")
    start, wide = len(k) - len(q), np.tile(v, 17)
    result = ops.dot_product_attention(*(jnp.asarray(x)[None, :, None, :] for x in (q, k, wide)), scale=0.3)[0, :, 0]
    narrow = ops.dot_product_attention(*(jnp.asarray(x)[None, :, None, :] for x in (q, k, v)), scale=0.3)[0, :, 0]
    expected = []
    for roundings in itertools.product((fused, unfused), repeat=3):
        products = Products(unordered_dot, *roundings)
        rows = [
            emulation.attention(row, k, wide, start + t, AttentionOptions(0.3), DEVICE, products)
            for t, row in enumerate(q)
        ]
        expected.append(np.stack([row for row, _ in rows]))
    assert_has_the_bits_of_one(result, expected)
    assert not same_bits(result[:, :16], narrow)


@pytest.mark.parametrize("kind", ["int8", "fp8_e4m3", "q4_0"])
def test_quantization_of_keys_and_values(kind: str) -> None:
    x = np.random.default_rng(0).standard_normal((128, 64)).astype(np.float32) * np.float32(7)
    x[3], x[4], x[5, :32] = 0, 1e-35, 0
    for dtype in DTYPES.values():
        pages = ops.quantize_kv(jnp.asarray(x.astype(dtype))[None, None], kind)  # pyright: ignore[reportArgumentType]
        numbers = x.astype(dtype)
        if kind == "q4_0":
            codes, scales = emulation.quantize_groups(numbers)
            assert_same_bits(pages.scales[0, 0].T, scales)
        else:
            codes, scales = emulation.quantize_rows(numbers, kind)
            assert_same_bits(pages.scales[0, 0], scales)
        assert_same_bits(pages.codes[0, 0], codes)


PROMPT = [2, 7, 1, 2**31 - 1]


@functools.cache
def random_bits(seed: int, position: int, sample_index: int) -> np.ndarray:
    key = emulation.noise_key(seed, emulation.prompt_digest(PROMPT), sample_index)
    return emulation.random_bits(key, position, range(600))


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 30.0])
def test_sampling(temperature: float) -> None:
    keys = [(0, 0, 0), (1, 5, 0), (2**40 + 7, 5, 3), (2**63 - 1, 1000, 1)]
    logits = np.random.default_rng(0).standard_normal((len(keys), 600)).astype(np.float32)
    logits[0, 17] = logits[0, 40] = logits[0].max() + 1
    arrays = ops.SamplingArrays(
        jnp.asarray([ops.noise_key(seed, ops.prompt_digest(PROMPT), index) for seed, _, index in keys], jnp.uint32),
        jnp.asarray([position for _, position, _ in keys], jnp.int32),
        jnp.full(len(keys), temperature, jnp.float32),
        jnp.zeros(len(keys), jnp.int32),
        jnp.ones(len(keys), jnp.float32),
        jnp.zeros(len(keys), jnp.float32),
    )
    tokens, logprobs = ops.sample(jnp.asarray(logits), arrays, filtered=False)
    expected = [
        emulation.sample(row, random_bits(*key), temperature, DEVICE) for row, key in zip(logits, keys, strict=True)
    ]
    assert np.asarray(tokens).tolist() == expected
    m, total = emulation.softmax_statistics(logits, DEVICE)
    differences = logits[np.arange(len(keys)), expected] - m[:, 0]
    for row, log_total in enumerate(DEVICE.log(total)[:, 0]):
        assert_has_the_bits_of_one(logprobs[row], [differences[row] - log for log in neighbours(log_total)])


@pytest.mark.parametrize("temperature", [0.7, 1.0, 30.0])
def test_sampling_logprobs(temperature: float) -> None:
    logits = np.random.default_rng(0).standard_normal((6, 4500)).astype(np.float32)
    logits[:, 10:20] = -np.inf
    tokens = [5, 4200, 99, 0, 4499, 15]
    # Four tokens are far likelier than all others.
    likely = [0, 5, 99, 4200]
    logits[:4, likely] += 30
    top_k = [4, 4, 4, 4, 0, 0]
    rows = range(len(tokens))
    zeros = jnp.zeros(len(tokens), jnp.int32)
    arrays = ops.SamplingArrays(
        jnp.zeros((len(tokens), 4), jnp.uint32),
        zeros,
        jnp.full(len(tokens), temperature, jnp.float32),
        jnp.asarray(top_k, jnp.int32),
        jnp.ones(len(tokens), jnp.float32),
        jnp.zeros(len(tokens), jnp.float32),
    )
    result = np.asarray(ops.sampling_logprobs(jnp.asarray(logits), jnp.asarray(tokens, jnp.int32), arrays))
    removed = [np.setdiff1d(np.arange(4500), likely).tolist() if k else [] for k in top_k]
    s = np.stack([emulation.sampling_exponents(logits[row], temperature, removed[row]) for row in rows])
    m, total = emulation.softmax_statistics(s, DEVICE)
    for row, log_total in enumerate(DEVICE.log(total)[:, 0]):
        difference = s[row, tokens[row]] - m[row, 0]
        assert_has_the_bits_of_one(result[row], [difference - log for log in neighbours(log_total)])
    assert np.isneginf(result).tolist() == [False] * 5 + [True]


SEEN = {0: 3, 2: 1, 5: 7, 8: 1000, 9: 65535, 30: 3, 31: 5}
"""Counts of generated tokens."""
PROMPT = [0, 1, 1, 6, 40]


def adjustments(requests: list[emulation.Adjustments]) -> ops.LogitAdjustments:
    """The arrays of some requests."""
    rows = [request.bias | dict.fromkeys(request.barred, -np.inf) for request in requests]
    width = max(len(row) for row in rows) + 2
    repetition = np.float32([request.repetition for request in requests])
    return ops.LogitAdjustments(
        repetition=repetition,
        reciprocal=1 / repetition,
        frequency=np.float32([request.frequency for request in requests]),
        presence=np.float32([request.presence for request in requests]),
        biased=np.int32([[*row, -1, 10_000, *([-1] * (width - 2 - len(row)))] for row in rows]),
        bias=np.float32([[*row.values()] + [0] * (width - len(row)) for row in rows]),
    )


def bitmask(allowed: frozenset[int] | None, size: int) -> np.ndarray:
    """A word of 32 bits for each 32 tokens."""
    words = np.zeros(-(-size // 32), np.uint32)
    for token in range(size) if allowed is None else allowed:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_adjustments_of_logits(dtype: str, masked: bool) -> None:
    size = 1003
    requests = [
        emulation.Adjustments(),
        emulation.Adjustments(repetition=1.1),
        emulation.Adjustments(repetition=0.7, frequency=0.1, presence=0.3),
        emulation.Adjustments(frequency=-0.1, presence=-1.7),
        emulation.Adjustments(bias={0: 5.3, 2: -0.1, 1002: 100.0, 700: 0.0}, barred=frozenset([3, 5])),
        emulation.Adjustments(1.3, 0.7, 0.9, {5: 0.1, 6: -3.3, 32: 1.1}, frozenset([0]), frozenset([0, 5, 32, 1002])),
    ]
    if not masked:
        requests = [dataclasses.replace(request, allowed=None) for request in requests]
    logits = (3 * np.random.default_rng(0).standard_normal((len(requests), size))).astype(DTYPES[dtype])
    logits[:, 1], logits[:, 2], logits[:, 4] = -0.0, np.inf, np.nan
    count = np.zeros((len(requests), size), np.uint16)
    count[:, [*SEEN]] = [*SEEN.values()]
    in_prompt = np.zeros((len(requests), size), bool)
    in_prompt[:, PROMPT] = True
    result = ops.adjust_logits(
        jnp.asarray(logits),
        ops.SeenTokens(jnp.asarray(count), jnp.asarray(in_prompt)),
        jax.tree.map(jnp.asarray, adjustments(requests)),
        jnp.asarray(np.stack([bitmask(request.allowed, size) for request in requests])) if masked else None,
    )
    expected = [emulation.adjusted(row, PROMPT, SEEN, request) for row, request in zip(logits, requests, strict=True)]
    assert_same_bits(result, np.stack(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_alone(dtype: str) -> None:
    size = 1003
    requests = [
        emulation.Adjustments(allowed=frozenset(allowed)) for allowed in ([0, 1, 31, 32, 1002], [], range(size))
    ]
    logits = (3 * np.random.default_rng(0).standard_normal((len(requests), size))).astype(DTYPES[dtype])
    logits[:, 1], logits[:, 2] = -0.0, np.inf
    masks = jnp.asarray(np.stack([bitmask(request.allowed, size) for request in requests]))
    expected = [emulation.adjusted(row, [], {}, request) for row, request in zip(logits, requests, strict=True)]
    assert_same_bits(ops.constrain_logits(jnp.asarray(logits), masks), np.stack(expected))
