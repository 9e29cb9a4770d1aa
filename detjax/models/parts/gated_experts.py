"""Mixtures of experts with a gated shared expert, which all tokens go through."""

import dataclasses

from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from detjax import ops
from detjax.models.parts.experts import Experts, ExpertsOptions
from detjax.models.parts.mlp import GatedMLP, MLPOptions
from detjax.models.parts.parameters import Tensors, random_weight
from detjax.operands.options import Activation


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedExpertsOptions(ExpertsOptions):
    """The shape and options of mixtures of experts with a shared expert.

    Attributes:
        shared_width: the width between the shared expert's projections.
    """

    shared_width: int


class GatedExperts(Experts):
    """Experts, and a shared expert whose result is multiplied by a sigmoid of the token (Qwen Team 2024)."""

    CHECKPOINT_NAMES = {"router": "gate", "shared_expert": "shared_expert"}  # noqa: RUF012

    def __init__(
        self, width: int, options: GatedExpertsOptions, activation: Activation, *, rngs: nnx.Rngs, dtype: DTypeLike
    ) -> None:
        super().__init__(width, options, activation, rngs=rngs, dtype=dtype)
        mlp = MLPOptions(inner_width=options.shared_width, activation=activation)
        self.shared_expert = GatedMLP(width, mlp, rngs=rngs, dtype=dtype)
        self.shared_gate = random_weight(rngs, (1, width), dtype)

    def shared(self, x: Float[Array, "N D"]) -> Float[Array, "N D"]:
        """Returns the shared expert's result times its gate, which is not rounded first."""
        gate = ops.matmul(x, self.shared_gate[...], layout="nk", out_dtype="float32")
        return ops.sigmoid_gated(self.shared_expert(x), gate)

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        return super().tensors | {"shared_gate": Tensors(("shared_expert_gate.weight",))}
