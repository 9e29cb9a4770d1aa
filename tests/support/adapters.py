"""Adapters with random factors, in peft's files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import safetensors.numpy

FIXTURE: Final = Path(__file__).parents[1] / "fixtures" / "qwen3"
LINEAR: Final = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""The linear layers of a dense model, as `target_modules` names them."""


def make_adapter(
    folder: Path,
    targets: Sequence[str],
    rank: int,
    *,
    base: Path = FIXTURE,
    seed: int = 0,
    replaced: Sequence[str] = (),
    **config: Any,
) -> Path:
    """Writes an adapter of a checkpoint to a folder, and returns the folder.

    Args:
        folder: the folder.
        targets: endings of the names of modules with factors.
        rank: the rank of modules without another one in `rank_pattern`, whose keys are endings here.
        base: the checkpoint.
        seed: of the random numbers.
        replaced: tensors to replace.
        config: further keys of `adapter_config.json`.
    """
    rng, tensors = np.random.default_rng(seed), dict[str, np.ndarray]()
    for name, value in safetensors.numpy.load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if value.ndim == 2 and module.endswith(tuple(targets)):
            patterns = config.get("rank_pattern", {}).items()
            ranks = next((other for ending, other in patterns if module.endswith(ending)), rank)
            a, b = rng.standard_normal((ranks, value.shape[1])), rng.standard_normal((value.shape[0], ranks))
            tensors[f"{module}.lora_A.weight"] = a / np.sqrt(value.shape[1])
            tensors[f"{module}.lora_B.weight"] = 0.3 * b / np.sqrt(ranks)
        if name in replaced:
            tensors[name] = value.astype(np.float32) + 0.1 * rng.standard_normal(value.shape)
    folder.mkdir(parents=True)
    contents = {f"base_model.model.{name}": value.astype(np.float32) for name, value in tensors.items()}
    safetensors.numpy.save_file(contents, folder / "adapter_model.safetensors")
    options = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank + 1, "target_modules": list(targets), **config}
    (folder / "adapter_config.json").write_text(json.dumps(options))
    return folder
