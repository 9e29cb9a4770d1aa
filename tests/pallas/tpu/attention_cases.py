"""Attention at the sizes of real models, as calls that the TPUs' compiler has to accept."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from detjax.contract import KV_BLOCK
from detjax.operands.attention import AttentionOperands
from detjax.operands.kv_pages import KeyColumns, KVPages, Queries
from detjax.operands.options import Masking
from detjax.pallas.tpu import attention
from tests.support.unchecked import without_checks

HEADS, KV_HEADS, WIDTH = 32, 8, 128  # Qwen3-8B
COLUMNS, PAGES = 64, 1024


def forward(
    batch: int,
    tokens: int,
    dtype: str = "bfloat16",
    *,
    heads: tuple[int, int] = (HEADS, KV_HEADS),
    width: int = WIDTH,
    value_width: int | None = None,
    latent: bool = False,
    sinks: bool = False,
    masks: int | None = None,
    with_normalizers: bool = False,
    **options: Any,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns `attention.forward` of requests with these numbers of tokens, and its arguments.

    `masks` is the H of a mask. If `latent`, values are columns of their keys.
    """
    masking = Masking(width**-0.5, **options)
    shaped, integers = jax.ShapeDtypeStruct, functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    pages = PAGES, heads[1], KV_BLOCK
    k, v = (shaped((*pages, columns), dtype) for columns in (width, value_width or width))
    arguments = AttentionOperands(
        shaped((batch, tokens, heads[0], width), dtype),
        KVPages(k, KeyColumns(v.shape[3]) if latent else v),
        without_checks(
            Queries, page_table=integers((batch, COLUMNS)), start=integers((batch,)), length=integers((batch,))
        ),
        shaped((heads[0],), dtype) if sinks else None,
        None if masks is None else shaped((batch, masks, tokens, tokens), jnp.bool_),
    )
    return functools.partial(attention.forward, masking=masking, with_normalizers=with_normalizers), (arguments,)


def ragged(rows: int, requests: int, dtype: str = "bfloat16") -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns `attention.ragged` of packed rows, and its arguments."""
    ((q, kv, *_),), integers = forward(1, 1, dtype)[1], functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    q = jax.ShapeDtypeStruct((rows, *q.shape[2:]), dtype)
    fields = dict.fromkeys(("start", "length", "count", "first_row"), integers((requests,)))
    queries = without_checks(Queries, page_table=integers((requests, COLUMNS)), **fields)
    return functools.partial(attention.ragged, masking=Masking(WIDTH**-0.5)), (AttentionOperands(q, kv, queries),)


def cases() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Functions and the shapes of their arguments, by name of the case."""
    slopes = tuple(2.0 ** -(1 + head % 8) for head in range(HEADS))
    latent = {"heads": (128, 1), "width": 576, "value_width": 512, "latent": True}  # DeepSeek-V3
    everything = {"window": 1024, "soft_cap": 30.0, "sinks": True, "alibi_slopes": slopes}
    return {
        "decode of 1": forward(1, 1),
        "decode of 64": forward(64, 1),
        "decode of 512": forward(512, 1),
        "decode of 64, float32": forward(64, 1, "float32"),
        "4 drafted tokens of 64": forward(64, 4),
        "prefill of 512": forward(1, 512),
        "prefill of 4096": forward(1, 4096),
        "prefill of 4096, float32": forward(1, 4096, "float32"),
        "prefill of 512 with everything": forward(1, 512, with_normalizers=True, **everything),
        "prefill of 512 with everything, float32": forward(1, 512, "float32", with_normalizers=True, **everything),
        "a mask": forward(2, 512, masks=1, causal=False),
        "a mask for each head, float32": forward(2, 512, "float32", masks=HEADS),
        "prefills side by side": ragged(512, 16),
        "prefills side by side, float32": ragged(512, 16, "float32"),
        "heads of 64 columns": forward(8, 16, heads=(32, 8), width=64),
        "heads of 80 columns": forward(8, 16, heads=(32, 32), width=80),
        "heads of 256 columns": forward(1, 512, heads=(16, 16), width=256),
        "heads of 256 columns, float32": forward(1, 512, "float32", heads=(16, 16), width=256, with_normalizers=True),
        "keys of 192 columns, values of 128": forward(1, 512, heads=(16, 16), width=192, value_width=128),
        "latents, decode of 64": forward(64, 1, **latent),
        "latents, prefill of 512, float32": forward(1, 512, "float32", with_normalizers=True, **latent),
        "7 heads that share their keys": forward(8, 16, heads=(28, 4)),
        "71 heads that share their keys": forward(8, 16, heads=(71, 1), width=64),
    }
