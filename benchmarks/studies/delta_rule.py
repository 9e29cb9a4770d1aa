"""The gated delta rule of linear attention: decode and prefill against plain XLA, and bits under chunking.

    python -m benchmarks delta_rule --out benchmarks/results/delta-rule-h200.json

First the bits: a request of 700 tokens is decoded, split into random chunks, verified by drafts and put among others.
Then times: a decode step of 1, 16 and 64 requests against the recurrence, which reads and writes the state at every
token, and a prefill of 8192 tokens against chunks that begin where the call begins. Times are medians of device time
over alternating rounds, for decode also of wall-clock time.

`--small` runs on a CPU in seconds. The exit code is 1 if a bit differs.
"""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from benchmarks import study as options
from benchmarks.study import Result, Run
from detjax import ops
from detjax.bench import command_line, timing
from detjax.bench.bits import same_bits
from detjax.cli.options import Option
from detjax.contract import ACCUMULATOR, DELTA_CHUNK
from detjax.operands.linear_attention_state import DROPPABLE_TOKENS
from detjax.runtime import compilation


@dataclasses.dataclass(frozen=True)
class Widths:
    """The shape of a layer.

    Attributes:
        key_heads: query heads, and key heads.
        heads: value heads.
        width: columns of a query, a key or a value.
    """

    key_heads: int
    heads: int
    width: int

    def state(self, requests: int) -> ops.DeltaState:
        """Returns the state of requests without tokens."""
        heads = self.key_heads, self.heads
        return ops.DeltaState.empty(requests, *heads, self.width, self.width, jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the measurements.

    Attributes:
        decodes: numbers of requests that decode.
        start: the position of the first decoded token.
        steps: decoded tokens per request, half of them before the end of a chunk and half after it.
        prefills: numbers of tokens that one request prefills.
        cut: tokens of the request that is split into chunks.
    """

    decodes: tuple[int, ...] = (1, 16, 64)
    start: int = 1024 + DELTA_CHUNK * 3 // 4
    steps: int = DELTA_CHUNK // 2
    prefills: tuple[int, ...] = (8192,)
    cut: int = 700


MODELS: Final = {"Qwen3-Next-80B-A3B": Widths(16, 32, 128)}
SMALL_MODELS: Final = {"tiny": Widths(1, 2, 64)}
SMALL: Final = Sizes((1, 3), DELTA_CHUNK - 1, 2, (100,), 70)


class Tokens(NamedTuple):
    """The inputs of tokens, `[..., h, K]`, `[..., h, K]`, `[..., H, K]`, `[..., H]` and `[..., H]`."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array


@functools.partial(jax.jit, static_argnums=(0, 1))
def random_tokens(widths: Widths, shape: tuple[int, ...], seed: int) -> Tokens:
    """Returns random tokens whose keys resemble each other and the queries."""
    keys = jax.random.split(jax.random.key(seed), 5)
    k = jax.random.normal(keys[0], (*shape, widths.key_heads, widths.width)) + 1
    q = k / 2 + jax.random.normal(keys[1], k.shape)
    q, k = ((x / jnp.sqrt((x * x).sum(-1, keepdims=True))).astype(jnp.bfloat16) for x in (q, k))
    v = jax.random.normal(keys[2], (*shape, widths.heads, widths.width), jnp.bfloat16)
    g = -0.1 * jax.random.uniform(keys[3], v.shape[:-1])
    return Tokens(q, k, v, g, jax.random.uniform(keys[4], g.shape))


def _queries(requests: int, start: Array | int, count: int) -> ops.Queries:
    """The `Queries` of `count` tokens per request from position `start` on."""
    starts, counts = jnp.full(requests, start, jnp.int32), jnp.full(requests, count, jnp.int32)
    return ops.Queries(jnp.zeros((requests, 1), jnp.int32), starts, starts + counts, counts)


def _rule(x: Tokens, state: ops.DeltaState, queries: ops.Queries) -> tuple[Array, ops.DeltaState]:
    return ops.gated_delta_rule(x.q, x.k, x.v, x.g, x.beta, state, queries)


def measure(name: str, widths: Widths, sizes: Sizes, calls: int) -> Iterator[dict[str, Any]]:
    """Yields the results of a model's layer: first the bits under chunking, then times."""
    yield {"model": name, "part": "bits", "tokens": sizes.cut} | cut_bits(widths, sizes.cut)
    for requests in sizes.decodes:
        yield {"model": name, "part": "decode", "requests": requests} | _decode(widths, sizes, requests, calls)
    for tokens in sizes.prefills:
        yield {"model": name, "part": "prefill", "tokens": tokens} | _prefill(widths, tokens, calls)


# --- times ------------------------------------------------------------------------------------------------------------


def _decode(widths: Widths, sizes: Sizes, requests: int, calls: int) -> dict[str, Any]:
    """Seconds of a step, averaged over positions in a chunk: kernels only, and with the time between them."""
    steps, start = sizes.steps, sizes.start
    # One array per step, as in a layer: a slice would add a kernel.
    tokens = [random_tokens(widths, (requests, 1), seed) for seed in range(steps)]
    before = random_tokens(widths, (requests, start), steps)
    prefill = compilation.jit(lambda state, x: _rule(x, state, _queries(requests, 0, start))[1])

    def contracted(state: ops.DeltaState, tokens: list[Tokens]) -> Any:
        outputs = []
        for step, x in enumerate(tokens):
            o, state = _rule(x, state, _queries(requests, start + step, 1))
            outputs.append(o)
        return state, outputs

    def recurrent(s: Array, tokens: list[Tokens]) -> Any:
        outputs = []
        for x in tokens:
            s, o = recurrence(s, Tokens(*(y[:, 0] for y in x)))
            outputs.append(o)
        return s, outputs

    state = prefill(widths.state(requests), before)
    programs: dict[str, tuple[Callable[..., Any], Any]] = {
        "detjax": (compilation.jit(contracted), state),
        "recurrence": (jax.jit(recurrent), state.s),
    }
    kernels = timing.in_turns(
        {
            name: functools.partial(timing.device_time, program, [(given, tokens)], calls=calls)
            for name, (program, given) in programs.items()
        },
        2,
    )
    wall = timing.in_turns(
        {
            name: functools.partial(timing.step_time, program, [(given, tokens)], steps=calls)
            for name, (program, given) in programs.items()
        },
        2,
    )
    row = 2 * widths.width * (widths.key_heads + widths.heads)
    read = 4 * widths.heads * widths.width**2 + DELTA_CHUNK // 2 * row
    return _compared(kernels, steps, "seconds") | _compared(wall, steps, "wall_seconds") | {"bytes": requests * read}


def _prefill(widths: Widths, tokens: int, calls: int) -> dict[str, Any]:
    """Seconds of a call."""
    x = random_tokens(widths, (1, tokens), 0)
    ours = compilation.jit(lambda state, x: _rule(x, state, _queries(1, 0, tokens)))
    state = widths.state(1)
    runs = {
        "detjax": functools.partial(timing.device_time, ours, [(state, x)], calls=calls),
        "chunked": functools.partial(timing.device_time, jax.jit(chunked), [(state.s, x)], calls=calls),
    }
    return _compared(timing.in_turns(runs, 2), 1, "seconds")


def _compared(rounds: timing.Rounds[str], steps: int, key: str) -> dict[str, Any]:
    """The medians per step, and detjax's over its rival's."""
    seconds = {name: x / steps for name, x in rounds.medians.items()}
    rivals = [x for name, x in seconds.items() if name != "detjax"]
    ratio = seconds["detjax"] / rivals[0] if rivals and "detjax" in seconds else None
    return {key: seconds, f"{key}_over_the_rival": ratio} | ({"missing": rounds.missing} if rounds.missing else {})


def recurrence(s: Array, token: Tokens) -> tuple[Array, Array]:
    """Computes the recurrence in plain XLA for one token per request: the next state and the outputs `[B, H, K]`."""
    group = token.v.shape[1] // token.k.shape[1]
    q, k, v = (x.astype(ACCUMULATOR) for x in token[:3])
    q, k = (jnp.repeat(x, group, axis=1) for x in (q * q.shape[-1] ** -0.5, k))
    s = s * jnp.exp(token.g)[..., None, None]
    u = (v - (k[..., None] * s).sum(2)) * token.beta[..., None]
    s = s + k[..., None] * u[..., None, :]
    return s, (q[..., None] * s).sum(2).astype(token.v.dtype)


def chunked(s: Array, tokens: Tokens) -> tuple[Array, Array]:
    """Computes chunks from the call's start in plain XLA, as libraries do: everything that needs no state is computed
    for all chunks at once, with bfloat16 products."""
    dot = functools.partial(jnp.einsum, preferred_element_type=ACCUMULATOR)
    count = tokens.v.shape[1]
    group = tokens.v.shape[2] // tokens.k.shape[2]

    def in_chunks(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, -count % DELTA_CHUNK)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(x.shape[0], -1, DELTA_CHUNK, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0).swapaxes(2, 3)

    q, k, v, g, beta = map(in_chunks, tokens)
    q, k = (jnp.repeat(x, group, axis=2) for x in (q, k))
    total = jnp.cumsum(g, axis=-1)
    between = total[..., :, None] - total[..., None, :]
    below = jnp.broadcast_to(jnp.tri(DELTA_CHUNK, dtype=bool), between.shape)
    between = jnp.exp(jnp.where(below, between, -jnp.inf))
    decay, rate = jnp.exp(total)[..., None], beta[..., None]
    weights = jnp.tril(rate * dot("cbhik,cbhjk->cbhij", k, k) * between, -1)
    system = weights + jnp.broadcast_to(jnp.eye(DELTA_CHUNK), weights.shape)
    dtype = q.dtype
    wide_q, wide_k, wide_v = (x.astype(ACCUMULATOR) for x in (q, k, v))
    right = jnp.concatenate([rate * wide_v, rate * decay * wide_k], axis=-1)
    solved = jax.scipy.linalg.solve_triangular(system, right, lower=True, unit_diagonal=True)
    u, w = jnp.split(solved, 2, axis=-1)
    p = (dot("cbhik,cbhjk->cbhij", q, k) * between * q.shape[-1] ** -0.5).astype(dtype)
    faded = (wide_k * jnp.exp(total[..., -1:] - total)[..., None]).astype(dtype)
    q = (wide_q * decay * q.shape[-1] ** -0.5).astype(dtype)

    def step(s: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        q, w, u, p, faded, end = chunk
        held = s.astype(dtype)
        u = (u - dot("bhik,bhkv->bhiv", w, held)).astype(dtype)
        o = dot("bhik,bhkv->bhiv", q, held) + dot("bhij,bhjv->bhiv", p, u)
        return jnp.exp(end)[..., None, None] * s + dot("bhjk,bhjv->bhkv", faded, u), o.astype(dtype)

    s, o = lax.scan(step, s, (q, w.astype(dtype), u, p, faded, total[..., -1]))
    o = jnp.moveaxis(o.swapaxes(2, 3), 0, 1)
    return s, o.reshape(o.shape[0], -1, *o.shape[3:])[:, :count]


# --- bits -------------------------------------------------------------------------------------------------------------


def cut_bits(widths: Widths, tokens: int) -> dict[str, Any]:
    """Compares a request that is split in several ways with a single call, and with float64.

    It is decoded, split at random, and prefilled and then decoded by drafts, which are all refused the first time.
    """
    x = random_tokens(widths, (1, tokens), 2)
    whole = _outputs(widths, x, [tokens])
    random = np.random.default_rng(0)
    begin = tokens // 2
    ways = {
        "decode": [*range(begin, tokens + 1)],
        "cuts": sorted({*random.integers(1, tokens, 6).tolist(), tokens}),
        "verify steps": sorted({*range(begin, tokens, 5), tokens}),
    }
    same = {way: bool(same_bits(_outputs(widths, x, ends), whole)) for way, ends in ways.items()}
    others = [random_tokens(widths, (1, tokens), seed) for seed in range(3, 6)]
    together = Tokens(*(jnp.concatenate(parts) for parts in zip(others[0], x, *others[1:], strict=True)))
    same["among others"] = bool(same_bits(_outputs(widths, together, ways["verify steps"])[1:2], whole))
    refused = _outputs(widths, x, ways["verify steps"], drafts=others[0])
    same["refused drafts"] = bool(same_bits(refused, whole))
    return {"same_bits": same, "error": error(widths, x, whole)}


def _outputs(widths: Widths, x: Tokens, ends: Sequence[int], drafts: Tokens | None = None) -> Array:
    """The outputs of calls that end at these positions. With drafts, each call first runs on them, then again."""
    requests, tokens = x.v.shape[:2]
    state, outputs = widths.state(requests), []
    for start, end in itertools.pairwise((0, *ends)):
        # Padding keeps the number of programs small.
        room = next(size for size in (1, DROPPABLE_TOKENS, tokens) if size >= end - start)
        queries = _queries(requests, start, end - start)
        if drafts is not None and start:
            state = _call(_padded(drafts, start, end, room), state, queries)[1]
        o, state = _call(_padded(x, start, end, room), state, queries)
        outputs.append(o[:, : end - start])
    return jnp.concatenate(outputs, axis=1)


def _padded(x: Tokens, start: int, end: int, room: int) -> Tokens:
    """A range of tokens, padded with zeros."""
    return Tokens(*(jnp.pad(y[:, start:end], [(0, 0), (0, room - end + start)] + [(0, 0)] * (y.ndim - 2)) for y in x))


_call = compilation.jit(_rule)


def error(widths: Widths, x: Tokens, o: Array) -> float:
    """Returns the relative error of outputs against NumPy's recurrence in float64."""
    q, k, v, g, beta = (np.asarray(y[0].astype(jnp.float32), np.float64) for y in x)
    q, k = (np.repeat(y, widths.heads // widths.key_heads, axis=1) for y in (q * widths.width**-0.5, k))
    s, outputs = np.zeros((widths.heads, widths.width, widths.width)), []
    for t in range(len(v)):
        s = s * np.exp(g[t])[:, None, None]
        u = (v[t] - np.einsum("hkv,hk->hv", s, k[t])) * beta[t][:, None]
        s = s + k[t][:, :, None] * u[:, None]
        outputs.append(np.einsum("hkv,hk->hv", s, q[t]))
    exact = np.stack(outputs)
    difference = np.asarray(o[0].astype(jnp.float32), np.float64) - exact
    return float(np.sqrt((difference**2).mean() / (exact**2).mean()))


def study(
    run: Run,
    *,
    calls: options.Calls = 12,
    limit: Annotated[float | None, Option("Start no measurement after this many seconds.", minimum=0)] = None,
) -> Result:
    end = math.inf if limit is None else time.monotonic() + limit
    sizes, calls = (SMALL, 2) if run.small else (Sizes(), calls)
    results: list[dict[str, Any]] = []
    different = []
    for name, widths in (SMALL_MODELS if run.small else MODELS).items():
        for result in measure(name, widths, sizes, calls):
            results.append(result)
            command_line.print_line(str(result))
            different += [way for way, same in result.get("same_bits", {}).items() if not same]
            run.save({"results": results})
            if time.monotonic() > end:
                command_line.print_line(f"the limit of {limit} seconds has passed")
                break
    return Result({"results": results}, f"bits differ from one call: {different}" if different else "")
