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
from detjax.engine import Engine, EngineConfig, Request, SamplingParams
from detjax.engine.model_runner import bytes_of_slot
from detjax.models import CheckpointError, Decoder, DecoderConfig, KVCache, load, save
from detjax.models.parts.delta_net import DeltaNetOptions
from detjax.models.parts.gated_experts import GatedExpertsOptions
from detjax.models.parts.state import StateSize
from detjax.operands.linear_attention_state import DROPPABLE_TOKENS
from detjax.ops.rotary import LinearScaling, RotaryEmbedding, YarnScaling
from tests.models.hugging_face import changed_tensors
from tests.support.bits import assert_same_bits, same_bits

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
    return fixture("bfloat16")


@pytest.fixture(scope="module")
def run(model: Decoder) -> Any:
    graphdef, state = nnx.split(model)
    program = detjax.jit(lambda state, *args: nnx.merge(graphdef, state)(*args))
    return lambda *args: program(state, *args)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("ends", [(60,), (63,), (120,), (126,)])
def test_dropped_tokens_leave_no_trace(ends: tuple[int], run: Any, model: Decoder) -> None:
    """A verify step's drafts are refused, and the cache is given its former lengths."""
    (kept,), given = ends, tokens(2, 144)
    whole = np.asarray(run(given))
    cache = KVCache.empty(model.config, 2, 144, model.dtype)
    _, cache = run(given, cache, jnp.array([kept, kept - 7], jnp.int32))
    lengths, drafts = cache.lengths, jnp.full((2, DROPPABLE_TOKENS), 5, jnp.int32)
    _, cache = run(drafts, cache, jnp.array([DROPPABLE_TOKENS, 3], jnp.int32))
    cache = dataclasses.replace(cache, lengths=lengths)
    rest = np.stack([np.roll(np.asarray(row), -start) for row, start in zip(given, (kept, kept - 7), strict=True)])
    logits, _ = run(jnp.asarray(rest), cache, jnp.array([144 - kept, 20], jnp.int32))
    assert_same_bits(np.asarray(logits)[0, : 144 - kept], whole[0, kept:])
    assert_same_bits(np.asarray(logits)[1, :20], whole[1, kept - 7 : kept + 13])


CALLS = {
    "a prefill": [130],
    "a prefill that ends with a chunk": [128],
    "single tokens": [100, *[1] * 36],
    "a verify step of 17": [125, 17],
    "verify steps over a chunk's end": [110, 10, 9, 1],
    "drafts that were refused, and a token": [110, 16, -10, 1],
    "refused drafts of one call and the call before": [120, 9, -9, 2, 7],
}
"""The tokens of calls; a negative number drops tokens."""


@pytest.mark.parametrize("name", CALLS)
def test_a_cache_goes_back_with_the_same_bits_or_not_at_all(name: str, run: Any, model: Decoder) -> None:
    """To every length: by a program of the call, which has NaN where the call by itself is refused."""
    given, after = tokens(1, 160), jnp.full((1, 3), 7, jnp.int32)
    cache, length = KVCache.empty(model.config, 1, 192, model.dtype), 0
    for count in CALLS[name]:
        if count < 0:
            cache = dataclasses.replace(cache, lengths=cache.lengths + count)
        else:
            call = jnp.roll(given, -length, axis=1)[:, : 1 if count == 1 else 160]
            _, cache = run(call, cache, jnp.array([count], jnp.int32))
        length += count
    refused = list[int]()
    for kept in range(length + 1):
        lowered = dataclasses.replace(cache, lengths=jnp.array([kept], jnp.int32))
        logits, gone_on = run(after, lowered, jnp.array([3], jnp.int32))
        whole = run(jnp.concatenate([given[:, :kept], after, given[:, kept:157]], axis=1))
        if not np.isnan(np.asarray(logits)).any():
            assert_same_bits(np.asarray(logits), np.asarray(whole)[:, kept : kept + 3])
            lowered.next_queries(jnp.array([3], jnp.int32))
            continue
        assert np.isnan(np.asarray(logits)).all()
        refused.append(kept)
        with pytest.raises(ValueError, match=rf"lengths of request 0 is {kept}; accepted: \d+ and more, or 0, because"):
            lowered.next_queries(jnp.array([3], jnp.int32))
        # What is lost stays lost, until the request begins again.
        assert np.isnan(np.asarray(run(after, gone_on, jnp.array([3], jnp.int32))[0])).all()
        with pytest.raises(ValueError, match=r"accepted: 0, because"):
            gone_on.next_queries(jnp.array([3], jnp.int32))
    assert refused == [*range(1, refused[-1] + 1)]  # from 0 everything is computed again
    last, dropped = CALLS[name][-1], length - refused[-1] - 1
    assert dropped >= min(last, DROPPABLE_TOKENS)
    assert dropped <= DROPPABLE_TOKENS


def test_a_request_that_has_lost_its_state_leaves_others_alone(run: Any, model: Decoder) -> None:
    given, after = tokens(3, 130), jnp.full((3, 3), 7, jnp.int32)
    _, cache = run(given, KVCache.empty(model.config, 3, 192, model.dtype))
    expected, _ = run(after, dataclasses.replace(cache, lengths=jnp.array([125, 130, 0], jnp.int32)))
    logits, again = run(after, dataclasses.replace(cache, lengths=jnp.array([125, 20, 0], jnp.int32)))
    assert_same_bits(np.asarray(logits)[[0, 2]], np.asarray(expected)[[0, 2]])
    assert np.isnan(np.asarray(logits)[1]).all() and np.isfinite(np.asarray(expected)).all()
    assert np.isfinite(np.asarray(run(after, again)[0])).all(axis=(1, 2)).tolist() == [True, False, True]
    begun = run(after, dataclasses.replace(again, lengths=jnp.zeros(3, jnp.int32)))[0]
    assert_same_bits(np.asarray(begun)[1], np.asarray(begun)[2])


def test_caches_of_pages_alone_go_back_to_any_length() -> None:
    model, _ = load(FIXTURE.with_name("qwen3"))
    cache = KVCache.empty(model.config, 1, 192, model.dtype)
    assert cache.oldest is None and cache.lost is None
    given = tokens(1, 40) % model.config.vocab_size
    whole, full = model(given, cache)
    logits, _ = model(given[:, 3:10], dataclasses.replace(full, lengths=jnp.array([3], jnp.int32)))
    assert_same_bits(np.asarray(logits), np.asarray(whole)[:, 3:10])


@pytest.mark.sampled(0)
@pytest.mark.parametrize("batch", [5, 33])
def test_a_request_is_the_same_in_every_batch_and_slot(batch: int, run: Any) -> None:
    given = tokens(batch, 70)
    alone = np.asarray(run(given[:1]))[0]
    for slot in (0, batch // 2, batch - 1):
        moved = jnp.roll(given, slot, axis=0)
        assert_same_bits(np.asarray(run(moved))[slot], alone)


def test_a_state_without_slots_is_refused(model: Decoder) -> None:
    with pytest.raises(ValueError, match="slots is None and the model keeps a state for each request; accepted: the"):
        model.empty_state(3)
    assert model.has_slots
    declaration = type(model.layers[0]).state(model.config, 0)
    assert declaration.empty(StateSize(1, jnp.bfloat16, slots=3)).rule.s.shape == (3, 4, 16, 12)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("num_pages", [None, 3])
def test_an_engine_gives_a_request_the_same_answer_in_a_crowd(num_pages: int | None, model: Decoder) -> None:
    """With 3 pages, sequences are preempted and computed again, in other slots. Prompts begin alike."""
    random = np.random.default_rng(3)
    beginning = random.integers(0, 113, 130).tolist()
    prompts = [beginning + random.integers(0, 113, count).tolist() for count in (1, 9, 40)] + [[7], [8, 9, 10]]
    params = SamplingParams(max_tokens=16, temperature=0.8, seed=5, ignore_eos=True)
    requests = [Request(prompt, params) for prompt in prompts]
    settings: dict[str, Any] = {"max_samples": 4, "token_budget": 48, "max_length": 256, "snapshot_tokens": 1}
    with Engine(model, None, num_pages=num_pages, **settings) as engine:
        together = [generation.completions[0] for generation in engine.generate(requests)]
        alone = [engine.generate([request])[0].completions[0] for request in requests]
        stats = engine.stats()
    assert together == alone
    if num_pages is None:
        assert (stats.snapshots > 0, stats.snapshot_hits > 0) == (True, True)
        assert stats.snapshot_bytes == stats.snapshots * bytes_of_slot(model)
    offline = detjax.generate(model, prompts, params)
    assert [generation.completions[0] for generation in offline] == together


def test_memory_for_less_than_one_snapshot_is_refused(model: Decoder) -> None:
    size = bytes_of_slot(model)
    with pytest.raises(ValueError, match=f"snapshot_bytes is {size - 1}; accepted: at least {size}, for one snapshot"):
        EngineConfig(snapshot_bytes=size - 1).resolved(model)
    for options in ({"snapshot_bytes": size}, {"snapshot_bytes": 0}, {"snapshot_bytes": 1, "prefix_cache": False}):
        EngineConfig(max_length=256, **options).resolved(model)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("size", [50, 1])
def test_stock_numerics_depend_on_how_a_request_is_cut(size: int) -> None:
    model, given = fixture("float32"), tokens(1, 100)
    with detjax.use_backend("stock"):
        graphdef, state = nnx.split(model)
        program = detjax.jit(lambda state, *args: nnx.merge(graphdef, state)(*args))
        whole, cache, parts = program(state, given), KVCache.empty(model.config, 1, 100, model.dtype), []
        for start in range(0, 100, size):
            logits, cache = program(state, given[:, start : start + size], cache)
            parts.append(np.asarray(logits))
    assert not same_bits(np.concatenate(parts, axis=1), np.asarray(whole))
