"""Small checkpoints of Llama's form in every format of quantized weights, with the plain weights that they stand for.

Encoders are written here a second time, from the formats' descriptions. Sizes fill no block of 128.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import safetensors.numpy

WIDTH, INNER, HEADS, KV_HEADS, HEAD, VOCABULARY = 192, 320, 2, 1, 64, 96
MATRICES: Final = {
    "self_attn.q_proj": (HEADS * HEAD, WIDTH),
    "self_attn.k_proj": (KV_HEADS * HEAD, WIDTH),
    "self_attn.v_proj": (KV_HEADS * HEAD, WIDTH),
    "self_attn.o_proj": (WIDTH, HEADS * HEAD),
    "mlp.gate_proj": (INNER, WIDTH),
    "mlp.up_proj": (INNER, WIDTH),
    "mlp.down_proj": (WIDTH, INNER),
}
GROUP: Final = 64
_AWQ: Final = [0, 2, 4, 6, 1, 3, 5, 7]
_E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
type Encoded = tuple[dict[str, np.ndarray], np.ndarray]
"""The tensors of a module by the ends of their names, and the plain weight that they stand for."""


def e4m3(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)


def words(numbers: np.ndarray) -> np.ndarray:
    """Packs eight numbers of four bits along the last axis, the lowest bits first."""
    grouped = numbers.reshape(*numbers.shape[:-1], -1, 8).astype(np.int64)
    return (grouped << 4 * np.arange(8)).sum(-1).astype(np.uint32).view(np.int32)


def fp8_blocks(w: np.ndarray, random: np.random.Generator, end: str = ".weight_scale_inv") -> Encoded:
    del random
    columns = range(0, w.shape[1], 128)
    grid = [[np.abs(w[i : i + 128, j : j + 128]).max() for j in columns] for i in range(0, len(w), 128)]
    scales = np.array(grid, np.float32) / np.float32(448)
    scales[scales == 0] = 1
    wide = scales.repeat(128, 0)[: len(w)].repeat(128, 1)[:, : w.shape[1]]
    codes = e4m3(w / wide)
    return {".weight": codes, end: scales}, codes.astype(np.float32) * wide


def fp8_channels(w: np.ndarray, random: np.random.Generator) -> Encoded:
    del random
    scales = np.abs(w).max(1, keepdims=True) / np.float32(448)
    scales[scales == 0] = 1
    codes = e4m3(w / scales)
    return {".weight": codes, ".weight_scale": scales}, codes.astype(np.float32) * scales


def fp8_static(w: np.ndarray, random: np.random.Generator) -> Encoded:
    scale = np.float32(np.abs(w).max() / 448)
    codes = e4m3(w / scale)
    parts = {".weight": codes, ".weight_scale": scale.reshape(1)}
    # So small that many activations are clipped.
    return parts | {".input_scale": np.array([0.003 * random.uniform(1, 2)], np.float32)}, codes.astype(
        np.float32
    ) * scale


def _integers(w: np.ndarray, random: np.random.Generator, groups: np.ndarray, *, symmetric: bool) -> Any:
    """Returns the numbers, zero points and scales of groups, and what they stand for; the first row is zero."""
    scales = random.uniform(0.02, 0.04, (len(w), w.shape[1] // GROUP)).astype(np.float16)
    zeros = np.full(scales.shape, 8) if symmetric else random.integers(1, 15, scales.shape)
    wide, points = scales.astype(np.float32)[:, groups], zeros[:, groups]
    numbers = np.clip(np.rint(w / wide) + points, 0, 15).astype(np.int64)
    return numbers, zeros, scales, (numbers - points).astype(np.float32) * wide


def int4(*, symmetric: bool, ordered: bool = False) -> Callable[..., Encoded]:
    def encode(w: np.ndarray, random: np.random.Generator) -> Encoded:
        groups = np.arange(w.shape[1]) // GROUP
        groups = random.permutation(groups) if ordered else groups
        numbers, zeros, scales, plain = _integers(w, random, groups, symmetric=symmetric)
        parts = {".weight_packed": words(numbers), ".weight_scale": scales, ".weight_shape": np.array(w.shape)}
        parts |= {} if symmetric else {".weight_zero_point": words(zeros.T).T}
        return parts | ({".weight_g_idx": groups.astype(np.int32)} if ordered else {}), plain

    return encode


def gptq(*, version: int, ordered: bool = False) -> Callable[..., Encoded]:
    def encode(w: np.ndarray, random: np.random.Generator) -> Encoded:
        groups = np.arange(w.shape[1]) // GROUP
        groups = random.permutation(groups) if ordered else groups
        numbers, zeros, scales, plain = _integers(w, random, groups, symmetric=False)
        parts = {".qweight": words(numbers).T, ".qzeros": words(zeros.T - (version == 1)), ".scales": scales.T}
        return parts | {".g_idx": groups.astype(np.int32)}, plain

    return encode


def awq(w: np.ndarray, random: np.random.Generator) -> Encoded:
    numbers, zeros, scales, plain = _integers(w, random, np.arange(w.shape[1]) // GROUP, symmetric=False)
    numbers, zeros = (x.T.reshape(len(x.T), -1, 8)[..., _AWQ].reshape(len(x.T), -1) for x in (numbers, zeros))
    return {".qweight": words(numbers), ".qzeros": words(zeros), ".scales": scales.T}, plain


def nvfp4(w: np.ndarray, random: np.random.Generator) -> Encoded:
    total = np.float32(random.uniform(1000, 2000))
    scales = e4m3(np.abs(w).reshape(len(w), -1, 16).max(-1) / 6 * total)
    wide = (scales.astype(np.float32) / total).repeat(16, 1)
    codes = np.abs(w[..., None] - wide[..., None] * _E2M1).argmin(-1).astype(np.uint8)
    parts = {".weight_packed": codes[:, 0::2] | codes[:, 1::2] << 4, ".weight_scale": scales}
    return parts | {".weight_global_scale": total.reshape(1)}, _E2M1[codes] * wide


def modelopt_nvfp4(w: np.ndarray, random: np.random.Generator) -> Encoded:
    factor = np.float32(random.uniform(0.0005, 0.001))
    scales = e4m3(np.abs(w).reshape(len(w), -1, 16).max(-1) / 6 / factor)
    wide = (scales.astype(np.float32) * factor).repeat(16, 1)
    codes = np.abs(w[..., None] - wide[..., None] * _E2M1).argmin(-1).astype(np.uint8)
    parts = {".weight": codes[:, 0::2] | codes[:, 1::2] << 4, ".weight_scale": scales}
    return parts | {".weight_scale_2": np.asarray(factor)}, _E2M1[codes] * wide


def _compressed(stored: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights | {"symmetric": weights.get("symmetric", True)}}
    groups = {"group_0": group | {"input_activations": inputs, "output_activations": None}}
    described = {"quant_method": "compressed-tensors", "format": stored, "quantization_status": "compressed"}
    return described | {"ignore": ["lm_head"], "config_groups": groups}


def _fp8(strategy: str, **changes: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False} | changes


_INT4: Final = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
_FP4: Final = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_GPTQ: Final = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
FORMATS: dict[str, tuple[dict[str, Any], Callable[..., Encoded]]] = {
    "fp8 blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        fp8_blocks,
    ),
    "fp8 blocks of compressed-tensors": (
        _compressed(
            "float-quantized",
            _fp8("block", block_structure=[128, 128]),
            _fp8("group", group_size=128, dynamic=True),
        ),
        functools.partial(fp8_blocks, end=".weight_scale"),
    ),
    "fp8 rows": (_compressed("float-quantized", _fp8("channel"), _fp8("token", dynamic=True)), fp8_channels),
    "fp8 static": (_compressed("float-quantized", _fp8("tensor"), _fp8("tensor")), fp8_static),
    "fp8 of modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, fp8_static),
    "fp8 weights": (_compressed("float-quantized", _fp8("channel")), fp8_channels),
    "int4": (_compressed("pack-quantized", _INT4), int4(symmetric=True)),
    "int4 with zeros": (_compressed("pack-quantized", _INT4 | {"symmetric": False}), int4(symmetric=False)),
    "int4 ordered": (
        _compressed("pack-quantized", _INT4 | {"actorder": "group"}),
        int4(symmetric=True, ordered=True),
    ),
    "gptq": (_GPTQ | {"checkpoint_format": "gptq"}, gptq(version=1)),
    "gptq ordered": (_GPTQ | {"desc_act": True}, gptq(version=1, ordered=True)),
    "gptq v2": (_GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(version=2)),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        awq,
    ),
    "nvfp4": (_compressed("nvfp4-pack-quantized", _FP4), nvfp4),
    "nvfp4 of modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
        modelopt_nvfp4,
    ),
}


def write(kind: str, folder: Path, **changes: Any) -> dict[str, np.ndarray]:
    """Writes a checkpoint, and returns the plain weights of its products by name.

    Args:
        kind: a key of `FORMATS`.
        folder: the new directory.
        changes: other values in `quantization_config`.
    """
    random = np.random.default_rng(0)
    described, encode = FORMATS[kind]
    stored = {
        "model.embed_tokens.weight": random.standard_normal((VOCABULARY, WIDTH), np.float32),
        "lm_head.weight": random.standard_normal((VOCABULARY, WIDTH), np.float32),
        "model.norm.weight": np.ones(WIDTH, np.float32),
    }
    plain = {}
    for name in ("input_layernorm", "post_attention_layernorm"):
        stored[f"model.layers.0.{name}.weight"] = np.ones(WIDTH, np.float32)
    for name, shape in MATRICES.items():
        weight = random.standard_normal(shape, np.float32) * np.float32(1.5 * shape[1] ** -0.5)
        weight[0, :GROUP] = 0  # a group of zeros
        parts, plain[f"model.layers.0.{name}.weight"] = encode(weight, random)
        stored |= {f"model.layers.0.{name}{end}": part for end, part in parts.items()}
    folder.mkdir()
    arrays = {name: np.ascontiguousarray(array) for name, array in stored.items()}
    safetensors.numpy.save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": described | changes}))
    return plain


CONFIG: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "float32",
}
