"""Checkpoints of heads that draft, and their formulas in NumPy."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from tests.models.hugging_face import FIXTURES, tensors

HEADS, KV_HEADS, COLUMNS, INNER, EPS, THETA = 4, 2, 8, 24, 1e-5, 500.0
Tensors = dict[str, np.ndarray]


def eagle3_tensors(
    width: int, vocabulary: int, guessed: int | None = None, *, seed: int = 0, norms: bool = False
) -> Tensors:
    """Random tensors of an EAGLE-3 head, by EAGLE's names. It guesses `guessed` tokens; None: all, in its own table."""
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return (2 * rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return (1 + 0.5 * rng.standard_normal(size)).astype(np.float32)

    attention = "midlayer.self_attn."
    head = {
        "fc.weight": matrix(width, 3 * width),
        "norm.weight": norm(width),
        "lm_head.weight": matrix(guessed or vocabulary, width),
        f"{attention}q_proj.weight": matrix(HEADS * COLUMNS, 2 * width),
        f"{attention}k_proj.weight": matrix(KV_HEADS * COLUMNS, 2 * width),
        f"{attention}v_proj.weight": matrix(KV_HEADS * COLUMNS, 2 * width),
        f"{attention}o_proj.weight": matrix(width, HEADS * COLUMNS),
        "midlayer.mlp.gate_proj.weight": matrix(INNER, width),
        "midlayer.mlp.up_proj.weight": matrix(INNER, width),
        "midlayer.mlp.down_proj.weight": matrix(width, INNER),
    }
    head |= {
        f"midlayer.{name}.weight": norm(width)
        for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    }
    if norms:
        head |= {f"{attention}{name}.weight": norm(COLUMNS) for name in ("q_norm", "k_norm")}
        head["embed_tokens.weight"] = matrix(vocabulary, width)
    if guessed is not None:
        ids = np.sort(rng.choice(vocabulary, guessed, replace=False))
        head |= {"d2t": ids - np.arange(guessed), "t2d": np.isin(np.arange(vocabulary), ids)}
    return head


def eagle3_config(width: int, vocabulary: int, guessed: int | None = None, **changes: Any) -> dict[str, Any]:
    """The `config.json` of such a head, as EAGLE writes it."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": COLUMNS,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "vocab_size": vocabulary,
        "draft_vocab_size": guessed or vocabulary,
        **changes,
    }


def speculators_config(width: int, vocabulary: int, guessed: int | None, **changes: Any) -> dict[str, Any]:
    """The `config.json` of such a head, as vLLM's speculators write it: without values that are defaults."""
    layer = eagle3_config(width, vocabulary) | {"model_type": "qwen3", "rope_theta": None}
    del layer["draft_vocab_size"], layer["architectures"], layer["hidden_size"]
    layer |= {"rope_parameters": {"rope_type": "default", "rope_theta": THETA}, "attention_bias": False}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": guessed,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [5, 1, 0],
        "target_hidden_size": width,
        "transformer_layer_config": layer,
        **changes,
    }


def write(directory: Path, config: Mapping[str, Any], stored: Tensors) -> Path:
    """Writes a checkpoint and returns its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    arrays = {name: np.ascontiguousarray(value) for name, value in stored.items()}
    safetensors.numpy.save_file(arrays, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def in_speculators_layout(head: Tensors) -> Tensors:
    return {name.replace("midlayer.", "layers.0."): value for name, value in head.items()}


def rms(x: np.ndarray, weight: np.ndarray, eps: float = EPS) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def eagle3_hidden(
    stored: Tensors,
    embedded: np.ndarray,
    mapped: np.ndarray,
    *,
    normalized_first: bool = False,
    fault: str | None = None,
    theta: float = THETA,
) -> np.ndarray:
    """The hidden states [T, D] of rows, given the embedding of each next token, and mapped features."""
    t = {name.removeprefix("midlayer."): value.astype(float) for name, value in stored.items()}
    rows, positions = len(mapped), np.arange(len(mapped)) * (fault != "no positions")
    normalized = mapped if fault == "no hidden norm" else rms(mapped, t["hidden_norm.weight"])
    parts = rms(embedded, t["input_layernorm.weight"]), normalized
    x = np.concatenate(parts[::-1] if fault == "hidden before embedding" else parts, axis=-1)
    q, k, v = ((x @ t[f"self_attn.{name}_proj.weight"].T).reshape(rows, -1, COLUMNS).swapaxes(0, 1) for name in "qkv")
    if "self_attn.q_norm.weight" in t:
        q, k = rms(q, t["self_attn.q_norm.weight"]), rms(k, t["self_attn.k_norm.weight"])
    angles = positions[:, None] * theta ** (-np.arange(0, COLUMNS, 2) / COLUMNS)

    def rotated(y: np.ndarray) -> np.ndarray:
        a, b = np.split(y, 2, axis=-1)
        return np.concatenate(
            [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=-1
        )

    q, k, v = rotated(q), rotated(k).repeat(HEADS // KV_HEADS, 0), v.repeat(HEADS // KV_HEADS, 0)
    scores = q @ k.swapaxes(1, 2) / np.sqrt(COLUMNS) + np.triu(np.full((rows, rows), -np.inf), 1)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    o = (shares / shares.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(rows, -1)
    hidden = (normalized if normalized_first else mapped) + o @ t["self_attn.o_proj.weight"].T
    y = rms(hidden, t["post_attention_layernorm.weight"])
    gate, up = (y @ t[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return hidden + (gate / (1 + np.exp(-gate)) * up) @ t["mlp.down_proj.weight"].T


def eagle3_logits(stored: Tensors, hidden: np.ndarray) -> np.ndarray:
    return rms(hidden, stored["norm.weight"].astype(float)) @ stored["lm_head.weight"].astype(float).T


def with_next_token_layer(name: str, directory: Path) -> Path:
    """A copy of a fixture with a layer that predicts a further token: its last layer with attention, changed."""
    config = json.loads((FIXTURES / name / "config.json").read_text())
    stored, rng = tensors(FIXTURES / name), np.random.default_rng(2)
    width, layers, dtype = config["hidden_size"], config["num_hidden_layers"], stored["model.embed_tokens.weight"].dtype
    is_qwen = name.startswith("qwen3")
    last = max(
        index for index in range(layers) if any(key.startswith(f"model.layers.{index}.self_attn.") for key in stored)
    )
    prefix = "mtp." if is_qwen else f"model.layers.{layers}."
    layer = {
        f"{prefix}{'layers.0.' if is_qwen else ''}{key.removeprefix(f'model.layers.{last}.')}": value[..., ::-1].copy()
        for key, value in stored.items()
        if key.startswith(f"model.layers.{last}.")
    }
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    names = names if is_qwen else ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    for part in names:
        shape = (width, 2 * width) if part in ("fc", "eh_proj") else (width,)
        value = rng.standard_normal(shape) * (2 * width) ** -0.5 if len(shape) == 2 else rng.standard_normal(shape) / 2
        layer[f"{prefix}{part}.weight"] = (value if len(shape) == 2 or is_qwen else 1 + value).astype(dtype)
    config |= {"mtp_num_hidden_layers" if is_qwen else "num_nextn_predict_layers": 1}
    if not is_qwen:
        layer[f"{prefix}embed_tokens.weight"] = stored["model.embed_tokens.weight"]
        layer[f"{prefix}shared_head.head.weight"] = stored["lm_head.weight"]
    return write(directory, config, stored | layer)


def as_decoder(directory: Path, rows: np.ndarray, target: Path) -> Path:
    """A decoder with the layer that predicts a further token alone, whose embedding's first rows are `rows`."""
    config, stored = json.loads((directory / "config.json").read_text()), tensors(directory)
    layers = config["num_hidden_layers"]
    is_qwen = "mtp.fc.weight" in stored
    prefix = "mtp.layers.0." if is_qwen else f"model.layers.{layers}."
    layer = {name.replace(prefix, "model.layers.0."): x for name, x in stored.items() if name.startswith(prefix)}
    other = ("enorm", "hnorm", "eh_proj", "shared_head", "embed_tokens")
    layer = {name: x for name, x in layer.items() if not name.startswith(tuple(f"model.layers.0.{o}" for o in other))}
    final = stored["mtp.norm.weight" if is_qwen else f"{prefix}shared_head.norm.weight"]
    table = np.zeros((config["vocab_size"], config["hidden_size"]), np.float32)
    table[: len(rows)] = rows
    config |= {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0, "mlp_only_layers": []}
    if is_qwen:
        config |= {"layer_types": ["full_attention"], "mtp_num_hidden_layers": 0}
    layer |= {
        "model.norm.weight": final,
        "model.embed_tokens.weight": table,
        "lm_head.weight": stored["lm_head.weight"],
    }
    return write(target, config, layer)
