"""The keys of `config.json` for experts: their number and shape, and the layers that have them."""

from typing import Any, Final

from detjax.models.configuration.json_object import MAX_EXPERTS, JsonObject
from detjax.models.configuration.keys import Key, write_keys
from detjax.models.parts.experts import ExpertsOptions

COUNTS: Final = "num_experts", "num_local_experts"
"""The keys of the number of experts: releases of transformers have used either."""


def read_count(file: JsonObject, default: int, *, minimum: int = 1) -> int:
    """Returns the number of experts, under either of `COUNTS`.

    Raises:
        CheckpointError: it is not an integer, or less than `minimum`.
    """
    return file.integer(count_key(file), default, minimum=minimum, maximum=MAX_EXPERTS)


def count_key(file: JsonObject, keys: tuple[str, str] = COUNTS) -> str:
    """Returns the key that the file uses for the number of experts, or the first if both are missing."""
    return next((key for key in keys if file.get(key) is not None), keys[0])


def read_sparse_layers(file: JsonObject, layers: int) -> tuple[bool, ...]:
    """Returns whether each layer has experts: every `decoder_sparse_step`-th, except for those in `mlp_only_layers`.

    Raises:
        CheckpointError: a value is out of range.
    """
    dense, step = file.get("mlp_only_layers") or [], file.integer("decoder_sparse_step", 1)
    if not isinstance(dense, list) or not all(isinstance(index, int) for index in dense):
        raise file.error("mlp_only_layers", "a list of integers")
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(layers))


def write_sparse_layers(sparse: tuple[bool, ...]) -> dict[str, Any]:
    """Returns the keys of `config.json` that `read_sparse_layers` reads."""
    dense = [index for index, is_sparse in enumerate(sparse) if not is_sparse]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def write_experts(experts: ExpertsOptions, keys: tuple[Key, ...], count: str = COUNTS[0]) -> dict[str, Any]:
    """Returns the keys of `config.json` for the number of experts, and the keys of a table."""
    return {count: experts.experts, "output_router_logits": False} | write_keys(experts, keys)
