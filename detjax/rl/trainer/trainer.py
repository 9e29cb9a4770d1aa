"""A decoder in training: masters, weights, and the step that updates them."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
import optax
from jaxtyping import Array, Float32, PyTree

from detjax.models import Decoder
from detjax.models.network import Network, Weights, split
from detjax.operands.adapted_weight import AdaptedWeight
from detjax.operands.options import MODEL_DISTRIBUTION, Distribution
from detjax.rl.trainer.entropy import entropies
from detjax.rl.trainer.gradients import Loss, completion_logprobs, last_hidden_states
from detjax.rl.trainer.microbatches import Microbatch, PlacedMicrobatch, Sample, by_sequence
from detjax.rl.trainer.sample_checks import check_certain, check_drawn
from detjax.rl.trainer.sample_images import with_rows
from detjax.rl.trainer.step import Plan, batch_gradients
from detjax.rl.trainer.train_state import TrainState, initial_state, update, update_calls, weights_of
from detjax.rl.trainer.trained_weights import trained, without_masters
from detjax.runtime import compilation


class StepReport(NamedTuple):
    """The report of a training step.

    Attributes:
        logprobs: the logprobs of each sample's completion before the step.
        gradient_norm: the norm of all gradients together.
    """

    logprobs: list[Float32[np.ndarray, "C"]]
    gradient_norm: float


class Scores(NamedTuple):
    """A policy's scores of completions.

    Attributes:
        logprobs: the logprobs of each sample's completion.
        entropies: the entropy of the distribution at each token of each completion, in nats.
    """

    logprobs: list[Float32[np.ndarray, "C"]]
    entropies: list[Float32[np.ndarray, "C"]]


class Trainer:
    """Trains a decoder on the devices of its plan, with bits that depend only on samples and configuration.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from flax import nnx
        >>> import detjax.demo
        >>> from detjax.models import load
        >>> from detjax.rl.trainer.losses import LogLikelihood
        >>> from detjax.rl.trainer.microbatches import Packed, Rows
        >>> from detjax.rl.trainer.optimizers import adamw
        >>> from detjax.rl.policy_gradients.policy_gradient import supervised_samples
        >>> from detjax.rl.trainer.trainer import Trainer
        >>> from detjax.rl.trainer.step import Plan
        >>> model, tokenizer = load(detjax.demo.CHECKPOINT, progress=False)
        >>> samples = supervised_samples([([1, 2, 3], [4, 5]), ([6], [7, 8, 9])])
        >>> weights = []
        >>> for layout in (Rows(sequences=1, length=16), Packed(tokens=64)):
        ...     trainer = Trainer(model, adamw(1e-3), LogLikelihood(), Plan(layout))
        ...     _ = trainer.step(samples)
        ...     weights.append([np.asarray(weight).tobytes() for weight in trainer.weights])
        >>> weights[0] == weights[1]
        True
    """

    def __init__(
        self,
        model: Decoder,
        optimizer: optax.GradientTransformation,
        loss: Loss,
        plan: Plan,
        *,
        max_norm: float | None = 1.0,
        distribution: Distribution = MODEL_DISTRIBUTION,
    ) -> None:
        """Starts training from a model's weights.

        Args:
            model: the decoder, which is not modified. With an adapter (`detjax.models.with_adapter`), the adapter's
                factors are trained, and nothing else.
            optimizer: such as `detjax.rl.trainer.optimizers.adamw`.
            loss: see `detjax.rl.trainer.losses`.
            plan: the training plan.
            max_norm: gradients with a larger norm are scaled down to it; None: no clipping.
            distribution: the distribution that samples are drawn from; the loss takes logprobs under it.
        """
        self.network, weights = split(model)
        self.optimizer, self.loss, self.plan, self.max_norm = optimizer, loss, plan, max_norm
        self.distribution = distribution
        self._like = tuple(
            weight
            if is_fixed or isinstance(weight, AdaptedWeight)
            else jax.ShapeDtypeStruct(weight.shape, weight.dtype)
            for weight, is_fixed in zip(weights, without_masters(weights), strict=True)
        )
        self.state = initial_state(weights, optimizer, plan.placement, trained=trained(self.network, weights))

    @property
    def state(self) -> TrainState:
        """Masters and optimizer state. A state that is set may come from a trainer with another plan."""
        return self._state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._state = self.plan.placement.placed(state)
        self.weights: Weights = weights_of(self._state, self._like, self.plan.placement)

    @property
    def params(self) -> PyTree[Array]:
        """The weights as in `nnx.state(model)`, without a copy; `Engine.update_weights` takes them."""
        return self.network.state(self.weights)

    @property
    def model(self) -> Decoder:
        """The decoder with the weights after the last step."""
        return self.network.with_weights(self.weights)

    def logprobs(self, samples: Sequence[Sample]) -> list[Float32[np.ndarray, "C"]]:
        """Returns the logprobs of each sample's completion, with the bits that an engine reports for these weights."""
        program, placed = _logprobs_program(self.network, self.distribution), self._placed(samples)
        return by_sequence(placed, [program(self.weights, one.arrays) for one in placed])

    def scores(self, samples: Sequence[Sample]) -> Scores:
        """Returns the logprobs of each sample's completion, and the entropies of the distributions."""
        program, placed = _scores_program(self.network, self.distribution), self._placed(samples)
        values = [program(self.weights, one.arrays) for one in placed]
        return Scores(*(by_sequence(placed, arrays) for arrays in zip(*values, strict=True)))

    def _placed(self, samples: Sequence[Sample]) -> list[PlacedMicrobatch]:
        check_drawn(samples, self.distribution)
        return list(self.plan.layout.microbatches(with_rows(self.network, self.weights, samples)))

    def step(self, samples: Sequence[Sample]) -> StepReport:
        """Trains one step.

        Raises:
            ValueError: the batch is empty; or a sample is longer than a row of the plan's layout, was drawn from
                another distribution, or lacks old logprobs that the loss needs.
        """
        placement, max_norm = self.plan.placement, self.max_norm
        gradients = batch_gradients(
            self.network,
            self.weights,
            samples,
            self.loss,
            self.plan,
            self.distribution,
            then=lambda: update_calls(self._state, self.weights, self.optimizer, placement, max_norm=max_norm),
        )
        check_certain(samples, self.loss, self.distribution, lambda: gradients.logprobs)
        self._state, self.weights, norm = update(
            self._state, gradients.leaves, self.weights, self.optimizer, placement, max_norm=max_norm
        )
        return StepReport(gradients.logprobs, float(norm))


@functools.lru_cache(maxsize=32)
def _logprobs_program(network: Network[Decoder], distribution: Distribution) -> Callable[[Weights, Microbatch], Array]:
    def logprobs(weights: Weights, microbatch: Microbatch) -> Array:
        return completion_logprobs(network.with_weights(weights), microbatch, distribution)

    return compilation.jit(logprobs)


@functools.lru_cache(maxsize=32)
def _scores_program(
    network: Network[Decoder], distribution: Distribution
) -> Callable[[Weights, Microbatch], tuple[Array, Array]]:
    def scores(weights: Weights, microbatch: Microbatch) -> tuple[Array, Array]:
        model = network.with_weights(weights)
        hidden = last_hidden_states(model, microbatch)
        return model.logprobs(hidden, microbatch.targets, distribution), entropies(model, hidden, distribution)

    return compilation.jit(scores)
