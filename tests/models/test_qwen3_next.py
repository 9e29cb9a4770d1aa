"""Qwen3-Next: what its configurations say, and requests whose state lies in slots."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import detjax
from detjax.engine import EngineConfig
from detjax.engine.model_runner import bytes_of_slot
from detjax.models import CheckpointError, Decoder, DecoderConfig, KVCache, load, save
from detjax.models.parts.delta_net import DeltaNetOptions
from detjax.models.parts.gated_experts import GatedExpertsOptions
from detjax.models.parts.state import StateSize
from detjax.operands.linear_attention_state import DROPPABLE_TOKENS
from detjax.ops.rotary import LinearScaling, RotaryEmbedding, YarnScaling
from tests.models.hugging_face import changed_tensors
from tests.models.shallow_models import shallow
from tests.support.bits import assert_same_bits

FIXTURE = Path(__file__).parents[1] / "fixtures" / "qwen3-next"
RAW: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
}


def read(**changes: Any) -> DecoderConfig:
    return DecoderConfig.from_hugging_face(RAW | changes, "some/config.json")


def refusal(**changes: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        read(**changes)
    return str(error.value)


# --- configurations ---------------------------------------------------------------------------------------------------


def test_keys_that_are_left_out_have_the_values_of_transformers() -> None:
    config = read()
    linear = (True, True, True, False, True, True)
    assert config.delta == DeltaNetOptions(
        key_heads=16, value_heads=32, key_dim=128, value_dim=128, taps=4, layers=linear
    )
    assert config.experts == GatedExpertsOptions(
        experts=512, chosen=10, inner_width=512, normalized=True, layers=(True,) * 6, shared_width=512
    )
    assert (config.head_dim, config.kv_heads, config.max_positions, config.qkv_bias) == (256, 2, 32768, False)
    assert config.rope == RotaryEmbedding(256, 10_000.0, rotary_dim=64)


def test_the_share_of_columns_that_turn_stands_in_one_of_three_places() -> None:
    expected = RotaryEmbedding(256, 1e7, rotary_dim=128)
    assert read(partial_rotary_factor=0.5, rope_theta=1e7).rope == expected
    assert read(rope_parameters={"rope_theta": 1e7, "partial_rotary_factor": 0.5}).rope == expected
    assert read(rope_theta=1e7, rope_scaling={"type": "default", "partial_rotary_factor": 0.5}).rope == expected
    assert read(partial_rotary_factor=1.0).rope == RotaryEmbedding(256, 10_000.0)
    scaled = read(rope_scaling={"type": "linear", "factor": 2.0})
    assert scaled.rope == RotaryEmbedding(256, 10_000.0, LinearScaling(2.0), rotary_dim=64)
    yarn = read(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096})
    assert yarn.rope == RotaryEmbedding(256, 10_000.0, YarnScaling(4.0, 4096), rotary_dim=64)
    assert DecoderConfig.from_hugging_face(yarn.to_hugging_face(), "config.json") == yarn


def test_columns_that_do_not_turn_have_the_frequency_zero() -> None:
    rope = RotaryEmbedding(24, 100.0, rotary_dim=8)
    assert_same_bits(rope.inverse_frequencies[:4], RotaryEmbedding(8, 100.0).inverse_frequencies)
    assert (rope.inverse_frequencies[4:] == 0).all() and len(rope.inverse_frequencies) == 12


def test_layers_follow_the_interval_or_are_named() -> None:
    delta = read(full_attention_interval=3).delta
    assert delta is not None and delta.layers == (True, True, False) * 2
    types = ["full_attention", *["linear_attention"] * 5]
    delta = read(layer_types=types).delta
    assert delta is not None and delta.layers == (False, True, True, True, True, True)


def test_some_layers_or_all_have_an_mlp() -> None:
    experts = read(mlp_only_layers=[1, 4], num_local_experts=7).experts
    assert experts is not None and (experts.experts, experts.layers) == (7, (True, False, True, True, False, True))
    assert read(num_experts=0).experts is None
    assert read(mlp_only_layers=[*range(6)]).experts is None


def test_what_is_written_says_the_same() -> None:
    for changes in ({}, {"num_experts": 0}, {"mlp_only_layers": [2], "layer_types": ["full_attention"] * 6}):
        config = read(**changes)
        assert DecoderConfig.from_hugging_face(config.to_hugging_face(), "config.json") == config


def test_what_is_not_served_is_refused() -> None:
    assert "partial_rotary_factor is 0.001; accepted: a share of head_dim" in refusal(partial_rotary_factor=0.001)
    assert "layer_types is ['sliding_attention'" in refusal(layer_types=["sliding_attention"] * 6)
    assert "linear_num_value_heads is 24; accepted: a multiple" in refusal(linear_num_value_heads=24)
    assert "mlp_only_layers is [True, 'x']" in refusal(mlp_only_layers=[True, "x"])


def test_tensors_of_the_prediction_of_further_tokens_are_passed_over(tmp_path: Path) -> None:
    save(fixture(), tmp_path / "saved")
    with changed_tensors(tmp_path / "saved" / "model.safetensors") as tensors:
        tensors["mtp.layers.0.mlp.gate.weight"] = np.zeros((2, 3), np.float32)
    load(tmp_path / "saved", progress=False)


# --- state in slots ---------------------------------------------------------------------------------------------------


def fixture(dtype: str = "float32") -> Decoder:
    return load(FIXTURE, dtype=dtype, progress=False)[0]


def tokens(batch: int, length: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, 113, (batch, length)), jnp.int32)


@pytest.fixture(scope="module")
def model() -> Decoder:
    """A layer with a state in slots, and one with pages."""
    return shallow("qwen3-next", 1, 3, "bfloat16")


@pytest.fixture(scope="module")
def run(model: Decoder) -> Any:
    graphdef, state = nnx.split(model)
    program = detjax.jit(lambda state, *args: nnx.merge(graphdef, state)(*args))
    return lambda *args: program(state, *args)


CALLS = {
    "a prefill": [130],
    "a prefill that ends with a chunk": [128],
    "single tokens": [117, *[1] * 19],
    "a verify step of 17": [125, 17],
    "a verify step whose first draft begins a chunk": [63, 17, -16, 2],
    "verify steps over a chunk's end": [110, 10, 9, 1],
    "drafts that were refused, and a token": [110, 16, -10, 1],
    "refused drafts of one call and the call before": [120, 9, -9, 2, 7],
}
"""The tokens of calls; a negative number drops tokens."""
NEXT = 3
"""Tokens of the call after them."""


@pytest.mark.parametrize("name", CALLS)
def test_a_cache_goes_back_with_the_same_bits_or_not_at_all(name: str, run: Any, model: Decoder) -> None:
    """Requests of equal tokens go back to several lengths, side by side, and have NaN where the call is refused."""
    rows = 8
    given, after = jnp.repeat(tokens(1, 160), rows, axis=0), jnp.full((rows, NEXT), 7, jnp.int32)
    cache, length = KVCache.empty(model.config, rows, 192, model.dtype), 0
    for count in CALLS[name]:
        if count < 0:
            cache = dataclasses.replace(cache, lengths=cache.lengths + count)
        else:
            call = jnp.roll(given, -length, axis=1)[:, : 1 if count == 1 else 160]
            _, cache = run(call, cache, jnp.full(rows, count, jnp.int32))
        length += count
    assert cache.oldest is not None
    (oldest,) = set(cache.oldest.tolist())
    assert min(CALLS[name][-1], DROPPABLE_TOKENS) <= length - oldest <= DROPPABLE_TOKENS

    kept = [length, oldest - 1, oldest, 0, oldest + 1, 1, length - 1, oldest // 2]
    is_lost = np.array([0 < one < oldest for one in kept])
    assert is_lost.tolist() == [False, True, False, False, False, True, False, True]
    lowered, counts = dataclasses.replace(cache, lengths=jnp.array(kept, jnp.int32)), jnp.full(rows, NEXT, jnp.int32)
    logits, gone_on = run(after, lowered, counts)
    sequences = jnp.stack([jnp.concatenate([given[0, :one], after[0], given[0, one:157]]) for one in kept])
    whole, _ = run(sequences, KVCache.empty(model.config, rows, 192, model.dtype), jnp.full(rows, 160, jnp.int32))
    for row, one in enumerate(kept):
        if is_lost[row]:
            assert np.isnan(np.asarray(logits)[row]).all()
        else:
            assert_same_bits(logits[row], np.asarray(whole)[row, one : one + NEXT])
        alone = dataclasses.replace(cache, lengths=jnp.full(rows, length).at[row].set(one))
        if is_lost[row]:
            words = rf"lengths of request {row} is {one}; accepted: {oldest} and more, or 0, because"
            with pytest.raises(ValueError, match=words):
                alone.next_queries(counts)
        else:
            alone.next_queries(counts)

    # A state that is lost stays lost, until the request begins again.
    with pytest.raises(ValueError, match=r"request 1 is .*; accepted: 0, because"):
        gone_on.next_queries(counts)
    logits, again = run(after, gone_on, counts)
    assert np.isnan(np.asarray(logits)).any(axis=(1, 2)).tolist() == is_lost.tolist()
    assert np.isnan(np.asarray(logits))[is_lost].all()
    begun = run(after, dataclasses.replace(again, lengths=jnp.zeros(rows, jnp.int32)), counts)[0]
    assert_same_bits(np.asarray(begun), np.repeat(np.asarray(begun)[3:4], rows, axis=0))
    assert np.isfinite(np.asarray(begun)).all()


def test_a_state_without_slots_is_refused(model: Decoder) -> None:
    with pytest.raises(ValueError, match="slots is None and the model keeps a state for each request; accepted: the"):
        model.empty_state(3)
    assert model.has_slots
    declaration = type(model.layers[0]).state(model.config, 0)
    assert declaration.empty(StateSize(1, jnp.bfloat16, slots=3)).rule.s.shape == (3, 4, 16, 12)


def test_memory_for_less_than_one_snapshot_is_refused(model: Decoder) -> None:
    size = bytes_of_slot(model)
    with pytest.raises(ValueError, match=f"snapshot_bytes is {size - 1}; accepted: at least {size}, for one snapshot"):
        EngineConfig(snapshot_bytes=size - 1).resolved(model)
    for options in ({"snapshot_bytes": size}, {"snapshot_bytes": 0}, {"snapshot_bytes": 1, "prefix_cache": False}):
        EngineConfig(max_length=256, **options).resolved(model)
