"""A model with one adapter for all of its rows: what a trainer trains, and what a sampler of RL samples from."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from detjax.models.adapters.adapter import Adapter
from detjax.models.adapters.targets import HEAD_PATH, AdapterArrays, Targets
from detjax.models.checkpoint.loading import without_weights
from detjax.models.configuration.json_object import CheckpointError
from detjax.models.decoder import Decoder
from detjax.models.mesh import everywhere, place, replicate, shardings_of, whole_weights
from detjax.models.network import parameters, split
from detjax.models.parts.sharding import OutputSharding
from detjax.operands.adapted_weight import AdaptedWeight, padded_rank

_EMBEDDING_PATH = ("embedding", "weight")


def with_adapter(model: Decoder, adapter: Adapter) -> Decoder:
    """Returns a decoder whose rows all have the adapter. It shares the weights that the adapter does not replace.

    Adapters of the head, and replaced tables of tokens, untie a head from the embedding.

    Raises:
        CheckpointError: the adapter does not fit the model.
    """
    targets = Targets(model.config, np.dtype(model.dtype))
    head = "lm_head"
    changed = {name.rsplit(".", 1)[0] for name in adapter.replaced} | set(adapter.factors)
    tables = {module for module in changed if module.endswith(("embed_tokens", head))}
    if tables and model.config.tied_embeddings:
        model = _untied(model)
        targets = Targets(model.config, np.dtype(model.dtype))
    factors, replaced = targets.factors_of(adapter), targets.replaced_by(adapter)
    network, weights = split(model)
    assert network.paths == targets.paths
    shardings = [None] * len(weights) if model.mesh is None else shardings_of(model, model.mesh)
    wholes = whole_weights(model) if replaced else []
    adapted: list[Any] = list(weights)
    for number, tensors in replaced.items():
        value = targets.with_replaced(number, wholes[number], tensors)
        adapted[number] = placed(value, shardings[number], model.mesh)
    rank = padded_rank(adapter.rank)
    for number, by_tensor in factors.items():
        arrays = targets.adaptable[number].arrays(by_tensor, rank)
        adapted[number] = AdaptedWeight(adapted[number], *placed_arrays(arrays, shardings[number], model.mesh))
    return network.with_weights(tuple(adapted))


def adapted_with(model: Decoder, arrays: Mapping[int, tuple[Any, Any, Any]], rows: Array | None) -> Decoder:
    """Returns a decoder with adapters for some weights, by their numbers; `rows` are the slots of its rows."""
    network, weights = split(model)
    adapted = [AdaptedWeight(x, *arrays[i], rows) if i in arrays else x for i, x in enumerate(weights)]
    return network.with_weights(tuple(adapted))


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
