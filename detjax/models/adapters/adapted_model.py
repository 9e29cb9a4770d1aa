"""A model with one adapter for all of its rows: what a trainer trains, and what a sampler of RL samples from."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from detjax.contract import RANK_STEP
from detjax.models.adapters.adapter import Adapter, Factors
from detjax.models.adapters.adapter_config import AdapterConfig
from detjax.models.adapters.targets import HEAD_PATH, AdapterArrays, Targets
from detjax.models.checkpoint.loading import without_weights
from detjax.models.configuration.json_object import CheckpointError
from detjax.models.decoder import Decoder
from detjax.models.mesh import everywhere, place, replicate, shardings_of, whole_weights
from detjax.models.network import parameters, split
from detjax.models.parts.sharding import OutputSharding
from detjax.operands.adapted_weight import AdaptedWeight, padded_rank
from detjax.ops import single_adapter
from detjax.ops.adapter_places import places_of_rows

_EMBEDDING_PATH = ("embedding", "weight")
_AXES_OF_FACTORS = 3
"""Axes of the first factors of all slots; factors of experts have one more."""


def with_adapter(model: Decoder, adapter: Adapter) -> Decoder:
    """Returns a decoder whose rows all have the adapter. It shares the weights that the adapter does not replace.

    Adapters of the head, and replaced tables of tokens, untie a head from the embedding.

    Raises:
        CheckpointError: the adapter does not fit the model.
    """
    model = with_replaced(model, adapter)
    targets = Targets(model.config, np.dtype(model.dtype))
    network, weights = split(model)
    shardings = _shardings(model, len(weights))
    adapted, rank = list(weights), padded_rank(adapter.rank)
    for number, by_tensor in targets.factors_of(adapter).items():
        one = targets.adaptable[number]
        mask = one.b_mask(rank)
        mask = None if mask is None else placed(mask, shardings[number], model.mesh)
        arrays = placed_arrays(one.arrays(by_tensor, rank), shardings[number], model.mesh)
        adapted[number] = AdaptedWeight(adapted[number], *arrays, None, mask)
    return network.with_weights(tuple(adapted))


def with_replaced(model: Decoder, adapter: Adapter) -> Decoder:
    """Returns a decoder with the tensors that an adapter replaces, and with a head of its own if it changes a table.

    Raises:
        CheckpointError: the tensors do not fit the model.
    """
    changed = {name.rsplit(".", 1)[0] for name in adapter.replaced} | set(adapter.factors)
    if model.config.tied_embeddings and any(module.endswith(("embed_tokens", "lm_head")) for module in changed):
        model = _untied(model)
    targets = Targets(model.config, np.dtype(model.dtype))
    replaced = targets.replaced_by(adapter)
    wholes = whole_weights(model) if replaced else []
    new = {
        number: targets.with_replaced(number, np.asarray(wholes[number]), tensors)
        for number, tensors in replaced.items()
    }
    return with_weights(model, new)


def with_weights(model: Decoder, new: Mapping[int, np.ndarray]) -> Decoder:
    """Returns a decoder with some whole weights replaced, by their numbers in `Network.paths`."""
    network, weights = split(model)
    shardings = _shardings(model, len(weights))
    put = {number: placed(value, shardings[number], model.mesh) for number, value in new.items()}
    return network.with_weights(tuple(put.get(number, weight) for number, weight in enumerate(weights)))


def merged(model: Decoder, adapter: Adapter) -> Decoder:
    """Returns a decoder with the weights `W + scale B A`; products are computed in float64, and sums rounded once.

    It is another model: its answers have other bits than those with the adapter, and close values. Serve the adapter
    itself where bits count.

    Raises:
        CheckpointError: the adapter does not fit the model.
    """
    model = with_replaced(model, adapter)
    targets, new = Targets(model.config, np.dtype(model.dtype)), dict[int, np.ndarray]()
    wholes = whole_weights(model)
    for number, by_tensor in targets.factors_of(adapter).items():
        parts = targets.adaptable[number].parameter.tensors.split(np.asarray(wholes[number]))
        sums = {}
        for index, (a, b, scale) in by_tensor.items():
            product = np.float64(scale) * (b.astype(np.float64) @ a.astype(np.float64))
            sums[index] = parts[index].astype(np.float64) + product
        new[number] = targets.with_replaced(number, np.asarray(wholes[number]), sums)
    return with_weights(model, new)


def _shardings(model: Decoder, count: int) -> list[OutputSharding | None]:
    return [None] * count if model.mesh is None else list(shardings_of(model, model.mesh))


def adapted_with(model: Decoder, arrays: Mapping[int, tuple[Any, Any, Any]], rows: Array | None) -> Decoder:
    """Returns a decoder with adapters for some weights, by their numbers; `rows` are the slots of its rows."""
    network, weights = split(model)
    slots = {len(a) for a, _, _ in arrays.values() if a.ndim == _AXES_OF_FACTORS}
    # All layers sort their rows alike, so one kernel finds the places for them.
    places = None
    if rows is not None and model.mesh is None and slots and single_adapter.is_served():
        places = places_of_rows(rows, *slots)

    def adapted(weight: Any, a: Array, b: Array, scales: Array) -> AdaptedWeight:
        return AdaptedWeight(weight, a, b, scales, rows, places=places if a.ndim == _AXES_OF_FACTORS else None)

    return network.with_weights(tuple(adapted(x, *arrays[i]) if i in arrays else x for i, x in enumerate(weights)))


def placed(x: np.ndarray, sharding: OutputSharding | None, mesh: Mesh | None) -> Array:
    """Returns an array on the devices that share a model."""
    return replicate(x, None) if mesh is None else place(x, sharding, mesh)


def placed_arrays(
    arrays: AdapterArrays, sharding: OutputSharding | None, mesh: Mesh | None
) -> tuple[Array, Array, Array]:
    """Returns the arrays of adapters on the devices that share a model: `A` on all, `B` by outputs, as the weight.

    Raises:
        CheckpointError: devices share the experts, each having some.
    """
    if sharding is not None and sharding.experts is not None and sharding.experts.shards > 1:
        raise CheckpointError(
            "adapter: it has factors for experts, and the mesh has an axis of experts; accepted: a mesh with the axis "
            "of tensors alone"
        )
    scales = None if sharding is None else sharding.at(-1)
    a = replicate(arrays.a, everywhere(mesh))
    return a, placed(arrays.b, sharding, mesh), placed(arrays.scales, scales, mesh)


def _untied(model: Decoder) -> Decoder:
    """Returns a decoder with a head of its own, a copy of the embedding."""
    empty = without_weights(dataclasses.replace(model.config, tied_embeddings=False), np.dtype(model.dtype))
    for name in ("generation_defaults", "image_options", "video_options", "mesh"):
        setattr(empty, name, getattr(model, name))
    known = dict(parameters(model))
    network = split(empty)[0]
    return network.with_weights(tuple(known[_EMBEDDING_PATH if path == HEAD_PATH else path] for path in network.paths))


def new_adapter(model: Decoder, config: AdapterConfig, *, seed: int = 0) -> Adapter:
    """Returns an adapter to train: its first product is zero, so the model's answers do not change yet.

    As in peft, each A is uniform within `1 / sqrt(inputs)`, and each B is zero.

    Args:
        model: the decoder.
        config: its targets choose the modules. "all-linear" leaves out the head.
        seed: of A.

    Raises:
        ValueError: no module of the model is a target.
    """
    targets, rng = Targets(model.config, np.dtype(model.dtype)), np.random.default_rng(seed)
    factors = {}
    for number, one in targets.adaptable.items():
        for index, (outputs, inputs) in enumerate(one.parameter.shapes.values()):
            module = targets.module_of(number, index)
            if config.has_target(module):
                rank, bound = config.rank_of(module), inputs**-0.5
                a = rng.uniform(-bound, bound, (rank, inputs)).astype(one.parameter.dtype)
                b = np.zeros((outputs, rank), one.parameter.dtype)
                factors[module] = Factors(a, b, np.float32(config.scale_of(module)))
    if not factors:
        raise ValueError(f"new_adapter: targets are {config.targets!r}; accepted: names of the model's linear layers")
    return Adapter(config, factors)


def adapter_of(model: Decoder, config: AdapterConfig | None = None) -> Adapter:
    """Returns the adapter of a decoder that has one, on the host: the inverse of `with_adapter`.

    Weights that an adapter replaced are not part of it.

    Args:
        model: a decoder from `with_adapter`, perhaps trained.
        config: the adapter's options. Default: ranks with padding, and factors as alphas, for each module.

    Raises:
        ValueError: the model has no adapter, or devices share it.
    """
    weights = split(model)[1]
    adapted = {number: weight for number, weight in enumerate(weights) if isinstance(weight, AdaptedWeight)}
    if not adapted or model.mesh is not None or any(weight.rows is not None for weight in adapted.values()):
        raise ValueError("adapter_of: the model has no adapter of its own; accepted: one of with_adapter on one device")
    targets, factors = Targets(model.config, np.dtype(model.dtype)), {}
    for number, weight in adapted.items():
        for index, padded in (
            targets.adaptable[number].factors(AdapterArrays(*map(np.asarray, _arrays(weight)))).items()
        ):
            module = targets.module_of(number, index)
            if config is None:
                factors[module] = padded
            else:
                rank = config.rank_of(module)
                factors[module] = Factors(padded.a[:rank], padded.b[:, :rank], np.float32(config.scale_of(module)))
    if config is None:
        ranks = {re.escape(module): len(one.a) for module, one in factors.items()}
        alphas = {re.escape(module): float(one.scale) * len(one.a) for module, one in factors.items()}
        config = AdapterConfig(rank=RANK_STEP, alpha=1.0, rank_pattern=ranks, alpha_pattern=alphas)
    return Adapter(config, factors)


def _arrays(weight: AdaptedWeight) -> tuple[Any, Any, Any]:
    return weight.a, weight.b, weight.scales
