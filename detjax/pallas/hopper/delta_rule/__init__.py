"""The gated delta rule on Hopper (Pallas Mosaic GPU): one kernel for requests of one token, and one for all others.

Each CTA has some value columns of a head of one request; columns are independent. Like `detjax.portable.delta_rule`, it
reads the state before a chunk and the rows of the chunk's earlier tokens. It writes only new rows, and the state when a
call reaches a new chunk.
"""

from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import Array

from detjax.contract import ACCUMULATOR
from detjax.operands.linear_attention_state import DELTA_ROWS, DeltaState, DeltaTokens, RequestRows
from detjax.operands.numerics import unique_scatter_indices
from detjax.pallas.hopper.attention.warpgroups import launch
from detjax.pallas.hopper.delta_rule import decode, tiles
from detjax.pallas.hopper.delta_rule.decode import Decode
from detjax.pallas.hopper.delta_rule.problem import Operands, Problem, Request
from detjax.pallas.hopper.delta_rule.substitution import COLUMNS
from detjax.pallas.hopper.delta_rule.tiles import Results, Tiles
from detjax.pallas.hopper.device import DTYPES
from detjax.portable import delta_rule as portable
from detjax.runtime import compilation

KEY_WIDTHS: Final = (64, 128)
"""Key widths that the kernels serve."""


def serves(key_width: int, value_width: int, dtype: jnp.dtype) -> bool:
    """Returns True if the kernels serve such heads. The portable program serves all others in every phase."""
    return key_width in KEY_WIDTHS and value_width % COLUMNS == 0 and dtype.name in DTYPES


def forward(tokens: DeltaTokens, state: DeltaState, rows: RequestRows) -> tuple[Array, DeltaState]:
    """Returns the outputs `[N, H, V]` and the next state; see `detjax.portable.delta_rule.forward`.

    A donated state is updated in place. Padding rows have undefined outputs.
    """
    if not serves(tokens.q.shape[2], tokens.v.shape[2], tokens.v.dtype):
        compilation.require_pinned_program("gated_delta_rule")
        return portable.forward(tokens, state, rows)
    requests, decodes = rows.first.shape[0], rows.most.decodes
    references: Any = jax.tree.map(jax.new_ref, state)
    operands = Operands(*tokens, Request.all_of(rows, state.chunk), references)
    o, decays = _in_tiles(operands, slice(decodes, requests)) if decodes < requests else (None, None)
    if decodes:
        o = _one_by_one(operands, slice(0, decodes), o)
    assert o is not None
    state = DeltaState(*(jax.freeze(x) for x in references))
    return o, state if decays is None else _with_rows(state, tokens.k, decays, rows.part(slice(decodes, requests)))


def backward(tokens: DeltaTokens, state: DeltaState, rows: RequestRows, do: Array) -> DeltaTokens:
    """Returns the gradients of the tokens; see `detjax.portable.delta_rule.backward`, which computes them."""
    compilation.require_pinned_program("gated_delta_rule")
    return portable.backward(tokens, state, rows, do)


def _selected(operands: Operands, requests: slice) -> tuple[Problem, Operands]:
    """Returns the shapes and the operands of some of the requests."""
    q, v, selected = operands.q, operands.v, operands.requests[:, requests]
    problem = Problem(selected.shape[1], q.shape[1], v.shape[1], q.shape[2], v.shape[2], v.dtype)
    return problem, operands._replace(requests=selected)


def _in_tiles(operands: Operands, requests: slice) -> tuple[Array, Array]:
    """Returns the outputs of requests with any number of tokens, and the tokens' sums of decays."""
    problem, operands = _selected(operands, requests)
    v, g = operands.v, operands.g
    out = [jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(g.shape, ACCUMULATOR)]

    def body(operands: Operands, results: list[Any], scratch: dict[str, Any]) -> None:
        Tiles(problem, operands, Results(*results), scratch).run()

    scratch, warpgroups = tiles.scratch_types(problem), tiles.WARPGROUPS
    o, decays = launch("delta_rule_tiles", body, operands, out, problem.ctas, scratch, warpgroups=warpgroups)
    return o, decays


def _one_by_one(operands: Operands, requests: slice, o: Array | None) -> Array:
    """Returns the outputs of requests with one token each; if others have outputs `o`, they are added to these."""
    problem, operands = _selected(operands, requests)
    v, scratch = operands.v, decode.scratch_types(problem)
    if o is None:

        def body(operands: Operands, results: list[Any], scratch: dict[str, Any]) -> None:
            Decode(problem, operands, results[0], scratch).run()

        out = [jax.ShapeDtypeStruct(v.shape, v.dtype)]
        return launch("delta_rule_decode", body, operands, out, problem.ctas, scratch, warpgroups=1)[0]

    def body_in_place(operands: tuple[Operands, Any], _: list[Any], scratch: dict[str, Any]) -> None:
        Decode(problem, *operands, scratch).run()

    result = jax.new_ref(o)
    launch("delta_rule_decode", body_in_place, (operands, result), (), problem.ctas, scratch, warpgroups=1)
    return jax.freeze(result)


def _with_rows(state: DeltaState, k: Array, decays: Array, rows: RequestRows) -> DeltaState:
    """Returns the state with the rows that CTAs share: no CTA may overwrite them while another one reads them."""
    # The ring has room for the last DELTA_ROWS tokens; scattering earlier ones too would write a place twice.
    offset = rows.tokens[:, None] - 1 - jnp.arange(min(rows.most.others, DELTA_ROWS), dtype=jnp.int32)[None]
    row = jnp.clip(rows.first[:, None] + offset, 0, k.shape[0] - 1)
    slot = unique_scatter_indices(offset >= 0, rows.slot[:, None], state.chunk.shape[0])
    place = slot, (rows.start[:, None] + offset) % DELTA_ROWS

    def written(x: Array, new: Array) -> Array:
        return x.at[place].set(new, mode="drop", unique_indices=True)

    return state._replace(keys=written(state.keys, k[row]), decays=written(state.decays, decays[row]))
