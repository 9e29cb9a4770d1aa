"""The gated delta rule at the sizes of real models, as calls that the TPUs' compiler has to accept."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from detjax.operands.kv_pages import Queries
from detjax.operands.linear_attention_state import DeltaState, DeltaTokens, RequestRows
from detjax.pallas.tpu import delta_rule
from detjax.pallas.tpu.delta_rule.problem import Schedule
from tests.support.unchecked import without_checks

KEY_HEADS, HEADS, WIDTH = 16, 32, 128  # Qwen3-Next-80B-A3B, Qwen3.5-35B-A3B
SLOTS = 80


def forward(
    rows: int, requests: int, dtype: str = "bfloat16", heads: tuple[int, int] = (KEY_HEADS, HEADS), width: int = WIDTH
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns `delta_rule.forward` of rows of several requests, and its arguments; the sixth is the state."""
    shaped, integers = jax.ShapeDtypeStruct, functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    keys, values = ((rows, count, width) for count in heads)
    gates = shaped((rows, heads[1]), jnp.float32)
    state = jax.eval_shape(functools.partial(DeltaState.empty, SLOTS, *heads, width, width, jnp.dtype(dtype)))
    number = integers((requests,))
    decodes = requests if rows == requests else 0
    first_row = integers((requests - decodes,))
    queries = without_checks(
        Queries,
        page_table=integers((requests, 1)),
        start=number,
        length=number,
        count=number,
        first_row=first_row,
        slots=number,
    )

    def fn(*arguments: Any, schedule: Schedule | None = None) -> Any:
        *tokens, state, queries = arguments
        return delta_rule.forward(DeltaTokens(*tokens), state, RequestRows.from_queries((rows,), queries), schedule)

    return fn, (shaped(keys, dtype), shaped(keys, dtype), shaped(values, dtype), gates, gates, state, queries)


def cases() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Functions and the shapes of their arguments, by name of the case."""
    return {
        "decode of 1": forward(1, 1),
        "decode of 64": forward(64, 64),
        "4 drafted tokens of 64": forward(256, 64),
        "prefill of 4096": forward(4096, 1),
        "prefill of 512, float32": forward(512, 1, "float32"),
        "prefills side by side": forward(4096 + 72, 72),
        "64 heads of values": forward(512, 4, heads=(16, 64)),
        "64 heads of values, float32": forward(512, 4, "float32", heads=(16, 64)),
        "48 heads of values": forward(512, 4, heads=(16, 48)),
        "as many heads of values as of keys": forward(512, 4, heads=(16, 16)),
        "a share of the heads": forward(512, 4, heads=(2, 4)),
        "heads of 256 columns": forward(512, 4, heads=(4, 8), width=256),
        "heads of 80 columns": forward(40, 4, width=80),
        "80 heads": forward(40, 4, heads=(80, 80)),
    }
