"""Attention on Hopper GPUs: one contract, served by kernels for decode, prefill and latents, and their gradients.

Gradients through key columns, and heads of more than 256 columns, come from the portable backend's program.
"""

import dataclasses
from typing import Final

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from detjax.contract import KV_BLOCK, QUERY_UNIT
from detjax.operands.attention import AttentionOperands
from detjax.operands.kv_pages import KVPages, Queries, request_of_rows
from detjax.operands.numerics import round_up
from detjax.operands.options import Masking
from detjax.pallas.hopper.attention import backward as hopper_backward
from detjax.pallas.hopper.attention import decode, latent, prefill
from detjax.pallas.hopper.attention.backward import Residuals
from detjax.pallas.hopper.attention.dequantize import PageRange, dequantize_pages
from detjax.pallas.hopper.attention.latent_schedule import PART
from detjax.pallas.hopper.attention.mask import pack_words
from detjax.pallas.hopper.attention.pieces import ragged_tiles
from detjax.pallas.hopper.attention.warpgroups import TILE
from detjax.pallas.hopper.device import DTYPES
from detjax.portable import attention as portable_attention
from detjax.runtime import backends

WIDTHS: Final = (*range(16, 129, 16), 192, 256)
"""Columns of keys and of values in kernels."""
WIDER: Final = range(320, 513, 64)
"""Columns of keys and of values that no kernel holds: calls with either go to the portable backend's program."""


def forward(
    operands: AttentionOperands, *, masking: Masking, with_normalizers: bool = True
) -> tuple[Array, Array | None]:
    """Returns the output `[B, T, H, V]` and, if asked for, the log2 of rows' normalizers.

    The normalizers are float32 `[H, N]` in `_packed`'s order, or `[B, T, H]` where values are key columns or wider.
    See `ops.attention` for the mask, `[B or 1, H or 1, T, s]`; only prefill takes one.

    Raises:
        NotImplementedError: no kernel serves the dtype or the sizes.
    """
    q, kv, queries, sinks, mask = operands
    if _is_wider(q, kv):
        return portable_attention.forward(operands, masking=masking, with_normalizers=with_normalizers)
    if kv.values_are_keys:
        _check_latents(operands, masking)
        return latent.forward(q, kv, queries, masking=masking, with_normalizers=with_normalizers)
    _check(q, kv)
    if not with_normalizers and mask is None and decode.serves(q, kv):
        return decode.forward(operands, masking=masking), None
    kv, queries = _dequantized(kv, queries, q.shape[1], masking, q.dtype)
    words = (
        None if mask is None else pack_words(mask, round_up(q.shape[1], TILE), queries.page_table.shape[1] * KV_BLOCK)
    )
    packed = AttentionOperands(_packed(q), kv, queries, sinks, words)
    o, normalizers = prefill.forward(packed, masking=masking)
    return _unpacked(o, q), normalizers


def backward(
    operands: AttentionOperands,
    output: tuple[Array, Array],
    do: Array,
    sinks_sum: Array | None = None,
    *,
    masking: Masking,
) -> portable_attention.Gradients:
    """Returns the gradients of q, of the pages and of the sinks; a page belongs to one request.

    Args:
        operands: the operands of `forward`.
        output: the result of `forward`.
        do: the gradient of the output.
        sinks_sum: float32 sum of the sinks' gradients that this call continues and returns unrounded; None: their
            gradient alone is returned, rounded.
        masking: see `forward`.
    """
    if operands.kv.values_are_keys or _is_wider(operands.q, operands.kv):
        return portable_attention.backward(operands, output, do, sinks_sum, masking=masking)
    (q, _, _, sinks, _), (o, log2_normalizers) = operands, output
    o, do = _packed(o), _packed(do)
    residuals = Residuals(*operands._replace(q=_packed(q)), o, log2_normalizers)
    dq, dk, dv, dsinks = hopper_backward.backward(residuals, do, sinks_sum, masking=masking)
    return _unpacked(dq, q), KVPages(dk, dv), _rounded_or_sum(dsinks, sinks, sinks_sum)


def _rounded_or_sum(dsinks: Array | None, sinks: Array | None, sinks_sum: Array | None) -> Array | None:
    """Returns the sinks' gradient in their dtype, or unrounded if the call continues a sum."""
    if sinks is None or dsinks is None:
        return None
    return dsinks.astype(sinks.dtype) if sinks_sum is None else dsinks


def _packed(x: Array) -> Array:
    """Packs `[B, T, H, K]` into `[N, H, K]`, with each request padded to a multiple of `QUERY_UNIT` rows."""
    batch, tokens, *rest = x.shape
    padded = round_up(tokens, QUERY_UNIT)
    return jnp.pad(x, ((0, 0), (0, padded - tokens), (0, 0), (0, 0))).reshape(batch * padded, *rest)


def _unpacked(x: Array, like: Array) -> Array:
    """Inverts `_packed` for `like`'s requests and tokens."""
    batch, tokens = like.shape[:2]
    return x.reshape(batch, -1, *x.shape[1:])[:, :tokens]


def ragged(operands: AttentionOperands, *, masking: Masking) -> Array:
    """Returns the output `[N, H, V]` of packed queries `[N, H, K]`.

    Raises:
        NotImplementedError: no kernel serves the dtype or the sizes.
    """
    q, kv, queries, _, _ = operands
    if _is_wider(q, kv):
        return portable_attention.ragged(operands, masking=masking)
    if kv.values_are_keys:
        _check_latents(operands, masking)
        return latent.ragged(q, kv, queries, masking=masking, with_normalizers=False)[0]
    return _ragged(operands, masking)[0]


def ragged_with_normalizers(operands: AttentionOperands, *, masking: Masking) -> tuple[Array, Array]:
    """Returns the output of packed queries, and the log2 of each row's normalizer; see `forward`.

    The normalizers are `[H, N]`, or `[N, H]` where values are key columns or wider. The output is 0 in padding rows:
    gradients of weights sum over all rows, and uninitialized memory may be NaN.

    Raises:
        NotImplementedError: no kernel serves the dtype or the sizes.
    """
    q, kv, queries, _, _ = operands
    if kv.values_are_keys:
        _check_latents(operands, masking)
        o, normalizers = latent.ragged(q, kv, queries, masking=masking)
    elif _is_wider(q, kv):
        o, normalizers = portable_attention.ragged_with_normalizers(operands, masking=masking)
    else:
        o, normalizers = _ragged(operands, masking)
    assert queries.first_row is not None and queries.count is not None
    request, offset = request_of_rows(q.shape[0], queries.first_row)
    is_given = (offset >= 0) & (offset < queries.count[request])
    return jnp.where(is_given[:, None, None], o, jnp.zeros((), o.dtype)), normalizers


def _ragged(operands: AttentionOperands, masking: Masking) -> tuple[Array, Array]:
    """Returns the output of packed queries and their normalizers, both undefined in padding rows."""
    q, kv, queries, sinks, _ = operands
    _check(q, kv)
    assert queries.first_row is not None and queries.count is not None
    rows = q.shape[0]
    packed = jnp.pad(q, ((0, round_up(rows, QUERY_UNIT) - rows), (0, 0), (0, 0)))
    tiles = ragged_tiles(rows, queries.first_row, queries.count)
    kv, queries = _dequantized(kv, queries, queries.count, masking, q.dtype)
    o, normalizers = prefill.forward(AttentionOperands(packed, kv, queries, sinks), masking=masking, tiles=tiles)
    return o[:rows], normalizers


def ragged_backward(
    operands: AttentionOperands,
    output: tuple[Array, Array],
    do: Array,
    sinks_sum: Array | None = None,
    *,
    masking: Masking,
) -> portable_attention.Gradients:
    """Returns the gradients of packed queries, of the pages and of the sinks: the bits of `backward`.

    Args:
        operands: the operands of `ragged_with_normalizers`.
        output: the result of `ragged_with_normalizers`.
        do: the gradient of the output; padding rows are not read.
        sinks_sum: see `backward`.
        masking: see `forward`.
    """
    if operands.kv.values_are_keys or _is_wider(operands.q, operands.kv):
        return portable_attention.ragged_backward(operands, output, do, sinks_sum, masking=masking)
    residuals, sinks = Residuals(*operands, *output), operands.sinks
    dq, dk, dv, dsinks = hopper_backward.backward(residuals, do, sinks_sum, masking=masking)
    return dq, KVPages(dk, dv), _rounded_or_sum(dsinks, sinks, sinks_sum)


def _dequantized(
    kv: KVPages, queries: Queries, count: Array | int, masking: Masking, dtype: DTypeLike
) -> tuple[KVPages, Queries]:
    """Dequantizes the pages that prefill visits with `count` queries per request; returns them and their page table."""
    if kv.quantized is None:
        return kv, queries
    start, end = jnp.asarray(queries.start), jnp.asarray(queries.length)
    blocks = queries.page_table.shape[1]
    last, first = start + count - 1, jnp.zeros_like(end)
    least_end = jnp.ones_like(end)
    if masking.causal:
        end = jnp.minimum(end, last + 1)
    if masking.window is not None:
        # A tile visits at least one block even if its window holds no key.
        first = jnp.maximum(start - (masking.window - 1), 0) // KV_BLOCK
        least_end = jnp.maximum(last - (masking.window - 1), 0) // KV_BLOCK + 1
    first = jnp.minimum(first, blocks - 1).astype(jnp.int32)
    end = jnp.minimum(jnp.maximum(-(-end // KV_BLOCK), least_end), blocks).astype(jnp.int32)
    read = PageRange(jnp.asarray(queries.page_table), first, end)
    (k, table), (v, _) = (dequantize_pages(pages, read, dtype) for pages in kv.quantized)
    return KVPages(k, v), dataclasses.replace(queries, page_table=table)


def _is_wider(q: Array, kv: KVPages) -> bool:
    """Returns whether keys or values have more columns than a kernel holds, and no more than the widest heads."""
    sizes = q.shape[-1], kv.value_width
    return not kv.values_are_keys and max(sizes) in WIDER and all(size in (*WIDTHS, *WIDER) for size in sizes)


def _check(q: Array, kv: KVPages) -> None:
    sizes = {"q": q.shape[-1], "v_pages": kv.value_width}
    if str(q.dtype) not in DTYPES:
        given, accepted = _dtype(q)
    elif not all(size in WIDTHS for size in sizes.values()):
        given = " and ".join(f"{name} has {size} columns" for name, size in sizes.items())
        accepted = f"{', '.join(map(str, (*WIDTHS, *WIDER)))}. Pad them with zeros"
    elif max(sizes.values()) > 128 and any(size % 64 for size in sizes.values()):
        given = " and ".join(f"{name} has {size} columns" for name, size in sizes.items())
        accepted = "multiples of 64 where either is above 128. Pad them with zeros"
    else:
        return
    raise _refused(given, accepted)


def _check_latents(operands: AttentionOperands, masking: Masking) -> None:
    """Raises NotImplementedError unless the latent kernel serves the call."""
    q, kv, _, sinks, mask = operands
    options = {"window": masking.window, "soft_cap": masking.soft_cap, "alibi_slopes": masking.alibi_slopes}
    options |= {"sinks": sinks, "mask": mask}
    refused = [name for name, option in options.items() if option is not None]
    if str(q.dtype) not in DTYPES:
        given, accepted = _dtype(q)
    elif kv.kv_heads != 1:
        given, accepted = f"key columns as values with {kv.kv_heads} KV heads", "1 KV head"
    elif kv.value_width not in latent.VALUE_WIDTHS or q.shape[-1] != kv.value_width + PART:
        given = f"keys of {q.shape[-1]} columns whose values are the first {kv.value_width}"
        accepted = f"{', '.join(map(str, latent.VALUE_WIDTHS))} value columns, and {PART} more for keys"
    elif refused:
        given = f"key columns as values with {', '.join(refused)}"
        accepted = "only scale and causal with key columns"
    else:
        return
    raise _refused(given, accepted)


def _dtype(q: Array) -> tuple[str, str]:
    return f"q has dtype {q.dtype}", f"{', '.join(DTYPES)}. Cast q and the pages"


def _refused(given: str, accepted: str) -> NotImplementedError:
    return NotImplementedError(
        f"attention: {given} on {backends.device_name()}; accepted by the backend 'hopper': {accepted}, or choose the "
        "backend 'portable', which takes them."
    )
