"""The cases that `run` measures and `compile` compiles: operations and whole steps of popular models.

Their inputs have the same bits on every device; see `inputs.hashed`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from detjax import ops
from detjax.bench import presets
from detjax.bench.inputs import hashed, hashed_integers
from detjax.bench.shapes import linears
from detjax.contract import DELTA_CHUNK, KV_BLOCK
from detjax.models import DecoderConfig
from detjax.models.cache import KVCache, declarations, layers_in_slots
from detjax.models.network import abstract, split
from detjax.operands.kv_pages import KVPages, Queries
from detjax.operands.rounding import rounded

type Pairs = Sequence[tuple[np.ndarray, np.ndarray]]
"""Computed arrays, each with its float64 reference."""

type Arguments = tuple[Any, ...]

OPERATIONS: Final = (
    "matmul",
    "rms_norm",
    "qk_rope",
    "softmax",
    "log_softmax",
    "logsumexp",
    "attention_prefill",
    "attention_decode",
    "delta_rule_prefill",
    "delta_rule_decode",
    "sample",
    "prefill_step",
    "decode_step",
)

_EPS: Final = 1e-6
_CHECKED_ROWS: Final = 4
_CHECKED_COLUMNS: Final = 256


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the cases, and the number of calls.

    Attributes:
        models: presets whose linear layers and steps are measured. The first one also gives the heads and widths of
            norms, rotary embedding and attention.
        tokens: numbers of tokens (rows) of a linear layer's matmul.
        head_tokens: numbers of tokens of the last layer's matmul, which is as wide as the vocabulary.
        rows: numbers of rows of norms and rotary embedding.
        vocabulary: the width of softmax and sampling.
        vocabulary_rows: numbers of rows of softmax and sampling.
        prefill: (requests, tokens per request) of prefills of attention and the gated delta rule.
        decode: (requests, cached tokens per request) of decodes of attention and the delta rule. The cost of the latter
            depends only on the tokens of the open chunk.
        delta_heads: key heads, value heads and head dimension of the delta rule. Default: as in Qwen3-Next-80B-A3B and
            Qwen3.5-35B-A3B.
        prefill_steps: (requests, tokens per request) of whole models' prefill steps.
        decode_steps: (requests, cached tokens per request) of whole models' decode steps.
        calls: calls per round.
        rounds: rounds in which the backend and stock XLA alternate.
    """

    models: tuple[str, ...] = ("Qwen3-8B", "Qwen3-0.6B")
    tokens: tuple[int, ...] = (1, 64, 512, 4096)
    head_tokens: tuple[int, ...] = (1, 64)
    rows: tuple[int, ...] = (1, 64, 4096)
    vocabulary: int = 151936
    vocabulary_rows: tuple[int, ...] = (1, 64)
    prefill: tuple[tuple[int, int], ...] = ((1, 1024), (1, 4096), (4, 1024))
    decode: tuple[tuple[int, int], ...] = ((1, 4096), (64, 1024), (64, 4096))
    delta_heads: tuple[int, int, int] = (16, 32, 128)
    prefill_steps: tuple[tuple[int, int], ...] = ((1, 1024),)
    decode_steps: tuple[tuple[int, int], ...] = ((1, 1024), (64, 1024))
    calls: int = 20
    rounds: int = 4


SMALL: Final = Sizes(
    models=("tiny",),
    tokens=(1, 17),
    head_tokens=(17,),
    rows=(1, 17),
    vocabulary=5000,
    vocabulary_rows=(3,),
    prefill=((2, 150),),
    decode=((3, 300),),
    delta_heads=(2, 4, 16),
    prefill_steps=((1, 40),),
    decode_steps=((3, 150),),
    calls=9,
    rounds=4,
)
"""Sizes that run on a CPU in seconds."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation, or one step of a model, at one size.

    Attributes:
        name: unique among the cases of its operation.
        operation: one of `OPERATIONS`.
        run: the function to measure; its last `carried` results replace its first `carried` arguments.
        draw: returns the arguments of `run` for a seed.
        bytes: the size of the arguments read and the results written, each counted once.
        flops: additions and multiplications of matrix products; other arithmetic is not counted.
        exact: returns pairs to compare, given arguments and results; None: no float64 reference.
        carried: the number of donated arguments.
        rotated: whether calls rotate through argument sets; unnecessary if no argument fits into a cache.
    """

    name: str
    operation: str
    run: Callable[..., tuple[Any, ...]]
    draw: Callable[[int], Arguments]
    bytes: int
    flops: int = 0
    exact: Callable[[Arguments, Sequence[Array]], Pairs] | None = None
    carried: int = 0
    rotated: bool = True

    def carrying(self, program: Callable[..., Any], arguments: Arguments) -> Callable[..., Any]:
        """Returns the compiled `run` with its carried arguments bound: each call takes them from the previous call.

        Args:
            program: `run`, compiled.
            arguments: the arguments of the first call, which are not donated.
        """
        carry = list(jax.tree.map(jnp.copy, arguments[: self.carried]))

        def call(*arguments: Any) -> Any:
            outputs = program(*carry, *arguments)
            carry[:] = outputs[len(outputs) - self.carried :]
            return outputs[: len(outputs) - self.carried]

        return call

    @property
    def shapes(self) -> Arguments:
        """The arguments as `jax.ShapeDtypeStruct`."""
        return jax.eval_shape(functools.partial(self.draw, 0))

    @property
    def arguments(self) -> list[str]:
        """The arguments' shapes and dtypes as text. Results are compared only if it is equal."""
        counts: dict[str, int] = {}
        for leaf in jax.tree.leaves(self.shapes):
            text = f"{leaf.dtype.name}[{','.join(map(str, leaf.shape))}]"
            counts[text] = counts.get(text, 0) + 1
        return [text if count == 1 else f"{count} × {text}" for text, count in counts.items()]


def cases(sizes: Sizes, only: Sequence[str] = OPERATIONS) -> Iterator[Case]:
    """Yields all cases of the operations in `only`.

    Raises:
        ValueError: an operation is unknown.
    """
    for name in only:
        if name not in OPERATIONS:
            raise ValueError(f"operation {name!r} is unknown; accepted: {', '.join(OPERATIONS)}")
    for case in _all(sizes):
        if case.operation in only:
            yield case


def _exponent(inputs: int) -> int:
    """The exponent of the power of two nearest to `inputs ** -0.5`, a variance-preserving scale of weights."""
    return -round(math.log2(inputs) / 2)


def _all(sizes: Sizes) -> Iterator[Case]:
    for model in sizes.models:
        yield from _matmuls(model, sizes)
    first, config = sizes.models[0], presets.config(sizes.models[0])
    for rows in sizes.rows:
        yield _rms_norm(first, config, rows)
    for rows in sizes.rows:
        yield _qk_rope(first, config, rows)
    for operation in ("softmax", "log_softmax", "logsumexp"):
        for rows in sizes.vocabulary_rows:
            yield _over_vocabulary(operation, rows, sizes.vocabulary)
    for batch, tokens in sizes.prefill:
        yield _attention("attention_prefill", first, config, batch, tokens, tokens)
    for batch, context in sizes.decode:
        yield _attention("attention_decode", first, config, batch, context, 1)
    for batch, tokens in sizes.prefill:
        yield _delta_rule("delta_rule_prefill", sizes.delta_heads, batch, 0, tokens)
    for batch, context in sizes.decode:
        yield _delta_rule("delta_rule_decode", sizes.delta_heads, batch, context, 1)
    for temperature in (0.0, 1.0):
        for rows in sizes.vocabulary_rows:
            yield _sample(rows, sizes.vocabulary, temperature)
    for model in reversed(sizes.models):
        for batch, tokens in sizes.prefill_steps:
            yield step_case("prefill_step", model, batch, tokens)
        for batch, context in sizes.decode_steps:
            yield step_case("decode_step", model, batch, context)


def _matmuls(model: str, sizes: Sizes) -> Iterator[Case]:
    for layer, (n, k) in linears(presets.config(model)).items():
        for m in sizes.head_tokens if layer == "lm_head" else sizes.tokens:
            yield _matmul(model, layer, m, n, k)


def _matmul(model: str, layer: str, m: int, n: int, k: int) -> Case:
    gated, out_dtype = layer == "gate+up", "float32" if layer in ("lm_head", "router") else "bfloat16"
    options: dict[str, Any] = {"activation": "silu", "gated": True} if gated else {}
    parts = 2 if gated else 1
    n //= parts

    def run(x: Array, w: Array) -> tuple[Array]:
        return (ops.matmul(x, w, layout="nk", out_dtype=out_dtype, **options),)

    def draw(seed: int) -> Arguments:
        shape = (2, n, k) if gated else (n, k)
        return hashed(2 * seed, (m, k), "bfloat16"), hashed(2 * seed + 1, shape, "bfloat16", _exponent(k))

    def exact(arguments: Arguments, outputs: Sequence[Array]) -> Pairs:
        x, w = _wide(arguments[0][-_CHECKED_ROWS:]), _wide(arguments[1][..., -_CHECKED_COLUMNS:, :])
        y = x @ w.swapaxes(-1, -2)
        want = y[0] / (1 + np.exp(-y[0])) * y[1] if gated else y
        return [(_wide(outputs[0][-_CHECKED_ROWS:, -_CHECKED_COLUMNS:]), want)]

    size = 2 * (m * k + parts * n * k) + jnp.dtype(out_dtype).itemsize * m * n
    return Case(f"{model} {layer}, M={m}", "matmul", run, draw, size, 2 * m * n * k * parts, exact)


def _rms_norm(model: str, config: DecoderConfig, rows: int) -> Case:
    D = config.hidden_size

    def run(x: Array, residual: Array, weight: Array) -> tuple[Array, Array]:
        return ops.rms_norm(x, weight, eps=_EPS, residual=residual)

    def draw(seed: int) -> Arguments:
        return (*(hashed(3 * seed + i, (rows, D), "bfloat16") for i in range(2)), _norm_weight(3 * seed + 2, D))

    def exact(arguments: Arguments, outputs: Sequence[Array]) -> Pairs:
        weight = _wide(arguments[2])
        h = _wide(outputs[1][-_CHECKED_ROWS:])  # the norm's input is the rounded sum
        y = h / np.sqrt(np.mean(h * h, axis=-1, keepdims=True) + _EPS) * weight
        return [(_wide(outputs[0][-_CHECKED_ROWS:]), y)]

    return Case(f"{model}, residual, {_counted(rows)}", "rms_norm", run, draw, 2 * (4 * rows * D + D), exact=exact)


def _qk_rope(model: str, config: DecoderConfig, rows: int) -> Case:
    H, h, K = config.heads, config.kv_heads, config.head_dim

    def run(qkv: Array, positions: Array, q_norm: Array, k_norm: Array) -> tuple[Array, Array]:
        norms = {"q_norm": q_norm, "k_norm": k_norm, "norm_eps": _EPS}
        return ops.qk_rope(qkv, positions, config.rope, heads=H, kv_heads=h, **norms)

    def draw(seed: int) -> Arguments:
        positions = hashed_integers(jnp.uint32(4 * seed + 1), (rows,), 4096)
        norms = (_norm_weight(4 * seed + i, K) for i in (2, 3))
        return hashed(4 * seed, (rows, H + 2 * h, K), "bfloat16"), positions, *norms

    def exact(arguments: Arguments, outputs: Sequence[Array]) -> Pairs:
        qkv, positions = _wide(arguments[0][-_CHECKED_ROWS:]), _wide(arguments[1][-_CHECKED_ROWS:])
        angles = positions[:, None, None] * config.rope.inverse_frequencies.astype(np.float64)
        cos, sin = np.cos(angles), np.sin(angles)
        pairs = []
        for output, heads, weight in zip(outputs, (slice(0, H), slice(H, H + h)), arguments[2:], strict=True):
            x = qkv[:, heads]
            x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + _EPS) * _wide(weight)
            first, second = np.split(x, 2, axis=-1)
            want = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
            pairs.append((_wide(output[-_CHECKED_ROWS:]), want))
        return pairs

    return Case(f"{model}, {_counted(rows)}", "qk_rope", run, draw, 4 * rows * (H + h) * K, exact=exact)


def _over_vocabulary(operation: str, rows: int, vocabulary: int) -> Case:
    function = getattr(ops, operation)

    def run(x: Array) -> tuple[Array]:
        return (function(x),)

    def draw(seed: int) -> Arguments:
        return (hashed(seed, (rows, vocabulary), "float32", 1),)

    def exact(arguments: Arguments, outputs: Sequence[Array]) -> Pairs:
        x = _wide(arguments[0][-_CHECKED_ROWS:])
        log_sum = _logsumexp(x)
        wanted = {"softmax": np.exp(x - log_sum), "log_softmax": x - log_sum, "logsumexp": log_sum[:, 0]}
        return [(_wide(outputs[0][-_CHECKED_ROWS:]), wanted[operation])]

    size = 4 * rows * (vocabulary + (1 if operation == "logsumexp" else vocabulary))
    return Case(f"{rows} × {vocabulary}, float32", operation, run, draw, size, exact=exact)


def _attention(operation: str, model: str, config: DecoderConfig, batch: int, context: int, tokens: int) -> Case:
    H, h, K = config.heads, config.kv_heads, config.head_dim
    start = context - tokens

    def run(q: Array, k_pages: Array, v_pages: Array, page_table: Array, q_start: Array, kv_length: Array):
        return (ops.attention(q, KVPages(k_pages, v_pages), Queries(page_table, q_start, kv_length)),)

    def draw(seed: int) -> Arguments:
        page_table = _scattered(batch, context)
        pool = (page_table.size, h, KV_BLOCK, K)
        pages = (hashed(3 * seed + i, pool, "bfloat16") for i in (1, 2))
        lengths = (jnp.full(batch, start, jnp.int32), jnp.full(batch, context, jnp.int32))
        return hashed(3 * seed, (batch, tokens, H, K), "bfloat16"), *pages, page_table, *lengths

    def exact(arguments: Arguments, outputs: Sequence[Array]) -> Pairs:
        q, k_pages, v_pages, page_table, *_ = arguments
        last = np.asarray(page_table[-1])
        k, v = (_wide(pages[last, -1]).reshape(-1, K)[:context] for pages in (k_pages, v_pages))
        q = _wide(q[-1, -_CHECKED_ROWS:, -1])
        positions = np.arange(context - len(q), context)
        s = np.where(np.arange(context)[None] <= positions[:, None], q @ k.T / math.sqrt(K), -np.inf)
        return [(_wide(outputs[0][-1, -_CHECKED_ROWS:, -1]), np.exp(s - _logsumexp(s)) @ v)]

    seen = batch * sum(range(start + 1, context + 1))
    size = 2 * batch * (2 * tokens * H * K + 2 * context * h * K)
    what = f"{context} tokens" if operation == "attention_prefill" else f"{context} keys"
    return Case(f"{model}, {batch} × {what}", operation, run, draw, size, 4 * H * K * seen, exact)


def _delta_rule(operation: str, heads: tuple[int, int, int], batch: int, start: int, tokens: int) -> Case:
    """The gated delta rule for requests with `start` previous tokens and an empty open chunk."""
    h, H, K = heads
    start = start // DELTA_CHUNK * DELTA_CHUNK

    def run(state: ops.DeltaState, q: Array, k: Array, v: Array, g: Array, beta: Array, q_start: Array):
        queries = Queries(jnp.zeros((batch, 1), jnp.int32), q_start, q_start + tokens)
        return ops.gated_delta_rule(q, k, v, g, beta, state, queries)

    def draw(seed: int) -> Arguments:
        state = ops.DeltaState.empty(batch, h, H, K, K, jnp.bfloat16)
        s = hashed(6 * seed, state.s.shape, "float32", _exponent(K))
        state = state._replace(s=s, chunk=jnp.full(batch, start // DELTA_CHUNK, jnp.int32))
        # Queries and keys have a norm of about 1, as in a model.
        q, k = (hashed(6 * seed + i, (batch, tokens, h, K), "bfloat16", _exponent(K)) for i in (1, 2))
        v = hashed(6 * seed + 3, (batch, tokens, H, K), "bfloat16")
        # Decays of a few percent, and rates between 0 and 1.
        g = -jnp.abs(hashed(6 * seed + 4, (batch, tokens, H), "float32", -4))
        beta = jnp.minimum(jnp.abs(hashed(6 * seed + 5, (batch, tokens, H), "float32", -1)), 1.0)
        return state, q, k, v, g, beta, jnp.full(batch, start, jnp.int32)

    def exact(arguments: Arguments, outputs: Sequence[Array]) -> Pairs:
        state, *arrays, _ = arguments
        q, k, v, g, beta = (_wide(x[-1, :, -1]) for x in arrays)
        s, wanted = _wide(state.s[-1, -1]) if start else np.zeros((K, K)), np.zeros_like(v)
        for t in range(tokens):
            s = s * np.exp(g[t])
            s = s + np.outer(k[t], beta[t] * (v[t] - k[t] @ s))
            wanted[t] = q[t] @ s / math.sqrt(K)
        return [(_wide(outputs[0][-1, :, -1]), wanted)]

    # A decode reads the states; a prefill that starts at the first token writes them.
    size = batch * (4 * H * K * K + tokens * (2 * (2 * h + 2 * H) * K + 8 * H))
    # Two products with the state per token; two products of keys, two of updates, and the next state per chunk.
    flops = 2 * batch * tokens * H * K * (3 * K + 2 * DELTA_CHUNK + (2 * DELTA_CHUNK * h) // H)
    what = f"{tokens} tokens" if operation == "delta_rule_prefill" else f"token {start}"
    return Case(f"{h}/{H} heads, {batch} × {what}", operation, run, draw, size, flops, exact, carried=1)


def _sample(rows: int, vocabulary: int, temperature: float) -> Case:
    def run(logits: Array, keys: Array, position: Array) -> tuple[Array, Array]:
        integers, whole = jnp.zeros(rows, jnp.int32), jnp.ones(rows, jnp.float32)
        options = whole * np.float32(temperature), integers, whole, 0 * whole
        return ops.sample(logits, ops.SamplingArrays(keys, position, *options), filtered=False)

    def draw(seed: int) -> Arguments:
        words = hashed_integers(jnp.uint32(3 * seed + 1), (rows, 4), 2**31).astype(jnp.uint32)
        return (
            hashed(3 * seed, (rows, vocabulary), "float32", 1),
            words,
            hashed_integers(jnp.uint32(3 * seed + 2), (rows,), 99),
        )

    def exact(arguments: Arguments, outputs: Sequence[Array]) -> Pairs:
        logits, tokens = _wide(arguments[0][-_CHECKED_ROWS:]), np.asarray(outputs[0][-_CHECKED_ROWS:])
        logprobs = np.take_along_axis(logits - _logsumexp(logits), tokens[:, None], axis=-1)[:, 0]
        return [(_wide(outputs[1][-_CHECKED_ROWS:]), logprobs)]

    name = f"{rows} × {vocabulary}, {f'temperature {temperature:g}' if temperature else 'greedy'}"
    return Case(name, "sample", run, draw, 4 * rows * vocabulary, exact=exact)


def step_case(operation: str, model: str, batch: int, context: int, layers: int | None = None) -> Case:
    """Returns the case of a whole model's step.

    Args:
        operation: "prefill_step" prefills prompts of `context` tokens into an empty cache; "decode_step" decodes one
            token of requests with `context` cached tokens.
        model: a preset.
        batch: the number of requests.
        layers: the number of layers. Default: the preset's own.

    Raises:
        ValueError: the model has state outside of KV pages, or layers with different pages.
    """
    config = presets.config(model, layers)
    if any(layers_in_slots(config)):
        raise ValueError(
            f"{operation}: {model} keeps a state of each request in slots; accepted: models that keep only keys and "
            f"values in pages. `python -m detjax.bench serve --preset {model}` measures it in an engine"
        )
    if len(set(declarations(config))) > 1:
        raise ValueError(
            f"{operation}: {model} has layers with different heads of keys; accepted: models whose layers have the "
            f"same. `python -m detjax.bench serve --preset {model}` measures it in an engine"
        )
    network, shapes = split(abstract(lambda: presets.decoder(model, layers)))
    decoding = operation == "decode_step"
    cached, tokens = (context, 1) if decoding else (0, context)

    def run(k: Any, v: Any, weights: Sequence[Array], tokens: Array, page_table: Array, lengths: Array):
        decoder = network.with_weights(tuple(weights))
        hidden, cache = decoder.hidden(tokens, KVCache(tuple(map(KVPages, k, v)), page_table, lengths))
        return decoder.logits(hidden[:, -1]), *zip(*((kv.k, kv.v) for kv in cache.state), strict=True)

    def draw(seed: int) -> Arguments:
        page_table = _scattered(batch, cached + tokens)
        pool = (page_table.size, config.kv_heads, KV_BLOCK, config.head_dim)
        seeds = iter(range(1000 * seed, 1000 * (seed + 1)))
        k, v = (tuple(hashed(next(seeds), pool, "bfloat16") for _ in range(config.layers)) for _ in range(2))
        weights = [
            _norm_weight(next(seeds), leaf.size)
            if leaf.ndim == 1
            else hashed(next(seeds), leaf.shape, leaf.dtype, _exponent(leaf.shape[-1]))
            for leaf in shapes
        ]
        ids = hashed_integers(jnp.uint32(next(seeds)), (batch, tokens), config.vocab_size)
        return k, v, weights, ids, page_table, jnp.full(batch, cached, jnp.int32)

    size, flops = _step_traffic(config, batch, cached, tokens)
    name = f"{model}, {batch} × {context} tokens" + (" in the cache" if decoding else "")
    return Case(name, operation, run, draw, size, flops, carried=2, rotated=False)


def _step_traffic(config: DecoderConfig, batch: int, cached: int, tokens: int) -> tuple[int, int]:
    """The bytes and operations of a step of `tokens` new tokens for requests with `cached` tokens in the cache."""
    head = config.vocab_size * config.hidden_size
    linear = config.layers * sum(n * k for name, (n, k) in linears(config).items() if name != "lm_head")
    width, seen = config.heads * config.head_dim, sum(range(cached + 1, cached + tokens + 1))
    cache_size = 2 * config.layers * config.kv_heads * config.head_dim * (cached + tokens)
    size = 2 * (linear + head + batch * cache_size) + 4 * batch * config.vocab_size
    flops = 2 * batch * (tokens * linear + head) + 4 * batch * config.layers * width * seen
    return size, flops


def _counted(rows: int) -> str:
    return "1 row" if rows == 1 else f"{rows} rows"


def _norm_weight(seed: int, size: int) -> Array:
    x = hashed(seed, (size,), "float32", -3) + np.float32(1)
    return rounded(x, "bfloat16")


def _scattered(batch: int, tokens: int) -> Array:
    """A page table with pages in reverse order."""
    return jnp.flip(ops.contiguous_page_table(batch, tokens))


def _wide(x: Array) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _logsumexp(x: np.ndarray) -> np.ndarray:
    largest = x.max(axis=-1, keepdims=True)
    return largest + np.log(np.exp(x - largest).sum(axis=-1, keepdims=True))
