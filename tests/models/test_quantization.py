"""Weights in blocks of fp8 and groups of int4: what they are read as, and what is refused. MXFP4: test_gpt_oss.py."""

import contextlib
import json
import math
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from detjax.models import CheckpointError, load, save
from detjax.models.checkpoint import quantization
from detjax.models.checkpoint.quantization import BlockFormat
from detjax.models.checkpoint.stored_formats import stored_formats
from detjax.models.checkpoint.weight_files import StoredTensor, open_weights
from detjax.models.configuration.json_object import JsonObject
from tests.models.hugging_face import FIXTURES, SINGLE, changed_json, changed_tensors, copied, tensors
from tests.support.bits import assert_same_bits

FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
GROUP: dict[str, Any] = {
    "input_activations": None,
    "output_activations": None,
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "actorder": None},
}
INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*self_attn.*", "shared_experts", r"re:.*mlp\.(gate|up|down)_proj"],
    "kv_cache_scheme": None,
}
LINEAR = re.compile(r".*(_proj|_proj_with_mqa)\.weight")
EXPERT = re.compile(r".*\.experts\.\d+\..*\.weight")
STORED = np.load(FIXTURES / "quantization.npz")


def fp8_config(rows: int, columns: int, **changes: Any) -> dict[str, Any]:
    return FP8 | {"weight_block_size": [rows, columns]} | changes


def int4_config(group: int, **changes: Any) -> dict[str, Any]:
    return (
        INT4 | {"config_groups": {"group_0": GROUP | {"weights": GROUP["weights"] | {"group_size": group}}}} | changes
    )


def block_format(config: dict[str, Any]) -> BlockFormat:
    described = stored_formats(JsonObject({"quantization_config": config}, "config.json"))
    assert described is not None
    ((_, scheme),) = described.groups
    assert isinstance(scheme.matrix_format, BlockFormat)
    return scheme.matrix_format


def values(config: dict[str, Any], parts: dict[str, np.ndarray], folder: Path, dtype: Any = "float32") -> np.ndarray:
    """Reads the plain tensor that `parts` encode from a file."""
    safetensors.numpy.save_file({name: np.ascontiguousarray(x) for name, x in parts.items()}, folder / SINGLE)
    with contextlib.ExitStack() as files:
        plain = block_format(config).dequantized(open_weights(folder, files)[1])
        assert list(plain) == ["w.weight"]
        result = plain["w.weight"].read(np.dtype(dtype))
        assert result.shape == plain["w.weight"].shape
        return result


# --- the contract a second time, in float64 ---------------------------------------------------------------------------


def e4m3(codes: np.ndarray) -> np.ndarray:
    """The numbers of bytes: a sign, four bits of exponent, three of fraction; float64."""
    exponent, fraction = codes.astype(int) >> 3 & 15, (codes & 7) / 8
    sizes = np.where(exponent > 0, (1 + fraction) * 2.0 ** (exponent - 7), fraction * 2.0**-6)
    return np.where(codes >> 7, -sizes, sizes)


def int4(codes: np.ndarray, columns: int) -> np.ndarray:
    """The numbers of 32-bit words, the lowest four bits first; float64."""
    nibbles = [codes.astype(np.int64) >> 4 * place & 15 for place in range(8)]
    return np.stack(nibbles, axis=-1).reshape(*codes.shape[:-1], -1)[..., :columns] - 8.0


def products(numbers: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Each number times its block's scale, one by one; float32. The float64 products are exact."""
    result = np.empty(numbers.shape, np.float32)
    for *index, row, column in np.ndindex(numbers.shape):
        place = (*index, row, column)
        scale = scales[(*index, row // block[0], column // block[1])]
        result[place] = np.float32(numbers[place] * np.float64(scale))
    return result


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("shape", "block"), [((7, 9), (4, 4)), ((130, 3), (128, 128)), ((2, 5, 200), (1, 128))])
def test_fp8_is_read_as_products_in_float32(
    tmp_path: Path, shape: tuple[int, ...], block: tuple[int, int], scale_dtype: str
) -> None:
    random = np.random.default_rng(0)
    finite = np.setdiff1d(np.arange(256), [127, 255]).astype(np.uint8)
    codes = random.permutation(np.resize(finite, math.prod(shape))).reshape(shape)
    grid = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
    scales = (random.standard_normal(grid) / 3).astype(np.dtype(scale_dtype))
    expected = products(e4m3(codes), scales, block)
    parts = {"w.weight": codes.view(ml_dtypes.float8_e4m3fn), "w.weight_scale_inv": scales}
    for dtype in ("float32", "bfloat16", "float16"):
        assert_same_bits(values(fp8_config(*block), parts, tmp_path, dtype), expected.astype(np.dtype(dtype)))


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("shape", "group"), [((3, 64), 32), ((5, 41), 32), ((2, 3, 70), 32), ((4, 8), 128)])
def test_int4_is_read_as_products_in_float32(
    tmp_path: Path, shape: tuple[int, ...], group: int, scale_dtype: str
) -> None:
    random = np.random.default_rng(0)
    codes = random.integers(-(2**31), 2**31, (*shape[:-1], -(-shape[-1] // 8)), dtype=np.int32)
    scales = random.standard_normal((*shape[:-1], -(-shape[-1] // group))).astype(np.dtype(scale_dtype))
    expected = products(int4(codes, shape[-1]), scales, (1, group))
    parts = {"w.weight_packed": codes, "w.weight_scale": scales, "w.weight_shape": np.array(shape)}
    for dtype in ("float32", "bfloat16", "float16"):
        assert_same_bits(values(int4_config(group), parts, tmp_path, dtype), expected.astype(np.dtype(dtype)))


def test_scales_of_fp8_may_be_powers_of_two(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    codes = random.integers(0, 127, (20, 30), dtype=np.uint8)
    exponents = random.integers(120, 130, (5, 4), dtype=np.uint8)
    parts = {"w.weight": codes.view(ml_dtypes.float8_e4m3fn)}
    parts["w.weight_scale_inv"] = exponents.view(ml_dtypes.float8_e8m0fnu)
    expected = products(e4m3(codes), 2.0 ** (exponents.astype(int) - 127), (4, 8))
    assert_same_bits(values(fp8_config(4, 8), parts, tmp_path), expected)


def fp8_parts(*shape: int) -> dict[str, np.ndarray]:
    """Random matrices in blocks of 4 x 8."""
    random = np.random.default_rng(0)
    grid = (*shape[:-2], -(-shape[-2] // 4), -(-shape[-1] // 8))
    codes = random.integers(0, 127, shape, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    return {"w.weight": codes, "w.weight_scale_inv": random.standard_normal(grid, np.float32)}


def int4_parts(*shape: int) -> dict[str, np.ndarray]:
    """Random matrices in groups of 12."""
    random = np.random.default_rng(0)
    codes = random.integers(-(2**31), 2**31, (*shape[:-1], -(-shape[-1] // 8)), dtype=np.int32)
    scales = random.standard_normal((*shape[:-1], -(-shape[-1] // 12)), np.float32)
    return {"w.weight_packed": codes, "w.weight_scale": scales, "w.weight_shape": np.array(shape, np.int32)}


def mxfp4_parts(*shape: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    draws = {"blocks": (0, 256, (*shape, 16)), "scales": (120, 130, shape)}
    return {f"w.weight_{name}": random.integers(*draw, dtype=np.uint8) for name, draw in draws.items()}


@pytest.mark.parametrize("at_once", [1, 97, 250, 2000])
@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (fp8_config(4, 8), fp8_parts(50, 24)),
        (fp8_config(4, 8), fp8_parts(2, 3, 13, 23)),
        (int4_config(12), int4_parts(3, 11, 45)),
        ({"quant_method": "mxfp4"}, mxfp4_parts(2, 11, 3)),
    ],
    ids=["fp8", "fp8 of several matrices", "int4", "mxfp4"],
)
def test_matrices_are_read_in_pieces_of_whole_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], parts: dict[str, np.ndarray], at_once: int
) -> None:
    whole, codes = values(config, parts, tmp_path), next(iter(parts))
    counts, read_bytes = list[int](), StoredTensor.read_bytes

    def counted(tensor: StoredTensor, first: int, count: int) -> np.ndarray:
        if tensor.name == codes:
            counts.append(count)
        return read_bytes(tensor, first, count)

    monkeypatch.setattr(StoredTensor, "read_bytes", counted)
    monkeypatch.setattr("detjax.models.checkpoint.quantization._NUMBERS_AT_ONCE", at_once)
    assert_same_bits(values(config, parts, tmp_path), whole)
    assert sum(counts) == parts[codes].nbytes
    assert max(counts) <= max(at_once, 4 * 24)  # no number takes more than a byte, no row of blocks more than 96


# --- other libraries --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["whole", "experts", "ragged"])
def test_fp8_has_the_bits_of_transformers(tmp_path: Path, name: str) -> None:
    codes, scales, expected = (STORED[f"fp8_{name}_{part}"] for part in ("codes", "scales", "values"))
    expected = expected if expected.dtype == np.float32 else expected.view(ml_dtypes.bfloat16)
    parts = {"w.weight": codes.view(ml_dtypes.float8_e4m3fn), "w.weight_scale_inv": scales}
    assert_same_bits(values(fp8_config(8, 8), parts, tmp_path, expected.dtype), expected)


@pytest.mark.parametrize(("name", "group"), [("whole", 32), ("ragged", 12)])
def test_int4_has_the_bits_of_compressed_tensors(tmp_path: Path, name: str, group: int) -> None:
    codes, scales, shape, expected = (STORED[f"int4_{name}_{part}"] for part in ("codes", "scales", "shape", "values"))
    parts = {
        "w.weight_packed": codes,
        "w.weight_scale": scales.view(ml_dtypes.bfloat16),
        "w.weight_shape": shape,
    }
    result = values(int4_config(group), parts, tmp_path, "bfloat16")
    assert_same_bits(result, expected.view(ml_dtypes.bfloat16))


# --- checkpoints ------------------------------------------------------------------------------------------------------


def in_fp8(name: str, weight: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A weight's tensors in blocks of 16 x 24, and what they stand for."""
    grid = (-(-weight.shape[0] // 16), -(-weight.shape[1] // 24))
    scales = np.random.default_rng(0).uniform(0.001, 0.01, grid).astype(np.float32)
    wide = scales.repeat(16, 0)[: weight.shape[0]].repeat(24, 1)[:, : weight.shape[1]]
    codes = (weight.astype(np.float32) / wide).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scales}, e4m3(codes.view(np.uint8)) * wide


def in_int4(name: str, weight: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A weight's tensors in groups of 32, and what they stand for."""
    rows, columns = weight.shape
    scales = np.full((rows, -(-columns // 32)), 0.04, ml_dtypes.bfloat16)
    scales[::2] = 0.06
    wide = scales.astype(np.float32).repeat(32, 1)[:, :columns]
    numbers = (weight.astype(np.float32) / wide).round().clip(-8, 7).astype(np.int64)
    padded = np.pad(numbers + 8, ((0, 0), (0, -columns % 8))).reshape(rows, -1, 8)
    codes = (padded << 4 * np.arange(8)).sum(-1).astype(np.uint32).view(np.int32)
    parts = {f"{name}_packed": codes, f"{name}_scale": scales, f"{name}_shape": np.array([rows, columns])}
    return parts, numbers * wide


CHECKPOINTS: dict[str, tuple[str, dict[str, Any], re.Pattern, Callable]] = {
    "fp8": ("deepseek-v3", fp8_config(16, 24), LINEAR, in_fp8),
    "int4": ("kimi-k2", int4_config(32), EXPERT, in_int4),
    "fp8 of a dense model": ("llama3", fp8_config(16, 24, modules_to_not_convert=["lm_head"]), LINEAR, in_fp8),
}


def quantized(kind: str, folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A quantized checkpoint, and the plain tensors that it stands for, rounded to bfloat16."""
    name, config, pattern, store = CHECKPOINTS[kind]
    directory = copied(name, folder)
    with changed_json(directory / "config.json") as raw:
        raw["quantization_config"] = config
    plain = {}
    with changed_tensors(directory / SINGLE) as stored:
        for name in [name for name in stored if pattern.fullmatch(name)]:
            parts, numbers = store(name, stored.pop(name))
            stored |= parts
            plain[name] = numbers.astype(np.float32).astype(ml_dtypes.bfloat16)
        assert plain
    return directory, plain


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_quantized_checkpoint_is_the_plain_one_that_it_stands_for(tmp_path: Path, kind: str) -> None:
    directory, plain = quantized(kind, tmp_path)
    model = load(directory, quantized="widened")[0]
    other = copied(CHECKPOINTS[kind][0], tmp_path / "plain")
    with changed_tensors(other / SINGLE) as stored:
        stored |= plain
    assert_same_bits(nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(load(other)[0])))

    save(model, tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    assert_same_bits(tensors(tmp_path / "saved"), tensors(other))


def test_quantized_layers_that_predict_further_tokens_are_passed_over(tmp_path: Path) -> None:
    directory, _ = quantized("fp8", tmp_path)
    expected = nnx.to_pure_dict(nnx.state(load(directory, quantized="widened")[0]))
    with changed_tensors(directory / SINGLE) as stored:
        stored |= in_fp8("model.layers.2.eh_proj.weight", np.ones((20, 30), np.float32))[0]
    assert_same_bits(nnx.to_pure_dict(nnx.state(load(directory, quantized="widened")[0])), expected)


def test_no_checkpoint_is_held_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, _ = quantized("fp8", tmp_path)
    wide = 4096
    with changed_json(directory / "config.json") as raw:
        raw |= {"intermediate_size": wide, "moe_intermediate_size": wide}
    with changed_tensors(directory / SINGLE) as stored:
        for name in [name for name in stored if LINEAR.fullmatch(name) and ".mlp." in name]:
            rows, columns = (wide if size in (20, 72) else size for size in stored[name].shape)
            stored |= in_fp8(name, np.full((rows, columns), 0.01, np.float32))[0]
    load(directory, quantized="widened")  # what is made once is not counted
    monkeypatch.setattr(quantization, "_NUMBERS_AT_ONCE", 1 << 14)
    tracemalloc.start()
    model = load(directory, quantized="widened")[0]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    sizes = [weight.nbytes for weight in nnx.to_flat_state(nnx.state(model)).leaves]
    assert max(sizes) > 6_000_000
    assert peak < sum(sizes) + max(sizes) / 2


# --- what is refused --------------------------------------------------------------------------------------------------

O_PROJ = "model.layers.0.self_attn.o_proj.weight"
DOWN = "model.layers.1.mlp.experts.1.down_proj.weight"


def nothing(x: np.ndarray) -> None:
    del x


def first_is(value: Any) -> Callable[[np.ndarray], np.ndarray]:
    def changed(x: np.ndarray) -> np.ndarray:
        x = x.copy()
        x.reshape(-1)[0] = value
        return x

    return changed


@pytest.mark.parametrize(
    ("kind", "name", "change", "words"),
    [
        ("fp8", f"{O_PROJ}_scale_inv", nothing, f"'{O_PROJ}_scale_inv' is missing, which belongs to '{O_PROJ}'"),
        ("fp8", O_PROJ, nothing, f"'{O_PROJ}' is missing, which belongs to '{O_PROJ}_scale_inv'"),
        ("fp8", O_PROJ, lambda x: x.astype(np.float32), f"'{O_PROJ}' is stored as F32; accepted: F8_E4M3, as fp8"),
        ("fp8", f"{O_PROJ}_scale_inv", lambda x: x[:2], "has shape (2, 4); accepted: (3, 4), as 'model.layers.0"),
        ("fp8", f"{O_PROJ}_scale_inv", lambda x: x.T, "_scale_inv' has shape (4, 3); accepted: (3, 4)"),
        ("fp8", f"{O_PROJ}_scale_inv", lambda x: x[0, 0], "_scale_inv' has shape (); accepted: (3, 4)"),
        ("fp8", f"{O_PROJ}_scale_inv", lambda x: x.astype(np.uint8), "is stored as U8; accepted: F32, BF16, F16"),
        ("fp8", f"{O_PROJ}_scale_inv", first_is(np.nan), "_scale_inv' holds infinite scales or NaN; accepted: numbers"),
        ("fp8", f"{O_PROJ}_scale_inv", first_is(-np.inf), "_scale_inv' holds infinite scales or NaN"),
        ("fp8", f"{O_PROJ}_scale_inv", first_is(3e38), f"'{O_PROJ}' holds values beyond the range of bfloat16"),
        ("fp8", O_PROJ, first_is(np.nan), f"'{O_PROJ}' holds NaN; accepted: finite values"),
        ("fp8", O_PROJ, lambda x: x[:-1], f"'{O_PROJ}' has shape (47, 80); accepted: (48, 80), which follows from"),
        ("fp8", O_PROJ, lambda x: x[:0], f"'{O_PROJ}' has shape (0, 80); accepted: at least 2 axes, none of them 0"),
        ("fp8", O_PROJ, lambda x: x[0], f"'{O_PROJ}' has shape (80,); accepted: at least 2 axes, none of them 0"),
        ("int4", f"{DOWN}_scale", nothing, f"'{DOWN}_scale' is missing, which belongs to '{DOWN}_packed'"),
        ("int4", f"{DOWN}_packed", nothing, f"'{DOWN}_packed' is missing, which belongs to '{DOWN}_scale'"),
        ("int4", f"{DOWN}_shape", nothing, f"'{DOWN}_shape' is missing, which belongs to '{DOWN}_packed'"),
        ("int4", f"{DOWN}_shape", first_is(39), "_shape' holds (39, 24); accepted: (40, 24), or up to 7 fewer columns"),
        ("int4", f"{DOWN}_shape", lambda x: x - (0, 8), "_shape' holds (40, 16); accepted: (40, 24), or up to 7"),
        ("int4", f"{DOWN}_shape", lambda x: x - (0, -1), "_shape' holds (40, 25); accepted: (40, 24), or up to 7"),
        ("int4", f"{DOWN}_shape", lambda x: x - (0, 1), "down_proj.weight' has shape (40, 23); accepted: (40, 24)"),
        (
            "int4",
            f"{DOWN}_shape",
            lambda x: x.astype(np.float32),
            "_shape' is stored as F32; accepted: I64, I32, as pack",
        ),
        ("int4", f"{DOWN}_packed", lambda x: x.view(np.uint32), "_packed' is stored as U32; accepted: I32, as pack-"),
        ("int4", f"{DOWN}_scale", lambda x: x[:1], "_scale' has shape (1, 1); accepted: (40, 1)"),
    ],
)
def test_tensors_that_are_not_the_formats_are_refused(
    tmp_path: Path, kind: str, name: str, change: Callable, words: str
) -> None:
    directory, _ = quantized(kind, tmp_path)
    with changed_tensors(directory / SINGLE) as stored:
        value = change(stored.pop(name))
        if value is not None:
            stored[name] = np.array(value, order="C")
    with pytest.raises(CheckpointError, match=re.escape(words)):
        load(directory, quantized="widened")


def group_with(**changes: Any) -> dict[str, Any]:
    weights = {key: changes.pop(key) for key in list(changes) if key not in (*GROUP, "format")}
    return {
        "config_groups": {"group_0": GROUP | changes | {"weights": GROUP["weights"] | {"group_size": 32} | weights}}
    }


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"bits": 4}, "quant_method is missing; accepted: mxfp4, fp8, compressed-tensors, gptq, awq, modelopt; other"),
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'; accepted: mxfp4, fp8, compressed-tensors"),
        ({"quant_method": ["fp8"]}, "quant_method is ['fp8']; accepted: mxfp4"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "bits is 8; accepted: 4"),
        ({"quant_method": "gptq", "bits": 4}, "group_size is missing; accepted: an integer >= 1"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:.*": {}}},
            "dynamic is {'-:.*': {}}; accepted: null",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
            "checkpoint_format is 'marlin'; accepted: gptq, gptq_v2",
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "version is 'gemv'; accepted: gemm"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'; accepted: FP8, NVFP4"),
        (FP8 | {"weight_block_size": [128, 0]}, "weight_block_size is [128, 0]; accepted: a list of the rows"),
        (fp8_config(128, 128, fmt="e5m2"), "fmt is 'e5m2'; accepted: e4m3"),
        (fp8_config(128, 128, activation_scheme="static"), "activation_scheme is 'static'; accepted: dynamic"),
        (int4_config(32, format="nvfp4-pack-quantized"), "format is 'nvfp4-pack-quantized'; accepted: pack-quantized"),
        (int4_config(32, kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme is {'num_bits': 8}; accepted: null"),
        (
            int4_config(32, sparsity_config={"format": "dense"}),
            "sparsity_config is {'format': 'dense'}; accepted: null",
        ),
        (int4_config(32, transform_config={"a": 1}), "transform_config is {'a': 1}; accepted: null"),
        (fp8_config(128, 128) | {"weight_block_size": [128]}, "weight_block_size is [128]; accepted"),
        (fp8_config(128, 128) | {"weight_block_size": [128, 128.0]}, "weight_block_size is [128, 128.0]; accepted"),
        (INT4, "config_groups is missing; accepted: an object"),
        (INT4 | {"config_groups": {"group_0": {"weights": None}}}, "config_groups.group_0 is {'weights': None}"),
        (INT4 | group_with(num_bits=8), "config_groups.group_0.weights.num_bits is 8; accepted: 4"),
        (INT4 | group_with(type="float"), "format is 'pack-quantized'; accepted: nvfp4-pack-quantized"),
        (INT4 | group_with(strategy="tensor"), "weights.strategy is 'tensor'; accepted: group, channel"),
        (INT4 | group_with(actorder="dynamic"), "weights.actorder is 'dynamic'; accepted: static, weight, group"),
        (INT4 | group_with(dynamic=True), "weights.dynamic is True; accepted: false"),
        (INT4 | group_with(targets=["Embedding"]), "group_0.targets is ['Embedding']; accepted: Linear"),
        (INT4 | group_with(group_size=0), "weights.group_size is 0; accepted: an integer >= 1"),
        (INT4 | group_with(input_activations={"num_bits": 8}), "group_0.input_activations is {'num_bits': 8}"),
        (INT4 | group_with(output_activations={"num_bits": 8}), "group_0.output_activations is {'num_bits': 8}"),
        (INT4 | group_with(format="dense"), "group_0.format is 'dense'; accepted: pack-quantized"),
    ],
)
def test_other_quantizations_are_refused_by_key(config: dict[str, Any], words: str) -> None:
    raw = json.loads((FIXTURES / "qwen3" / "config.json").read_text()) | {"quantization_config": config}
    with pytest.raises(CheckpointError) as error:
        stored_formats(JsonObject(raw, "config.json"))
    assert str(error.value).startswith("config.json: quantization_config.")
    assert words in str(error.value)


def test_keys_without_effect_and_other_orders_of_groups_are_read() -> None:
    for changes in ({}, {"sparsity_config": {}, "transform_config": None}, group_with(actorder="weight")):
        assert block_format(int4_config(32) | changes).block == (1, 32)
    assert block_format(FP8 | {"weight_block_size": [3, 5]}).block == (3, 5)
    assert stored_formats(JsonObject({"quantization_config": {}}, "config.json")) is None
