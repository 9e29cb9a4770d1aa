"""Gradients of a batch: sums accumulated over microbatches, and shards added as a tree."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from detjax import ops
from detjax.contract import ACCUMULATOR
from detjax.models import Decoder
from detjax.models.network import Network, Weights
from detjax.operands.accumulated_weight import AccumulatedWeight
from detjax.operands.options import MODEL_DISTRIBUTION, Distribution
from detjax.rl.trainer.microbatches import Microbatch, Sample
from detjax.rl.trainer.trained_weights import gradient_shapes, trained, with_sums, without_masters
from detjax.runtime import compilation


@runtime_checkable
class Loss(Protocol):
    """A loss: its gradient with respect to logprobs, and its value; see `detjax.rl.trainer.losses`.

    A loss that ignores old logprobs may set its attribute `needs_old_logprobs` to False.
    """

    def __call__(self, logprobs: Float32[Array, "*N"], microbatch: Microbatch) -> Float32[Array, "*N"]:
        """Returns the gradient for the logprob of each target of a microbatch."""
        ...

    def value(self, samples: Sequence[Sample], logprobs: Sequence[Float32[np.ndarray, "_"]]) -> float:
        """Returns the value of the loss for the logprobs of each sample's completion."""
        ...


_TABLE: Final = "embedding", "weight"
_HEAD: Final = "lm_head", "weight"
"""Paths of a decoder's weights. With tied embeddings, the embedding is the head."""
_TABLES: Final = frozenset({_TABLE, ("router", "expert_scales")})
"""The last two levels of the paths of weights whose rows are looked up."""


class WeightSums(NamedTuple):
    """The sums of one weight's gradients, float32; see `AccumulatedWeight`."""

    products: Float32[Array, "..."] | None
    lookups: Float32[Array, "..."] | None


type Sums = tuple[WeightSums, ...]
"""The sums of all weights of a network, in the order of the weights."""


def empty_sums(network: Network[Decoder], weights: Weights) -> Sums:
    """Returns zero sums for each weight of a decoder. The sums of frozen weights stay zero."""

    def empty(path: tuple[object, ...], shape: tuple[int, ...]) -> WeightSums:
        zeros = functools.partial(jnp.zeros, shape, ACCUMULATOR)
        is_table = path[-2:] in _TABLES
        is_multiplied = not is_table or path == network.paths[_head_index(network)]
        return WeightSums(zeros() if is_multiplied else None, zeros() if is_table else None)

    return tuple(empty(path, shape) for path, shape in zip(network.paths, gradient_shapes(weights), strict=True))


def completion_logprobs(model: Decoder, microbatch: Microbatch, distribution: Distribution) -> Float32[Array, "*N"]:
    """Returns the logprob of each target of a microbatch, under a distribution."""
    return model.logprobs(last_hidden_states(model, microbatch), microbatch.targets, distribution)


def last_hidden_states(model: Decoder, microbatch: Microbatch, *, rematerialized: bool = False) -> Float[Array, "*N D"]:
    """Returns the normalized last hidden state of each token of a microbatch."""
    state = model.empty_state(microbatch.num_pages, slots=microbatch.queries.start.shape[0])
    hidden, _ = model.hidden_states(
        microbatch.tokens, microbatch.queries, state, images=microbatch.images, rematerialized=rematerialized
    )
    return hidden


def next_sums(
    network: Network[Decoder],
    weights: Weights,
    sums: Sums,
    microbatch: Microbatch,
    loss: Loss,
    distribution: Distribution = MODEL_DISTRIBUTION,
    *,
    rematerialized: bool = False,
) -> tuple[Sums, Float32[Array, "*N"]]:
    """Adds a microbatch's gradients to the sums, and returns them with the logprob of each target.

    Args:
        rematerialized: recompute each layer in the backward pass instead of storing activations. No bit depends on it.
    """

    head = _head_index(network)
    # A head that is never trained has no gradient to compute.
    is_fixed = without_masters(weights)[head]
    head_weight = weights[head] if is_fixed else AccumulatedWeight(weights[head], sums[head].products)

    def hidden_states(sums: Sums) -> Array:
        leaves = zip(weights, sums, trained(network, weights), strict=True)
        model = network.with_weights(
            tuple(with_sums(weight, *total) if is_trained else weight for weight, total, is_trained in leaves)
        )
        return last_hidden_states(model, microbatch, rematerialized=rematerialized)

    # The head's forward and backward pass run together between the passes of the layers, so logits are computed once.
    layer_sums = (*sums[:head], sums[head]._replace(products=None), *sums[head + 1 :])
    hidden, pullback = jax.vjp(hidden_states, layer_sums)
    rows = map(jnp.asarray, microbatch[:4])
    logprobs, dhidden, products = ops.token_logprobs_and_gradients(
        hidden,
        head_weight,
        jnp.asarray(microbatch.targets),
        _Derivative(loss),
        *rows,
        distribution=distribution,
        **network.with_weights(weights).head.logit_options,
    )
    if is_fixed:
        products = sums[head].products
    (sums,) = pullback(dhidden)
    return (*sums[:head], sums[head]._replace(products=products), *sums[head + 1 :]), logprobs


def _head_index(network: Network[Decoder]) -> int:
    """The index of the head among a decoder's weights."""
    return network.paths.index(_HEAD if _HEAD in network.paths else _TABLE)


@dataclasses.dataclass(frozen=True)
class _Derivative:
    """A loss as a function of arrays only."""

    loss: Loss

    def __call__(self, logprobs: Array, *rows: Array) -> Array:
        # The derivative at a token does not depend on its position in a sequence.
        return self.loss(logprobs, Microbatch(*rows, queries=None))  # pyright: ignore[reportArgumentType]


class ShardTree:
    """Adds the sums of shards as a balanced binary tree, and holds one partial result per level."""

    def __init__(self) -> None:
        self._levels: list[tuple[int, Sums]] = []

    def add(self, sums: Sums) -> None:
        """Appends the next shard's sums. Their buffers are donated."""
        level = 0
        while self._levels and self._levels[-1][0] == level:
            _, left = self._levels.pop()
            sums, level = _added(left, sums), level + 1
        self._levels.append((level, sums))

    def total(self) -> Sums:
        """Returns the sum of all shards and clears the tree.

        Raises:
            ValueError: the number of shards is not a power of two.
        """
        if len(self._levels) != 1:
            shards = sum(2**level for level, _ in self._levels)
            raise ValueError(f"ShardTree.total: {shards} shards; accepted: a power of two")
        return self._levels.pop()[1]


@functools.partial(compilation.jit, donate_argnums=0)
def _added(left: Sums, right: Sums) -> Sums:
    return jax.tree.map(jnp.add, left, right)


def shard_bounds(sequences: int, shards: int) -> list[tuple[int, int]]:
    """Returns the first sequence of each shard, and the sequence after its last."""
    bounds = [shard * sequences // shards for shard in range(shards + 1)]
    return list(itertools.pairwise(bounds))
