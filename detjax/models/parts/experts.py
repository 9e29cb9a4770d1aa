"""Mixtures of experts in place of a layer's MLP."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, Bool, DTypeLike, Float, Float32, Int32

from detjax import ops
from detjax.models.parts.expert_exchange import (
    at_home,
    first_local,
    from_homes,
    local_ids,
    results_at_home,
    whole_experts,
)
from detjax.models.parts.parameters import Tensors, optional, random_weight, zero_bias
from detjax.models.parts.sharding import (
    EXPERT,
    TENSOR,
    OutputSharding,
    ShardGroup,
    devices,
    gathered,
    gathered_grouped_matmul,
    local_columns,
    outputs,
    sharded_grouped_matmul,
)
from detjax.operands.adapted_weight import at_rows
from detjax.operands.kv_pages import Queries, requests_of_tokens
from detjax.operands.options import Activation, Aggregation, Clamp


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsOptions:
    """The shape and options of a decoder's mixtures of experts.

    Attributes:
        experts: experts of a layer.
        chosen: experts that a token chooses.
        inner_width: the width between an expert's projections.
        normalized: whether the weights of the chosen experts are divided by their sum.
        layers: for each layer, whether it has experts in place of an MLP.
        bias: whether the projections of experts have biases.
        clamp: bounds of the gate and up projections; None: no bounds.
        aggregation: the order in which experts' results are added; see `detjax.ops.combine_experts`.
    """

    experts: int
    chosen: int
    inner_width: int
    normalized: bool
    layers: tuple[bool, ...]
    bias: bool = False
    clamp: Clamp | None = None
    aggregation: Aggregation = "contract"


class Router(nnx.Module):
    """Chooses experts for tokens."""

    def __call__(self, x: Float[Array, "N D"]) -> tuple[Int32[Array, "N k"], Float32[Array, "N k"]]:
        """Returns the experts of each token in ascending order, and their weights."""
        raise NotImplementedError

    def with_rows(
        self, x: Float[Array, "N D"], experts: ShardGroup, present: Bool[Array, "N"]
    ) -> tuple[Int32[Array, "N k"], Float32[Array, "N k"], ops.ExpertRows]:
        """Returns the experts of each token, their weights, and the rows of tokens for this device's experts."""
        ids, weights = self(x)
        return ids, weights, ops.expert_rows(local_ids(ids, experts), experts.length, present)


class SoftmaxRouter(Router):
    """Chooses the experts with the highest probabilities, which become their weights (Shazeer et al. 2017; Fedus et al.
    2022).

    Logits are float32 and not rounded.
    """

    def __init__(self, width: int, options: ExpertsOptions, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.options = options
        self.weight = random_weight(rngs, (options.experts, width), dtype)

    def __call__(self, x: Float[Array, "N D"]) -> tuple[Int32[Array, "N k"], Float32[Array, "N k"]]:
        """Returns the experts of each token in ascending order, and their weights."""
        probabilities = ops.softmax(self.logits(x))
        ids, weights = ops.choose_experts(probabilities, self.options.chosen, normalized=self.options.normalized)
        return ids, self.final(weights, ids)

    def with_rows(
        self, x: Float[Array, "N D"], experts: ShardGroup, present: Bool[Array, "N"]
    ) -> tuple[Int32[Array, "N k"], Float32[Array, "N k"], ops.ExpertRows]:
        """Returns the result of `Router.with_rows`, by one kernel where the backend has it."""
        place: dict[str, Any] = {"present": present, "first": first_local(experts), "experts": experts.length}
        logits, options = self.logits(x), self.options
        ids, weights, rows = ops.route(logits, options.chosen, normalized=options.normalized, **place)
        return ids, self.final(weights, ids), rows

    def logits(self, x: Float[Array, "N D"]) -> Float32[Array, "N E"]:
        """Returns the logits of tokens."""
        return ops.matmul(x, self.weight[...], layout="nk", out_dtype="float32")

    def final(self, weights: Float32[Array, "N k"], ids: Int32[Array, "N k"]) -> Float32[Array, "N k"]:
        """Returns the weights by which results are multiplied, from probabilities; here the same."""
        del ids
        return weights

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        return {"weight": Tensors(("weight",))}


class Experts(nnx.Module):
    """Gated MLPs; each token goes through the ones that its router chooses.

    Weights are `[E, N, K]`, rows being outputs, as in checkpoints; gate and up are stacked, `[E, 2, N, K]`.
    """

    CHECKPOINT_NAMES: ClassVar[Mapping[str, str]] = {"router": "gate"}
    PRODUCTS: ClassVar = ("gate_up", "down")
    """The parameters that products take in codes as well."""
    ROUTER: ClassVar[Any] = SoftmaxRouter
    """The class of the router."""
    PROJECTIONS: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """The checkpoint names of the gate, up and down projections."""

    def __init__(
        self, width: int, options: ExpertsOptions, activation: Activation, *, rngs: nnx.Rngs, dtype: DTypeLike
    ) -> None:
        experts, inner = options.experts, options.inner_width
        self.options = options
        self.width = width
        self.activation: Activation = activation
        self.router = self.ROUTER(width, options, rngs=rngs, dtype=dtype)
        self.gate_up = random_weight(rngs, (experts, 2, inner, width), dtype)
        self.gate_up_bias = zero_bias(options.bias, (experts, 2, inner), dtype)
        self.down = random_weight(rngs, (experts, width, inner), dtype)
        self.down_bias = zero_bias(options.bias, (experts, width), dtype)

    def __call__(
        self,
        x: Float[Array, "*N D"],
        queries: Queries,
        *,
        residual: Float[Array, "*N D"] | None = None,
        routed_by: Float[Array, "*N D"] | None = None,
    ) -> Float[Array, "*N D"]:
        """Returns the combined results of each token's experts, added to the residual stream if there is one.

        Args:
            x: the normalized hidden states of the new tokens.
            queries: the requests of these tokens. Padding goes to no expert.
            residual: the residual stream.
            routed_by: the hidden states that the router sees; default: the normalized ones.
        """
        flat = x.reshape(-1, x.shape[-1])
        request, present = requests_of_tokens(queries, x.shape[:-1])
        shardings = self.expert_shardings(devices((TENSOR,)), devices((EXPERT,)))
        experts = whole_experts(self.options.experts, devices((EXPERT,)))
        routed_by = flat if routed_by is None else routed_by.reshape(flat.shape)
        ids, weights, rows = self.router.with_rows(routed_by, experts, present)
        # Rows that pad a group belong to no sequence.
        sequences = request.at[rows.token].get(mode="fill", fill_value=-1)
        options: dict[str, Any] = {"unit": rows.unit, "tiles": rows.tiles, "sequences": sequences}
        gate: dict[str, Any] = {"activation": self.activation, "gated": True, "clamp": self.options.clamp}
        chosen_rows, sizes = rows.gather(flat), rows.group_sizes
        gate_up, down = shardings["gate_up"].output_sharding, shardings["down"].output_sharding
        inner: dict[str, Any] = {"sharding": gate_up, "bias": optional(self.gate_up_bias), **gate, **options}
        outer: dict[str, Any] = {"sharding": down, "bias": optional(self.down_bias), **options}
        gate_up_weight, down_weight = (at_rows(weight[...], rows.token) for weight in (self.gate_up, self.down))
        y = gathered_grouped_matmul(chosen_rows, gate_up_weight, sizes, **inner)
        y = sharded_grouped_matmul(y, down_weight, sizes, **outer)
        # A token's results are added column by column, so each device adds its own columns.
        columns = functools.partial(local_columns, sharding=down)
        given = {"shared": self.shared(flat), "residual": None if residual is None else residual.reshape(flat.shape)}
        addends: dict[str, Any] = {name: columns(addend) for name, addend in given.items() if addend is not None}
        combine = functools.partial(ops.combine_experts, aggregation=self.options.aggregation)
        if experts.shards == 1:
            combined = combine(y, weights, rows, **addends)
        else:
            y = results_at_home(rows.results(y), ids, experts)
            addends = {name: at_home(addend) for name, addend in addends.items()}
            combined = combine(y, at_home(weights), None, **addends)
            combined = from_homes(combined, len(flat))
        return gathered(combined, down).reshape(x.shape)

    def expert_shardings(self, tensor: int, expert: int) -> dict[str, OutputSharding]:
        """Returns the sharding of each parameter: whole experts over the axis `EXPERT`, their outputs over `TENSOR`."""
        sharding = {"over": (TENSOR,), "experts": whole_experts(self.options.experts, expert)}
        inner = dataclasses.replace(outputs(self.options.inner_width, tensor), **sharding)
        outer = dataclasses.replace(outputs(self.width, tensor), **sharding)
        return {"gate_up": inner, "gate_up_bias": inner.at(-1), "down": outer, "down_bias": outer.at(-1)}

    def shared(self, x: Float[Array, "N D"]) -> Float[Array, "N D"] | None:
        """Returns the result of the experts that every token goes through; None if the layer has none."""
        del x

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter, either separate or one for all experts."""
        gate, up, down = self.PROJECTIONS
        experts = range(self.options.experts)
        pairs = tuple(f"experts.{expert}.{name}.weight" for expert in experts for name in (gate, up))
        downs = tuple(f"experts.{expert}.{down}.weight" for expert in experts)
        all_pairs, all_downs = Tensors(("experts.gate_up_proj",), pairs="halves"), Tensors(("experts.down_proj",))
        return {
            "gate_up": Tensors(pairs, stacked=(len(experts), 2), other_form=all_pairs),
            "down": Tensors(downs, stacked=(len(experts),), other_form=all_downs),
        }
