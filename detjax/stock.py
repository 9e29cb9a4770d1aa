"""XLA's own operations with the semantics of `detjax.ops`, under no contract: what detjax is compared with.

Here XLA chooses tiles, splits and fusions by shape, as in any JAX program. It is served only where it is asked for by
name, for benchmarks, for the demo, and as the negative control of the tests.
"""

from typing import Final

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn  # JAX has no public name for paged attention
from jaxtyping import Array, DTypeLike

from detjax import backends
from detjax.contract import ACCUMULATOR, KV_BLOCK, PRNG
from detjax.options import Activation, Epilogue, Masking, WeightLayout

_CUDNN_DTYPES: Final = ("bfloat16", "float16")
_PADDING: Final = 4
"""Rows that packed queries take at most where they are padded, over those that they have."""
_LEAST_PADDED_ROWS: Final = 4096


def embed(tokens: Array, table: Array) -> Array:
    """See `detjax.ops.embed`."""
    return table[tokens]


def matmul(
    x: Array,
    w: Array,
    bias: Array | None,
    residual: Array | None,
    *,
    layout: WeightLayout,
    epilogue: Epilogue,
    out_dtype: DTypeLike,
) -> Array:
    """See `detjax.ops.matmul`."""
    transposed = w if layout == "kn" else jnp.swapaxes(w, -1, -2)

    def linear(index: int | None) -> Array:
        part = transposed if index is None else transposed[index]
        z = jnp.matmul(*_operands(x, part), precision="highest", preferred_element_type=ACCUMULATOR)
        return z if bias is None else z + _broadcast((bias if index is None else bias[index]).astype(ACCUMULATOR), z)

    if epilogue.gated:
        assert epilogue.activation is not None
        y = _activation(epilogue.activation)(linear(0)) * linear(1)
    else:
        y = linear(None)
        if epilogue.activation is not None:
            y = _activation(epilogue.activation)(y)
    if epilogue.soft_cap is not None:
        y = epilogue.soft_cap * jnp.tanh(y / epilogue.soft_cap)
    if residual is not None:
        y = y + residual.astype(ACCUMULATOR)
    return y.astype(out_dtype)


def _operands(x: Array, y: Array) -> tuple[Array, Array]:
    """What a dot with a float32 result takes: XLA's CPU runtime (jaxlib 0.11.2) has none of bfloat16 for one row."""
    if backends.target() == "cpu":
        return x.astype(ACCUMULATOR), y.astype(ACCUMULATOR)
    return x, y


def _broadcast(vector: Array, like: Array) -> Array:
    return jnp.broadcast_to(vector, like.shape)


def _activation(name: Activation):
    if name.startswith("gelu"):
        return lambda z: jax.nn.gelu(z, approximate=name == "gelu_tanh")
    return getattr(jax.nn, name)


def rms_norm(
    x: Array, weight: Array, residual: Array | None, *, eps: float, weight_offset: float
) -> tuple[Array, Array | None]:
    """See `detjax.ops.rms_norm`; the second result is None without a residual."""
    h = x if residual is None else x + residual
    wide = h.astype(ACCUMULATOR)
    y = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    y = (y * _broadcast(weight.astype(ACCUMULATOR) + weight_offset, y)).astype(x.dtype)
    return y, None if residual is None else h


def softmax(x: Array) -> Array:
    """See `detjax.ops.softmax`."""
    return jax.nn.softmax(x.astype(ACCUMULATOR), axis=-1)


def log_softmax(x: Array) -> Array:
    """See `detjax.ops.log_softmax`."""
    return jax.nn.log_softmax(x.astype(ACCUMULATOR), axis=-1)


def logsumexp(x: Array) -> Array:
    """See `detjax.ops.logsumexp`."""
    return jax.nn.logsumexp(x.astype(ACCUMULATOR), axis=-1)


def rope(x: Array, positions: Array, inverse_frequencies: Array, *, scale: float) -> Array:
    """See `detjax.ops.rope`."""
    angles = positions.astype(ACCUMULATOR)[..., None, None]
    angles = angles * inverse_frequencies.reshape((1,) * (angles.ndim - 1) + (-1,))
    cos, sin = jnp.cos(angles) * scale, jnp.sin(angles) * scale
    first, second = jnp.split(x.astype(ACCUMULATOR), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def attention(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    q_start: Array,
    kv_length: Array,
    sinks: Array | None,
    mask: Array | None = None,
    *,
    masking: Masking,
) -> Array:
    """See `detjax.ops.attention`. Decode is cuDNN's where that can do it."""
    batch, tokens, heads, width = q.shape
    kv_heads = k_pages.shape[1]
    # cuDNN lines queries up with the first keys: a window would lie there.
    if tokens == 1 and mask is None and masking.window is None and _has_cudnn(q, v_pages, sinks, masking):
        length = jnp.minimum(kv_length, q_start + 1) if masking.causal else kv_length
        where = page_table, jnp.ones_like(length), length
        o = _cudnn(q.swapaxes(1, 2), k_pages, v_pages, *where, masking, causal=False).swapaxes(1, 2)
        return jnp.where((length > 0)[:, None, None, None], o, jnp.zeros_like(o))
    k, v = (
        pages[page_table].transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, -1, pages.shape[-1])
        for pages in (k_pages, v_pages)
    )
    grouped = q.reshape(batch, tokens, kv_heads, -1, width)
    operands = _operands(grouped, k)
    s = jnp.einsum("bthgk,bhsk->bhgts", *operands, precision="highest", preferred_element_type=ACCUMULATOR)
    s = s.reshape(batch, heads, tokens, -1) * masking.scale
    if masking.soft_cap is not None:
        s = masking.soft_cap * jnp.tanh(s / masking.soft_cap)
    keys = jnp.arange(page_table.shape[1] * KV_BLOCK)[None, None, None, :]
    positions = (q_start[:, None] + jnp.arange(tokens)[None])[:, None, :, None]
    if masking.alibi_slopes is not None:
        slopes = jnp.asarray(masking.alibi_slopes, ACCUMULATOR)[None, :, None, None]
        s = s + slopes * (keys - positions).astype(ACCUMULATOR)
    own = keys < kv_length[:, None, None, None]
    visible = own
    if masking.causal:
        visible = visible & (keys <= positions)
    if masking.window is not None:
        visible = visible & (keys > positions - masking.window)
    if mask is not None:
        visible = visible & jnp.pad(mask, ((0, 0), (0, 0), (0, 0), (0, keys.size - mask.shape[-1])))
    s = jnp.where(visible, s, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(ACCUMULATOR)[None, :, None, None], (*s.shape[:-1], 1))
        p = jax.nn.softmax(jnp.concatenate([sink, s], axis=-1), axis=-1)[..., 1:]
    else:
        p = jax.nn.softmax(s, axis=-1)
    p = jnp.where(visible, p, 0.0).astype(v.dtype).reshape(batch, kv_heads, -1, tokens, s.shape[-1])
    v = jnp.where(own.swapaxes(-1, -2), v, jnp.zeros_like(v))
    o = jnp.einsum("bhgts,bhsk->bthgk", *_operands(p, v), precision="highest", preferred_element_type=ACCUMULATOR)
    return o.reshape(batch, tokens, heads, -1).astype(q.dtype)


def ragged_attention(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    q_row: Array,
    q_length: Array,
    q_start: Array,
    kv_length: Array,
    sinks: Array | None,
    *,
    request: Array,
    index: Array,
    masking: Masking,
) -> Array:
    """See `detjax.ops.ragged_attention`. It is cuDNN's where that can do it, else each row is a request.

    `request` and `index` say of each row whose it is, and how far behind that one's first.
    """
    rows, requests = q.shape[0], page_table.shape[0]
    position = q_start[request] + index
    if not _has_cudnn(q, v_pages, sinks, masking):
        is_own = (index >= 0) & (index < q_length[request])
        where = page_table[request], position, jnp.where(is_own, kv_length[request], 0)
        return attention(q[:, None], k_pages, v_pages, *where, sinks, masking=masking)[:, 0]

    # cuDNN lines queries up with the first keys. So they are put where they stand in their requests, behind as many
    # rows of no meaning as there are keys before them; as many requests at once as such rows have room for.
    keys = page_table.shape[1] * KV_BLOCK
    together = min(requests, max(1, max(_PADDING * rows, _LEAST_PADDED_ROWS) // keys))

    def attend(first: Array | int, o: Array) -> Array:
        """The output, with that of the requests from `first` on."""
        of = jnp.minimum(first + jnp.arange(together, dtype=jnp.int32), requests - 1)
        source = (q_row - q_start)[of][:, None] + jnp.arange(keys, dtype=jnp.int32)[None]
        padded = q[jnp.clip(source, 0, rows - 1)].swapaxes(1, 2)
        length = jnp.where(q_length[of] > 0, kv_length[of], 0)
        found = _cudnn(padded, k_pages, v_pages, page_table[of], length, length, masking, causal=masking.causal)
        slot = request - first
        mine = found[jnp.clip(slot, 0, together - 1), :, jnp.clip(position, 0, keys - 1)]
        return jnp.where(((slot >= 0) & (slot < together))[:, None, None], mine, o)

    o = jnp.zeros_like(q)
    if together == requests:
        return attend(0, o)
    present = jnp.max(jnp.where(q_length > 0, jnp.arange(1, requests + 1), 0))
    return jax.lax.fori_loop(0, -(-present // together), lambda turn, o: attend(turn * together, o), o)


def _has_cudnn(q: Array, v_pages: Array, sinks: Array | None, masking: Masking) -> bool:
    width = q.shape[-1]
    return (
        backends.target() == "gpu"
        and q.dtype.name in _CUDNN_DTYPES
        and width % 8 == 0
        and width <= 256
        and v_pages.shape[-1] == width
        and sinks is None
        and masking.soft_cap is None
        and masking.alibi_slopes is None
    )


def _cudnn(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    q_length: Array,
    kv_length: Array,
    masking: Masking,
    *,
    causal: bool,
) -> Array:
    """cuDNN's attention of queries `[B, H, T, K]`; if causal, query `t` sees the keys up to position `t`."""
    # Not `cudnn.paged_attention`: it accepts only pools with as many pages as the page table has entries.
    none = jnp.zeros(0, q.dtype)
    table = jnp.clip(page_table.astype(jnp.int32), 0, k_pages.shape[0] - 1)[:, None, :, None]
    mask_type = cudnn.MaskType.PADDING_CAUSAL if causal else cudnn.MaskType.PADDING
    return cudnn._dot_product_attention(
        q,
        k_pages,
        v_pages,
        none,
        q_length.astype(jnp.int32),
        kv_length.astype(jnp.int32),
        none,
        none,
        table,
        table,
        masking.scale,
        0,
        0.0,
        (False, False),
        mask_type,
        cudnn.AttentionLayout.BNTH.value,
        masking.window,
        cudnn.check_cudnn_version(),
        False,
    )


def sample(
    logits: Array,
    seed: Array,
    position: Array,
    sample_index: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    *,
    filtered: bool,
) -> tuple[Array, Array]:
    """See `detjax.ops.sample`."""
    logits = logits.astype(ACCUMULATOR)
    greedy = temperature == 0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    if filtered:
        order = jnp.argsort(-scaled, axis=-1, stable=True)
        ranked = jnp.take_along_axis(scaled, order, axis=-1)
        rank = jnp.arange(logits.shape[-1])[None, :]
        kept = rank < jnp.where(top_k > 0, top_k, logits.shape[-1])[:, None]
        probability = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf), axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        kept = kept & ((before < top_p[:, None]) | (rank == 0)) & (probability >= min_p[:, None] * probability[:, :1])
        kept = jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1)
        scaled = jnp.where(kept, scaled, -jnp.inf)

    def gumbel(seed: Array, position: Array, sample_index: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl=PRNG), position)
        return jax.random.gumbel(jax.random.fold_in(key, sample_index), logits.shape[-1:], ACCUMULATOR)

    noise = jax.vmap(gumbel)(seed, position, sample_index)
    token = jnp.argmax(jnp.where(greedy[:, None], logits, scaled + noise), axis=-1).astype(jnp.int32)
    logprob = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), token[:, None], axis=-1)[:, 0]
    return token, logprob


def top_logprobs(logits: Array, *, count: int) -> tuple[Array, Array]:
    """See `detjax.ops.top_logprobs`."""
    logprobs, tokens = jax.lax.top_k(jax.nn.log_softmax(logits.astype(ACCUMULATOR), axis=-1), count)
    return tokens.astype(jnp.int32), logprobs
