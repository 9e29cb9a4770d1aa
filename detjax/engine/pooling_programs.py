"""The programs that pool hidden states, for models that do not generate."""

import functools
from typing import Any

from jaxtyping import Array, Float, Float32, Int32

from detjax.engine.program import Parameters, StepProgram, model_of
from detjax.models.network import Network
from detjax.models.parts.pooling import ChunkRows, Method, PooledRows, carried_on, pooled
from detjax.operands.sampling_arrays import Arrays
from detjax.runtime import compilation


def carry(carried: Any, rows: Any, chunks: ChunkRows, method: Method) -> StepProgram:
    """Returns the program that adds the rows of prefill chunks to what the slots carry."""
    size, args = (len(rows), len(chunks.slot)), (carried, rows, chunks)
    purpose = f"sums of hidden states: prefills of up to {size[0]} rows"
    return StepProgram(_carry, size, args, {"method": method}, purpose)


def pool(rows: Any, wanted: PooledRows) -> StepProgram:
    """Returns the program that computes results from hidden states, such as each chunk's last one."""
    count = len(wanted.is_scored)
    return StepProgram(_pool, count, (rows, wanted), {}, f"results of up to {count} hidden states")


def pool_carried(carried: Any, slots: Any, factors: Any, wanted: PooledRows) -> StepProgram:
    """Returns the program that computes results from what slots carry, times factors."""
    count = len(wanted.is_scored)
    args = carried, slots, factors, wanted
    return StepProgram(_pool_carried, count, args, {}, f"results of up to {count} sums of hidden states")


@functools.partial(compilation.jit, static_argnums=0, static_argnames="method")
def _carry(
    network: Network,
    parameters: Parameters,
    carried: Float32[Array, "slots D"],
    rows: Float[Array, "rows D"],
    chunks: ChunkRows,
    *,
    method: Method,
) -> Float32[Array, "slots D"]:
    """Returns what the slots carry after the chunks."""
    with model_of(network, parameters) as model:
        return model.on_each_device(_carried_on, carried, rows, chunks, method=method)


def _carried_on(_: Any, carried: Array, rows: Array, chunks: ChunkRows, *, method: Method) -> Array:
    return carried_on(carried, rows, chunks, method=method)


@functools.partial(compilation.jit, static_argnums=0)
def _pool(
    network: Network, parameters: Parameters, rows: Float[Array, "R D"], wanted: PooledRows
) -> Float32[Array, "R W"]:
    """Returns the results for hidden states."""
    with model_of(network, parameters) as model:
        return model.on_each_device(pooled, rows, wanted)


@functools.partial(compilation.jit, static_argnums=0)
def _pool_carried(
    network: Network,
    parameters: Parameters,
    carried: Float32[Array, "slots D"],
    slots: Int32[Arrays, "R"],
    factors: Float32[Arrays, "R"],
    wanted: PooledRows,
) -> Float32[Array, "R W"]:
    """Returns the results for what slots carry."""
    rows = carried.at[slots].get(mode="fill", fill_value=0.0)
    with model_of(network, parameters) as model:
        return model.on_each_device(pooled, rows, wanted, factors)
