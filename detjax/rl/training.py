"""One training step: the gradients of a batch, and the update of float32 masters that weights are rounded from.

The bits of a step depend on its samples, in their order, and on the number of shards. Layout, rematerialization, and
the devices that share the batch and the state are schedules.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float32, PyTree

from detjax import compilation, ops
from detjax.contract import ACCUMULATOR, GRADIENT_SHARDS, LANES
from detjax.models import Decoder
from detjax.models.network import Network, Weights
from detjax.numerics import round_up
from detjax.options import MODEL_DISTRIBUTION, Distribution
from detjax.portable.elements import map_elements
from detjax.rl.gradients import Loss, ShardTree, Sums, WeightSums, empty_sums, next_sums, shard_bounds
from detjax.rl.microbatches import Layout, Microbatch, Sample, logprobs_by_sequence
from detjax.rl.optimizers import norm_of_slices, slice_squares
from detjax.rounding import rounded

AXIS: Final = "data"
"""The axis of the mesh whose devices share a batch."""

type Flat = Float32[Array, "n"]
"""A weight's elements as one row, with zeros behind them up to a multiple of `shards * contract.LANES`."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a batch's gradients are computed. Bits depend on `shards` alone.

    Attributes:
        layout: how sequences are laid out.
        shards: the contiguous parts of the batch whose sums are added as a tree; a power of two. It belongs to a run's
            configuration, as a seed does.
        devices: how many devices share the batch, a power of two up to `shards`.
        is_sharded: whether these devices also share masters and moments, each having a part of every leaf.
        rematerialized: whether backward passes compute layers again in place of keeping their activations.
    """

    layout: Layout
    shards: int = GRADIENT_SHARDS
    devices: int = 1
    is_sharded: bool = False
    rematerialized: bool = False

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            ValueError: the shards are no power of two, or the devices do not divide them.
        """
        if self.shards < 1 or self.shards & (self.shards - 1):
            raise ValueError(f"Plan: shards is {self.shards}; accepted: powers of two")
        if self.devices < 1 or self.shards % self.devices:
            raise ValueError(f"Plan: devices is {self.devices}; accepted: powers of two up to shards, {self.shards}")

    @property
    def mesh(self) -> Mesh:
        """The devices, the first ones of JAX's list.

        Raises:
            ValueError: there are fewer devices.
        """
        return _mesh(self.devices)


@functools.cache
def _mesh(devices: int) -> Mesh:
    if jax.device_count() < devices:
        raise ValueError(f"Plan: devices is {devices}; accepted: up to {jax.device_count()}, which JAX has")
    return Mesh(np.array(jax.devices()[:devices]), (AXIS,), axis_types=(AxisType.Auto,))


class BatchGradients(NamedTuple):
    """The gradients of a batch, and what the forward passes gave.

    Attributes:
        leaves: the gradient of each weight, float32.
        logprobs: for each sample the logprobs of its completion, float32.
    """

    leaves: tuple[Flat, ...]
    logprobs: list[Float32[np.ndarray, "C"]]


class TrainState(NamedTuple):
    """What a run needs to go on, beside its configuration.

    Attributes:
        masters: the weights in float32.
        optimizer: the optimizer's state, for leaves like the masters.
    """

    masters: tuple[Flat, ...]
    optimizer: Any


def batch_gradients(
    network: Network[Decoder],
    weights: Weights,
    samples: Sequence[Sample],
    loss: Loss,
    plan: Plan,
    distribution: Distribution = MODEL_DISTRIBUTION,
) -> BatchGradients:
    """Returns the gradients of a batch's loss with regard to the weights.

    Args:
        network: the decoder without its weights.
        weights: its weights, on every device.
        samples: the sequences, whose order is part of the result.
        loss: the derivative with regard to the logprobs; hashable, as it is part of the programs.
        plan: how they are computed.
        distribution: the distribution whose logprobs the loss takes: the one that samples were drawn from.

    Raises:
        ValueError: there is no sample, or one is longer than a row.
    """
    if not samples:
        raise ValueError("batch_gradients: no samples; accepted: at least one")
    bounds = shard_bounds(len(samples), plan.shards)
    placed = [
        [dataclasses.replace(one, first=one.first + begin) for one in plan.layout.microbatches(samples[begin:end])]
        for begin, end in bounds
    ]
    add, empty = _programs(network, loss, plan, distribution)
    by_device, tree, values = plan.shards // plan.devices, ShardTree(), []
    for index in range(by_device):
        # Each device has the same number of consecutive shards, and works on one of them at a time.
        shards = [placed[device * by_device + index] for device in range(plan.devices)]
        sums = empty(weights)
        for step in range(max(map(len, shards))):
            row = [shard[step] if step < len(shard) else None for shard in shards]
            arrays = [plan.layout.empty() if one is None else one.arrays for one in row]
            stacked = jax.tree.map(lambda *x: np.stack(x), *arrays)
            sums, logprobs = add(weights, sums, stacked)
            values += [(one, logprobs, device) for device, one in enumerate(row) if one is not None]
        tree.add(sums)
    ordered = sorted(values, key=lambda value: value[0].first)
    host = {id(logprobs): np.asarray(logprobs) for _, logprobs, _ in ordered}
    by_sequence = logprobs_by_sequence(
        [one for one, _, _ in ordered], [host[id(logprobs)][device] for _, logprobs, device in ordered]
    )
    return BatchGradients(_reduced(plan)(tree.total()), by_sequence)


@functools.lru_cache(maxsize=32)
def _programs(
    network: Network[Decoder], loss: Loss, plan: Plan, distribution: Distribution
) -> tuple[Callable[[Weights, Sums, Microbatch], tuple[Sums, Array]], Callable[[Weights], Sums]]:
    """The program that adds a microbatch of every device, and the one that makes sums of zeros."""

    def add(weights: Weights, sums: Sums, microbatch: Microbatch) -> tuple[Sums, Array]:
        sums, microbatch = jax.tree.map(lambda x: x[0], (sums, microbatch))
        options = {"distribution": distribution, "rematerialized": plan.rematerialized}
        result = next_sums(network, weights, sums, microbatch, loss, **options)
        return jax.tree.map(lambda x: x[None], result)

    def empty(weights: Weights) -> Sums:
        return jax.tree.map(lambda x: x[None], empty_sums(network, weights))

    program = _on_devices(plan, add, (P(), P(AXIS), P(AXIS)), (P(AXIS), P(AXIS)))
    return compilation.jit(program, donate_argnums=1), compilation.jit(_on_devices(plan, empty, (P(),), P(AXIS)))


@functools.lru_cache(maxsize=32)
def _reduced(plan: Plan) -> Callable[[Sums], tuple[Flat, ...]]:
    """The program that adds the devices' sums, and the two sums of a table that is also a head."""

    def over_devices(total: Array | None) -> Array | None:
        if total is None:
            return None
        reduce = ops.psum_scatter if plan.is_sharded else ops.psum
        return reduce(flat(total[0], plan.shards), AXIS)

    def reduced(sums: Sums) -> tuple[Flat, ...]:
        def leaf(total: WeightSums) -> Array:
            parts = [part for part in map(over_devices, total) if part is not None]
            return functools.reduce(jnp.add, parts)

        return tuple(map(leaf, sums))

    spec = P(AXIS) if plan.is_sharded else P()
    return compilation.jit(_on_devices(plan, reduced, (P(AXIS),), spec))


def initial_state(weights: Weights, optimizer: optax.GradientTransformation, plan: Plan) -> TrainState:
    """Returns the state before the first step of training the weights."""
    masters = tuple(flat(jnp.asarray(weight, ACCUMULATOR), plan.shards) for weight in weights)
    return placed_state(TrainState(masters, optimizer.init(masters)), plan)


def placed_state(state: TrainState, plan: Plan) -> TrainState:
    """Returns the state on the devices of a plan, such as one that was read from a disk."""
    sharding = NamedSharding(plan.mesh, P(AXIS) if plan.is_sharded else P())
    everywhere = NamedSharding(plan.mesh, P())
    return jax.tree.map(lambda x: jax.device_put(x, sharding if jnp.ndim(x) else everywhere), state)


def update(
    state: TrainState,
    gradients: Sequence[Flat],
    optimizer: optax.GradientTransformation,
    plan: Plan,
    *,
    max_norm: float | None = None,
) -> tuple[TrainState, Float32[Array, ""]]:
    """Returns the next state, and the norm of the gradients.

    Args:
        state: the state; its arrays must not be used any more.
        gradients: of each weight, as `batch_gradients` returns them.
        optimizer: such as `detjax.rl.optimizers.adamw`.
        plan: of `batch_gradients`.
        max_norm: larger gradients are scaled down to this norm; None: they are not.
    """
    return _update_program(optimizer, plan, max_norm, jax.tree.structure(state))(state, tuple(gradients))


@functools.lru_cache(maxsize=32)
def _update_program(
    optimizer: optax.GradientTransformation, plan: Plan, max_norm: float | None, tree: Any
) -> Callable[[TrainState, tuple[Flat, ...]], tuple[TrainState, Array]]:
    shards = plan.shards // plan.devices if plan.is_sharded else plan.shards

    def step(state: TrainState, gradients: tuple[Flat, ...]) -> tuple[TrainState, Array]:
        slices = jnp.stack([jnp.stack(slice_squares(leaf, shards)) for leaf in gradients])
        if plan.is_sharded:
            # Every device has some slices of each leaf.
            slices = jax.lax.all_gather(slices, AXIS, axis=1, tiled=True)
        norm = norm_of_slices(slices)
        if max_norm is not None:
            scale = jax.lax.optimization_barrier(jnp.float32(max_norm) / jnp.maximum(norm, jnp.float32(max_norm)))
            gradients = tuple(map_elements(lambda g, s: g * s, leaf, scalars=(scale,)) for leaf in gradients)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.masters)
        changes: Any = updates
        return TrainState(tuple(map(jnp.add, state.masters, changes)), optimizer_state), norm

    leaf = P(AXIS) if plan.is_sharded else P()
    example = jax.tree.unflatten(tree, [0] * tree.num_leaves)
    # The count of updates is everywhere; all else is like the masters.
    specs = TrainState(
        jax.tree.map(lambda _: leaf, example.masters),
        type(example.optimizer)(P(), *jax.tree.map(lambda _: leaf, tuple(example.optimizer)[1:])),
    )
    return compilation.jit(_on_devices(plan, step, (specs, leaf), (specs, P())), donate_argnums=0)


def weights_of(state: TrainState, like: Weights, plan: Plan) -> Weights:
    """Returns the masters rounded to weights, in the shapes and dtypes of `like`, on every device."""
    shapes = tuple(jax.ShapeDtypeStruct(weight.shape, weight.dtype) for weight in like)
    return _weights_program(plan, shapes)(state.masters)


@functools.lru_cache(maxsize=32)
def _weights_program(plan: Plan, shapes: tuple[jax.ShapeDtypeStruct, ...]) -> Callable[[tuple[Flat, ...]], Weights]:
    def weights(masters: tuple[Flat, ...]) -> Weights:
        def weight(master: Array, like: jax.ShapeDtypeStruct) -> Array:
            x = rounded(master, like.dtype)
            if plan.is_sharded:
                x = jax.lax.all_gather(x, AXIS, tiled=True)
            return x[: like.size].reshape(like.shape)

        return tuple(map(weight, masters, shapes))

    spec = P(AXIS) if plan.is_sharded else P()
    return compilation.jit(_on_devices(plan, weights, (spec,), P()))


def flat(x: Array, shards: int) -> Flat:
    """Returns an array's elements as one row, with zeros behind them up to a multiple of `shards * contract.LANES`."""
    x = x.reshape(-1)
    return jnp.pad(x, (0, round_up(x.size, shards * LANES) - x.size))


def _on_devices(plan: Plan, fn: Callable[..., Any], inputs: PyTree[P], outputs: PyTree[P]) -> Callable[..., Any]:
    # Loops of the operations begin with zeros that every device has, and go on with what differs between devices.
    return jax.shard_map(fn, mesh=plan.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
