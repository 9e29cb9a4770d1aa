"""Gemma 4: what its configurations say, layers that read other layers' pages, and one set of bits in every phase."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import detjax
from detjax import ops
from detjax.bench import presets
from detjax.engine import Engine, Request
from detjax.engine.model_runner import bytes_of_page
from detjax.models import CheckpointError, Decoder, DecoderConfig, KVCache, load, mesh_of, save, sharded
from detjax.models.checkpoint.loading import tensor_shapes
from detjax.models.parts.per_layer_embedding import PerLayerOptions
from detjax.models.parts.scaled_experts import ScaledExpertsOptions, ScaledRouter
from detjax.models.parts.shared_keys_attention import SharedKeysOptions
from detjax.models.parts.state import PagedKeysAndValues, PagesOfLayer
from detjax.ops.rotary import LinearScaling, RotaryEmbedding
from tests.models.hugging_face import FIXTURES, changed_tensors, copied, tensors
from tests.models.shallow_models import shallow
from tests.support.bits import assert_same_bits, same_bits
from tests.support.simulated_devices import ALL_HOLD, run_on_devices

SLIDING, FULL = "sliding_attention", "full_attention"
RAW: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
}
ROPE = {"rope_theta": 5.0}
EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24}


def read(**changes: Any) -> DecoderConfig:
    return DecoderConfig.from_hugging_face(RAW | changes, "some/config.json")


# --- configurations ---------------------------------------------------------------------------------------------------


def test_keys_that_are_left_out_have_the_values_of_transformers() -> None:
    config = read()
    assert config.windows == (512, 512, 512, 512, 512, None, None)
    assert config.rope == RotaryEmbedding(512, 1e6, rotary_dim=128, proportional=True)
    assert config.window_rope == RotaryEmbedding(256, 1e4)
    assert config.shared_keys == SharedKeysOptions(
        full_kv_heads=4, full_head_dim=512, values_from_keys=False, readers=0, wide_mlp=False
    )
    assert config.per_layer == PerLayerOptions(width=256, vocab_size=262144)
    assert (config.experts, config.logit_soft_cap) == (None, None)


def test_heads_of_layers_without_a_window_stand_in_one_of_two_forms() -> None:
    published = read(global_head_dim=96, attention_k_eq_v=True, num_global_key_value_heads=2)
    heads = {"head_dim": 96, "num_key_value_heads": 2}
    by_layer = read(attention_k_eq_v=True, per_layer_config={"5": heads, "6": heads})
    assert published == by_layer
    assert published.shared_keys is not None
    assert (published.shared_keys.full_kv_heads, published.shared_keys.full_head_dim) == (2, 96)
    # Without shared projections, transformers has the same number of heads in all layers.
    assert read(global_head_dim=96, num_global_key_value_heads=2) == read(global_head_dim=96)
    assert read(per_layer_config={}) == read(global_head_dim=256)
    written = by_layer.to_hugging_face()
    for key in ("global_head_dim", "per_layer_config"):
        rest = {name: value for name, value in written.items() if name != key}
        assert DecoderConfig.from_hugging_face(rest, "config.json") == by_layer


@pytest.mark.parametrize(
    "changes",
    [
        {},
        EXPERTS | {"rms_norm_eps": 1e-5},
        {"num_kv_shared_layers": 5, "use_double_wide_mlp": True, "layer_types": [SLIDING, FULL] * 3 + [SLIDING]},
        {"layer_types": [FULL] * 7, "rope_parameters": {FULL: {"rope_theta": 5.0}}},
        {"head_dim": 24, "global_head_dim": 24, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 5.0},
        {
            "global_head_dim": 24,
            "rope_parameters": {
                FULL: {"rope_type": "proportional", "rope_theta": 9.0, "partial_rotary_factor": 0.42, "factor": 2.0},
                SLIDING: {"rope_type": "proportional", "rope_theta": 9.0, "factor": 8.0},
            },
        },
    ],
    ids=str,
)
def test_what_is_written_says_the_same(changes: dict[str, Any]) -> None:
    config = read(**changes)
    written = json.loads(json.dumps(config.to_hugging_face()))
    assert DecoderConfig.from_hugging_face(written, "config.json") == config
    # In transformers the first of these keys would hide the rotations of both types of layers.
    assert not {"rope_scaling", "rope_theta"} & written.keys()


def test_rotations_are_those_of_few_columns_with_the_frequencies_of_a_head() -> None:
    config = read(
        global_head_dim=24,
        rope_parameters={
            FULL: {"rope_type": "proportional", "rope_theta": 9.0, "partial_rotary_factor": 0.42, "factor": 2.0},
            SLIDING: {"rope_theta": 7.0},
        },
    )
    expected = RotaryEmbedding(24, 9.0, LinearScaling(2.0), rotary_dim=10, proportional=True)
    assert (config.rope, config.window_rope) == (expected, RotaryEmbedding(256, 7.0))
    whole = RotaryEmbedding(24, 9.0, LinearScaling(2.0)).inverse_frequencies
    assert_same_bits(expected.inverse_frequencies[:5], whole[:5])
    assert_same_bits(expected.inverse_frequencies[5:], np.zeros(7, np.float32))
    assert "proportional=True" in repr(expected)
    for options in ({}, {"rotary_dim": 0}, {"rotary_dim": 4, "scaling": ops.YarnScaling(2.0, 64)}):
        with pytest.raises(ValueError, match="RotaryEmbedding: proportional is True"):
            RotaryEmbedding(24, 9.0, proportional=True, **options)


def test_layers_without_keys_read_the_last_layer_of_their_kind_that_has_some() -> None:
    types = [SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING, FULL]
    config = read(layer_types=types, num_kv_shared_layers=3, head_dim=24, global_head_dim=40)
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    states = [type(layer).state(config, index) for index, layer in enumerate(model.layers)]
    with_window, without = PagedKeysAndValues(4, 24, 8), PagedKeysAndValues(4, 40, 8)
    assert states[:4] == [with_window, without, with_window, with_window]
    assert states[4:] == [PagesOfLayer(1), PagesOfLayer(3), PagesOfLayer(1)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'; accepted: \"vision\", null"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers is 7; accepted: a number that leaves keys to a layer"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2; accepted: a number that leaves keys to a layer"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1; accepted: an integer >= 0"),
        ({"global_head_dim": 33}, "global_head_dim is 33; accepted: an even width"),
        (
            {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
            "num_global_key_value_heads is 3; accepted: divisors of num_attention_heads, which is 8",
        ),
        ({"per_layer_config": {"5": {"intermediate_size": 9}}}, "per_layer_config.5.intermediate_size is 9; accepted:"),
        ({"per_layer_config": {"5": {"head_dim": 96}}}, "per_layer_config.6 is missing; accepted: 4 heads of keys of"),
        ({"per_layer_config": {"0": {"head_dim": 96}}}, "per_layer_config.0 is {'head_dim': 96}; accepted: 4 heads"),
        ({"per_layer_config": {"7": {"head_dim": 96}}}, "per_layer_config.7 is {'head_dim': 96}; accepted: keys from"),
        ({"vocab_size_per_layer_input": 99}, "vocab_size_per_layer_input is 99; accepted: at least vocab_size"),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input is -1"),
        (EXPERTS | {"top_k_experts": 7}, "top_k_experts is 7; accepted: an integer from 1 to 6, the number of experts"),
        (EXPERTS | {"num_experts": None}, "num_experts is None; accepted: an integer >= 1"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters.rope_theta is 5.0; accepted: full_attention and"),
        ({"rope_parameters": {SLIDING: ROPE}}, "rope_parameters.full_attention is missing; accepted: an object"),
        (
            {"rope_parameters": {FULL: ROPE, SLIDING: ROPE, "other": {}}},
            "rope_parameters.other is {}; accepted: full_attention and sliding_attention",
        ),
        (
            {"rope_parameters": {FULL: {"rope_type": "yarn", "factor": 2.0}, SLIDING: ROPE}},
            "rope_parameters.full_attention.rope_type is 'yarn'; accepted: default, proportional",
        ),
        (
            {"rope_parameters": {FULL: {"rope_type": "default", "factor": 2.0}, SLIDING: ROPE}},
            "rope_parameters.full_attention.factor is 2.0; accepted: no such key with this rope_type",
        ),
        (
            {"rope_parameters": {FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.003}, SLIDING: ROPE}},
            "partial_rotary_factor is 0.003; accepted: a number up to 1 whose share of 512 columns",
        ),
        ({"layer_types": [SLIDING] * 6}, "layer_types is"),
        ({"sliding_window": 0}, "sliding_window is 0"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_file_and_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read(**changes)
    assert str(error.value).startswith("some/config.json: ")
    assert words in str(error.value)


def test_presets_have_the_published_numbers_of_weights_and_can_be_cut() -> None:
    """5.1 billion with towers, and 2.3 without tables of layers; 25.2 billion."""
    sizes = {}
    for name in ("gemma-4-E2B", "gemma-4-26B-A4B"):
        for tensor, shape in tensor_shapes(presets.config(name)).items():
            kind = name, "embed_tokens_per_layer" in tensor
            sizes[kind] = sizes.get(kind, 0) + math.prod(shape) / 1e9
    assert {kind: round(size, 2) for kind, size in sizes.items()} == {
        ("gemma-4-E2B", False): 2.28,
        ("gemma-4-E2B", True): 2.35,
        ("gemma-4-26B-A4B", False): 25.23,
    }
    config = presets.config("gemma-4-E2B", 7)
    assert config.windows == (512, 512, 512, 512, None, 512, None)
    assert config.shared_keys is not None and config.shared_keys.readers == 2


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_model_with_towers_is_read_and_saved_as_its_text_model(tmp_path: Path) -> None:
    """Towers, and keys of layers that have none, are not read."""
    folder = copied("gemma4", tmp_path)
    with changed_tensors(folder / "model.safetensors") as held:
        assert "model.vision_tower.std_bias" in held
        for name in ("k_proj", "v_proj", "k_norm"):
            held[f"model.language_model.layers.3.self_attn.{name}.weight"] = np.zeros((2, 3), np.float32)
    model, _ = load(folder, progress=False)
    assert model.config.architecture == "Gemma4ForCausalLM"
    save(model, tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (written["architectures"], written["model_type"]) == (["Gemma4ForCausalLM"], "gemma4_text")
    saved, prefix = tensors(tmp_path / "saved"), "model.language_model."
    text = {name: x for name, x in tensors(FIXTURES / "gemma4").items() if name.startswith(prefix)}
    assert_same_bits(saved, {f"model.{name.removeprefix(prefix)}": x for name, x in text.items()})
    with changed_tensors(folder / "model.safetensors") as held:
        held["model.language_model.layers.2.self_attn.k_norm.bias"] = np.zeros(3, np.float32)
    with pytest.raises(CheckpointError, match=r"layers.2.self_attn.k_norm.bias' is surplus"):
        load(folder, progress=False)


def test_images_are_refused() -> None:
    model, _ = load(FIXTURES / "gemma4", progress=False)
    with Engine(model, None, max_samples=1, max_length=64) as engine:
        with pytest.raises(ValueError, match="Gemma4ForCausalLM reads only text; accepted: no images"):
            engine.generate([Request([1, 140], images=[np.zeros((8, 8, 3), np.uint8)])])


# --- one set of bits --------------------------------------------------------------------------------------------------

PROMPT = 131
"""Tokens of a prompt, which end three after a page."""


def tokens_of(decoder: Decoder, batch: int, length: int = PROMPT) -> jax.Array:
    return jnp.asarray(np.random.default_rng(7).integers(0, decoder.config.vocab_size, (batch, length)), jnp.int32)


def compiled(decoder: Decoder) -> Any:
    graphdef, state = nnx.split(decoder)
    program = detjax.jit(lambda state, *args: nnx.merge(graphdef, state)(*args))
    return lambda *args: program(state, *args)


def in_pieces(decoder: Decoder, tokens: jax.Array, size: int) -> tuple[np.ndarray, KVCache]:
    """Logits of the tokens in padded pieces through the cache, and the cache."""
    batch, length = tokens.shape
    cache, program, logits = KVCache.empty(decoder.config, batch, 256, decoder.dtype), compiled(decoder), []
    for start in range(0, length, size):
        piece = tokens[:, start : start + size]
        count = piece.shape[1]
        piece = jnp.pad(piece, ((0, 0), (0, size - count)), constant_values=1)
        out, cache = program(piece, cache, jnp.full(batch, count, jnp.int32))
        logits.append(np.asarray(out)[:, :count])
    return np.concatenate(logits, axis=1), cache


@pytest.mark.parametrize(
    ("name", "first", "stop", "dtype", "size"),
    [
        ("gemma4", 2, 4, "bfloat16", 47),
        ("gemma4-moe", 2, 3, "bfloat16", 47),
        *(
            pytest.param(*case, size, marks=pytest.mark.nightly)
            for case in (("gemma4", 0, 5, "float32"), ("gemma4-moe", 0, 3, "bfloat16"))
            for size in (1, 47)
        ),
    ],
)
def test_chunks_decode_and_batches_have_the_bits_of_prefill(
    name: str, first: int, stop: int, dtype: str, size: int
) -> None:
    """A layer with keys and one that reads them; and experts next to an MLP. The request is second of three."""
    decoder = shallow(name, first, stop, dtype)
    tokens = tokens_of(decoder, 3)
    whole = np.asarray(compiled(decoder)(tokens[1:2]))[0]
    pieces, cache = in_pieces(decoder, tokens, size)
    assert_same_bits(pieces[1], whole)
    readers = 0 if decoder.config.shared_keys is None else decoder.config.shared_keys.readers
    assert [state == () for state in cache.state] == [
        index >= len(cache.state) - readers for index in range(len(cache.state))
    ]


def test_a_layer_without_keys_reads_another_layers_pages_and_has_no_memory() -> None:
    whole, _ = load(FIXTURES / "gemma4", dtype="bfloat16", progress=False)
    # Two sliding layers of one head of 12 columns, and one layer of 20: keys and values, 2 bytes each.
    assert bytes_of_page(whole, None) == 128 * 2 * 2 * (12 + 20 + 12)
    decoder = shallow("gemma4", 2, 4)
    tokens = tokens_of(decoder, 1, 9)
    cache = KVCache.empty(decoder.config, 1, 128, decoder.dtype)
    _, filled = compiled(decoder)(tokens, cache, jnp.full(1, 9, jnp.int32))
    following = jnp.full((1, 1), 5, jnp.int32)
    expected, _ = compiled(decoder)(following, filled, jnp.ones(1, jnp.int32))
    changed = jax.tree.map(lambda pages: pages.at[0, :, 3].add(1.0), filled.state)
    other, _ = compiled(decoder)(following, dataclasses.replace(filled, state=changed), jnp.ones(1, jnp.int32))
    assert not same_bits(other, expected)


def test_training_has_the_bits_of_prefill_and_gradients_of_keys_come_from_layers_without_any() -> None:
    decoder = shallow("gemma4", 2, 4)
    graphdef, state = nnx.split(decoder)
    tokens = tokens_of(decoder, 2, 21)

    def loss(state: Any) -> tuple[jax.Array, jax.Array]:
        logits = nnx.merge(graphdef, state)(tokens)
        chosen = jnp.take_along_axis(ops.log_softmax(logits)[:, :-1], tokens[:, 1:, None], axis=-1)
        return -jnp.mean(chosen), logits

    gradients, logits = detjax.jit(jax.grad(loss, has_aux=True))(state)
    assert_same_bits(logits, compiled(decoder)(tokens))
    with detjax.use_backend("stock"):
        expected, _ = detjax.jit(lambda state: jax.grad(loss, has_aux=True)(state))(state)
    for (path, a), e in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(expected), strict=True):
        size = np.linalg.norm(np.asarray(e))
        error = np.linalg.norm(np.asarray(a - e)) / (size if size else 1.0)
        assert error < 2e-4, f"{jax.tree_util.keystr(path)}: relative error {error:.1e}"


def test_two_devices_give_the_bits_of_one_and_read_their_own_heads_pages() -> None:
    run_on_devices(__name__)


def compare_two_devices() -> None:
    """A layer with keys, and one that reads them, with four heads on two devices; a prefill in two pieces."""
    config = read(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        global_head_dim=16,
        layer_types=[FULL, FULL],
        num_kv_shared_layers=1,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=100,
    )
    model = Decoder(config, rngs=nnx.Rngs(0))
    tokens = tokens_of(model, 2, 11)
    expected = np.asarray(model(tokens))
    shared = sharded(model, mesh_of(2))
    cache = shared.empty_cache(2, 128)
    assert cache.state[0].k.sharding.spec[1] is not None
    first, cache = shared(tokens[:, :6], cache)
    second, cache = shared(tokens[:, 6:], cache)
    assert_same_bits(np.concatenate([first, second], axis=1), expected)
    assert cache.state[1] == ()
    print(ALL_HOLD)


def test_weights_of_experts_are_their_shares_times_their_scales() -> None:
    options = ScaledExpertsOptions(experts=5, chosen=2, inner_width=8, normalized=True, layers=(True,), norm_eps=0.01)
    router = ScaledRouter(24, options, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    random = np.random.default_rng(0)
    x, norm, scales = (
        np.asarray(jnp.asarray(random.standard_normal(shape), jnp.bfloat16)) for shape in ((7, 24), 24, 5)
    )
    router.norm[...], router.expert_scales[...] = jnp.asarray(norm), jnp.asarray(scales)
    ids, weights = detjax.jit(router)(jnp.asarray(x))
    wide = x.astype(np.float64)
    y = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 0.01) * norm.astype(np.float64)
    logits = y @ np.asarray(router.weight[...]).astype(np.float64).T * 24**-0.5
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.sort(np.argsort(-shares, -1)[:, :2])
    assert_same_bits(np.asarray(ids), chosen.astype(np.int32))
    best = np.take_along_axis(shares, chosen, -1)
    expected = best / best.sum(-1, keepdims=True) * scales.astype(np.float64)[chosen]
    np.testing.assert_allclose(weights, expected, rtol=0.02)


if __name__ == "__main__":
    compare_two_devices()
