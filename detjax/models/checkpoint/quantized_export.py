"""Checkpoints with weights rounded to the nearest numbers of 8 or 4 bits, which vLLM reads as well."""

import contextlib
import functools
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, get_args

import ml_dtypes
import numpy as np

from detjax.contract import FP8_BLOCK, FP8_LARGEST
from detjax.models.checkpoint import loading, saving
from detjax.models.checkpoint.directory_files import refuse_adapter, refuse_without_model
from detjax.models.checkpoint.stored_formats import KEY
from detjax.models.checkpoint.weight_files import StoredTensor, open_weights, write_weights
from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import description
from detjax.models.configuration.json_object import CheckpointError, parse_json_object, read_file

ExportFormat = Literal["fp8-block", "fp8-channel", "int4"]
"""Blocks of e4m3 numbers as DeepSeek stores them; e4m3 numbers with a scale for each output, or groups of four-bit
integers, as compressed-tensors stores them."""

_SHARD_BYTES: Final = 5_000_000_000
_WEIGHTS: Final = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack")
_INT4_STEPS: Final = np.float32(7.5)
"""Half the width of the range of four-bit integers."""


def quantize(
    path: str | os.PathLike[str], out: str | os.PathLike[str], to: ExportFormat, *, group_size: int = 128
) -> list[str]:
    """Writes a copy of a checkpoint whose products have quantized weights, and returns the names of those weights.

    Every weight is rounded to the nearest number; nothing is calibrated. Embeddings, heads, routers, norms and the
    up-projections of latent attention stay plain, and so do experts that one tensor holds. The new directory appears
    when it is complete.

    Args:
        path: a checkpoint with plain weights.
        out: the new directory; nothing may exist there.
        to: the format.
        group_size: the columns of a group of "int4".

    Raises:
        CheckpointError: the checkpoint is quantized already, incomplete, or of an unsupported architecture.
        FileExistsError: `out` exists.
        ValueError: an option is unknown or out of range.
    """
    directory, target = Path(path), Path(out).resolve()
    if to not in get_args(ExportFormat):
        raise ValueError(f"quantize: to is {to!r}; accepted: {', '.join(get_args(ExportFormat))}")
    if group_size < 8 or group_size % 8:
        raise ValueError(f"quantize: group_size is {group_size}; accepted: multiples of 8")
    if target.exists():
        raise FileExistsError(f"quantize: {target} exists; accepted: a path that does not exist")
    refuse_without_model(directory)
    refuse_adapter(directory)
    file = directory / loading.CONFIG
    raw = parse_json_object(read_file(file), str(file))
    described = description(raw, str(file))
    if described.file.get(KEY) not in (None, {}):
        raise CheckpointError(f"{file}: {KEY} is present; accepted: a checkpoint with plain weights")
    with contextlib.ExitStack() as files:
        tensors = open_weights(directory, files)[1]
        chosen = _products(tensors, DecoderConfig.from_description(described), described.family)
        plain = [name.removesuffix(".weight") for name, one in tensors.items() if _may_be_linear(one, chosen)]
        int4 = functools.partial(_int4, group_size)
        encode = {"fp8-block": _fp8_blocks, "fp8-channel": _fp8_channels, "int4": int4}[to]
        readers = [_reader(one, encode if name in chosen else None) for name, one in tensors.items()]
        groups = list(zip([one.size for one in tensors.values()], readers, strict=True))
        with saving.new_directory(target) as new:
            shutil.copytree(directory, new, ignore=shutil.ignore_patterns(*_WEIGHTS, ".*"), dirs_exist_ok=True)
            content = raw | {KEY: _described(to, plain, group_size)}
            (new / loading.CONFIG).write_text(f"{json.dumps(content, indent=2)}\n", encoding="utf-8")
            write_weights(new, groups, _SHARD_BYTES)
    return sorted(chosen)


def _products(tensors: Mapping[str, StoredTensor], config: DecoderConfig, family: Any) -> set[str]:
    """Returns the names of the matrices that products take in codes."""
    stored = loading.by_decoder_name(tensors, family, config)
    parameters = loading.parameters_of_checkpoint(loading.without_weights(config, np.dtype(config.dtype)), stored)
    chosen = set[str]()
    for parameter in parameters:
        for name in parameter.shapes if parameter.is_product else ():
            if name not in stored:
                raise CheckpointError(f"tensor {name!r} is missing; accepted: one of shape {parameter.shapes[name]}")
            if name.endswith(".weight") and len(parameter.shapes[name]) == 2:
                chosen.add(stored[name].name)
    return chosen


def _may_be_linear(tensor: StoredTensor, chosen: set[str]) -> bool:
    is_matrix = len(tensor.shape) > 1 and tensor.name.endswith(".weight")
    return is_matrix and tensor.name not in chosen


def _reader(
    tensor: StoredTensor, encode: Callable[[np.ndarray, np.dtype], dict[str, np.ndarray]] | None
) -> Callable[[], dict[str, np.ndarray]]:
    """Returns a function that returns the tensors to write in place of one."""

    def read() -> dict[str, np.ndarray]:
        if encode is None:
            return {tensor.name: tensor.read()}
        weight = tensor.read(np.dtype(np.float32))
        if not np.isfinite(weight).all():
            raise CheckpointError(f"{tensor.file}: tensor {tensor.name!r} holds infinities or NaN; accepted: numbers")
        return {f"{tensor.name}{end}": array for end, array in encode(weight, tensor.dtype).items()}

    return read


def _described(to: ExportFormat, plain: list[str], group_size: int) -> dict[str, Any]:
    """Returns the `quantization_config`."""
    if to == "fp8-block":
        described: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        return described | {"weight_block_size": [FP8_BLOCK, FP8_BLOCK], "modules_to_not_convert": plain}
    weights: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size}
    inputs = None
    if to == "fp8-channel":
        weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
        inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights | {"symmetric": True, "dynamic": False}}
    group |= {"input_activations": inputs, "output_activations": None}
    stored = "float-quantized" if to == "fp8-channel" else "pack-quantized"
    described = {"quant_method": "compressed-tensors", "format": stored, "quantization_status": "compressed"}
    return described | {"kv_cache_scheme": None, "ignore": plain, "config_groups": {"group_0": group}}


# --- formats ----------------------------------------------------------------------------------------------------------


def _e4m3(weight: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return np.clip(weight / scales, -FP8_LARGEST, FP8_LARGEST).astype(ml_dtypes.float8_e4m3fn)


def _not_zero(scales: np.ndarray) -> np.ndarray:
    return np.where(scales == 0, np.ones_like(scales), scales)


def _fp8_blocks(weight: np.ndarray, dtype: np.dtype) -> dict[str, np.ndarray]:
    del dtype
    (rows, columns), size = weight.shape, FP8_BLOCK
    padded = np.pad(np.abs(weight), [(0, -rows % size), (0, -columns % size)])
    largest = padded.reshape(len(padded) // size, size, -1, size).max((1, 3))
    scales = _not_zero(largest / np.float32(FP8_LARGEST))
    wide = scales.repeat(size, 0)[:rows].repeat(size, 1)[:, :columns]
    return {"": _e4m3(weight, wide), "_scale_inv": scales}


def _fp8_channels(weight: np.ndarray, dtype: np.dtype) -> dict[str, np.ndarray]:
    del dtype
    scales = _not_zero(np.abs(weight).max(1, keepdims=True) / np.float32(FP8_LARGEST))
    return {"": _e4m3(weight, scales), "_scale": scales}


def _int4(group: int, weight: np.ndarray, dtype: np.dtype) -> dict[str, np.ndarray]:
    rows, columns = weight.shape
    padded = np.pad(np.abs(weight), [(0, 0), (0, -columns % group)])
    scales = _not_zero((padded.reshape(rows, -1, group).max(2) / _INT4_STEPS).astype(dtype))
    wide = scales.astype(np.float32).repeat(group, 1)[:, :columns]
    codes = np.clip(np.rint(weight / wide), -8, 7).astype(np.int64) + 8
    words = np.pad(codes, [(0, 0), (0, -columns % 8)]).reshape(rows, -1, 8) << 4 * np.arange(8)
    packed = words.sum(-1).astype(np.uint32).view(np.int32)
    return {"_packed": packed, "_scale": scales, "_shape": np.array([rows, columns], np.int64)}
