"""The MLP of a layer, with or without a gate."""

import dataclasses
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from detjax import ops
from detjax.models.parts.parameters import Tensors, optional, random_weight, zero_bias
from detjax.models.parts.sharding import OutputSharding, devices, gathered_matmul, outputs
from detjax.operands.options import Activation
from detjax.operands.products import NormalizedRows


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLPOptions:
    """The shape and options of an MLP.

    Attributes:
        inner_width: the width between the projections.
        activation: the activation function; the gate's if the MLP has one.
        bias: whether the projections have biases.
        fused: whether checkpoints have gate and up as one tensor.
    """

    inner_width: int
    activation: Activation
    bias: bool = False
    fused: bool = False


class GatedMLP(nnx.Module):
    """A gated linear unit (Shazeer 2020): `down(activation(gate(x)) * up(x))`.

    Weights are `[N, K]`, rows being outputs, as in checkpoints; gate and up are stacked.
    """

    PRODUCTS: ClassVar = ("gate_up", "down")
    """The parameters that products take in codes as well."""

    def __init__(self, width: int, options: MLPOptions, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        inner = options.inner_width
        self.options = options
        self.width = width
        self.gate_up = random_weight(rngs, (2, inner, width), dtype)
        self.gate_up_bias = zero_bias(options.bias, (2, inner), dtype)
        self.down = random_weight(rngs, (width, inner), dtype)
        self.down_bias = zero_bias(options.bias, (width,), dtype)

    def __call__(
        self, x: Float[Array, "*N D"] | NormalizedRows, *, residual: Float[Array, "*N D"] | None = None
    ) -> Float[Array, "*N D"]:
        """Returns the MLP of `x`, added to the residual stream if there is one."""
        shardings, options = self.shardings(devices()), {"activation": self.options.activation, "gated": True}
        inner: dict[str, Any] = {"sharding": shardings["gate_up"], "bias": optional(self.gate_up_bias), **options}
        y = gathered_matmul(x, self.gate_up[...], **inner)
        outer: dict[str, Any] = {"sharding": shardings["down"], "bias": optional(self.down_bias), "residual": residual}
        return gathered_matmul(y, self.down[...], **outer)

    @property
    def input_weight(self) -> Any:
        """The weight by which all inputs are multiplied; see `RMSNorm.for_product`."""
        return self.gate_up[...]

    def shardings(self, devices: int) -> dict[str, OutputSharding]:
        """Returns the sharding of each parameter."""
        inner, outer = outputs(self.options.inner_width, devices), outputs(self.width, devices)
        return {"gate_up": inner, "gate_up_bias": inner.at(-1), "down": outer, "down_bias": outer.at(-1)}

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        names, fused = ("gate_up_proj",) if self.options.fused else ("gate_proj", "up_proj"), self.options.fused
        return {
            "gate_up": Tensors(tuple(f"{name}.weight" for name in names), joined=fused),
            "gate_up_bias": Tensors(tuple(f"{name}.bias" for name in names), joined=fused),
            "down": Tensors(("down_proj.weight",)),
            "down_bias": Tensors(("down_proj.bias",)),
        }


class MLP(nnx.Module):
    """Two linear maps with biases: `down(activation(up(x)))`. Weights are `[N, K]`, as in checkpoints."""

    def __init__(self, width: int, options: MLPOptions, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        inner = options.inner_width
        self.options = options
        self.up = random_weight(rngs, (inner, width), dtype)
        self.up_bias = zero_bias(options.bias, (inner,), dtype)
        self.down = random_weight(rngs, (width, inner), dtype)
        self.down_bias = zero_bias(options.bias, (width,), dtype)

    def __call__(
        self, x: Float[Array, "*N D"], *, residual: Float[Array, "*N D"] | None = None
    ) -> Float[Array, "*N D"]:
        """Returns the MLP of `x`, added to the residual stream if there is one."""
        bias, activation = optional(self.up_bias), self.options.activation
        y = ops.matmul(x, self.up[...], layout="nk", bias=bias, activation=activation)
        return ops.matmul(y, self.down[...], layout="nk", bias=optional(self.down_bias), residual=residual)

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        return {
            "up": Tensors(("linear_fc1.weight",)),
            "up_bias": Tensors(("linear_fc1.bias",)),
            "down": Tensors(("linear_fc2.weight",)),
            "down_bias": Tensors(("linear_fc2.bias",)),
        }
