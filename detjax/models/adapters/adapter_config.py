"""peft's `adapter_config.json`: the ranks and factors of adapters, and what is refused."""

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from detjax.models.configuration.json_object import JsonObject, parse_json_object, read_file

CONFIG: Final = "adapter_config.json"

_REFUSED: Final[Mapping[str, str]] = {
    "use_dora": "false; DoRA divides by norms of the adapted weight",
    "lora_bias": "false; biases belong to the products of A and B there",
    "use_qalora": "false",
    "fan_in_fan_out": "false; the linear layers of these models store [outputs, inputs]",
    "layer_replication": "null; it makes another stack of layers",
    "trainable_token_indices": "null",
    "target_parameters": 'null; adapters of experts are accepted per module, such as "experts.0.up_proj"',
    "alora_invocation_tokens": "null; the adapter would begin at some tokens of a prompt",
    "megatron_config": "null",
    "arrow_config": "null; it chooses among adapters by activations",
    "use_bdlora": "null",
    "velora_config": "null",
    "monteclora_config": "null",
}
"""Keys that change the result, with the accepted value."""
_CHANGED_BASE: Final = ("pissa", "olora", "corda", "loftq")
"""Beginnings of `init_lora_weights` that change the base model's weights as well."""
_UNUSED: Final = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "task_type"),
        *("peft_version", "megatron_core", "qalora_group_size", "runtime_config", "eva_config", "lora_ga_config"),
        *("layers_to_transform", "layers_pattern", "exclude_modules", "ensure_weight_tying"),
    )
)
"""Keys that do not change the result: they concern training, or the tensors show their effect."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """The options of an adapter.

    Attributes:
        rank: the rank of modules without another one.
        alpha: the numerator of the factors of modules without another one.
        rank_pattern: ranks by patterns of module names. The first pattern that matches counts.
        alpha_pattern: alphas by patterns.
        is_rank_stabilized: whether a factor is `alpha / sqrt(rank)` (Kalajdzievski 2023) and not `alpha / rank`.
        targets: the modules with factors: endings of names, or a regular expression; None: not stated.
        replaced: endings of the names of modules whose weights are replaced.
        replaces_biases: whether biases may be replaced.
        base: the base model's name; None: not stated.
    """

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int] = dataclasses.field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = dataclasses.field(default_factory=dict)
    is_rank_stabilized: bool = False
    targets: tuple[str, ...] | str | None = None
    replaced: tuple[str, ...] = ()
    replaces_biases: bool = False
    base: str | None = None

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module's factors."""
        return _first_match(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Returns the factor of the product of a module's factors."""
        rank, alpha = self.rank_of(module), _first_match(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def has_target(self, module: str) -> bool:
        """Returns whether the configuration gives factors to a module."""
        if self.targets is None:
            return True
        if self.targets == "all-linear":
            return module.rsplit(".", 1)[-1] != "lm_head"
        if isinstance(self.targets, str):
            return re.fullmatch(self.targets, module) is not None
        return any(module == target or module.endswith(f".{target}") for target in self.targets)

    def to_json(self) -> dict[str, Any]:
        """Returns the contents of `adapter_config.json`."""
        targets = self.targets if isinstance(self.targets, str | None) else list(self.targets)
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "inference_mode": True,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "target_modules": targets,
            "rank_pattern": dict(self.rank_pattern),
            "alpha_pattern": dict(self.alpha_pattern),
            "use_rslora": self.is_rank_stabilized,
            "modules_to_save": list(self.replaced) or None,
            "bias": "all" if self.replaces_biases else "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
        }


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Returns the options in a folder's `adapter_config.json`.

    Raises:
        CheckpointError: the file is missing or damaged, or it has an option that is not supported.
    """
    path = folder / CONFIG
    file = JsonObject(parse_json_object(read_file(path), str(path)), str(path))
    file.choice("peft_type", "", ("LORA",))
    if file.raw.get("peft_type") is None:
        raise file.error("peft_type", "LORA")
    for key, accepted in _REFUSED.items():
        if file.get(key):
            raise file.error(key, accepted)
    start = file.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise file.error(
            "init_lora_weights",
            "true, false, gaussian, eva, orthogonal. This one changed the base model too: convert the adapter "
            "to plain LoRA with save_pretrained(path_initial_model_for_weight_conversion=...) of peft",
        )
    if file.get("loftq_config"):
        raise file.error("loftq_config", "{}; LoftQ changed the base model's weights too")
    bias = file.choice("bias", "none", ("none", "all", "lora_only"))
    config = AdapterConfig(
        rank=file.integer("r", 8),
        alpha=file.number("lora_alpha", 8.0),
        rank_pattern=_patterns(file, "rank_pattern", whole=True),
        alpha_pattern=_patterns(file, "alpha_pattern", whole=False),
        is_rank_stabilized=file.boolean("use_rslora", False),
        targets=_targets(file),
        replaced=_names(file, "modules_to_save") or (),
        replaces_biases=bias != "none",
        base=file.get("base_model_name_or_path"),
    )
    for key, value in file.unread().items():
        if key not in _UNUSED and value not in (False, [], {}, ""):
            raise file.error(key, "the keys of LoRA in peft 0.18; this one is not known, and might change the result")
    return config


def _names(file: JsonObject, key: str) -> tuple[str, ...] | None:
    value = file.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise file.error(key, "a list of names of modules")
    return tuple(value)


def _targets(file: JsonObject) -> tuple[str, ...] | str | None:
    value = file.get("target_modules")
    if not isinstance(value, str):
        return _names(file, "target_modules")
    try:
        re.compile(value)
    except re.error as error:
        raise file.error("target_modules", f"a regular expression ({error})") from None
    return value


def _patterns(file: JsonObject, key: str, *, whole: bool) -> dict[str, Any]:
    value = file.get(key)
    if value is None:
        return {}
    accepted = f"an object of patterns and {'integers >= 1' if whole else 'numbers > 0'}"
    kinds = int if whole else (int, float)
    if not isinstance(value, Mapping):
        raise file.error(key, accepted)
    for pattern, number in value.items():
        if not isinstance(number, kinds) or isinstance(number, bool) or not 0 < number < math.inf:
            raise file.error(key, accepted)
        try:
            re.compile(_module_pattern(pattern))
        except re.error as error:
            raise file.error(key, f"{accepted} ({pattern!r}: {error})") from None
    return dict(value)


def _module_pattern(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


def _first_match[T](patterns: Mapping[str, T], module: str, default: T) -> T:
    """Returns the value of the first pattern that matches a module's name, as in peft."""
    return next((value for key, value in patterns.items() if re.match(_module_pattern(key), module)), default)
