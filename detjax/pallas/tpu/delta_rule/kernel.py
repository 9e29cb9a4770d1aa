"""The kernel of the gated delta rule for TPUs: it visits a request's chunks in order, with the state in VMEM.

Prefill, decode and the verification of drafted tokens are one program. A visit computes all `DELTA_CHUNK` places of a
chunk, whichever have tokens in the call: the matrix unit multiplies all of them in products of one shape, a token's row
is always at its own place, and every row is computed from its own numbers. So neither the number of tokens in a call
nor its first position can affect the bits. In decode, a single row on the vector unit would be cheaper, but its
additions would have another order than prefill's. Only updates, which depend on one another, are computed in units of
`SUBLANES` tokens, and units without tokens of the call are skipped.

The kernel copies tokens itself: arrays `[N, heads, columns]` can be sliced at any token, because memory is tiled along
heads and columns. In VMEM heads come first.
"""

import dataclasses
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
import numpy as np
from jax import Array

from detjax.contract import ACCUMULATOR
from detjax.pallas.tpu.delta_rule.chunk import Chunk, Steps
from detjax.pallas.tpu.delta_rule.copies import Arrays, Buffers, Copies, Results, start, wait
from detjax.pallas.tpu.delta_rule.problem import Problem, Schedule
from detjax.pallas.tpu.delta_rule.units import for_each
from detjax.pallas.tpu.delta_rule.visits import Visits
from detjax.pallas.tpu.device import VMEM_LIMIT
from detjax.runtime import backends

SCRATCH_LIMIT: Final = VMEM_LIMIT - 8 * 2**20
"""Bytes of VMEM for a chunk and its buffers; 8 MiB are left for the gates' blocks and temporaries."""


def run(
    problem: Problem, schedule: Schedule, visits: Visits, number: Array, gates: Array, arrays: Arrays
) -> tuple[Results, Array]:
    """Returns the results, and the gates with the sums of decays of all tokens.

    `number` is the number of visits. `gates` are float32 `[visits, tiles, DELTA_CHUNK, LANES]`: for each place and head
    the sum of decays, or the term that the token adds to it, and rates in the lanes after all heads.

    Raises:
        NotImplementedError: the heads don't fit into VMEM.
    """
    buffers, chunk = Buffers.scratch(problem), Chunk.scratch(problem, gates.shape[1])
    _check_memory(problem, buffers, chunk)
    tokens, given = arrays[:3], Results(jnp.zeros_like(arrays.v), *arrays[3:])
    in_memory = pl.BlockSpec(memory_space=pl.ANY)
    gates_of_visit = pl.BlockSpec((1, *gates.shape[1:]), lambda visit, visits: (visit, 0, 0, 0))

    def kernel(
        visits: Visits,
        gates: Any,
        tokens: tuple[Any, ...],
        _given: Results,
        results: Results,
        sums: Any,
        *scratch: Any,
    ) -> None:
        buffers, chunk = scratch
        copies = Copies(visits, tokens, results, buffers)
        _Kernel(problem, visits, copies, Steps(problem, schedule, buffers, chunk)).run(gates, sums)

    operands = visits, gates, tokens, given
    last = len(jax.tree.leaves(operands))
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(jnp.maximum(number, 1),),
            in_specs=[gates_of_visit, (in_memory,) * len(tokens), Results(*[in_memory] * len(given))],
            out_specs=(Results(*[in_memory] * len(given)), gates_of_visit),
            scratch_shapes=[buffers, chunk],
        ),
        out_shape=(
            Results(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given)),
            jax.ShapeDtypeStruct(gates.shape, ACCUMULATOR),
        ),
        input_output_aliases={last - len(given) + index: index for index in range(len(given))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_LIMIT),
        name="gated_delta_rule",
    )(*operands)


def _check_memory(problem: Problem, buffers: Buffers, chunk: Chunk) -> None:
    size = sum(int(np.prod(x.shape)) * jnp.dtype(x.dtype).itemsize for x in (*buffers[:-2], *chunk))
    if size > SCRATCH_LIMIT:
        raise NotImplementedError(
            f"gated_delta_rule: {problem.heads} heads of values, {problem.key_heads} of keys, in {problem.dtype} need "
            f"{size >> 20} MiB of VMEM on {backends.device_name()}; accepted by the backend 'tpu': "
            f"{SCRATCH_LIMIT >> 20}. Cut the heads over devices, or choose the backend 'portable'."
        )


@dataclasses.dataclass(frozen=True, eq=False)
class _Kernel:
    problem: Problem
    visits: Visits
    copies: Copies
    steps: Steps

    def run(self, gates: Any, sums: Any) -> None:
        visit = pl.program_id(0)
        visits, copies, steps = self.visits, self.copies, self.steps
        low, high = visits.low[visit], visits.high[visit]
        pl.when(visit == 0)(lambda: copies.load(visit, start))
        # The next visit's loads can start now: it needs nothing that this one stores except the state, which is in
        # VMEM.
        pl.when(visit + 1 < pl.num_programs(0))(lambda: copies.load(visit + 1, start))
        copies.load(visit, wait)
        state = copies.buffers.s.at[visits.buffer[visit]]

        @pl.when(visits.clears[visit] > 0)
        def clear() -> None:
            state[...] = jnp.zeros(state.shape, state.dtype)

        # The slot keeps the state before the chunk, so its store overlaps with the steps and ends before `fold` changes
        # it.
        copies.store_state(visit, state, start)
        steps.arrange(visit, low, high)
        steps.add_decays(gates, sums, low, high)

        @pl.when(low < high)
        def compute() -> None:
            for_each(self.problem.key_heads, lambda head: steps.meet_state(head, state))
            steps.substitute(low, high)
            for_each(self.problem.heads, steps.add_updates)
            steps.collect(visit, low, high)
            copies.store(visit, start)
            copies.store(visit, wait)

        copies.store_state(visit, state, wait)
        pl.when(visits.folds[visit] > 0)(lambda: for_each(self.problem.key_heads, lambda head: steps.fold(head, state)))
