"""Mixtures of experts whose router normalizes the hidden state, and whose weights have a factor for each expert."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Float32, Int32

from detjax import ops
from detjax.models.parts.experts import Experts, ExpertsOptions, SoftmaxRouter
from detjax.models.parts.parameters import Tensors, random_weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledExpertsOptions(ExpertsOptions):
    """The shape and options of mixtures of experts with such a router.

    Attributes:
        norm_eps: epsilon of the router's norm.
    """

    norm_eps: float


class ScaledRouter(SoftmaxRouter):
    """Chooses the experts with the highest probabilities; their weights are normalized, then times the experts' scales.

    The router sees the RMS norm of the hidden state, times a weight for each column and `1 / sqrt(width)`. Logits are
    float32 and not rounded, and the last factor multiplies them.
    """

    def __init__(self, width: int, options: ScaledExpertsOptions, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.options = options
        self.factor = width**-0.5
        self.norm = nnx.Param(jnp.ones(width, dtype))
        self.weight = random_weight(rngs, (options.experts, width), dtype)
        self.expert_scales = nnx.Param(jnp.ones(options.experts, dtype))

    def logits(self, x: Float[Array, "N D"]) -> Float32[Array, "N E"]:
        """Returns the logits of tokens."""
        y = ops.rms_norm(x, self.norm[...], eps=self.options.norm_eps)
        return ops.scale(ops.matmul(y, self.weight[...], layout="nk", out_dtype="float32"), self.factor)

    def final(self, weights: Float32[Array, "N k"], ids: Int32[Array, "N k"]) -> Float32[Array, "N k"]:
        """Returns normalized weights times the experts' scales."""
        # An accumulated weight is reshaped together with its sum.
        table: Any = jax.tree.map(lambda scales: scales.reshape(-1, 1), self.expert_scales[...])
        return ops.multiply(weights, ops.embed(ids, table)[..., 0])

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        return {
            "norm": Tensors(("scale",)),
            "weight": Tensors(("proj.weight",)),
            "expert_scales": Tensors(("per_expert_scale",)),
        }


class ScaledExperts(Experts):
    """Experts that such a router chooses; in checkpoints, one tensor has the projections of all of them."""

    CHECKPOINT_NAMES = {"router": "router"}  # noqa: RUF012
    ROUTER: ClassVar[Any] = ScaledRouter

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        return {
            "gate_up": Tensors(("experts.gate_up_proj",), pairs="halves"),
            "down": Tensors(("experts.down_proj",)),
        }
