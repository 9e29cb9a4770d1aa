"""Requests of the gated delta rule: inputs from a seed, calls that cut them, and the rule itself in NumPy."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from detjax import ops

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 4, 16, 24


class Shape(NamedTuple):
    """The shape of a layer."""

    key_heads: int = KEY_HEADS
    heads: int = HEADS
    key_dim: int = KEY_DIM
    value_dim: int = VALUE_DIM


SHAPE = Shape()


class Tokens(NamedTuple):
    """The arguments of `gated_delta_rule` for the tokens of one request, `[T, ...]`."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any

    def cut(self, start: int, end: int) -> "Tokens":
        return Tokens(*(x[start:end] for x in self))


def tokens(count: int, seed: int = 0, dtype: str = "bfloat16", shape: Shape = SHAPE) -> Tokens:
    """Tokens whose keys resemble each other and the queries, with heads that forget slowly and fast."""
    random = np.random.default_rng([seed, count])
    k = random.standard_normal((count, shape.key_heads, shape.key_dim)) + 1
    q = k / 2 + random.standard_normal(k.shape)
    unit = [x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k)]
    v = random.standard_normal((count, shape.heads, shape.value_dim))
    g = -random.random((count, shape.heads)) * np.resize([0.01, 0.1, 0.5, 3.0], shape.heads)
    wide = [x.astype(jnp.dtype(dtype)) for x in (*unit, v)]
    return Tokens(*wide, g.astype(np.float32), random.random(g.shape).astype(np.float32))  # pyright: ignore[reportCallIssue]


def empty_state(slots: int, dtype: str = "bfloat16", shape: Shape = SHAPE) -> ops.DeltaState:
    # NumPy makes the zeros, because JAX compiles a program for each shape of zeros.
    made = jax.eval_shape(lambda: ops.DeltaState.empty(slots, *shape, jnp.dtype(dtype)))
    return jax.tree.map(lambda x: jnp.asarray(np.zeros(x.shape, x.dtype)), made)


def shape_of(request: Tokens) -> Shape:
    """The shape of the layer that a request is for."""
    return Shape(*request.k.shape[1:2], request.v.shape[1], request.k.shape[2], request.v.shape[2])  # pyright: ignore[reportCallIssue]


def queries(starts: Sequence[int], counts: Sequence[int], slots: Sequence[int] | None = None) -> ops.Queries:
    start, count = (np.array(x, np.int32) for x in (starts, counts))
    table = np.zeros((len(start), 1), np.int32)
    placed = None if slots is None else np.array(slots, np.int32)
    return ops.Queries(table, start, start + count, count, slots=placed)


def call(request: Tokens, state: ops.DeltaState, start: int, end: int) -> tuple[np.ndarray, ops.DeltaState]:
    """The outputs of some of a request's tokens, and the next state of slot 0."""
    some = [jnp.asarray(x[None]) for x in request.cut(start, end)]
    o, state = ops.gated_delta_rule(*some, state, queries([start], [end - start]))  # pyright: ignore[reportCallIssue]
    return np.asarray(o)[0], state


def in_calls(request: Tokens, ends: Sequence[int]) -> np.ndarray:
    """The outputs of a request whose calls end at the positions given."""
    state, outputs, start = empty_state(1, request.v.dtype.name, shape_of(request)), [], 0
    for end in ends:
        o, state = call(request, state, start, end)
        outputs.append(o)
        start = end
    return np.concatenate(outputs)


def recurrence(request: Tokens) -> np.ndarray:
    """The outputs by the recurrence in float64."""
    q, k, v, g, beta = (np.asarray(x).astype(np.float64) for x in request)
    shape = shape_of(request)
    q, k = (np.repeat(x, shape.heads // shape.key_heads, axis=1) for x in (q * shape.key_dim**-0.5, k))
    s, outputs = np.zeros(shape[1:]), []
    for t in range(len(v)):
        s = s * np.exp(g[t])[:, None, None]
        u = (v[t] - np.einsum("hkv,hk->hv", s, k[t])) * beta[t][:, None]
        s = s + k[t][:, :, None] * u[:, None]
        outputs.append(np.einsum("hkv,hk->hv", s, q[t]))
    return np.stack(outputs)


def packed(parts: Sequence[Tokens], *, decodes: int, rows: int) -> tuple[list[Any], list[int]]:
    """The tokens of several requests side by side, NaN between them, and the first row of each request."""
    unit, firsts, at = 8, [], decodes
    for index, part in enumerate(parts):
        firsts.append(index if index < decodes else at)
        at += 0 if index < decodes else -(-len(part.v) // unit) * unit
    arrays = [np.full((decodes + rows, *x.shape[1:]), np.nan, x.dtype) for x in parts[0]]
    for first, part in zip(firsts, parts, strict=True):
        for array, x in zip(arrays, part, strict=True):
            array[first : first + len(x)] = x
    return arrays, firsts


@dataclasses.dataclass(frozen=True)
class Cut:
    """A way to cut a request of 300 tokens into calls."""

    name: str
    ends: tuple[int, ...]

    def __repr__(self) -> str:
        return self.name
