"""Attention on Hopper GPUs: one contract, served by two kernels and their gradients."""

from typing import Final

import jax.numpy as jnp
from jax import Array

from detjax import platform
from detjax.contract import Masking
from detjax.pallas import attention_decode_hopper, attention_prefill_hopper
from detjax.pallas.attention_prefill_hopper import ROW_UNIT
from detjax.pallas.attention_tile_hopper import ROWS
from detjax.pallas.schedules.matmul_hopper import round_up

DTYPES: Final = ("bfloat16", "float16")
MOST_WIDTH: Final = 256


def forward(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    q_start: Array,
    kv_length: Array,
    sinks: Array | None,
    *,
    masking: Masking,
    with_normalizer: bool = True,
) -> tuple[Array, Array | None]:
    """Output `[B, T, H, V]` and, if asked for, the log2 of each row's normalizer, `[H, N]` float32, N being B times T
    rounded up to eights.

    Raises:
        NotImplementedError: no kernel serves the dtype or the sizes.
    """
    _check(q, v_pages)
    batch, tokens, heads, _ = q.shape
    operands = k_pages, v_pages, page_table, q_start, kv_length, sinks
    few = tokens <= attention_decode_hopper.MOST_TOKENS and heads // k_pages.shape[1] <= ROWS
    if few and not with_normalizer:
        return attention_decode_hopper.forward(q, *operands, masking=masking), None
    padded = round_up(tokens, ROW_UNIT)
    packed = jnp.pad(q, ((0, 0), (0, padded - tokens), (0, 0), (0, 0))).reshape(batch * padded, *q.shape[2:])
    o, normalizers = attention_prefill_hopper.forward(packed, *operands, masking=masking)
    return o.reshape(batch, padded, heads, -1)[:, :tokens], normalizers


def _check(q: Array, v_pages: Array) -> None:
    sizes = {"q": q.shape[-1], "v_pages": v_pages.shape[-1]}
    if str(q.dtype) not in DTYPES:
        given, accepted = f"q has dtype {q.dtype}", f"{', '.join(DTYPES)}. Cast q and the pages"
    elif any(size % 16 or size > MOST_WIDTH for size in sizes.values()):
        given = " and ".join(f"{name} has {size} columns" for name, size in sizes.items())
        accepted = f"multiples of 16 up to {MOST_WIDTH}. Pad them with zeros"
    else:
        return
    raise NotImplementedError(
        f"attention: {given} on {platform.device_name()}; accepted by the backend 'hopper': {accepted}, or choose the "
        "backend 'portable', which takes them."
    )
