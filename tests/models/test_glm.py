"""GLM-4 and GLM-4.5: what files say and what is refused, rotated columns, and layers that predict further tokens."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from detjax import ops
from detjax.bench import presets
from detjax.models import CheckpointError, DecoderConfig, load, save
from detjax.models.parts.attention import Attention, AttentionOptions
from detjax.models.parts.grouped_experts import GroupedExpertsOptions
from detjax.operands.kv_pages import KVPages
from detjax.ops.rotary import RotaryEmbedding, YarnScaling
from tests.models.hugging_face import FIXTURES, SINGLE, changed_tensors, copied, tensors
from tests.support.bits import assert_same_bits

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
}


def read(architecture: str, **changes: Any) -> DecoderConfig:
    raw = {"architectures": [f"{architecture}ForCausalLM"], **SIZES, **changes}
    return DecoderConfig.from_hugging_face(raw, "some/config.json")


# --- config.json ------------------------------------------------------------------------------------------------------


def test_experts_that_are_left_out_have_the_values_of_transformers() -> None:
    assert read("Glm4Moe").experts == GroupedExpertsOptions(
        experts=128, chosen=8, inner_width=1408, normalized=True, layers=(False, True, True),
        groups=1, kept_groups=1, factor=1.0, shared=1,
    )  # fmt: skip


def test_half_of_a_head_is_rotated_unless_the_file_says_otherwise() -> None:
    assert read("Glm4").rope == RotaryEmbedding(128, 10_000.0, rotary_dim=64)
    assert read("Glm4Moe", head_dim=24).rope == RotaryEmbedding(24, 10_000.0, rotary_dim=12)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert read("Glm4", rope_scaling=yarn).rope == RotaryEmbedding(128, 10_000.0, YarnScaling(4.0, 64), rotary_dim=64)


@pytest.mark.parametrize("architecture", ["Glm4", "Glm4Moe"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"partial_rotary_factor": 0.45, "head_dim": 12},
            "partial_rotary_factor is 0.45; accepted: a share of head_dim",
        ),
        ({"partial_rotary_factor": "half"}, "partial_rotary_factor is 'half'; accepted: a number above 0"),
        ({"rope_parameters": {"partial_rotary_factor": 2.0}}, "rope_parameters.partial_rotary_factor is 2.0"),
        ({"attention_bias": 1}, "attention_bias is 1; accepted: true, false"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types is ['sliding_attention'"),
        ({"num_experts": 8}, "num_experts is 8; accepted: 0, null"),
    ],
)
def test_what_is_not_supported_is_refused(architecture: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{re.escape(f'some/config.json: {words}')}"):
        read(architecture, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_qk_norm": "yes"}, "use_qk_norm is 'yes'; accepted: true, false"),
        ({"n_group": 3}, "n_group is 3; accepted: a divisor of n_routed_experts, which is 128"),
        ({"topk_group": 2}, "topk_group is 2; accepted: 1 to 1, which is n_group"),
        ({"n_routed_experts": 4}, "num_experts_per_tok is missing; accepted: 1 to 4"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor is 0; accepted: a finite number > 0"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1; accepted: an integer >= 0"),
    ],
)
def test_experts_out_of_range_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{re.escape(f'some/config.json: {words}')}"):
        read("Glm4Moe", **changes)


def test_presets_are_of_the_sizes_that_they_are_named_for() -> None:
    air, large = presets.config("GLM-4.5-Air"), presets.config("GLM-4.5")
    for config, billions in ((air, (104, 110)), (large, (350, 360))):
        experts = config.experts
        assert isinstance(experts, GroupedExpertsOptions)
        per_layer = (experts.experts + experts.shared) * 3 * config.hidden_size * experts.inner_width
        attention = 2 * (config.heads + config.kv_heads) * config.head_dim * config.hidden_size
        total = sum(experts.layers) * per_layer + config.layers * attention + 2 * config.vocab_size * config.hidden_size
        assert billions[0] < total / 1e9 < billions[1]
    assert (air.qk_norm, large.qk_norm) == (False, True)
    assert (air.rope.turning, air.head_dim) == (64, 128)


# --- rotated columns --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 4, 0])
def test_scores_are_those_of_columns_as_checkpoints_have_them(rotary_dim: int | None, interleaved: bool) -> None:
    """Attention over one sequence, with the tensors in the order of checkpoints, in float64."""
    heads, kv_heads, width, tokens, turning = 3, 1, 6, 5, 6 if rotary_dim is None else rotary_dim
    rope = RotaryEmbedding(width, 100.0, rotary_dim=rotary_dim)
    options = AttentionOptions(
        heads=heads, kv_heads=kv_heads, head_dim=width, rope=rope, qkv_bias=True, interleaved=interleaved
    )
    part = Attention(8, options, rngs=nnx.Rngs(0), dtype="float32")
    random = np.random.default_rng(0)
    part.qkv_bias = nnx.Param(jnp.asarray(random.standard_normal(part.qkv.shape[0]), jnp.float32))
    x = jnp.asarray(random.standard_normal((1, tokens, 8)), jnp.float32)
    pages = jnp.zeros((1, kv_heads, 128, width))
    queries = ops.Queries(ops.contiguous_page_table(1, tokens), jnp.array([0]), jnp.array([tokens]))
    result, _ = part(x, queries, KVPages(pages, pages))

    split = (
        part.tensors["qkv"].split(np.asarray(part.qkv[...])),
        part.tensors["qkv_bias"].split(np.asarray(part.qkv_bias[...])),
    )
    q, k, v = (
        (np.asarray(x[0], np.float64) @ weight.T + bias).reshape(tokens, -1, width)
        for weight, bias in zip(*split, strict=True)
    )
    angles = np.arange(tokens)[:, None, None] * 100.0 ** (-2 * np.arange(turning // 2) / max(turning, 1))

    def rotated(x: np.ndarray) -> np.ndarray:
        first = x[..., 0:turning:2] if interleaved else x[..., : turning // 2]
        second = x[..., 1:turning:2] if interleaved else x[..., turning // 2 : turning]
        turned = first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)
        return np.concatenate([*turned, x[..., turning:]], axis=-1)

    scores = np.einsum("thk,sk->hts", rotated(q), rotated(k)[:, 0]) / np.sqrt(width)
    scores = np.where(np.tril(np.ones((tokens, tokens), bool)), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    o = np.einsum("hts,sk->thk", p / p.sum(-1, keepdims=True), v[:, 0]).reshape(tokens, -1)
    np.testing.assert_allclose(result[0], o @ np.asarray(part.output[...], np.float64).T, atol=1e-5)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_layers_that_predict_further_tokens_are_skipped(tmp_path: Path) -> None:
    directory = copied("glm4-moe", tmp_path)
    with changed_tensors(directory / SINGLE) as stored:
        stored["model.layers.2.eh_proj.weight"] = np.zeros((2, 3), np.float32)
        stored["model.layers.2.shared_head.norm.weight"] = np.zeros(3, np.float32)
    model, _ = load(directory, progress=False)
    plain, _ = load(FIXTURES / "glm4-moe", progress=False)
    for one, other in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(plain)), strict=True):
        assert_same_bits(one, other)
    with changed_tensors(directory / SINGLE) as stored:
        stored["model.layers.3.eh_proj.weight"] = np.zeros((2, 3), np.float32)
    with pytest.raises(CheckpointError, match=r"'model\.layers\.3\.eh_proj\.weight' is surplus"):
        load(directory, progress=False)


@pytest.mark.parametrize("name", ["glm4", "glm4-moe", "granite", "phi3", "phi3-short", "smollm3"])
def test_what_is_saved_has_the_names_and_bits_of_what_was_loaded(name: str, tmp_path: Path) -> None:
    model, _ = load(FIXTURES / name, progress=False)
    save(model, tmp_path / "saved")
    assert_same_bits(tensors(tmp_path / "saved"), tensors(FIXTURES / name))
