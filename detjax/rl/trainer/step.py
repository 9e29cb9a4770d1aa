"""The gradients of a batch, whose bits depend on its samples, in their order, and on the number of shards.

Layout, rematerialization, and the devices that share the batch are schedules.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float32

from detjax.contract import GRADIENT_SHARDS
from detjax.models import Decoder
from detjax.models.network import Network, Weights
from detjax.operands.options import MODEL_DISTRIBUTION, Distribution
from detjax.rl.trainer.gradients import Loss, ShardTree, Sums, WeightSums, empty_sums, next_sums, shard_bounds
from detjax.rl.trainer.microbatches import Layout, Microbatch, PlacedMicrobatch, Sample, by_sequence
from detjax.rl.trainer.placement import AXIS, Flat, Placement, on_host
from detjax.rl.trainer.sample_checks import check_drawn, check_old_logprobs
from detjax.rl.trainer.sample_images import with_rows
from detjax.rl.trainer.update_groups import update_groups
from detjax.runtime import compilation


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a batch's gradients are computed. Bits depend on `shards` alone.

    Attributes:
        layout: how sequences are laid out.
        shards: the contiguous parts of the batch whose sums are added as a tree; a power of two. It belongs to a run's
            configuration, as a seed does.
        devices: the devices that share the batch; see `Placement`.
        is_sharded: whether these devices also share masters and moments, each having a part of every leaf.
        rematerialized: whether backward passes compute layers again in place of keeping their activations.
    """

    layout: Layout
    shards: int = GRADIENT_SHARDS
    devices: int | tuple[Any, ...] = 1
    is_sharded: bool = False
    rematerialized: bool = False

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            ValueError: the shards are no power of two, or the devices do not divide them.
        """
        assert self.placement

    @property
    def placement(self) -> Placement:
        """The devices, and what each of them has."""
        return Placement(self.shards, self.devices, self.is_sharded)


@dataclasses.dataclass(frozen=True)
class BatchGradients:
    """The gradients of a batch, and what the forward passes gave. Devices may still be computing them.

    Attributes:
        leaves: the gradient of each weight, float32.
        forward: each microbatch, the logprobs of its targets on all devices, and the index of its own device.
    """

    leaves: tuple[Flat, ...]
    forward: list[tuple[PlacedMicrobatch, Float32[Array, "devices *N"], int]]

    @functools.cached_property
    def logprobs(self) -> list[Float32[np.ndarray, "C"]]:
        """For each sample the logprobs of its completion. To read them waits for the devices."""
        ordered = sorted(self.forward, key=lambda one: one[0].first)
        host = {id(values): on_host(values) for _, values, _ in ordered}
        return by_sequence(
            [placed for placed, _, _ in ordered], [host[id(values)][device] for _, values, device in ordered]
        )


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
        ValueError: there is no sample, one is longer than a row, has images that are not its prompt's, was drawn from
            another distribution, or lacks the logprobs that the loss compares with.
    """
    if not samples:
        raise ValueError("batch_gradients: no samples; accepted: at least one")
    check_drawn(samples, distribution)
    check_old_logprobs(samples, loss)
    samples = with_rows(network, weights, samples)
    bounds = shard_bounds(len(samples), plan.shards)
    placed = [list(plan.layout.microbatches(samples[begin:end], begin)) for begin, end in bounds]
    placement = plan.placement
    add, empty = _programs(network, loss, placement, plan.rematerialized, distribution)
    by_device, tree, forward = plan.shards // placement.count, ShardTree(), []
    for index in range(by_device):
        # Each device has the same number of consecutive shards, and works on one of them at a time.
        shards = [placed[device * by_device + index] for device in range(placement.count)]
        sums = empty(weights)
        for step in range(max(map(len, shards))):
            row = [shard[step] if step < len(shard) else None for shard in shards]
            # A device that has no microbatch left computes one without sequences, whose gradients are exact zeros.
            nothing = jax.tree.map(np.zeros_like, next(one.arrays for one in row if one is not None))
            stacked = jax.tree.map(lambda *x: np.stack(x), *(nothing if one is None else one.arrays for one in row))
            sums, logprobs = add(weights, sums, placement.shared(stacked))
            forward += [(one, logprobs, device) for device, one in enumerate(row) if one is not None]
        tree.add(sums)
    return BatchGradients(_reduced(tree.total(), placement), forward)


@functools.lru_cache(maxsize=32)
def _programs(
    network: Network[Decoder], loss: Loss, placement: Placement, rematerialized: bool, distribution: Distribution
) -> tuple[Callable[[Weights, Sums, Microbatch], tuple[Sums, Array]], Callable[[Weights], Sums]]:
    """The program that adds a microbatch of every device, and the one that makes sums of zeros."""

    def add(weights: Weights, sums: Sums, microbatch: Microbatch) -> tuple[Sums, Array]:
        sums, microbatch = jax.tree.map(lambda x: x[0], (sums, microbatch))
        options = {"distribution": distribution, "rematerialized": rematerialized}
        result = next_sums(network, weights, sums, microbatch, loss, **options)
        return jax.tree.map(lambda x: x[None], result)

    def empty(weights: Weights) -> Sums:
        return jax.tree.map(lambda x: x[None], empty_sums(network, weights))

    program = placement.on_devices(add, (P(), P(AXIS), P(AXIS)), (P(AXIS), P(AXIS)))
    return (
        compilation.jit(program, donate_argnums=1),
        compilation.jit(placement.on_devices(empty, (P(),), P(AXIS))),
    )


def _reduced(sums: Sums, placement: Placement) -> tuple[Flat, ...]:
    """Returns the sums of all devices, and of the two sums of a table that is also a head."""
    program, rest = _reduced_program(placement), dict(enumerate(sums))
    del sums
    leaves: dict[int, Flat] = {}
    for indices in update_groups(list(rest.values())):
        # Sums are given up round by round, so that they and the gradients never take the memory of both.
        results = program(tuple(rest.pop(index) for index in indices))
        leaves |= zip(indices, results, strict=True)
    return tuple(leaves[index] for index in range(len(leaves)))


@functools.lru_cache(maxsize=32)
def _reduced_program(placement: Placement) -> Callable[[Sums], tuple[Flat, ...]]:
    def reduced(sums: Sums) -> tuple[Flat, ...]:
        def leaf(total: WeightSums) -> Array:
            parts = [placement.added(placement.flat(part[0])) for part in total if part is not None]
            return functools.reduce(jnp.add, parts)

        return tuple(map(leaf, sums))

    return compilation.jit(placement.on_devices(reduced, (P(AXIS),), placement.spec))
