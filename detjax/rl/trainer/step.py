"""The gradients of a batch. Their bits depend only on the samples, in order, and on the number of shards.

Layout, rematerialization and the devices that share the batch are schedules.
"""

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float32

from detjax.contract import GRADIENT_SHARDS, LANES
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
from detjax.runtime.ahead import Call, compile_ahead
from detjax.runtime.compilation import ExecutionChoices


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan by which a batch's gradients are computed. Only `shards` affects bits.

    Attributes:
        layout: the layout of sequences in microbatches.
        shards: the number of contiguous parts of the batch whose sums are added as a tree; a power of two. Part of a
            run's configuration, like its seed.
        devices: the devices that share the batch; see `Placement`.
        is_sharded: whether masters and moments are sharded over these devices.
        rematerialized: whether backward passes recompute layers instead of storing activations.
    """

    layout: Layout
    shards: int = GRADIENT_SHARDS
    devices: int | tuple[Any, ...] = 1
    is_sharded: bool = False
    rematerialized: bool = False

    def __post_init__(self) -> None:
        """Raises `ValueError` unless the shards are a power of two and a multiple of the devices."""
        assert self.placement

    @property
    def placement(self) -> Placement:
        """The placement of batch and state on the devices."""
        return Placement(self.shards, self.devices, self.is_sharded)


@dataclasses.dataclass(frozen=True)
class BatchGradients:
    """The gradients of a batch, and the results of its forward passes. Devices may still be computing them.

    Attributes:
        leaves: the gradient of each weight, float32.
        forward: each microbatch, with the logprobs on all devices, and its device's index in them.
    """

    leaves: tuple[Flat, ...]
    forward: list[tuple[PlacedMicrobatch, Float32[Array, "devices *N"], int]]

    @functools.cached_property
    def logprobs(self) -> list[Float32[np.ndarray, "C"]]:
        """The logprobs of each sample's completion. Reading them blocks until the devices are done."""
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
    then: Callable[[], Iterable[Call]] | None = None,
) -> BatchGradients:
    """Returns the gradients of a batch's loss with respect to the weights.

    Args:
        network: the decoder without its weights.
        weights: its weights, on every device.
        samples: the sequences. Their order affects the bits.
        loss: hashable, since programs are cached by it.
        distribution: the distribution that samples were drawn from; the loss takes logprobs under it.
        then: returns the calls that follow. Their programs are compiled together with the gradients' program, if no
            microbatch had these shapes before. None: programs are compiled when they are called.

    Raises:
        ValueError: the batch is empty; or a sample is longer than a row, has images that do not match its prompt, was
            drawn from another distribution, or lacks old logprobs that the loss needs.
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
        # Each device has the same number of consecutive shards, and computes one of them at a time.
        shards = [placed[device * by_device + index] for device in range(placement.count)]
        sums = empty(weights)
        for step in range(max(map(len, shards))):
            row = [shard[step] if step < len(shard) else None for shard in shards]
            # A device without a remaining microbatch computes an empty one, whose gradients are exact zeros.
            empty_one = jax.tree.map(np.zeros_like, next(one.arrays for one in row if one is not None))
            stacked = jax.tree.map(lambda *x: np.stack(x), *(empty_one if one is None else one.arrays for one in row))
            shared = placement.shared(stacked)
            if then is not None and (types := _types((weights, shared))) not in _KNOWN.setdefault(add, set()):
                # The program that takes longest comes first: the others are traced while its kernels are compiled.
                first = Call(add, (weights, sums, shared))
                compile_ahead(itertools.chain([first], _reduced_calls(sums, placement), then()))
                _KNOWN[add].add(types)
            sums, logprobs = add(weights, sums, shared)
            forward += [(one, logprobs, device) for device, one in enumerate(row) if one is not None]
        tree.add(sums)
    return BatchGradients(_reduced(tree.total(), placement), forward)


_KNOWN: Final[weakref.WeakKeyDictionary[Any, set[Any]]] = weakref.WeakKeyDictionary()
"""For each program that adds microbatches, the types of the arguments for which it was compiled ahead."""


def _types(tree: Any) -> Any:
    """Returns what a program of these arguments depends on, for the backend chosen here."""
    leaves, structure = jax.tree.flatten(tree)
    return ExecutionChoices.here(), structure, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)


@functools.lru_cache(maxsize=32)
def _programs(
    network: Network[Decoder], loss: Loss, placement: Placement, rematerialized: bool, distribution: Distribution
) -> tuple[Callable[[Weights, Sums, Microbatch], tuple[Sums, Array]], Callable[[Weights], Sums]]:
    """The program that adds a microbatch of every device, and the program that creates zero sums."""

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
    """Adds the sums over devices, and the two sums of an embedding that is also the head."""
    program, rest = _reduced_program(placement), dict(enumerate(sums))
    del sums
    leaves: dict[int, Flat] = {}
    for indices in update_groups(list(rest.values())):
        # Sums are freed group by group, so that sums and gradients never exist as a whole at the same time.
        given, kept = _given_and_kept([rest.pop(index) for index in indices], placement)
        leaves |= zip(indices, program(given, kept), strict=True)
        del given, kept
    return tuple(leaves[index] for index in range(len(leaves)))


def _reduced_calls(sums: Sums, placement: Placement) -> Iterator[Call]:
    """Yields the calls of `_reduced`."""
    for indices in update_groups(list(sums)):
        yield Call(_reduced_program(placement), _given_and_kept([sums[index] for index in indices], placement))


def _given_and_kept(
    group: Sequence[WeightSums], placement: Placement
) -> tuple[tuple[WeightSums | None, ...], tuple[WeightSums | None, ...]]:
    """Returns the sums whose memory the gradients take, and the others; None stands for sums of the other kind."""
    given = tuple(total if _stays(total, placement) else None for total in group)
    return given, tuple(None if one else total for one, total in zip(given, group, strict=True))


def _stays(total: WeightSums, placement: Placement) -> bool:
    """Returns whether a gradient can lie where its sum lay: the only one, on one device, of a size without padding."""
    first, *others = (part for part in total if part is not None)
    return placement.count == 1 and not others and first.size % (placement.shards * LANES) == 0


@functools.lru_cache(maxsize=32)
def _reduced_program(placement: Placement) -> Callable[..., tuple[Flat, ...]]:
    def reduced(given: tuple[WeightSums | None, ...], kept: tuple[WeightSums | None, ...]) -> tuple[Flat, ...]:
        def leaf(total: WeightSums) -> Array:
            parts = [placement.added(placement.flat(part[0])) for part in total if part is not None]
            return functools.reduce(jnp.add, parts)

        return tuple(leaf(one or other) for one, other in zip(given, kept, strict=True))  # pyright: ignore[reportArgumentType]

    return compilation.jit(placement.on_devices(reduced, (P(AXIS), P(AXIS)), placement.spec), donate_argnums=0)
