"""Granite and SmolLM3: factors, layers without rotation, what files say, and what is refused."""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from detjax import ops
from detjax.bench import presets
from detjax.models import CheckpointError, Decoder, DecoderConfig
from detjax.models.configuration.config import Multipliers
from detjax.ops.rotary import RotaryEmbedding
from tests.models.shallow_models import shallow
from tests.support.bits import assert_same_bits

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
}


def read(architecture: str, **changes: Any) -> DecoderConfig:
    raw = {"architectures": [f"{architecture}ForCausalLM"], **SIZES, **changes}
    return DecoderConfig.from_hugging_face(raw, "some/config.json")


# --- Granite ----------------------------------------------------------------------------------------------------------


def test_factors_are_1_by_default_that_of_scores_too() -> None:
    assert read("Granite").multipliers == Multipliers(embedding=1.0, scores=1.0, residual=1.0, logits_divisor=1.0)
    assert read("Llama", embedding_multiplier=3.0).multipliers is None


@pytest.mark.parametrize(
    "key", ["embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"]
)
@pytest.mark.parametrize("value", [0, -1.0, "1", float("inf")])
def test_factors_out_of_range_are_refused(key: str, value: Any) -> None:
    words = re.escape(f"some/config.json: {key} is {value!r}; accepted: a finite number > 0")
    with pytest.raises(CheckpointError, match=f"^{words}"):
        read("Granite", **{key: value})


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_added_to_the_residual_stream_is_multiplied_in_float32_and_rounded(dtype: str) -> None:
    layer = shallow("granite", 0, 1, dtype).layers[0]
    random = np.random.default_rng(0)
    y, x = (jnp.asarray(random.standard_normal((3, 54)), dtype) for _ in range(2))
    scaled = (np.asarray(y, np.float32) * np.float32(0.62)).astype(y.dtype)
    expected = (scaled.astype(np.float32) + np.asarray(x, np.float32)).astype(y.dtype)
    assert_same_bits(np.asarray(layer._added(y, x)), expected)


def test_logits_are_multiplied_by_the_inverse_of_the_divisor_everywhere() -> None:
    """Logits, logprobs of tokens, and the options of the trainer's pass are of one network."""
    model = shallow("granite", 0, 1)
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((4, 54)), jnp.float32)
    logits = ops.scale(ops.matmul(hidden, model.head.weight[...], layout="nk", out_dtype="float32"), 1 / 0.7)
    assert_same_bits(model.logits(hidden), logits)
    assert_same_bits(model.with_logits(lambda logits: logits.whole, hidden), logits)
    tokens = jnp.arange(4)
    expected = jnp.take_along_axis(ops.log_softmax(logits), tokens[:, None], axis=1)[:, 0]
    assert_same_bits(model.logprobs(hidden, tokens), expected)
    assert_same_bits(ops.token_logprobs(hidden, model.head.weight[...], tokens, **model.head.logit_options), expected)


def test_a_separate_head_has_the_divisor_and_no_factor_of_the_embedding() -> None:
    config = read("Granite", logits_scaling=4.0, embedding_multiplier=3.0, num_hidden_layers=1)
    model = Decoder(config, rngs=nnx.Rngs(0))
    assert model.lm_head is not None
    assert (model.lm_head.factor, model.lm_head.logit_factor) == (None, 0.25)
    assert model.embedding.factor == 3.0


# --- SmolLM3 ----------------------------------------------------------------------------------------------------------


def test_every_fourth_layer_is_not_rotated_unless_the_file_says_otherwise() -> None:
    config = read("SmolLM3")
    assert config.rotated == (True, True, True, False, True)
    assert config.rope.theta == 2_000_000.0
    layers = Decoder(config, rngs=nnx.Rngs(0)).layers
    assert [layer.attention.options.rope.turning for layer in layers] == [8, 8, 8, 0, 8]
    assert read("SmolLM3", no_rope_layers=[0, 1, 0, 1, 0, 1, 1]).rotated == (False, True, False, True, False)


def test_the_published_form_is_read() -> None:
    """It has keys that transformers' class does not read."""
    config = read("SmolLM3", pretraining_tp=2, max_window_layers=28, rope_scaling=None, sliding_window=None)
    assert config == read("SmolLM3")


def test_windows_are_by_default_of_the_layers_without_rotation() -> None:
    assert read("SmolLM3", sliding_window=9).windows == (None,) * 5
    assert read("SmolLM3", use_sliding_window=True, sliding_window=9).windows == (None, None, None, 9, None)
    assert read("SmolLM3", use_sliding_window=True).windows == (None,) * 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers is [1, 0]; accepted: a list with 1 for each of 5 layers that"),
        ({"no_rope_layers": [1, 0, 2, 1, 1]}, "no_rope_layers is [1, 0, 2, 1, 1]; accepted"),
        ({"no_rope_layers": 4}, "no_rope_layers is 4; accepted"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0; accepted: an integer >= 1"),
        (
            {"layer_types": ["sliding_attention"] * 5, "sliding_window": 9},
            "layer_types is ['sliding_attention', 'sliding_attention', 'sliding_attention', 'sliding_attention', "
            "'sliding_attention']; accepted: full_attention for every layer, because the model has no sliding window",
        ),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0; accepted: an integer >= 1"),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{re.escape(f'some/config.json: {words}')}"):
        read("SmolLM3", **changes)


def test_a_head_without_rotated_columns_stays_as_it_is() -> None:
    rope = RotaryEmbedding(8, 10_000.0, rotary_dim=0)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 8)), jnp.bfloat16)
    assert_same_bits(ops.rope(x, jnp.array([7, 1_000_000]), rope), x)


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_presets_are_of_the_sizes_that_they_are_named_for() -> None:
    for name, billions in (("Granite-3.3-8B", (8, 8.5)), ("SmolLM3-3B", (3, 3.2))):
        config = presets.config(name)
        attention = 2 * (config.heads + config.kv_heads) * config.head_dim * config.hidden_size
        layer = attention + 3 * config.hidden_size * config.intermediate_size
        tables = config.vocab_size * config.hidden_size
        assert config.tied_embeddings
        assert billions[0] < (config.layers * layer + tables) / 1e9 < billions[1]
