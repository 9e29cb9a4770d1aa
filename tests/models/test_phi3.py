"""Phi-3 and Phi-4: LongRoPE's factors and their choice, what files say, and what is refused."""

import json
import math
import re
from typing import Any

import numpy as np
import pytest

from detjax.bench import presets
from detjax.models import CheckpointError, DecoderConfig
from detjax.ops.rotary import LongRopeScaling, RotaryEmbedding

RAW: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "partial_rotary_factor": 0.5,
}
SHORT, LONG = [1.0, 1.25, 1.5], [1.0, 3.0, 12.5]
SCALING = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}


def read(**changes: Any) -> DecoderConfig:
    return DecoderConfig.from_hugging_face(RAW | changes, "some/config.json")


def long_rope(**changes: Any) -> LongRopeScaling:
    scaling = read(**changes).rope.scaling
    assert isinstance(scaling, LongRopeScaling)
    return scaling


# --- the choice of factors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positions", "original", "factors"), [(64, 64, SHORT), (63, 64, SHORT), (65, 64, LONG), (4096, 64, LONG)]
)
def test_the_long_factors_serve_models_for_more_positions_than_the_original_ones(
    positions: int, original: int, factors: list[float]
) -> None:
    """Each frequency is divided by its factor, and no sequence's length has an influence."""
    config = read(
        rope_scaling=SCALING,
        max_position_embeddings=positions,
        original_max_position_embeddings=original,
        rope_theta=50,
    )
    assert config.rope.rotary_dim == 6
    expected = [1 / (factor * 50 ** (2 * pair / 6)) for pair, factor in enumerate(factors)]
    np.testing.assert_allclose(config.rope.inverse_frequencies[:3], expected, rtol=2e-7)
    assert not config.rope.inverse_frequencies[3:].any()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, math.sqrt(1 + math.log(8) / math.log(64))),
        ({"factor": 32.0}, math.sqrt(1 + math.log(32) / math.log(64))),
        ({"factor": 0.5}, 1.0),
        ({"attention_factor": 1.75}, 1.75),
        ({"attention_factor": 0.75, "factor": 32.0}, 0.75),
    ],
)
def test_the_embedding_has_the_stated_factor_or_the_papers(changes: dict[str, Any], expected: float) -> None:
    positions = {"max_position_embeddings": 512, "original_max_position_embeddings": 64}
    rope = read(rope_scaling=SCALING | changes, **positions).rope
    np.testing.assert_allclose(rope.pair_scales, [expected] * 3 + [1] * 3, rtol=1e-7)
    same = read(rope_scaling=SCALING, max_position_embeddings=64, original_max_position_embeddings=64)
    assert same.rope.embedding_scale == 1.0


def test_factors_must_be_as_many_as_pairs_that_rotate() -> None:
    scaling = LongRopeScaling((1.0, 2.0), (1.0, 2.0), 64, 512)
    with pytest.raises(ValueError, match="RotaryEmbedding: scaling has 2 factors; accepted: 4, one for each pair"):
        RotaryEmbedding(8, 100.0, scaling)
    assert RotaryEmbedding(8, 100.0, scaling, rotary_dim=4).turning == 4


# --- config.json ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_older_names_of_longrope_are_read(name: str, key: str) -> None:
    scaling = {key: name, "short_factor": SHORT, "long_factor": LONG}
    expected = LongRopeScaling(tuple(SHORT), tuple(LONG), 4096, 4096)
    assert long_rope(rope_scaling=scaling) == expected
    written = read(rope_scaling=scaling).to_hugging_face()
    # Transformers 4 accepts these three keys alone.
    assert json.loads(json.dumps(written["rope_scaling"])) == SCALING
    assert written["original_max_position_embeddings"] == 4096


def test_original_positions_are_next_to_the_scaling_and_may_be_repeated_in_it() -> None:
    inner = SCALING | {"original_max_position_embeddings": 64}
    assert long_rope(rope_scaling=inner, original_max_position_embeddings=64).original_max_position_embeddings == 64
    assert long_rope(rope_scaling=SCALING).original_max_position_embeddings == 4096


def test_a_window_holds_for_all_layers_and_is_none_by_default() -> None:
    assert read().windows == read(sliding_window=None).windows == (None, None)
    assert read(sliding_window=2047).windows == (2047, 2047)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling.type is 'linear'; accepted: default, longr",
        ),
        (
            {"rope_scaling": SCALING | {"short_factor": None}},
            "rope_scaling.short_factor is None; accepted: a list of 3",
        ),
        ({"rope_scaling": SCALING | {"long_factor": LONG[:2]}}, "rope_scaling.long_factor is [1.0, 3.0]; accepted"),
        ({"rope_scaling": SCALING | {"long_factor": [1.0, 0, 2]}}, "rope_scaling.long_factor is [1.0, 0, 2]; accepted"),
        ({"rope_scaling": SCALING | {"long_factor": [1.0, True, 2]}}, "rope_scaling.long_factor is [1.0, True, 2]"),
        ({"rope_scaling": SCALING | {"attention_factor": 0}}, "rope_scaling.attention_factor is 0; accepted: a finite"),
        ({"rope_scaling": SCALING | {"factor": "4"}}, "rope_scaling.factor is '4'; accepted: a finite number > 0"),
        ({"rope_scaling": SCALING | {"beta_fast": 32.0}}, "rope_scaling.beta_fast is 32.0; accepted: no such key"),
        (
            {"rope_scaling": SCALING | {"original_max_position_embeddings": 64}},
            "rope_scaling.original_max_position_embeddings is 64; accepted: 4096",
        ),
        ({"original_max_position_embeddings": 1}, "original_max_position_embeddings is 1; accepted: an integer >= 2"),
        ({"sliding_window": 0}, "sliding_window is 0; accepted: an integer >= 1"),
        ({"partial_rotary_factor": 0.05}, "partial_rotary_factor is 0.05; accepted: a share of head_dim, which is 12"),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{re.escape(f'some/config.json: {words}')}"):
        read(**changes)


def test_presets_are_of_the_sizes_that_they_are_named_for() -> None:
    for name, billions in (("Phi-4", (14, 15)), ("Phi-4-mini", (3.7, 4))):
        config = presets.config(name)
        attention = 2 * (config.heads + config.kv_heads) * config.head_dim * config.hidden_size
        layer = attention + 3 * config.hidden_size * config.intermediate_size
        tables = (1 if config.tied_embeddings else 2) * config.vocab_size * config.hidden_size
        assert billions[0] < (config.layers * layer + tables) / 1e9 < billions[1]
    mini = presets.config("Phi-4-mini")
    assert isinstance(mini.rope.scaling, LongRopeScaling)
    assert (mini.rope.turning, mini.head_dim) == (96, 128)
