"""Training as pure functions of pytrees, for loops of any kind: rollouts, gradients and updates.

`params` are a model's weights as `nnx.state(model)` returns them. No function changes its arguments, and results do not
depend on microbatches or devices. `detjax.rl.runs.run` trains with the same steps.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float32, Int32, PyTree

from detjax.contract import ACCUMULATOR, GRADIENT_SHARDS
from detjax.engine import Engine, SamplingParams
from detjax.models import Decoder
from detjax.models.network import split
from detjax.operands.options import MODEL_DISTRIBUTION, Distribution
from detjax.rl import rollouts
from detjax.rl.trainer.gradients import Loss
from detjax.rl.trainer.microbatches import Layout, Sample
from detjax.rl.trainer.placement import Flat, Placement
from detjax.rl.trainer.sample_checks import check_certain
from detjax.rl.trainer.step import Plan, batch_gradients
from detjax.rl.trainer.train_state import TrainState, initial_state, update
from detjax.rl.trainer.trained_weights import gradient_shapes, trained
from detjax.runtime import compilation

type Params = PyTree[Array]
"""A model's weights, as `nnx.state(model)` returns them and `Engine.update_weights` takes them."""


class Rollouts(NamedTuple):
    """Completions of each prompt.

    Attributes:
        tokens: for each prompt and sample, the tokens of the completion, its end token included.
        logprobs: their logprobs under the distribution that they were sampled from.
    """

    tokens: list[list[Int32[np.ndarray, "C"]]]
    logprobs: list[list[Float32[np.ndarray, "C"]]]


class LossAndGradients(NamedTuple):
    """The loss, gradients and logprobs of a batch.

    Attributes:
        loss: computed in float64 from the logprobs.
        gradients: float32, a pytree like the params; zeros for frozen weights.
        logprobs: the logprobs of each sample's completion.
    """

    loss: float
    gradients: PyTree[Float32[Array, "..."]]
    logprobs: list[Float32[np.ndarray, "C"]]


class State(NamedTuple):
    """The state between two training steps.

    Attributes:
        params: the weights.
        training: the float32 masters from which the weights are rounded, and the optimizer state.
    """

    params: Params
    training: TrainState


class Training:
    """The pure functions that train a model.

    Attributes:
        network: the model without its weights.
    """

    def __init__(
        self,
        model: Decoder,
        optimizer: optax.GradientTransformation,
        loss: Loss,
        *,
        max_norm: float | None = 1.0,
        shards: int = GRADIENT_SHARDS,
        distribution: Distribution = MODEL_DISTRIBUTION,
    ) -> None:
        """Binds the functions to a model.

        Args:
            model: the decoder. Its weights are not used; they may be `jax.ShapeDtypeStruct`. With an adapter
                (`detjax.models.with_adapter`), only the adapter's factors are trained, and the other weights are used.
                Gradients then have one leaf for an adapted weight, the numbers of A and then of B, and a single zero
                for other weights.
            optimizer: such as `detjax.rl.trainer.optimizers.adamw`. It sees one leaf at a time.
            loss: see `detjax.rl.trainer.losses`.
            max_norm: gradients with a larger norm are scaled down to it; None: no clipping.
            shards: the number of shards of a batch, whose sums are added as a tree. Part of a run's configuration, like
                its seed.
            distribution: the distribution that samples are drawn from; the loss takes logprobs under it.
        """
        self.network, self._like = split(model)
        self._optimizer, self._loss, self._max_norm = optimizer, loss, max_norm
        self._shards, self._distribution = shards, distribution

    def rollout_function(
        self, engine: Engine, *, max_tokens: int, samples: int = 1
    ) -> Callable[[Params, Sequence[str | Sequence[int]], int], Rollouts]:
        """Returns `rollout(params, prompts, seed)`, which samples completions from the distribution.

        Args:
            engine: computes the completions. Each call of `rollout` replaces its weights, or the adapter that it has
                under the name "policy": then it has the base model's weights, and `max_loras` of at least 1.
            max_tokens: maximum number of tokens of a completion.
            samples: completions of each prompt.
        """
        distribution = dataclasses.asdict(self._distribution)
        sampling = SamplingParams(max_tokens, n=samples, sampling_logprobs=True, **distribution)

        def rollout(params: Params, prompts: Sequence[str | Sequence[int]], seed: int) -> Rollouts:
            adapter = rollouts.give_policy(engine, self.network, self.network.weights(params))
            seeds = rollouts.prompt_seeds(seed, len(prompts))
            groups = rollouts.rollouts(engine, prompts, sampling, seeds, adapter=adapter)
            return Rollouts(
                [[one.completion for one in group] for group in groups],
                [[one.sampling_logprobs for one in group] for group in groups],
            )

        return rollout

    def init(self, params: Params) -> State:
        """Returns the state before the first step."""
        weights = self.network.weights(params)
        placement = Placement(self._shards)
        return State(params, initial_state(weights, self._optimizer, placement, trained=trained(self.network, weights)))

    def loss_and_gradients(
        self,
        params: Params,
        batch: Sequence[Sample],
        *,
        microbatch: Layout,
        mesh: Mesh | None = None,
        rematerialized: bool = False,
    ) -> LossAndGradients:
        """Returns the loss of a batch and its gradients. No bit depends on microbatches or devices.

        Args:
            batch: the sequences. Their order affects the bits.
            microbatch: the layout of microbatches.
            mesh: the devices that share the batch, a power of two up to the number of shards. Gradients are replicated
                on them; axis names do not matter. Default: one device.
            rematerialized: whether the backward pass recomputes layers instead of storing activations, bit for bit.

        Raises:
            ValueError: the batch is empty; a sample is longer than a row, was drawn from another distribution, or lacks
                old logprobs that the loss needs; or the mesh has an unsupported number of devices.
        """
        plan = Plan(
            microbatch, self._shards, 1 if mesh is None else tuple(mesh.devices.flat), rematerialized=rematerialized
        )
        weights = plan.placement.everywhere(self.network.weights(params))
        # No call follows that is known here, but kernels are compiled side by side.
        result = batch_gradients(self.network, weights, batch, self._loss, plan, self._distribution, then=tuple)
        check_certain(batch, self._loss, self._distribution, lambda: result.logprobs)
        leaves = _shaped(result.leaves, tuple(gradient_shapes(self._like)))
        loss = self._loss.value(batch, result.logprobs)
        return LossAndGradients(loss, self.network.state(leaves), result.logprobs)

    def update(self, state: State, gradients: Params, *, donated: bool = False) -> tuple[State, Float32[Array, ""]]:
        """Returns the next state, on the devices that hold the gradients, and the norm of the gradients.

        Args:
            gradients: float32, a pytree like the params.
            donated: donates the buffers of `state.training`, which must not be used afterwards.

        Raises:
            ValueError: the gradients have other shapes or dtypes.
        """
        leaves = self.network.weights(gradients)
        for path, leaf, shape in zip(self.network.paths, leaves, gradient_shapes(self._like), strict=True):
            if (leaf.shape, leaf.dtype) != (shape, ACCUMULATOR):
                raise ValueError(
                    f"update: the gradient of {path} is {leaf.dtype}{list(leaf.shape)}; accepted: float32{list(shape)}"
                )
        placement = Placement(self._shards, _devices(leaves[0]))
        is_trained = [one is not None for one in state.training.optimizer]
        flat = iter(_flat(tuple(itertools.compress(leaves, is_trained)), placement))
        flat = tuple(next(flat) if one else leaf for leaf, one in zip(leaves, is_trained, strict=True))
        training, weights, norm = update(
            placement.placed(state.training),
            flat,
            self.network.weights(state.params),
            self._optimizer,
            placement,
            max_norm=self._max_norm,
            donated=donated,
        )
        return State(self.network.state(weights), training), norm


# One program for all leaves: starting one for each would take longer than the small ones take.
@functools.partial(compilation.jit, static_argnums=1)
def _shaped(leaves: tuple[Flat, ...], shapes: tuple[tuple[int, ...], ...]) -> tuple[Array, ...]:
    pairs = zip(leaves, shapes, strict=True)
    return tuple(x[: int(np.prod(shape))].reshape(shape) for x, shape in pairs)


@functools.partial(compilation.jit, static_argnums=1)
def _flat(leaves: tuple[Array, ...], placement: Placement) -> tuple[Flat, ...]:
    return tuple(map(placement.flat, leaves))


def _devices(leaf: Any) -> tuple[Any, ...]:
    """The devices that hold an array, in mesh order."""
    sharding = jax.numpy.asarray(leaf).sharding
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return tuple(sharding.mesh.devices.flat)
    return tuple(sharding.device_set)
