"""Hugging Face directories: what `load` makes of them, and what `save` writes."""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from safetensors import safe_open

from detjax.models import CheckpointError, Decoder, DecoderConfig, GenerationDefaults, load, network, save
from detjax.models.checkpoint.weight_files import open_file, write_weights
from tests.models.hugging_face import (
    EMBEDDING,
    FIXTURES,
    HEAD,
    INDEX,
    LANGUAGE,
    NAMES,
    SINGLE,
    changed_json,
    changed_tensors,
    copied,
    plain_tensors,
    tensors,
)
from tests.support.bits import assert_same_bits


def parameters(model: Decoder) -> dict[Any, Any]:
    return dict(network.parameters(model))


def model_in(directory: Path | str, **arguments: Any) -> Decoder:
    return load(directory, **arguments)[0]


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_disk_may_give_a_tensor_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.arange(999, dtype=np.float32)
    safetensors.numpy.save_file({"before": x[:5], "x": x}, tmp_path / SINGLE)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: preadv(file, [buffers[0][:100]], offset))
    with contextlib.ExitStack() as files:
        assert_same_bits(open_file(tmp_path / SINGLE, files)["x"].read(), x)


def test_an_open_file_is_read_even_if_another_one_has_its_name(tmp_path: Path) -> None:
    with contextlib.ExitStack() as files:
        safetensors.numpy.save_file({"x": np.ones(9)}, tmp_path / SINGLE)
        opened = open_file(tmp_path / SINGLE, files)
        safetensors.numpy.save_file({"x": np.zeros(9)}, tmp_path / "new")
        (tmp_path / "new").rename(tmp_path / SINGLE)
        assert_same_bits(opened["x"].read_bytes(0, 72).view(np.float64), np.ones(9))


# --- load -------------------------------------------------------------------------------------------------------------

_TOWER = {
    ("vision", "patches", "weight"): "visual.patch_embed.proj.weight",
    ("vision", "patches", "bias"): "visual.patch_embed.proj.bias",
    ("vision", "positions", "weight"): "visual.pos_embed.weight",
    ("vision", "merger", "norm", "bias"): "visual.merger.norm.bias",
    ("vision", "merger", "norm", "weight"): "visual.merger.ln_q.weight",
    ("vision", "merger", "inner"): "visual.merger.mlp.0.weight",
    ("vision", "merger", "inner_bias"): "visual.merger.mlp.0.bias",
    ("vision", "merger", "output"): "visual.merger.mlp.2.weight",
    ("vision", "merger", "output_bias"): "visual.merger.mlp.2.bias",
}
_MERGER_OF_QWEN3_5 = {"ln_q": "norm", "mlp.0": "linear_fc1", "mlp.2": "linear_fc2"}
_TOWER_BLOCK = {
    ("attention_norm", "bias"): "norm1.bias",
    ("mlp_norm", "bias"): "norm2.bias",
    ("mlp", "up"): "mlp.linear_fc1.weight",
    ("mlp", "up_bias"): "mlp.linear_fc1.bias",
    ("attention_norm", "weight"): "norm1.weight",
    ("attention", "qkv"): "attn.qkv.weight",
    ("attention", "qkv_bias"): "attn.qkv.bias",
    ("attention", "output"): "attn.proj.weight",
    ("attention", "output_bias"): "attn.proj.bias",
    ("mlp_norm", "weight"): "norm2.weight",
    ("mlp", "down"): "mlp.down_proj.weight",
    ("mlp", "down_bias"): "mlp.down_proj.bias",
}


_HEAD_ORDERS = {
    "glm4-moe": [0, 1, 2, 3, 4, 5, 12, 13, 14, 15, 6, 7, 8, 9, 10, 11, 16, 17, 18, 19],
    "glm4": [0, 2, 4, 6, 8, 9, 10, 11, 12, 13, 1, 3, 5, 7, 14, 15, 16, 17, 18, 19],
    "phi3": [0, 1, 2, 3, 4, 5, 12, 13, 6, 7, 8, 9, 10, 11, 14, 15],
    "phi3-short": list(range(14)),
}
"""The columns of heads of queries and keys, in the decoder's order. Half a head lies between the two of a pair."""


_GEMMA4 = {
    ("factor",): "layer_scalar",
    ("per_layer", "gate"): "per_layer_input_gate.weight",
    ("per_layer", "projection"): "per_layer_projection.weight",
    ("per_layer", "norm", "weight"): "post_per_layer_input_norm.weight",
    ("experts_norm", "weight"): "pre_feedforward_layernorm_2.weight",
    ("mlp_result_norm", "weight"): "post_feedforward_layernorm_1.weight",
    ("experts_result_norm", "weight"): "post_feedforward_layernorm_2.weight",
    ("experts", "down"): "experts.down_proj",
    ("experts", "router", "weight"): "router.proj.weight",
    ("experts", "router", "norm"): "router.scale",
    ("experts", "router", "expert_scales"): "router.per_expert_scale",
}
"""The tensors of a layer's parameters."""
_PER_LAYER = {
    ("per_layer", "embedding", "weight"): "model.embed_tokens_per_layer.weight",
    ("per_layer", "projection"): "model.per_layer_model_projection.weight",
    ("per_layer", "norm", "weight"): "model.per_layer_projection_norm.weight",
}


def moonvit(stored: dict[str, np.ndarray]) -> dict[tuple, np.ndarray]:
    """Takes the tensors of Kimi K2.5's tower, with 2 heads of 3 turns by the column, then the row, of 2 columns."""

    def in_order(x: np.ndarray) -> np.ndarray:
        q, k, v = (part.reshape(2, 3, 2, 2, -1) for part in np.split(x, 3))
        q, k = (part.transpose(0, 3, 2, 1, 4)[:, :, ::-1] for part in (q, k))
        return np.concatenate([part.reshape(len(x) // 3, *x.shape[1:]) for part in (q, k, v)])

    names = {
        "patch_embed.proj": ("patches", ""),
        "final_norm": ("final_norm", ""),
        "merger.pre_norm": ("merger", "norm", ""),
        "merger.proj.0": ("merger", "inner"),
        "merger.proj.2": ("merger", "output"),
    }
    for i in range(2):
        names |= {f"blocks.{i}.norm0": ("blocks", i, "attention_norm", "")}
        names |= {f"blocks.{i}.norm1": ("blocks", i, "mlp_norm", "")}
        names |= {f"blocks.{i}.wqkv": ("blocks", i, "attention", "qkv")}
        names |= {f"blocks.{i}.wo": ("blocks", i, "attention", "output")}
        names |= {
            f"blocks.{i}.mlp.fc0": ("blocks", i, "mlp", "up"),
            f"blocks.{i}.mlp.fc1": ("blocks", i, "mlp", "down"),
        }
    taken = {("vision", "positions", "weight"): stored.pop("visual.patch_embed.pos_emb.weight")}
    for tensor, (*path, last) in names.items():
        for kind, key in (("weight", last or "weight"), ("bias", f"{last}_bias" if last else "bias")):
            x = stored.pop(f"visual.{tensor}.{kind}")
            taken["vision", *path, key] = in_order(x) if last == "qkv" else x
    return taken


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_stands_where_the_decoder_has_it(name):
    stored = plain_tensors(FIXTURES / name)
    read = parameters(model_in(FIXTURES / name, quantized="widened"))

    def joined(layer: int, join: Callable, *names: str) -> np.ndarray:
        return join([stored.pop(f"model.layers.{layer}.{name}") for name in names])

    def by_turns(parts: list[np.ndarray]) -> np.ndarray:
        """Gate and up `[E, 2, N, ...]` of a tensor in which they alternate along the last axis."""
        return np.moveaxis(np.stack([parts[0][..., 0::2], parts[0][..., 1::2]], axis=1), -1, 2)

    def in_order(parts: list[np.ndarray]) -> np.ndarray:
        """Rows of queries, keys and values with the rows of each head of queries and keys in the decoder's order."""
        order, config = _HEAD_ORDERS[name], model_in(FIXTURES / name).config
        q, k, v = np.split(np.concatenate(parts), np.cumsum([config.heads, config.kv_heads]) * config.head_dim)
        heads = (x.reshape(-1, config.head_dim, *x.shape[1:])[:, order].reshape(x.shape) for x in (q, k))
        return np.concatenate([*heads, v])

    def one_head(parts: list[np.ndarray]) -> np.ndarray:
        return parts[0][_HEAD_ORDERS[name]]

    def by_kind(*sizes: int) -> Callable:
        """Sorts a tensor with rows of several kinds for each key head: all rows of one kind, then all of the next."""

        def ordered(parts: list[np.ndarray]) -> np.ndarray:
            heads = np.split(parts[0], 2)
            ends = np.cumsum([0, *sizes])
            kinds = itertools.pairwise(ends.tolist())
            return np.concatenate([head[start:end] for start, end in kinds for head in heads])

        return ordered

    only, rows, stacked = (lambda parts: parts[0]), np.concatenate, np.stack
    expected = {("embedding", "weight"): stored.pop(EMBEDDING)}
    expected["final_norm", "weight"] = stored.pop("model.norm.weight")
    if ("lm_head", "weight") in read:
        expected["lm_head", "weight"] = stored.pop(HEAD)
    has_q_latent = "model.layers.0.self_attn.q_a_proj.weight" in stored
    latents = ("q_a_proj", "kv_a_proj_with_mqa") if has_q_latent else ("kv_a_proj_with_mqa",)
    for i in sorted({path[1] for path in read if path[0] == "layers"}):
        names = {
            ("attention_norm", "weight"): (only, "input_layernorm.weight"),
            ("attention", "qkv"): (rows, *(f"self_attn.{x}_proj.weight" for x in "qkv")),
            ("attention", "qkv_bias"): (rows, *(f"self_attn.{x}_proj.bias" for x in "qkv")),
            ("attention", "q_norm"): (only, f"self_attn.{'q_a_layernorm' if has_q_latent else 'q_norm'}.weight"),
            ("attention", "k_norm"): (only, "self_attn.k_norm.weight"),
            ("attention", "latents"): (rows, *(f"self_attn.{name}.weight" for name in latents)),
            ("attention", "latents_bias"): (rows, *(f"self_attn.{name}.bias" for name in latents)),
            ("attention", "q_up"): (only, f"self_attn.{'q_b_proj' if has_q_latent else 'q_proj'}.weight"),
            ("attention", "kv_norm"): (only, "self_attn.kv_a_layernorm.weight"),
            ("attention", "kv_up"): (only, "self_attn.kv_b_proj.weight"),
            ("attention", "output"): (only, "self_attn.o_proj.weight"),
            ("attention", "output_bias"): (only, "self_attn.o_proj.bias"),
            ("attention", "sinks"): (only, "self_attn.sinks"),
            ("mlp_norm", "weight"): (only, "post_attention_layernorm.weight"),
            ("mlp", "gate_up"): (stacked, "mlp.gate_proj.weight", "mlp.up_proj.weight"),
            ("mlp", "gate_up_bias"): (stacked, "mlp.gate_proj.bias", "mlp.up_proj.bias"),
            ("mlp", "down"): (only, "mlp.down_proj.weight"),
            ("mlp", "down_bias"): (only, "mlp.down_proj.bias"),
        }
        linear = {
            "convolution": "conv1d.weight",
            "log_rate": "A_log",
            "time_bias": "dt_bias",
            "norm": "norm.weight",
            "output": "out_proj.weight",
        }
        names |= {("delta_net", key): (only, f"linear_attn.{tensor}") for key, tensor in linear.items()}
        if name == "qwen3-next":
            names["delta_net", "qkvz"] = by_kind(16, 16, 24, 24), "linear_attn.in_proj_qkvz.weight"
            names["delta_net", "ba"] = by_kind(2, 2), "linear_attn.in_proj_ba.weight"
        else:
            names["delta_net", "qkvz"] = rows, *(f"linear_attn.in_proj_{x}.weight" for x in ("qkv", "z"))
            names["delta_net", "ba"] = rows, *(f"linear_attn.in_proj_{x}.weight" for x in "ba")
        if ("layers", i, "mlp", "router", "weight") in read:
            block = "block_sparse_moe" if name == "mixtral" else "mlp"
            gate, up, down = ("w1", "w3", "w2") if name == "mixtral" else ("gate_proj", "up_proj", "down_proj")
            experts = range(len(read["layers", i, "mlp", "down"]))
            pairs = [f"{block}.experts.{expert}.{x}.weight" for expert in experts for x in (gate, up)]
            names["mlp", "router", "weight"] = only, f"{block}.gate.weight"
            names["mlp", "router", "correction"] = only, f"{block}.gate.e_score_correction_bias"
            for shared in ("shared_experts", "shared_expert"):
                names["mlp", shared, "gate_up"] = stacked, *(f"{block}.{shared}.{x}.weight" for x in (gate, up))
                names["mlp", shared, "down"] = only, f"{block}.{shared}.{down}.weight"
            names["mlp", "shared_gate"] = only, f"{block}.shared_expert_gate.weight"
            names["mlp", "gate_up"] = (lambda parts: np.stack([parts[0::2], parts[1::2]], axis=1)), *pairs
            names["mlp", "down"] = stacked, *(f"{block}.experts.{expert}.{down}.weight" for expert in experts)
        if name.startswith("gpt-oss"):
            names["mlp", "router", "weight"] = only, "mlp.router.weight"
            names["mlp", "router", "bias"] = only, "mlp.router.bias"
            names["mlp", "gate_up"] = by_turns, "mlp.experts.gate_up_proj"
            names["mlp", "gate_up_bias"] = by_turns, "mlp.experts.gate_up_proj_bias"
            names["mlp", "down"] = (lambda parts: parts[0].swapaxes(1, 2)), "mlp.experts.down_proj"
            names["mlp", "down_bias"] = only, "mlp.experts.down_proj_bias"
        if name.startswith("gemma"):
            names["mlp_norm", "weight"] = only, "pre_feedforward_layernorm.weight"
            names["attention_output_norm", "weight"] = only, "post_attention_layernorm.weight"
            names["mlp_output_norm", "weight"] = only, "post_feedforward_layernorm.weight"
        if name.startswith("gemma4"):
            names |= {key: (only, tensor) for key, tensor in _GEMMA4.items()}
            for key, kind in (("qkv", "weight"), ("qkv_bias", "bias")):
                tensors_of_heads = [f"self_attn.{x}_proj.{kind}" for x in "qkv"]
                held = [tensor for tensor in tensors_of_heads if f"model.layers.{i}.{tensor}" in stored]
                names["attention", key] = rows, *held
            names["experts", "gate_up"] = (
                (lambda parts: np.stack(np.split(parts[0], 2, axis=1), axis=1)),
                *("experts.gate_up_proj",),
            )
        if name in _HEAD_ORDERS:
            fused = name.startswith("phi3")
            for key, kind in (("qkv", "weight"), ("qkv_bias", "bias")):
                projections = ("qkv_proj",) if fused else ("q_proj", "k_proj", "v_proj")
                names["attention", key] = in_order, *(f"self_attn.{x}.{kind}" for x in projections)
            for norm in ("q_norm", "k_norm"):
                names["attention", norm] = one_head, f"self_attn.{norm}.weight"
        if name.startswith("phi3") or name == "glm4":
            names["mlp", "gate_up"] = (lambda parts: np.stack(np.split(parts[0], 2))), "mlp.gate_up_proj.weight"
        if name == "glm4":
            names["attention_output_norm", "weight"] = only, "post_self_attn_layernorm.weight"
            names["mlp_output_norm", "weight"] = only, "post_mlp_layernorm.weight"
        expected |= {("layers", i, *key): joined(i, *names[key]) for key in names if ("layers", i, *key) in read}
    for i in sorted({path[2] for path in read if path[:2] == ("vision", "deepstack")}):
        for path, tensor in _TOWER.items():
            if path[1] == "merger":
                for old, new in _MERGER_OF_QWEN3_5.items():
                    tensor = tensor.replace(f"merger.{old}", f"deepstack_merger_list.{i}.{new}")
                tensor = tensor.replace("merger.norm", f"deepstack_merger_list.{i}.norm")
                expected["vision", "deepstack", i, *path[2:]] = stored.pop(tensor)
    for path, tensor in _PER_LAYER.items():
        expected |= {path: stored.pop(tensor)} if path in read else {}
    if name == "kimi-k2-5":
        expected |= moonvit(stored)
    has_gates = "visual.merger.ln_q.weight" in stored
    for path, tensor in {}.items() if name == "kimi-k2-5" else _TOWER.items():
        for old, new in {} if has_gates else _MERGER_OF_QWEN3_5.items():
            tensor = tensor.replace(f"merger.{old}", f"merger.{new}")
        expected |= {path: stored.pop(tensor)} if path in read else {}
    blocks = set() if name == "kimi-k2-5" else {path[2] for path in read if path[:2] == ("vision", "blocks")}
    for i in sorted(blocks):
        block = {key: f"visual.blocks.{i}.{name}" for key, name in _TOWER_BLOCK.items()}
        for key, name in block.items():
            name = name if has_gates else name.replace("down_proj", "linear_fc2")
            expected |= {("vision", "blocks", i, *key): stored.pop(name)} if name in stored else {}
        for kind in ("weight", "bias") if has_gates else ():
            key = "gate_up" if kind == "weight" else "gate_up_bias"
            both = [stored.pop(f"visual.blocks.{i}.mlp.{x}_proj.{kind}") for x in ("gate", "up")]
            expected["vision", "blocks", i, "mlp", key] = stacked(both)
    assert not stored
    assert_same_bits(read, expected)


def test_the_tokenizer_is_none_where_the_directory_has_none():
    assert load(FIXTURES / "qwen3")[1] is not None
    assert load(FIXTURES / "qwen2")[1] is None


def test_generation_defaults_come_from_their_file_or_else_from_the_configuration():
    assert model_in(FIXTURES / "qwen3").generation_defaults.eos_token_ids == (509, 510)
    assert not (FIXTURES / "llama-linear" / "generation_config.json").exists()
    assert model_in(FIXTURES / "llama-linear").generation_defaults.eos_token_ids == (2,)


def nearest_bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounded to nearest even on the bits of float32."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)


def test_narrowing_rounds_to_nearest_even_and_widening_is_exact():
    name = "model.layers.1.mlp.down_proj.weight"
    wide = tensors(FIXTURES / "mistral")[name]
    narrow = np.asarray(model_in(FIXTURES / "mistral", dtype=jnp.bfloat16).layers[1].mlp.down[...])
    assert_same_bits(narrow, nearest_bfloat16(wide))
    stored = tensors(FIXTURES / "qwen2")[name]
    widened = np.asarray(model_in(FIXTURES / "qwen2", dtype="float32").layers[1].mlp.down[...])
    assert_same_bits(widened.astype(ml_dtypes.bfloat16), stored)
    assert widened.dtype == np.float32


@pytest.mark.parametrize(
    ("name", "dtype"), [("mistral", "float32"), ("qwen3", "bfloat16"), ("llama-linear", "float16")]
)
def test_the_dtype_is_the_one_that_the_checkpoint_names(name, dtype):
    assert {x.dtype.name for x in parameters(model_in(FIXTURES / name)).values()} == {dtype}


def test_a_checkpoint_that_names_no_dtype_has_the_one_it_is_stored_in(tmp_path):
    directory = copied("qwen3", tmp_path)
    with changed_json(directory / "config.json") as raw:
        del raw["dtype"]
    model = model_in(directory)
    assert (model.config.dtype, model.dtype) == ("bfloat16", jnp.bfloat16)


def test_the_older_key_of_the_dtype_counts_before_the_stored_one(tmp_path):
    directory = copied("qwen3", tmp_path)
    with changed_json(directory / "config.json") as raw:
        raw["torch_dtype"] = "float16"
        del raw["dtype"]
    assert model_in(directory).dtype == jnp.float16


@pytest.mark.parametrize("dtype", ["float64", "int8", "no dtype"])
def test_a_dtype_that_weights_cannot_have_is_refused(dtype):
    with pytest.raises(ValueError, match="accepted: bfloat16, float16, float32"):
        load(FIXTURES / "qwen3", dtype=dtype)


def test_a_value_beyond_the_dtype_is_an_error_but_stored_infinities_and_nans_are_kept(tmp_path):
    directory = copied("mistral", tmp_path)
    with changed_tensors(directory / SINGLE) as stored:
        stored["model.norm.weight"][:3] = [np.inf, np.nan, -np.inf]
    norm = np.asarray(model_in(directory, dtype="float16").final_norm.weight[...])
    assert np.isposinf(norm[0])
    assert np.isnan(norm[1])
    assert np.isneginf(norm[2])
    with changed_tensors(directory / SINGLE) as stored:
        stored["model.norm.weight"][5] = 1e6
    with pytest.raises(CheckpointError, match=r"model.norm.weight.*beyond the range of float16; accepted: float32"):
        load(directory, dtype="float16")
    assert np.isfinite(np.asarray(model_in(directory, dtype="bfloat16").final_norm.weight[...])[5])


@pytest.mark.parametrize(
    ("bits", "dtype"), [(0x7F7F8000, "bfloat16"), (0xFF7F8000, "bfloat16"), (0x477FF000, "float16")]
)
def test_the_smallest_value_beyond_a_dtype_is_refused_and_the_largest_within_is_read(tmp_path, bits, dtype):
    directory = copied("mistral", tmp_path)
    with changed_tensors(directory / SINGLE) as stored:
        stored["model.norm.weight"][:2] = np.array([np.inf, np.array(bits, np.uint32).view(np.float32)])
    with pytest.raises(CheckpointError, match=f"beyond the range of {dtype}"):
        load(directory, dtype=dtype)
    with changed_tensors(directory / SINGLE) as stored:
        stored["model.norm.weight"][1] = np.array(bits - 1, np.uint32).view(np.float32)
    norm = np.asarray(model_in(directory, dtype=dtype).final_norm.weight[...])
    assert np.isfinite(norm[1]) and norm[0] == np.inf


def test_frequencies_that_old_checkpoints_store_are_passed_over(tmp_path):
    directory = copied("mistral", tmp_path)
    with changed_tensors(directory / SINGLE) as stored:
        stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(40, np.float64)
    assert_same_bits(parameters(model_in(directory)), parameters(model_in(FIXTURES / "mistral")))


@pytest.mark.parametrize("also_embedding", [True, False])
def test_a_tied_head_may_be_stored_as_well_or_instead(tmp_path, also_embedding):
    directory = copied("qwen3", tmp_path)
    with changed_tensors(directory / SINGLE) as stored:
        stored[HEAD] = stored[EMBEDDING] if also_embedding else stored.pop(EMBEDDING)
    model = model_in(directory)
    assert model.config.tied_embeddings
    assert_same_bits(parameters(model), parameters(model_in(FIXTURES / "qwen3")))


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_serves_with_a_warning(tmp_path):
    directory = copied("qwen3", tmp_path)
    with changed_tensors(directory / SINGLE) as stored:
        head = stored[HEAD] = stored[EMBEDDING] * 2
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        model = model_in(directory)
    assert not model.config.tied_embeddings
    assert_same_bits(model.lm_head.weight[...], head)


def test_a_head_of_equal_bytes_and_another_dtype_differs(tmp_path):
    directory = copied("qwen3", tmp_path)
    with changed_tensors(directory / SINGLE) as stored:
        stored[HEAD] = stored[EMBEDDING].view(np.float16)
        stored[HEAD][:] = 0
        stored[EMBEDDING][:] = 0
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        assert not model_in(directory).config.tied_embeddings


def test_a_single_file_counts_before_an_index(tmp_path):
    directory = copied("mistral", tmp_path)
    (directory / INDEX).write_text("not read")
    with pytest.warns(UserWarning, match="another index of safetensors"):
        load(directory)


@pytest.mark.parametrize(
    ("terminal", "progress", "shown"),
    [("1", None, True), ("0", None, False), ("0", True, True), ("1", False, False)],
)
def test_a_progress_bar_is_drawn_on_stderr_if_it_is_a_terminal_or_asked_for(
    capsys, monkeypatch, terminal, progress, shown
):
    monkeypatch.setenv("TTY_COMPATIBLE", terminal)
    load(FIXTURES / "qwen3", progress=progress)
    output = capsys.readouterr()
    assert output.out == ""
    assert ("Loading qwen3" in output.err) == shown


# --- save -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_what_is_saved_has_the_tensors_it_was_loaded_from_and_loads_as_the_same(tmp_path, name):
    model, tokenizer = load(FIXTURES / name)
    save(model, tmp_path / "saved", tokenizer=tokenizer)
    assert_same_bits(plain_tensors(tmp_path / "saved"), plain_tensors(FIXTURES / name))
    is_nested = model.config.vision is not None and model.config.vision.positions is not None
    prefix = "language_model." if name == "kimi-k2-5" else LANGUAGE
    assert any(key.startswith(prefix) for key in tensors(tmp_path / "saved")) == is_nested
    again, tokenizer_again = load(tmp_path / "saved")
    assert_same_bits(parameters(again), parameters(model))
    assert (again.config, again.generation_defaults) == (model.config, model.generation_defaults)
    assert (again.image_options, again.video_options) == (model.image_options, model.video_options)
    assert (tokenizer_again is None) == (tokenizer is None)
    with safe_open(tmp_path / "saved" / SINGLE, framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_tokenizer_is_saved_as_it_was_read(tmp_path):
    model, tokenizer = load(FIXTURES / "qwen3")
    save(model, tmp_path / "saved", tokenizer=tokenizer)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "saved" / name).read_bytes() == (FIXTURES / "qwen3" / name).read_bytes()


def test_weights_of_more_bytes_than_a_shard_are_cut_into_shards_with_an_index(tmp_path):
    model = model_in(FIXTURES / "qwen3-yarn")
    save(model, tmp_path / "saved", max_shard_bytes=100_000)
    shards = sorted(path.name for path in (tmp_path / "saved").glob("*.safetensors"))
    assert shards == [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    sizes = [sum(tensor.nbytes for tensor in tensors(tmp_path / "saved", shard).values()) for shard in shards]
    assert len(shards) > 3
    assert max(sizes) <= 100_000
    assert all(size + following > 100_000 for size, following in itertools.pairwise(sizes))
    index = json.loads((tmp_path / "saved" / INDEX).read_text())
    original = json.loads((FIXTURES / "qwen3-yarn" / INDEX).read_text())
    assert index["weight_map"].keys() == original["weight_map"].keys()
    assert index["metadata"]["total_size"] == original["metadata"]["total_size"]
    assert_same_bits(parameters(model_in(tmp_path / "saved")), parameters(model))


@pytest.mark.parametrize(
    ("sizes", "shards"),
    [([4, 4, 8, 9, 1], [[4, 4], [8], [9], [1]]), ([9, 8], [[9], [8]]), ([3, 5], [[3, 5]]), ([], [[]])],
)
def test_a_shard_is_filled_to_its_last_byte(tmp_path, sizes, shards):
    def group(index: int, size: int) -> tuple[int, Callable]:
        return size, lambda: {f"{index}": np.full(size, index, np.uint8)}

    write_weights(tmp_path, [group(*pair) for pair in enumerate(sizes)], 8)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [[x.size for _, x in sorted(tensors(tmp_path, file.name).items())] for file in files] == shards
    assert (tmp_path / INDEX).exists() == (len(shards) > 1)


def test_a_model_in_another_dtype_is_saved_in_that_dtype(tmp_path):
    save(model_in(FIXTURES / "qwen3", dtype="float32"), tmp_path / "saved")
    raw = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (raw["dtype"], raw["torch_dtype"]) == ("float32", "float32")
    assert {x.dtype.name for x in tensors(tmp_path / "saved").values()} == {"float32"}


def small_config(**changes: Any) -> DecoderConfig:
    config = dataclasses.replace(model_in(FIXTURES / "llama-linear").config, layers=1, windows=(None,), **changes)
    return dataclasses.replace(config, vocab_size=16, hidden_size=8, intermediate_size=8)


@functools.cache
def small_model() -> Decoder:
    return Decoder(small_config(), rngs=nnx.Rngs(0), dtype=jnp.float16)


def test_a_model_made_here_is_saved_without_ending_tokens_of_its_architecture(tmp_path):
    model = small_model()
    save(model, tmp_path / "saved")
    assert not (tmp_path / "saved" / "generation_config.json").exists()
    again = model_in(tmp_path / "saved")
    assert again.generation_defaults == GenerationDefaults()
    assert_same_bits(parameters(again), parameters(model))


@pytest.mark.parametrize("there", ["file", "directory with a file"])
def test_nothing_is_saved_over_what_is_there(tmp_path, there):
    target = tmp_path / "saved"
    kept = target if there == "file" else target / "kept"
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("precious")
    with pytest.raises(FileExistsError, match=f"{re.escape(str(target))} exists; accepted"):
        save(model_in(FIXTURES / "qwen2"), target)
    assert kept.read_text() == "precious"


def test_an_empty_directory_and_missing_parents_are_places_to_save_to(tmp_path):
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "empty", tmp_path / "a" / "b"):
        save(model_in(FIXTURES / "qwen2"), target)
        load(target)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_save_leaves_nothing(tmp_path, monkeypatch, error):
    def interrupted(*_: Any, **__: Any) -> None:
        raise error

    model = model_in(FIXTURES / "qwen2")
    monkeypatch.setattr(safetensors.numpy, "save_file", interrupted)
    with pytest.raises(error):
        save(model, tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_saved_files_have_the_permissions_of_any_new_file(tmp_path):
    (tmp_path / "any").mkdir()
    (tmp_path / "any" / "file").touch()
    save(model_in(FIXTURES / "qwen2"), tmp_path / "saved")
    mode = stat.S_IMODE((tmp_path / "any" / "file").stat().st_mode)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "saved").iterdir()} == {mode}
    assert (tmp_path / "saved").stat().st_mode == (tmp_path / "any").stat().st_mode


def test_a_model_that_transformers_does_not_have_is_not_saved(tmp_path):
    model = Decoder(small_config(qk_norm=True), rngs=nnx.Rngs(0), dtype=jnp.float16)
    with pytest.raises(ValueError, match="qk_norm is True"):
        save(model, tmp_path / "saved")
    model = nnx.clone(small_model())
    model.embedding.weight = nnx.Param(jnp.zeros((17, 8), jnp.float16))
    with pytest.raises(ValueError, match=r"save: parameter embedding.weight has shape \(17, 8\); accepted: \(16, 8\)"):
        save(model, tmp_path / "saved")
    with pytest.raises(ValueError, match="max_shard_bytes is 0; accepted: integers >= 1"):
        save(model, tmp_path / "saved", max_shard_bytes=0)
    assert list(tmp_path.iterdir()) == []
