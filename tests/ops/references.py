"""The operations as textbooks write them, in plain `jax.numpy` and for float64: what the numbers are held against."""

import math

import jax
import jax.numpy as jnp
import numpy as np

type Array = jax.Array

ACTIVATIONS = {
    "silu": lambda z: z / (1 + jnp.exp(-z)),
    "gelu": lambda z: z * (1 + jax.lax.erf(z / math.sqrt(2))) / 2,
    "gelu_tanh": lambda z: z * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2,
    "relu": lambda z: jnp.where(z > 0, z, 0.0),
}


def matmul(x, w, bias=None, residual=None, *, layout="kn", activation=None, gated=False):
    def linear(w, bias):
        y = jnp.einsum("...k,kn->...n" if layout == "kn" else "...k,nk->...n", x, w)
        return y if bias is None else y + jnp.broadcast_to(bias, y.shape)

    if gated:
        gate, up = (linear(w[i], None if bias is None else bias[i]) for i in range(2))
        y = ACTIVATIONS[activation](gate) * up
    else:
        y = linear(w, bias)
        y = y if activation is None else ACTIVATIONS[activation](y)
    return y if residual is None else y + residual


def rms_norm(x, weight, residual=None, *, eps, weight_offset=0.0):
    h = x if residual is None else x + residual
    root = jnp.sqrt((h**2).mean(axis=-1, keepdims=True) + eps)
    y = h / root * jnp.broadcast_to(weight + weight_offset, h.shape)
    return y if residual is None else (y, h)


def softmax(x):
    e = jnp.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def logsumexp(x):
    top = x.max(axis=-1)
    return top + jnp.log(jnp.exp(x - top[..., None]).sum(axis=-1))


def log_softmax(x):
    return x - logsumexp(x)[..., None]


def frequencies(head_dim, theta, scaling=None):
    """Radians per position of each pair, and the factor on the embedding, one pair after another."""
    result, factor = [], 1.0
    for pair in range(head_dim // 2):
        frequency = theta ** (-2 * pair / head_dim)
        match scaling:
            case {"rope_type": "linear"}:
                frequency /= scaling["factor"]
            case {"rope_type": "llama3"}:
                wavelength = 2 * math.pi / frequency
                low = scaling["original"] / scaling["low_freq_factor"]
                high = scaling["original"] / scaling["high_freq_factor"]
                if wavelength > low:
                    frequency /= scaling["factor"]
                elif wavelength >= high:
                    smooth = scaling["original"] / wavelength - scaling["low_freq_factor"]
                    smooth /= scaling["high_freq_factor"] - scaling["low_freq_factor"]
                    frequency = (1 - smooth) * frequency / scaling["factor"] + smooth * frequency
            case {"rope_type": "yarn"}:
                factor = 0.1 * math.log(scaling["factor"]) + 1
                low, high = (
                    head_dim * math.log(scaling["original"] / (turns * 2 * math.pi)) / (2 * math.log(theta))
                    for turns in (32, 1)
                )
                low, high = max(math.floor(low), 0), min(math.ceil(high), head_dim - 1)
                interpolated = min(max((pair - low) / (high - low), 0), 1)
                frequency = frequency / scaling["factor"] * interpolated + frequency * (1 - interpolated)
        result.append(frequency)
    return np.array(result), factor


def rope(x, positions, turning, factor=1.0):
    """Pairs of columns `i`, `i + K / 2` as complex numbers, each turned by its angle."""
    z = x[..., : x.shape[-1] // 2] + 1j * x[..., x.shape[-1] // 2 :]
    z = (
        z
        * factor
        * jnp.exp(1j * jnp.asarray(positions)[..., None, None] * jnp.reshape(turning, (1,) * (z.ndim - 1) + (-1,)))
    )
    return jnp.concatenate([z.real, z.imag], axis=-1)


def attention(
    q, k_pages, v_pages, sinks=None, *, page_table, q_start, kv_length,
    scale=None, causal=True, window=None, soft_cap=None, alibi_slopes=None, mask=None,
):  # fmt: skip
    """Computes all scores at once, and masks the keys that a query does not see."""
    batch, tokens, heads, width = q.shape
    group = heads // k_pages.shape[1]

    def contiguous(pages):
        x = pages[page_table].transpose(0, 1, 3, 2, 4)
        x = x.reshape(batch, -1, *x.shape[3:])
        return jnp.repeat(x, group, axis=2)

    k, v = contiguous(k_pages), contiguous(v_pages)
    at = np.asarray(q_start)[:, None] + np.arange(tokens)
    key = np.arange(k.shape[1])
    seen = np.broadcast_to(key < np.asarray(kv_length)[:, None, None], (batch, tokens, len(key)))
    if causal:
        seen = seen & (key <= at[..., None])
    if window is not None:
        seen = seen & (key > at[..., None] - window)
    seen = np.broadcast_to(seen[:, None], (batch, heads, tokens, len(key)))
    if mask is not None:
        seen = seen & np.pad(mask, ((0, 0), (0, 0), (0, 0), (0, len(key) - mask.shape[3])))

    s = jnp.einsum("bthk,bshk->bhts", q, k) * (width**-0.5 if scale is None else scale)
    s = s if soft_cap is None else soft_cap * jnp.tanh(s / soft_cap)
    if alibi_slopes is not None:
        distance = np.broadcast_to(key - at[:, None, :, None], s.shape)
        s = s + np.asarray(alibi_slopes)[None, :, None, None] * distance
    weight = jnp.where(seen, jnp.exp(jnp.where(seen, s, 0.0)), 0.0)
    total = weight.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks)[None, :, None, None]
    return jnp.einsum("bhts,bshv->bthv", weight / jnp.where(total == 0, 1.0, total), v)
