"""The gated delta rule by XLA: chunks from the call's start, and the recurrence for calls of one token.

That is the usual form. The state of a request is the state after its last token; no rows of open chunks are stored.
"""

import functools
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array

from detjax.contract import ACCUMULATOR, DELTA_CHUNK
from detjax.operands.linear_attention_state import DeltaState, DeltaTokens, RequestRows

DIFFERENTIATED_BY_JAX: Final = True

_einsum = functools.partial(jnp.einsum, precision="highest", preferred_element_type=ACCUMULATOR)


def gated_delta_rule(tokens: DeltaTokens, state: DeltaState, rows: RequestRows) -> tuple[Array, DeltaState]:
    """See `detjax.ops.gated_delta_rule`. No tokens of a call can be dropped."""
    q, k, v, g, beta = tokens
    count, dtype, group = v.shape[0], v.dtype, v.shape[1] // q.shape[1]
    requests = rows.first.shape[0]
    # One request may have all rows, unless each has one.
    most = 1 if count == requests else count
    offset = jnp.arange(most, dtype=jnp.int32)[None]
    present = offset < rows.tokens[:, None]
    index = jnp.clip(rows.first[:, None] + offset, 0, count - 1)

    def gathered(x: Array) -> Array:
        x = x[index].astype(ACCUMULATOR)
        return jnp.where(present.reshape(*present.shape, *[1] * (x.ndim - 2)), x, jnp.zeros_like(x))

    q, k, v, g, beta = map(gathered, (q, k, v, g, beta))
    q, k = (jnp.repeat(x, group, axis=2) for x in (q * q.shape[-1] ** -0.5, k))
    before = state.s[rows.slot]
    s = jnp.where((rows.start == 0)[:, None, None, None], jnp.zeros_like(before), before)
    o, s = (_recurrent if most == 1 else _chunked)(s, q, k, v, g, beta)
    s = jnp.where((rows.tokens > 0)[:, None, None, None], s, before)
    request, offset, _ = rows.by_row(count)
    return o[request, jnp.clip(offset, 0, most - 1)].astype(dtype), state._replace(s=state.s.at[rows.slot].set(s))


def _recurrent(s: Array, q: Array, k: Array, v: Array, g: Array, beta: Array) -> tuple[Array, Array]:
    q, k, v, g, beta = (x[:, 0] for x in (q, k, v, g, beta))
    s = s * jnp.exp(g)[..., None, None]
    u = (v - _einsum("bhk,bhkv->bhv", k, s)) * beta[..., None]
    s = s + k[..., None] * u[..., None, :]
    return _einsum("bhk,bhkv->bhv", q, s)[:, None], s


def _chunked(s: Array, *tokens: Array) -> tuple[Array, Array]:
    """Outputs `[B, T, H, V]` and the next state, given tokens `[B, T, H, ...]`."""
    batch, count = tokens[0].shape[:2]

    def in_chunks(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, -count % DELTA_CHUNK)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(batch, -1, DELTA_CHUNK, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0).swapaxes(2, 3)

    s, o = jax.lax.scan(_chunk, s, tuple(map(in_chunks, tokens)))
    o = jnp.moveaxis(o.swapaxes(2, 3), 0, 1)
    return o.reshape(batch, -1, *o.shape[3:])[:, :count], s


def _chunk(s: Array, tokens: tuple[Array, ...]) -> tuple[Array, Array]:
    q, k, v, g, beta = tokens
    decays = jnp.cumsum(g, axis=-1)
    below = jnp.tri(DELTA_CHUNK, dtype=bool)[None, None]
    between = decays[..., :, None] - decays[..., None, :]
    between = jnp.exp(jnp.where(jnp.broadcast_to(below, between.shape), between, -jnp.inf))
    weights = jnp.tril(_einsum("bhik,bhjk->bhij", k * beta[..., None], k) * between, -1)
    decay = jnp.exp(decays)[..., None]
    right = beta[..., None] * (v - decay * _einsum("bhik,bhkv->bhiv", k, s))
    system = weights + jnp.broadcast_to(jnp.eye(DELTA_CHUNK, dtype=weights.dtype)[None, None], weights.shape)
    u = jax.scipy.linalg.solve_triangular(system, right, lower=True, unit_diagonal=True)
    p = _einsum("bhik,bhjk->bhij", q, k) * between
    o = decay * _einsum("bhik,bhkv->bhiv", q, s) + _einsum("bhij,bhjv->bhiv", p, u)
    end = decays[..., -1:]
    faded = u * jnp.exp(end - decays)[..., None]
    return jnp.exp(end)[..., None] * s + _einsum("bhjk,bhjv->bhkv", k, faded), o
