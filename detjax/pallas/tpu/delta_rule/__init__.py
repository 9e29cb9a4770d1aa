"""The gated delta rule on TPUs: one kernel for prefill, decode and verify steps, and its operands and results."""

from typing import Final

import jax.numpy as jnp
import numpy as np
from jax import Array

from detjax.contract import DELTA_CHUNK, LOG2_E
from detjax.operands.linear_attention_state import DeltaState, DeltaTokens, RequestRows
from detjax.operands.numerics import round_up, unique_scatter_indices
from detjax.pallas.tpu.delta_rule import kernel
from detjax.pallas.tpu.delta_rule.copies import Arrays
from detjax.pallas.tpu.delta_rule.problem import Problem, Schedule, default_schedule
from detjax.pallas.tpu.delta_rule.visits import Visits, kept_chunks
from detjax.pallas.tpu.device import LANES, check_dtypes
from detjax.pallas.tpu.matmul import padded
from detjax.portable import delta_rule as portable_delta_rule

backward: Final = portable_delta_rule.backward


def forward(
    tokens: DeltaTokens, state: DeltaState, rows: RequestRows, schedule: Schedule | None = None
) -> tuple[Array, DeltaState]:
    """Returns the outputs `[N, H, V]`, zeros for padding rows, and the next state.

    A donated state is updated in place.

    Args:
        tokens: all tokens.
        state: the state of all slots.
        rows: the tokens' requests and positions.
        schedule: default: `default_schedule`'s.

    Raises:
        NotImplementedError: a dtype is not one of `device.DTYPES`, the heads don't fit into VMEM, or the call has too
            many tokens.
        ValueError: the schedule does not fit the problem.
    """
    q, k, v, g, beta = tokens
    check_dtypes("gated_delta_rule", q, k, v)
    key_width, value_width = q.shape[2], v.shape[2]
    problem = Problem(
        q.shape[1],
        v.shape[1],
        round_up(key_width, LANES),
        round_up(value_width, LANES),
        np.float32(key_width**-0.5),
        v.dtype,
    )
    schedule = schedule or default_schedule(problem)
    schedule.check(problem)
    visits, number = Visits.from_rows(rows, state.chunk[rows.slot], v.shape[0])
    # Heads that don't fill registers are padded with zeros, which add nothing. Published models need no padding.
    arrays = Arrays(
        padded(q, 2, LANES),
        padded(k, 2, LANES),
        padded(v, 2, LANES),
        padded(padded(state.s, 2, LANES), 3, LANES),
        padded(state.keys, 3, LANES),
        padded(state.updates, 3, LANES),
    )
    results, decays = kernel.run(problem, schedule, visits, number, _gates(g, beta, state, visits), arrays)
    next_state = DeltaState(
        results.s[:, :, :key_width, :value_width],
        results.keys[..., :key_width],
        results.updates[..., :value_width],
        _with_decays(state.decays, decays, visits),
        state.chunk.at[unique_scatter_indices(rows.tokens > 0, rows.slot, state.chunk.shape[0])].set(
            kept_chunks(rows), mode="drop", unique_indices=True
        ),
    )
    return results.o[..., :value_width], next_state


def _gates(g: Array, beta: Array, state: DeltaState, visits: Visits) -> Array:
    """Returns the kernel's gates, float32 `[visits, tiles, DELTA_CHUNK, LANES]`, with a lane for each head.

    The first lanes, one per head, have the sums `G` of earlier tokens and the terms that the call's tokens add to them;
    the lanes after them have rates.
    """
    heads = g.shape[1]
    row = jnp.clip(visits.rows, 0, g.shape[0] - 1)
    # XLA computes the products, so they are rounded before the kernel adds them.
    steps = (g * LOG2_E)[row]
    sums = state.decays.reshape(-1, heads)[visits.rows_of_slots]
    earlier, present = visits.earlier[..., None], visits.present[..., None]
    zeros = jnp.zeros_like(steps)
    lanes = [
        _selected(earlier, sums, _selected(present, steps, zeros)),
        _selected(present, beta[row], zeros),
    ]
    gates = padded(jnp.concatenate(lanes, axis=2), 2, LANES)
    return gates.reshape(*gates.shape[:2], -1, LANES).swapaxes(1, 2)


def _with_decays(decays: Array, gates: Array, visits: Visits) -> Array:
    """Returns the decays of all slots, updated from the kernel's gates."""
    slots, rows, heads = decays.shape
    new = gates.swapaxes(1, 2).reshape(-1, DELTA_CHUNK, gates.shape[1] * LANES)[..., :heads].reshape(-1, heads)
    kept = (visits.present & (visits.keeps_rows > 0)[:, None]).reshape(-1)
    place = unique_scatter_indices(kept, visits.rows_of_slots.reshape(-1), slots * rows)
    flat = decays.reshape(-1, heads).at[place].set(new, mode="drop", unique_indices=True)
    return flat.reshape(decays.shape)


def _selected(rows: Array, x: Array, y: Array) -> Array:
    return jnp.where(jnp.broadcast_to(rows, x.shape), x, y)
