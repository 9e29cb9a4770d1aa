"""The next token on TPUs (Mosaic TPU): logits are read once, noise is made where it is used, nothing is stored.

One kernel streams the blocks of a tile of rows through VMEM. It keeps the best candidate of every lane, and the maximum
and the sum of every block; at the end of the row the lanes meet. Where rows have filters, sorting and deciding what is
kept are the portable backend's part.
"""

import math
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import tpu as pltpu

from detjax.contract import ACCUMULATOR, SOFTMAX_BLOCK
from detjax.pallas.gumbel import NO_ID, beats, gumbel
from detjax.pallas.tpu import softmax
from detjax.pallas.tpu.device import check_dtypes
from detjax.pallas.tpu.rows import LOWEST, PIECE, lane_ids, row_unit, wide
from detjax.pallas.tpu.softmax import blocks_of_row, end_of_row, pieces_of_block
from detjax.portable import sampling as portable

PIECES_TOGETHER: Final = 8
"""Pieces whose noise is made at the same time: one alone waits for each of its instructions."""


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
    rows: int | None = None,
) -> tuple[Array, Array]:
    """Tokens `[B]` int32 and their logprobs `[B]` float32; see `detjax.ops.sample`.

    `rows` of a tile are a schedule: no bit depends on them.

    Raises:
        NotImplementedError: the logits' dtype is none of `tpu.DTYPES`.
    """
    check_dtypes("sample", logits)
    keys = jax.random.key_data(jax.vmap(portable.sample_key)(seed, position, sample_index))
    kept = (portable.masked(logits, temperature, top_k, top_p, min_p),) if filtered else ()
    return chosen((logits, *kept), keys, temperature, rows)


def chosen(
    operands: tuple[Array, ...], keys: Array, temperature: Array, rows: int | None = None
) -> tuple[Array, Array]:
    """Tokens and logprobs of logits `[B, V]`, followed by those logits that filters leave, where there are filters."""
    B, V = operands[0].shape
    blocks = blocks_of_row(V)
    # Noise takes more instructions than all else: there are to be few rows in a tile that are not there in the batch.
    R = rows or row_unit(operands[0].dtype)
    pieces = pieces_of_block(V)
    together = math.gcd(pieces, PIECES_TOGETHER)

    def body(*refs: Any) -> None:
        x_ref, kept_ref = refs[0], refs[len(operands) - 1]
        keys_ref, temperature_ref, token_ref, logprob_ref, m_ref, l_ref, *best_refs = refs[len(operands) :]
        block = pl.program_id(1)

        m, total = softmax.block_statistics(lambda: softmax.pieces_at(x_ref, block, V, -jnp.inf))
        m_ref[block] = wide(m)
        l_ref[block] = wide(total)

        @pl.when(block == 0)
        def _() -> None:
            for ref, nothing in zip(best_refs, (-jnp.inf, NO_ID, -jnp.inf), strict=True):
                ref[...] = jnp.full(ref.shape, nothing, ref.dtype)

        temperature = temperature_ref[...]
        warm = jnp.max(jnp.where(temperature == 0, 0.0, 1.0)) > 0
        left = end_of_row(block, V)

        def keep_best(value_of: Callable[[Array, Array, Array], Array]) -> None:
            """Brings the lanes' best up to date with `value_of(logits, kept logits, ids)` of this block."""

            def step(index: Array, best: tuple[Array, ...]) -> tuple[Array, ...]:
                for piece in (index * together + i for i in range(together)):
                    place = pl.ds(pl.multiple_of(piece * PIECE, PIECE), PIECE)
                    column = lane_ids(R) + piece * PIECE
                    token = column + block * SOFTMAX_BLOCK
                    x, kept = x_ref[:, place].astype(ACCUMULATOR), kept_ref[:, place].astype(ACCUMULATOR)
                    value = value_of(x, kept, token)
                    better = (beats(value, best[0]) | (best[1] == NO_ID)) & (column < left)
                    new = value, token, x
                    best = tuple(jnp.where(better, n, old) for n, old in zip(new, best, strict=True))
                return best

            best = lax.fori_loop(0, pieces // together, step, tuple(ref[...] for ref in best_refs))
            for ref, new in zip(best_refs, best, strict=True):
                ref[...] = new

        @pl.when(jnp.logical_not(warm))
        def _() -> None:
            keep_best(lambda x, kept, token: x)

        @pl.when(warm)
        def _() -> None:
            greedy = wide(temperature) == 0
            inverse = wide(1 / jnp.where(temperature == 0, 1.0, temperature))
            key = wide(keys_ref[:, 0:1]), wide(keys_ref[:, 1:2])

            def value_of(x: Array, kept: Array, token: Array) -> Array:
                scaled = kept * inverse
                # A NaN stays one. What a filter took out is below all else; a logit of -inf itself is not.
                scaled = jnp.where(scaled < LOWEST, LOWEST, scaled)
                if len(operands) > 1:
                    scaled = jnp.where((kept == -jnp.inf) & (x != -jnp.inf), -jnp.inf, scaled)
                return jnp.where(greedy, x, scaled + gumbel(key, lax.bitcast_convert_type(token, jnp.uint32)))

            keep_best(value_of)

        @pl.when(block == blocks - 1)
        def _() -> None:
            m, total = softmax.merged_statistics(m_ref, l_ref)
            token, logit = _best_of_lanes(*(ref[...] for ref in best_refs))
            constant = softmax.row_constant("log_softmax", total)
            token_ref[...] = token
            logprob_ref[...] = softmax.finished("log_softmax", wide(logit), m, constant)[:, :1]

    tile = pl.BlockSpec((R, pieces * PIECE), lambda i, b: (i, b))
    column = pl.BlockSpec((R, 1), lambda i, b: (i, 0))
    token, logprob = pl.pallas_call(
        body,
        out_shape=[jax.ShapeDtypeStruct((B, 1), jnp.int32), jax.ShapeDtypeStruct((B, 1), ACCUMULATOR)],
        grid=(pl.cdiv(B, R), blocks),
        in_specs=[*[tile] * len(operands), pl.BlockSpec((R, 2), lambda i, b: (i, 0)), column],
        out_specs=[column, column],
        scratch_shapes=[
            *[pltpu.VMEM((blocks, R, PIECE), ACCUMULATOR)] * 2,
            pltpu.VMEM((R, PIECE), ACCUMULATOR),
            pltpu.VMEM((R, PIECE), jnp.int32),
            pltpu.VMEM((R, PIECE), ACCUMULATOR),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="sample",
    )(*operands, keys, jnp.pad(temperature, (0, -B % R))[:, None])  # rows that are not there are greedy
    return token[:, 0], logprob[:, 0]


def _best_of_lanes(value: Array, token: Array, logit: Array) -> tuple[Array, Array]:
    """The lowest id among the lanes with the largest value, `[rows, 1]`, and its logit."""
    # Nothing here asks what a maximum makes of a NaN.
    no_number = jnp.where(value != value, 1.0, 0.0)
    top = jnp.max(jnp.where(value != value, -jnp.inf, value), axis=1, keepdims=True)
    largest = no_number == jnp.max(no_number, axis=1, keepdims=True)
    among = largest & ((value != value) | (value == top))
    chosen = jnp.min(jnp.where(among, token, NO_ID), axis=1, keepdims=True)
    # A NaN makes its whole row one, whatever its own logit is taken for.
    own = jnp.where(token == chosen, logit, -jnp.inf)
    return chosen, jnp.max(own, axis=1, keepdims=True)
