"""DeepSeek's family: what its files say and what is refused, and latent attention in every phase of an engine."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import detjax
from detjax import SamplingParams, ops
from detjax.contract import KV_BLOCK
from detjax.models import CheckpointError, Decoder, DecoderConfig, KVCache, digest, load, save
from detjax.models.parts.grouped_experts import GroupedExpertsOptions, GroupLimitedRouter
from detjax.models.parts.latent_attention import LatentAttention, LatentAttentionOptions, LatentOptions
from detjax.operands.kv_pages import KeyColumns
from detjax.ops.rotary import RotaryEmbedding, YarnScaling
from tests.models.hugging_face import FIXTURES, SINGLE, changed_tensors, copied, tensors
from tests.support.bits import assert_same_bits, same_bits

RAW: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 50,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 128,
    "first_k_dense_replace": 2,
}
REMOVED = object()


def read(**changes: Any) -> DecoderConfig:
    raw = {key: value for key, value in (RAW | changes).items() if value is not REMOVED}
    return DecoderConfig.from_hugging_face(raw, "some/config.json")


# --- config.json ------------------------------------------------------------------------------------------------------


def test_keys_that_are_left_out_have_the_values_of_transformers() -> None:
    config = read()
    assert config.latent == LatentOptions(q_rank=1536, kv_rank=512, nope_dim=128, value_dim=128, interleaved=True)
    assert (config.head_dim, config.rope, config.max_positions) == (64, RotaryEmbedding(64, 10_000.0), 4096)
    assert (config.kv_heads, config.qkv_bias, config.output_bias) == (128, False, False)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"q_lora_rank": None}, {"q_rank": None}),
        ({"q_lora_rank": 7, "kv_lora_rank": 8}, {"q_rank": 7, "kv_rank": 8}),
        ({"qk_nope_head_dim": 3, "v_head_dim": 5}, {"nope_dim": 3, "value_dim": 5}),
        ({"rope_interleave": False}, {"interleaved": False}),
        ({"rope_interleave": None}, {"interleaved": False}),
    ],
)
def test_its_keys_say_the_shape_of_latent_attention(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    latent = read(**changes).latent
    assert latent is not None
    assert {key: getattr(latent, key) for key in expected} == expected


def test_layers_have_experts_after_the_first() -> None:
    assert read().experts is None
    experts = read(first_k_dense_replace=1).experts
    assert experts == GroupedExpertsOptions(
        experts=256,
        chosen=8,
        inner_width=2048,
        normalized=True,
        layers=(False, True),
        groups=8,
        kept_groups=4,
        factor=2.5,
        shared=1,
    )
    assert read(first_k_dense_replace=1, num_local_experts=64).experts == dataclasses.replace(experts, experts=64)
    assert read(first_k_dense_replace=0, norm_topk_prob=False).experts == dataclasses.replace(
        experts, layers=(True, True), normalized=False
    )


def test_rotated_columns_have_a_key_of_their_own() -> None:
    # transformers computes head_dim from it, whatever the file says.
    config = read(qk_rope_head_dim=32, head_dim=48)
    assert (config.head_dim, config.rope.head_dim) == (32, 32)
    assert config.to_hugging_face()["qk_rope_head_dim"] == 32


def test_the_fixtures_say_what_they_were_made_for() -> None:
    deepseek, kimi = (
        DecoderConfig.from_hugging_face(json.loads((FIXTURES / name / "config.json").read_text()), "config.json")
        for name in ("deepseek-v3", "kimi-k2")
    )
    assert deepseek.latent == LatentOptions(q_rank=40, kv_rank=32, nope_dim=24, value_dim=20, interleaved=True)
    assert deepseek.rope == RotaryEmbedding(16, 1e4, YarnScaling(8.0, 32, mscale=0.7, mscale_all_dim=1.3))
    assert (deepseek.norm_eps, deepseek.qkv_bias, deepseek.output_bias) == (0.05, False, False)
    assert kimi.latent == LatentOptions(q_rank=None, kv_rank=24, nope_dim=16, value_dim=16, interleaved=True)
    assert kimi.rope == RotaryEmbedding(8, 5e4, YarnScaling(32.0, 16, 1.0, 1.0, mscale=1.0, mscale_all_dim=1.0))
    assert (kimi.norm_eps, kimi.qkv_bias, kimi.output_bias) == (1e-5, True, True)


def test_kimis_model_type_says_the_same() -> None:
    assert read(model_type="kimi_k2") == read(model_type="deepseek_v3") == read()
    assert read(model_type="kimi_k2").to_hugging_face()["model_type"] == "deepseek_v3"
    assert read(model_type="kimi_k2", auto_map={"AutoModelForCausalLM": "code.Model"}) == read()
    assert read(model_type="kimi_k2", architectures=REMOVED) == read()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; accepted: sigmoid"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'; accepted: noaux_tc"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2; accepted: 1"),
        ({"model_type": "deepseek_v2"}, "model_type is 'deepseek_v2'; accepted: 'deepseek_v3'"),
        ({"num_attention_heads": 4}, "num_key_value_heads is missing; accepted: a divisor of num_attention_heads"),
        ({"num_key_value_heads": 64}, "num_key_value_heads is 64; accepted: 128, which is num_attention_heads"),
        ({"first_k_dense_replace": 0, "n_group": 3}, "n_group is 3; accepted: a divisor of n_routed_experts, which"),
        ({"first_k_dense_replace": 0, "n_group": 256}, "n_group is 256; accepted: a divisor of n_routed_experts"),
        ({"first_k_dense_replace": 0, "topk_group": 9}, "topk_group is 9; accepted: 1 to 8, which is n_group"),
        (
            {"first_k_dense_replace": 0, "topk_group": 1, "num_experts_per_tok": 33},
            "num_experts_per_tok is 33; accepted: 1 to 32, the experts of 1 groups",
        ),
        ({"first_k_dense_replace": 0, "routed_scaling_factor": 0}, "routed_scaling_factor is 0"),
        ({"first_k_dense_replace": 0, "n_shared_experts": 0}, "n_shared_experts is 0"),
        ({"qk_rope_head_dim": 31}, "qk_rope_head_dim is 31; accepted: an even number"),
        ({"q_lora_rank": 0}, "q_lora_rank is 0; accepted: an integer >= 1"),
        ({"layer_types": ["sliding_attention"] * 2}, "accepted: full_attention for every layer, as deepseek_v3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}}, "mscale_all_dim is 1.0"),
    ],
)
def test_what_is_not_served_is_refused_by_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read(**changes)
    assert str(error.value).startswith("some/config.json: ")
    assert words in str(error.value)


def test_yarn_scales_the_scores_by_the_multiplier_of_all_dimensions() -> None:
    latent = LatentOptions(q_rank=None, kv_rank=8, nope_dim=48, value_dim=4)
    yarn = functools.partial(YarnScaling, 8.0, 32)
    plain = {None, yarn(), yarn(mscale=0.7), yarn(mscale_all_dim=0.0), YarnScaling(1.0, 32, mscale_all_dim=1.3)}
    for scaling in plain:
        rope = RotaryEmbedding(16, 1e4, scaling)
        assert LatentAttentionOptions(heads=1, latent=latent, rope=rope).scale == 1 / 8
    rope = RotaryEmbedding(16, 1e4, yarn(mscale=0.7, mscale_all_dim=1.3))
    multiplier = 0.1 * 1.3 * np.log(8) + 1
    np.testing.assert_allclose(
        LatentAttentionOptions(heads=1, latent=latent, rope=rope).scale, multiplier**2 / 8, rtol=1e-15
    )


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_layers_that_predict_further_tokens_are_passed_over(tmp_path: Path) -> None:
    directory = copied("deepseek-v3", tmp_path)
    with changed_tensors(directory / SINGLE) as stored:
        stored["model.layers.2.eh_proj.weight"] = np.ones((3, 4), np.float32)
        stored["model.layers.2.self_attn.o_proj.weight"] = np.ones((1, 4), np.float32)
    expected = load(FIXTURES / "deepseek-v3", progress=False)[0]
    assert_same_bits(nnx.state(load(directory, progress=False)[0]), nnx.state(expected))
    with changed_tensors(directory / SINGLE) as stored:
        stored["model.layers.20.eh_proj.weight"] = np.ones((3, 4), np.float32)
    with pytest.raises(CheckpointError, match=r"'model.layers.20.eh_proj.weight' is surplus"):
        load(directory, progress=False)


def test_code_beside_the_weights_is_never_run(tmp_path: Path) -> None:
    directory = copied("kimi-k2", tmp_path)
    assert "auto_map" in json.loads((directory / "config.json").read_text())
    (directory / "modeling_deepseek.py").write_text("raise SystemExit('this code ran')\n")
    assert digest(load(directory, progress=False)[0]) == digest(load(FIXTURES / "kimi-k2", progress=False)[0])


def test_a_model_of_kimi_is_saved_as_the_class_that_transformers_reads(tmp_path: Path) -> None:
    model, _ = load(FIXTURES / "kimi-k2", progress=False)
    save(model, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["model_type"] == "deepseek_v3"
    assert digest(load(tmp_path / "saved", progress=False)[0]) == digest(model)


def test_the_correction_of_scores_stays_float32(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    stored = tensors(FIXTURES / "deepseek-v3")[name]
    assert not same_bits(stored.astype(jnp.bfloat16).astype(np.float32), stored)
    for dtype in ("bfloat16", "float16", "float32"):
        decoder, _ = load(FIXTURES / "deepseek-v3", dtype=dtype, progress=False)
        assert_same_bits(decoder.layers[1].mlp.router.correction[...], stored)
        assert {x.dtype.name for x in jax.tree.leaves(nnx.state(decoder))} == {dtype, "float32"}
        save(decoder, tmp_path / dtype)
        assert_same_bits(tensors(tmp_path / dtype)[name], stored)


# --- the cache --------------------------------------------------------------------------------------------------------


@functools.cache
def model(name: str = "deepseek-v3") -> Decoder:
    return load(FIXTURES / name, dtype="bfloat16", progress=False)[0]


def test_the_cache_holds_one_latent_and_the_rotated_columns_of_a_token() -> None:
    cache = KVCache.empty(model().config, 2, 200, jnp.bfloat16)
    for layer in cache.state:
        assert layer.k.shape == (4, 1, KV_BLOCK, 32 + 16)
        assert layer.v == KeyColumns(32)


@pytest.mark.parametrize("kind", ["int8", "fp8_e4m3", "q4_0"])
def test_a_quantized_cache_is_refused(kind: Any) -> None:
    message = f"KVCache: the quantization is {kind!r} and the model has latent attention; accepted: None"
    with pytest.raises(ValueError, match=message):
        KVCache.empty(model().config, 1, 8, jnp.bfloat16, quantized=kind)
    with pytest.raises(ValueError, match=message):
        detjax.generate(model(), [[1]], SamplingParams(max_tokens=1), kv_cache_dtype=kind)


# --- form A, in float64 -----------------------------------------------------------------------------------------------

HEADS, WIDTH = 3, 20


def part(q_rank: int | None, interleaved: bool, bias: bool) -> LatentAttention:
    latent = LatentOptions(q_rank=q_rank, kv_rank=10, nope_dim=6, value_dim=5, interleaved=interleaved)
    rope = RotaryEmbedding(4, 100.0, YarnScaling(4.0, 8, mscale=0.6, mscale_all_dim=1.2))
    options = LatentAttentionOptions(heads=HEADS, latent=latent, rope=rope, bias=bias)
    module = LatentAttention(WIDTH, options, rngs=nnx.Rngs(0), dtype=jnp.float32)
    random = np.random.default_rng(0)
    nnx.update(module, jax.tree.map(lambda x: x + random.normal(0, 0.3, x.shape).astype(np.float32), nnx.state(module)))
    return module


def expanded(module: LatentAttention, weights: dict[str, Any], x: Any, residual: Any) -> Any:
    """Attention of one request over the keys and values of each head: the form that the paper begins with."""
    options, latent = module.options, module.options.latent
    rank, turned = latent.q_rank or 0, options.rope.head_dim

    def norm(x: Any, weight: Any) -> Any:
        return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight

    def rotate(x: Any) -> Any:
        angles = np.arange(len(x))[:, None, None] * options.rope.inverse_frequencies.astype(np.float64)
        cos, sin = (turn(angles) * options.rope.embedding_scale for turn in (np.cos, np.sin))
        a, b = (x[..., 0::2], x[..., 1::2]) if latent.interleaved else jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    low = x @ weights["latents"].T + weights.get("latents_bias", 0.0)
    q_low = norm(low[:, :rank], weights["q_norm"]) if rank else x
    q = (q_low @ weights["q_up"].T).reshape(len(x), HEADS, -1)
    up = (norm(low[:, rank:-turned], weights["kv_norm"]) @ weights["kv_up"].T).reshape(len(x), HEADS, -1)
    k_rope = rotate(low[:, None, -turned:])
    k = jnp.concatenate([up[..., : latent.nope_dim], jnp.repeat(k_rope, HEADS, axis=1)], axis=-1)
    q = jnp.concatenate([q[..., : latent.nope_dim], rotate(q[..., latent.nope_dim :])], axis=-1)
    scores = jnp.einsum("thk,shk->hts", q, k) * options.scale
    scores = jnp.where(np.tri(len(x), dtype=bool), scores, -jnp.inf)
    o = jnp.einsum("hts,shv->thv", jax.nn.softmax(scores, axis=-1), up[..., latent.nope_dim :])
    return o.reshape(len(x), -1) @ weights["output"].T + weights.get("output_bias", 0.0) + residual


@pytest.mark.parametrize(
    ("q_rank", "interleaved", "bias"),
    [
        (7, False, True),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in [(7, True, False), (None, False, True)]),
    ],
)
def test_values_and_gradients_are_those_of_the_expanded_form(q_rank: int | None, interleaved: bool, bias: bool) -> None:
    module, tokens = part(q_rank, interleaved, bias), 131
    graph, state = nnx.split(module)
    random = np.random.default_rng(1)
    x, residual, dy = (random.standard_normal((tokens, WIDTH)).astype(np.float32) for _ in range(3))
    queries = ops.Queries(*(jnp.asarray(x, jnp.int32) for x in ([[0, 1]], [0], [tokens], [tokens])))

    def absorbed(state: Any, x: Any, residual: Any) -> Any:
        kv = ops.KVPages(jnp.zeros((2, 1, KV_BLOCK, module.options.key_width)), KeyColumns(10))
        return nnx.merge(graph, state)(x[None], queries, kv, residual=residual[None])[0][0]

    def with_gradients(fn: Any, *operands: Any) -> Any:
        y, pullback = jax.vjp(fn, *operands)
        return y, pullback(jnp.asarray(dy, y.dtype))

    y, (dstate, *others) = detjax.jit(functools.partial(with_gradients, absorbed))(state, x, residual)
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        wide = [np.asarray(a, np.float64) for a in (x, residual)]
        weights = {
            path[0]: np.asarray(w, np.float64) for path, w in nnx.to_pure_dict(state).items() for path in [(path,)]
        }
        fn = functools.partial(expanded, module)
        expected, (dweights, *expected_others) = jax.jit(functools.partial(with_gradients, fn))(weights, *wide)
        expected, dweights, expected_others = jax.tree.map(np.asarray, (expected, dweights, expected_others))
    actual = nnx.to_pure_dict(dstate)
    assert actual.keys() == dweights.keys()
    pairs = [("y", y, expected), *((str(i), *pair) for i, pair in enumerate(zip(others, expected_others, strict=True)))]
    for name, a, e in [*pairs, *((name, actual[name], dweights[name]) for name in dweights)]:
        error = np.linalg.norm(np.asarray(a, np.float64) - e) / np.linalg.norm(e)
        assert error < 3e-6, f"{name}: relative error {error:.1e}"


# --- the router -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("normalized", "groups", "kept"), [(True, 4, 2), (False, 4, 2), (True, 1, 1)])
def test_a_router_chooses_by_corrected_scores_and_weighs_by_plain_ones(
    normalized: bool, groups: int, kept: int
) -> None:
    options: Any = {"groups": groups, "kept_groups": kept, "factor": 2.827, "shared": 1, "layers": (True,)}
    options |= {"experts": 8, "chosen": 3, "inner_width": 4, "normalized": normalized}
    router = GroupLimitedRouter(20, GroupedExpertsOptions(**options), rngs=nnx.Rngs(0), dtype=jnp.float32)
    random = np.random.default_rng(0)
    correction = random.normal(0, 0.5, 8).astype(np.float32)
    router.correction[...] = jnp.asarray(correction)
    x = random.standard_normal((40, 20)).astype(np.float32)
    ids, weights = router(jnp.asarray(x))
    scores = 1 / (1 + np.exp(-x.astype(np.float64) @ np.asarray(router.weight[...], np.float64).T))
    ranks = (scores + correction).reshape(40, groups, -1)
    best = np.argsort(-np.sort(ranks, axis=-1)[..., -2:].sum(axis=-1), axis=1, kind="stable")[:, :kept]
    is_kept = (best[:, :, None] == np.arange(groups)).any(axis=1)
    ranks = np.where(is_kept[..., None], ranks, -np.inf).reshape(40, 8)
    expected = np.sort(np.argsort(-ranks, axis=1, kind="stable")[:, :3], axis=1)
    np.testing.assert_array_equal(ids, expected)
    chosen = np.take_along_axis(scores, expected, axis=1)
    chosen = chosen / (chosen.sum(axis=1, keepdims=True) + 1e-20) if normalized else chosen
    np.testing.assert_allclose(weights, 2.827 * chosen, rtol=2e-6)
    # The test would not see a correction in the weights, nor a missing limit of groups, if neither mattered.
    assert (expected != np.sort(np.argsort(-scores, axis=1)[:, :3], axis=1)).any()
    assert groups == 1 or (~np.isfinite(ranks)).any()
