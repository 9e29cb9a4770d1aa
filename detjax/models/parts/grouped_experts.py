"""DeepSeek-V3's mixtures of experts: sigmoid scores, groups of experts, and experts that all tokens share."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Float32, Int32

from detjax import ops
from detjax.models.parts.experts import Experts, ExpertsOptions, Router
from detjax.models.parts.mlp import GatedMLP, MLPOptions
from detjax.models.parts.parameters import FixedWeight, Tensors, random_weight
from detjax.operands.options import Activation

_EPS = 1e-20
"""Added to the sum of the chosen experts' scores before they are divided by it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedExpertsOptions(ExpertsOptions):
    """The shape and options of mixtures of experts in groups.

    Attributes:
        groups: groups of consecutive experts.
        kept_groups: groups that a token may choose its experts from.
        factor: multiplies the weights of the chosen experts.
        shared: additional experts that every token goes through.
    """

    groups: int
    kept_groups: int
    factor: float
    shared: int


class GroupLimitedRouter(Router):
    """Chooses the experts with the highest corrected scores in the best groups (DeepSeek-AI 2024, section 2.1.2).

    Scores are sigmoids of float32 logits that are not rounded. The correction, float32 in any model, only decides which
    experts are chosen; the weights are the scores without it. Training does not change it.
    """

    def __init__(self, width: int, options: GroupedExpertsOptions, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.options = options
        self.weight = random_weight(rngs, (options.experts, width), dtype)
        self.correction = FixedWeight(jnp.zeros(options.experts, jnp.float32))

    def __call__(self, x: Float[Array, "N D"]) -> tuple[Int32[Array, "N k"], Float32[Array, "N k"]]:
        """Returns the experts of each token in ascending order, and their weights."""
        options = self.options
        scores = ops.sigmoid(ops.matmul(x, self.weight[...], layout="nk", out_dtype="float32"))
        ranks = ops.group_limited_ranks(scores, self.correction[...], groups=options.groups, kept=options.kept_groups)
        choice: dict[str, Any] = {"normalized": options.normalized, "eps": _EPS}
        ids, weights = ops.choose_experts(scores, options.chosen, ranks=ranks, **choice)
        return ids, ops.scale(weights, options.factor)

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        return {"weight": Tensors(("weight",)), "correction": Tensors(("e_score_correction_bias",))}


class GroupedExperts(Experts):
    """Experts in groups, and shared experts, which are one MLP as wide as all of them."""

    CHECKPOINT_NAMES = {"router": "gate", "shared_experts": "shared_experts"}  # noqa: RUF012
    ROUTER: ClassVar[Any] = GroupLimitedRouter

    def __init__(
        self, width: int, options: GroupedExpertsOptions, activation: Activation, *, rngs: nnx.Rngs, dtype: DTypeLike
    ) -> None:
        super().__init__(width, options, activation, rngs=rngs, dtype=dtype)
        mlp = MLPOptions(inner_width=options.shared * options.inner_width, activation=activation)
        self.shared_experts = GatedMLP(width, mlp, rngs=rngs, dtype=dtype)

    def shared(self, x: Float[Array, "N D"]) -> Float[Array, "N D"]:
        """Returns the result of the experts that every token goes through."""
        return self.shared_experts(x)
