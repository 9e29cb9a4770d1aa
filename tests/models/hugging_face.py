"""Copies of the fixtures, and ways to change them."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
from safetensors import safe_open

FIXTURES = Path(__file__).parents[1] / "fixtures"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/config.json"))
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "U8": np.uint8,
    "I32": np.int32,
    "I64": np.int64,
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LANGUAGE, TOWER = "model.language_model.", "model.visual."
"""Prefixes of the text model's and the tower's tensor names in a multimodal checkpoint."""


def copied(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / name, folder / name))


def tensors(directory: Path, files: str = "*.safetensors") -> dict[str, np.ndarray]:
    read = {}
    for file in directory.glob(files):
        with safe_open(file, framework="numpy") as handle:
            read |= {name: handle.get_tensor(name) for name in handle.keys()}
    return read


def plain_tensors(directory: Path) -> dict[str, np.ndarray]:
    """The stored tensors of the decoder, by its names, and as they are saved: without MXFP4, with single experts.

    In place of blocks and scales there are the numbers [E, inputs, outputs].
    """
    stored = tensors(directory)
    if any(name.startswith("vision_tower.") for name in stored):
        stored = {name_in_decoder(name): x for name, x in stored.items()}
    if any(name.startswith(LANGUAGE) for name in stored):
        config = json.loads((directory / "config.json").read_text())
        has_tower = "vision_config" in config
        if config["model_type"] == "qwen3_vl_moe":  # rows are inputs
            stored = {name: x.swapaxes(1, 2) if ".experts." in name else x for name, x in stored.items()}
        read = LANGUAGE, "lm_head.", *((TOWER,) if has_tower else ())
        renamed = {name.replace(LANGUAGE, "model.").replace(TOWER, "visual."): name for name in stored}
        stored = by_expert({new: stored[old] for new, old in renamed.items() if old.startswith(read)})
    for blocks in [name for name in stored if name.endswith("_blocks")]:
        name = blocks.removesuffix("_blocks")
        numbers = mxfp4_numbers(stored.pop(blocks), stored.pop(f"{name}_scales"))
        stored[name] = numbers.swapaxes(1, 2).astype(ml_dtypes.bfloat16)
    return stored


def name_in_decoder(name: str) -> str:
    """The decoder's name of a tensor of Kimi K2.5."""
    prefixes = {
        "language_model.": "",
        "vision_tower.encoder.final_layernorm.": "visual.final_norm.",
        "vision_tower.encoder.": "visual.",
        "vision_tower.": "visual.",
        "mm_projector.": "visual.merger.",
    }
    prefix = next(prefix for prefix in prefixes if name.startswith(prefix))
    return prefixes[prefix] + name.removeprefix(prefix)


def by_expert(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors, with gate, up and down of each expert in place of one tensor [E, 2I, D] and one [E, D, I]."""
    read = {}
    for name, x in stored.items():
        prefix, _, tensor = name.rpartition(".experts.")
        prefix = prefix if tensor in ("gate_up_proj", "down_proj") else ""
        for expert in range(len(x)) if prefix else ():
            parts = {tensor: x[expert]}
            if tensor == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), np.split(x[expert], 2), strict=True))
            read |= {f"{prefix}.experts.{expert}.{part}.weight": y for part, y in parts.items()}
        if not prefix:
            read[name] = x
    return read


def mxfp4_numbers(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The numbers [E, outputs, inputs] of blocks and scales, float64: a sign, two bits of exponent, one of size."""
    nibbles = np.stack([blocks % 16, blocks // 16], axis=-1).astype(np.int64)
    negative, exponent, half = nibbles >> 3, nibbles >> 1 & 3, (nibbles & 1) / 2
    sizes = np.where(exponent > 0, (1 + half) * 2.0 ** (exponent - 1), half)
    numbers = np.where(negative, -sizes, sizes).reshape(*scales.shape, 32) * 2.0 ** (
        scales[..., None].astype(int) - 127
    )
    return numbers.reshape(*scales.shape[:2], -1)


@contextlib.contextmanager
def changed_tensors(file: Path) -> Iterator[dict[str, Any]]:
    # Bytes, since safetensors does not give NumPy arrays of eight-bit floating-point numbers.
    read = {
        name: np.frombuffer(entry["data"], DTYPES[entry["dtype"]]).reshape(entry["shape"]).copy()
        for name, entry in safetensors.deserialize(file.read_bytes())
    }
    yield read
    safetensors.numpy.save_file(read, file, metadata={"format": "pt"})


@contextlib.contextmanager
def changed_json(file: Path) -> Iterator[dict[str, Any]]:
    raw = json.loads(file.read_text(encoding="utf-8"))
    yield raw
    file.write_text(json.dumps(raw), encoding="utf-8")
