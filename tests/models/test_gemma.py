"""Gemma 2 and 3: what their configurations say, and the bits of norms of branches, of bounds and of two rotations."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import detjax
from detjax import ops
from detjax.models import CheckpointError, Decoder, DecoderConfig, GenerationDefaults, digest, load, save
from detjax.models.configuration.family import description
from detjax.ops.rotary import LinearScaling, RotaryEmbedding
from tests.models.shallow_models import reference, shallow
from tests.support.bits import assert_same_bits

FIXTURES = Path(__file__).parents[1] / "fixtures"
NAMES = ["gemma2", "gemma3"]
GEMMA2: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
}
GEMMA3 = GEMMA2 | {"architectures": ["Gemma3ForCausalLM"]}


def read(raw: dict[str, Any], **changes: Any) -> DecoderConfig:
    return DecoderConfig.from_hugging_face(raw | changes, "some/config.json")


def refusal(raw: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        read(raw, **changes)
    return str(error.value)


def fixture(name: str) -> tuple[Decoder, jax.Array]:
    """The model in float32, and three sequences; the first one is the reference's."""
    model = load(FIXTURES / name, dtype="float32", progress=False)[0]
    tokens = np.load(FIXTURES / name / "reference.npz")["tokens"][:140]
    others = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 140))
    return model, jnp.asarray(np.concatenate([tokens[None], others]), jnp.int32)


# --- configurations ---------------------------------------------------------------------------------------------------


def test_keys_that_are_left_out_have_the_values_of_transformers() -> None:
    config = read(GEMMA2)
    assert (config.head_dim, config.kv_heads, config.max_positions, config.norm_eps) == (256, 4, 8192, 1e-6)
    assert config.windows == (4096, None, 4096, None, 4096, None, 4096)
    assert (config.attention_soft_cap, config.logit_soft_cap, config.query_pre_attn_scalar) == (50.0, 30.0, 256)
    assert (config.rope, config.window_rope) == (RotaryEmbedding(256, 10_000.0), None)
    assert (config.activation, config.tied_embeddings, config.qk_norm) == ("gelu_tanh", True, False)
    newer = read(GEMMA3)
    assert (newer.head_dim, newer.kv_heads, newer.max_positions) == (256, 4, 131072)
    assert newer.windows == (4096,) * 5 + (None, 4096)
    assert (newer.attention_soft_cap, newer.logit_soft_cap, newer.query_pre_attn_scalar) == (None, None, 256)
    assert (newer.rope, newer.window_rope) == (RotaryEmbedding(256, 1e6), RotaryEmbedding(256, 10_000.0))
    assert (newer.activation, newer.tied_embeddings, newer.qk_norm) == ("gelu_tanh", True, True)


def test_texts_begin_and_end_with_tokens_of_the_family_unless_the_checkpoint_says_otherwise() -> None:
    for raw in (GEMMA2, GEMMA3):
        defaults = GenerationDefaults.from_hugging_face({}, "generation_config.json", description(raw, "config.json"))
        assert (defaults.bos_token_id, defaults.eos_token_ids) == (2, (1,))
        several = raw | {"eos_token_id": [1, 106]}
        defaults = GenerationDefaults.from_hugging_face(
            {}, "generation_config.json", description(several, "config.json")
        )
        assert defaults.eos_token_ids == (1, 106)


@pytest.mark.parametrize(("raw", "model_type"), [(GEMMA2, "gemma2"), (GEMMA3, "gemma3_text")])
def test_the_architecture_may_be_told_by_the_model_type_alone(raw: dict[str, Any], model_type: str) -> None:
    assert read(raw, architectures=None, model_type=model_type) == read(raw)


def test_a_bound_that_is_null_is_none_and_one_that_is_left_out_is_the_default() -> None:
    config = read(GEMMA2, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (config.attention_soft_cap, config.logit_soft_cap) == (None, None)
    written = config.to_hugging_face()
    assert written["attn_logit_softcapping"] is None
    assert DecoderConfig.from_hugging_face(written, "config.json") == config
    config = read(GEMMA3, attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    assert (config.attention_soft_cap, config.logit_soft_cap) == (None, 30.0)


def test_both_forms_of_rotations_and_of_layer_types_say_the_same() -> None:
    rope, window_rope = RotaryEmbedding(256, 5e5, LinearScaling(8.0)), RotaryEmbedding(256, 300.0)
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    expected = dataclasses.replace(
        read(GEMMA3), rope=rope, window_rope=window_rope, windows=(9, 9, None, 9, 9, None, 9), query_pre_attn_scalar=168
    )
    full = {"rope_type": "linear", "factor": 8.0}
    common = {"sliding_window": 9, "query_pre_attn_scalar": 168}
    old = common | {"rope_theta": 5e5, "rope_local_base_freq": 300, "rope_scaling": full, "sliding_window_pattern": 3}
    parameters = {"full_attention": full | {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 300.0}}
    new = common | {"rope_parameters": parameters, "layer_types": [*types, *types, "sliding_attention"]}
    mixed = new | {"rope_scaling": full, "rope_theta": 5e5}
    for form in (old, new, mixed, old | {"layer_types": None}):
        assert read(GEMMA3, **form) == expected
    written = expected.to_hugging_face()
    assert (written["sliding_window_pattern"], written["rope_local_base_freq"]) == (3, 300.0)
    for removed in ("layer_types", "rope_parameters", "rope_scaling", "sliding_window_pattern", "rope_local_base_freq"):
        rest = {key: value for key, value in written.items() if key != removed}
        assert DecoderConfig.from_hugging_face(rest, "config.json") == expected


@pytest.mark.parametrize(
    ("raw", "changes", "words"),
    [
        (GEMMA2, {"num_attention_heads": 12}, "num_attention_heads is 12; accepted: a divisor of hidden_size, which"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention is True; accepted: false, null"),
        (GEMMA2, {"hidden_activation": "quick_gelu"}, "hidden_activation is 'quick_gelu'; accepted: silu"),
        (GEMMA2, {"sliding_window": None}, "sliding_window is None; accepted: an integer >= 1"),
        (GEMMA2, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        (GEMMA2, {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping is -1.0; accepted: a finite number > 0"),
        (GEMMA3, {"final_logit_softcapping": 0}, "final_logit_softcapping is 0"),
        (GEMMA3, {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        (GEMMA3, {"layer_types": ["full_attention"]}, "layer_types is ['full_attention']; accepted: a list with"),
        (GEMMA3, {"rope_local_base_freq": 0}, "rope_local_base_freq is 0"),
        (GEMMA3, {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters.rope_theta is 10000.0; accepted: full_att"),
        (
            GEMMA3,
            {"rope_parameters": {"sliding_attention": {"rope_type": "dynamic"}}},
            "rope_parameters.sliding_attention.rope_type is 'dynamic'",
        ),
        (
            GEMMA3,
            {
                "rope_parameters": {"full_attention": {"rope_type": "default"}},
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            "rope_scaling is {'rope_type': 'linear', 'factor': 8.0}; accepted: what rope_parameters says",
        ),
        (GEMMA2, {"rope_parameters": {"full_attention": {}}}, "rope_parameters.full_attention is {}"),
    ],
)
def test_what_is_not_supported_is_refused_by_file_and_key(raw: dict[str, Any], changes: Any, words: str) -> None:
    message = refusal(raw, **changes)
    assert message.startswith("some/config.json: ")
    assert words in message


@pytest.mark.parametrize(
    ("raw", "changes", "words"),
    [
        (GEMMA3, {"attention_soft_cap": 50.0}, "attention_soft_cap is 50.0"),
        (GEMMA2, {"qk_norm": True}, "qk_norm is True"),
        (GEMMA2, {"window_rope": RotaryEmbedding(256, 1e4)}, "window_rope is"),
        (GEMMA2, {"windows": (4096, None, 5, None, 4096, None, 4096)}, "windows is"),
    ],
)
def test_what_transformers_does_not_have_is_not_written(raw: dict[str, Any], changes: Any, words: str) -> None:
    with pytest.raises(ValueError, match="to_hugging_face: ") as error:
        dataclasses.replace(read(raw), **changes).to_hugging_face()
    assert words in str(error.value)


# --- networks ---------------------------------------------------------------------------------------------------------


def test_rows_of_the_embedding_are_multiplied_by_a_rounded_root() -> None:
    model, tokens = fixture("gemma2")
    narrow = load(FIXTURES / "gemma2", dtype="bfloat16", progress=False)[0]
    for decoder, dtype in ((model, np.float32), (narrow, ml_dtypes.bfloat16)):
        rows = np.asarray(decoder.embedding.weight[...])[np.asarray(tokens)].astype(np.float32)
        root = np.float32(np.float32(44**0.5).astype(dtype))
        assert_same_bits(detjax.jit(decoder.embedding)(tokens), (rows * root).astype(dtype))


@pytest.mark.parametrize("name", ["gemma2", pytest.param("gemma3", marks=pytest.mark.nightly)])
def test_logprobs_in_training_have_the_bits_of_logits(name: str) -> None:
    tokens = jnp.asarray(reference(name)["tokens"][None, :43], jnp.int32)
    graphdef, state = nnx.split(shallow(name, 0, 1))

    def logprobs(state: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        decoder = nnx.merge(graphdef, state)
        hidden, _ = decoder.hidden(tokens)
        chosen = jnp.roll(tokens, -1, axis=1)
        taken = jnp.take_along_axis(ops.log_softmax(decoder.logits(hidden)), chosen[..., None], axis=-1)[..., 0]
        return decoder.logprobs(hidden, chosen), taken

    assert_same_bits(*detjax.jit(logprobs)(state, tokens))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_saved_is_read_with_the_same_digest(name: str, tmp_path: Path) -> None:
    model, _ = load(FIXTURES / name, progress=False)
    save(model, tmp_path / "saved")
    again, _ = load(tmp_path / "saved", progress=False)
    assert digest(again) == digest(model)
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert written["hidden_activation"] == "gelu_pytorch_tanh"
