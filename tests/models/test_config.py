"""`config.json` and `generation_config.json`: what is read, what it defaults to, and what is refused."""

import dataclasses
import json
from typing import Any

import pytest

from detjax.models import CheckpointError, DecoderConfig, GenerationDefaults
from detjax.models.configuration.family import description, families, register
from detjax.ops.rotary import LinearScaling, Llama3Scaling, RotaryEmbedding, YarnScaling
from tests.models.hugging_face import FIXTURES, NAMES

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
}
QWEN2, LLAMA, MISTRAL = (QWEN3 | {"architectures": [f"{name}ForCausalLM"]} for name in ("Qwen2", "Llama", "Mistral"))
REMOVED = object()


def read(raw: dict[str, Any], **changes: Any) -> DecoderConfig:
    raw = {key: value for key, value in (raw | changes).items() if value is not REMOVED}
    return DecoderConfig.from_hugging_face(raw, "some/config.json")


def refusal(raw: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        read(raw, **changes)
    return str(error.value)


def fixture(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES / name / "config.json").read_text())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3", {"heads": 14, "kv_heads": 2, "head_dim": 80, "qk_norm": True, "tied_embeddings": True}),
        ("qwen3", {"rope": RotaryEmbedding(80, 1e6), "windows": (None, None), "dtype": "bfloat16"}),
        ("qwen3-yarn", {"rope": RotaryEmbedding(32, 1e4, YarnScaling(4.0, 32)), "tied_embeddings": False}),
        ("qwen2", {"qkv_bias": True, "output_bias": False, "head_dim": 8, "windows": (None, 48, 48)}),
        ("llama3", {"rope": RotaryEmbedding(96, 5e5, Llama3Scaling(8.0, 1.0, 4.0, 32)), "norm_eps": 1e-5}),
        ("llama-linear", {"rope": RotaryEmbedding(24, 1e4, LinearScaling(4.0)), "head_dim": 24, "dtype": "float16"}),
        ("llama-linear", {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "kv_heads": 4}),
        ("mistral", {"windows": (40, 40), "qkv_bias": False, "dtype": "float32", "max_positions": 512}),
    ],
)
def test_the_fixtures_say_what_they_were_made_for(name, expected):
    config = read(fixture(name))
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (QWEN3, {"head_dim": 128, "kv_heads": 32, "max_positions": 32768, "qk_norm": True, "qkv_bias": False}),
        (QWEN2, {"head_dim": 2, "kv_heads": 32, "max_positions": 32768, "qk_norm": False, "qkv_bias": True}),
        (LLAMA, {"head_dim": 2, "kv_heads": 32, "max_positions": 2048, "qk_norm": False, "qkv_bias": False}),
        (MISTRAL, {"head_dim": 2, "kv_heads": 8, "max_positions": 131072, "qk_norm": False, "qkv_bias": False}),
    ],
)
def test_keys_that_are_left_out_have_the_values_of_transformers(raw, expected):
    config = read(raw)
    assert {key: getattr(config, key) for key in expected} == expected
    window = 4096 if raw is MISTRAL else None
    common = dataclasses.replace(
        config,
        activation="silu",
        norm_eps=1e-6,
        rope=RotaryEmbedding(config.head_dim, 10000.0),
        windows=(window,) * 3,
        output_bias=False,
        mlp_bias=False,
        tied_embeddings=False,
        dtype="float32",
    )
    assert config == common


@pytest.mark.parametrize("raw", [QWEN3, QWEN2, LLAMA, MISTRAL])
def test_kv_heads_that_are_null_are_as_many_as_heads(raw):
    assert read(raw, num_attention_heads=16, num_key_value_heads=None).kv_heads == 16


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama", "mistral"])
def test_the_architecture_may_be_told_by_the_model_type_alone(name):
    config = read(QWEN3, architectures=REMOVED, model_type=name)
    assert config.architecture.lower() == f"{name}forcausallm"


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        ({}, None),
        ({"factor": 4}, LinearScaling(4.0)),
        (
            {"factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
            Llama3Scaling(8.0, 1.0, 4.0, 64),
        ),
        ({"factor": 4.0, "original_max_position_embeddings": 64}, YarnScaling(4.0, 64)),
        ({"factor": 4.0}, YarnScaling(4.0, 2048)),
        (
            {"factor": 2.0, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.1, "truncate": False},
            YarnScaling(2.0, 2048, 16.0, 2.0, None, 0.7, 1.1, False),
        ),
        ({"factor": 2.0, "attention_factor": 1.5}, YarnScaling(2.0, 2048, attention_factor=1.5)),
    ],
)
def test_transformers_4_and_5_say_rope_in_two_forms_of_one_meaning(parameters, scaling):
    kind = {None: "default", LinearScaling: "linear", Llama3Scaling: "llama3"}.get(
        type(scaling) if scaling else None, "yarn"
    )
    expected = read(LLAMA, rope_parameters={"rope_type": kind, "rope_theta": 500.0, **parameters})
    assert expected.rope == RotaryEmbedding(2, 500.0, scaling)
    for form in (
        {"rope_theta": 500, "rope_scaling": {"type": kind, **parameters}},
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": kind, "type": kind, **parameters}},
        {"rope_theta": 500.0, "rope_parameters": {"rope_type": kind, **parameters}},
        {"rope_scaling": {"rope_type": kind, "rope_theta": 500.0, **parameters}, "rope_parameters": None},
    ):
        assert read(LLAMA, **form) == expected


def test_the_original_context_beside_the_rope_parameters_has_precedence():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert read(LLAMA, rope_parameters=yarn, original_max_position_embeddings=32).rope.scaling == YarnScaling(4.0, 32)


@pytest.mark.parametrize(
    ("raw", "changes", "windows"),
    [
        (QWEN2, {"sliding_window": 9}, (None, None, None)),
        (QWEN2, {"sliding_window": 9, "use_sliding_window": True}, (None, None, None)),
        (QWEN2, {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}, (None, 9, 9)),
        (QWEN3, {"use_sliding_window": True, "max_window_layers": 0}, (4096, 4096, 4096)),
        (QWEN3, {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, (None, None, None)),
        (
            QWEN3,
            {
                "sliding_window": 9,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (9, None, 9),
        ),
        (MISTRAL, {"sliding_window": 9}, (9, 9, 9)),
        (MISTRAL, {"sliding_window": None}, (None, None, None)),
        (MISTRAL, {"sliding_window": 9, "layer_types": ["sliding_attention"] * 3}, (9, 9, 9)),
        (LLAMA, {"sliding_window": 9, "use_sliding_window": True}, (None, None, None)),
    ],
)
def test_windows_are_those_of_the_architecture(raw, changes, windows):
    assert read(raw, **changes).windows == windows


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("silu", "silu"),
        ("gelu", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("relu", "relu"),
    ],
)
def test_activations_have_the_names_of_transformers(name, activation):
    assert read(LLAMA, hidden_act=name).activation == activation


def test_dtype_has_precedence_over_torch_dtype():
    assert read(LLAMA, torch_dtype="float16").dtype == "float16"
    assert read(LLAMA, torch_dtype="float16", dtype="bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize(
    ("raw", "changes", "words"),
    [
        (
            QWEN3,
            {"architectures": ["Qwen3VLForCausalLM"]},
            "architectures is ['Qwen3VLForCausalLM']; accepted: a list",
        ),
        (QWEN3, {"architectures": []}, "architectures is []"),
        (QWEN3, {"architectures": [["Qwen3ForCausalLM"]]}, "architectures is [["),
        (QWEN3, {"architectures": REMOVED}, "architectures is missing; accepted: DeepseekV3ForCausalLM, "),
        (QWEN3, {"model_type": "llama"}, "model_type is 'llama'; accepted: 'qwen3'"),
        (QWEN3, {"vocab_size": REMOVED}, "vocab_size is missing; accepted: an integer >= 1"),
        (QWEN3, {"hidden_size": "64"}, "hidden_size is '64'"),
        (QWEN3, {"hidden_size": 64.0}, "hidden_size is 64.0"),
        (QWEN3, {"intermediate_size": -1}, "intermediate_size is -1"),
        (QWEN3, {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        (QWEN3, {"num_attention_heads": True}, "num_attention_heads is True"),
        (QWEN3, {"num_key_value_heads": 5}, "num_key_value_heads is 5; accepted: a divisor of num_attention_heads"),
        (MISTRAL, {"num_attention_heads": 4}, "num_key_value_heads is missing; accepted: a divisor"),
        (LLAMA, {"num_attention_heads": 5}, "head_dim is missing; accepted: an integer, as hidden_size 64"),
        (QWEN3, {"head_dim": 7}, "head_dim is 7; accepted: an even number"),
        (QWEN3, {"max_position_embeddings": 1.5}, "max_position_embeddings is 1.5"),
        (QWEN3, {"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06; accepted: a finite number > 0"),
        (QWEN3, {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        (QWEN3, {"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        (QWEN3, {"attention_bias": 1}, "attention_bias is 1; accepted: true, false"),
        (QWEN3, {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        (QWEN3, {"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu'; accepted: silu"),
        (QWEN3, {"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'; accepted: bfloat16, float16, float32"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; accepted: 1.0, null"),
        (LLAMA, {"pretraining_tp": 2}, "pretraining_tp is 2; accepted: 1, null"),
        (QWEN3, {"num_experts": 8}, "num_experts is 8"),
        (QWEN2, {"is_causal": False}, "is_causal is False"),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0"),
        (QWEN2, {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers is -1"),
        (QWEN2, {"layer_types": ["full_attention"]}, "layer_types is ['full_attention']; accepted: a list with"),
        (QWEN2, {"layer_types": ["chunked_attention"] * 3}, "layer_types is ['chunked_attention'"),
        (QWEN2, {"layer_types": ["sliding_attention"] * 3}, "accepted: full_attention for every layer, because the"),
        (LLAMA, {"layer_types": ["sliding_attention"] * 3}, "accepted: full_attention for every layer, as llama"),
        (MISTRAL, {"layer_types": ["full_attention"] * 3}, "accepted: sliding_attention for every layer, as mistral"),
        (LLAMA, {"rope_theta": 0}, "rope_theta is 0"),
        (LLAMA, {"rope_scaling": "linear"}, "rope_scaling is 'linear'; accepted: an object"),
    ],
)
def test_a_configuration_that_is_not_supported_is_refused_by_file_and_key(raw, changes, words):
    message = refusal(raw, **changes)
    assert message.startswith("some/config.json: ")
    assert words in message


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"type": "dynamic", "factor": 2.0}, "type is 'dynamic'; accepted: default, linear, llama3, yarn"),
        ({"rope_type": "dynamic"}, "rope_type is 'dynamic'; accepted: default, linear, llama3, yarn, longrope"),
        ({"rope_type": "linear"}, "factor is missing; accepted: a finite number > 0"),
        ({"rope_type": "linear", "factor": "4"}, "factor is '4'"),
        ({"rope_type": "yarn", "factor": -4.0}, "factor is -4.0"),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0},
            "original_max_position_embeddings",
        ),
        ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 0.5}, "beta_fast is 0.5; accepted: at least beta_slow"),
        ({"rope_type": "yarn", "factor": 4.0, "truncate": "no"}, "truncate is 'no'"),
        ({"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0}, "high_freq_factor is missing"),
        (
            {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 2.0, "high_freq_factor": 2.0},
            "high_freq_factor is 2.0; accepted: more than low_freq_factor",
        ),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; accepted: 1.0"),
        ({"rope_type": "default", "mrope_section": [1, 1]}, "mrope_section is [1, 1]; accepted: no such key"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention is {"),
    ],
)
def test_rope_parameters_that_are_not_supported_are_refused_by_key(key, parameters, words):
    message = refusal(LLAMA, **{key: parameters})
    assert message.startswith(f"some/config.json: {key}.")
    assert words in message


def test_rope_said_twice_must_be_said_the_same():
    linear = {"rope_type": "linear", "factor": 2.0}
    assert read(LLAMA, rope_parameters=linear, rope_scaling=linear).rope.scaling == LinearScaling(2.0)
    assert "rope_scaling is" in refusal(LLAMA, rope_parameters=linear, rope_scaling=linear | {"factor": 4.0})


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read_as_the_same_configuration(name):
    config = read(fixture(name))
    written = json.loads(json.dumps(config.to_hugging_face()))
    assert DecoderConfig.from_hugging_face(written, "config.json") == config


@pytest.mark.parametrize("removed", ["rope_parameters", "rope_scaling", "dtype", "torch_dtype", "layer_types"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_needs_the_keys_of_one_version_of_transformers_only(name, removed):
    config = read(fixture(name))
    written = config.to_hugging_face()
    if removed == "layer_types" and name in ("gemma2", "gpt-oss", "smollm3", "qwen3-next", "qwen3-5", "qwen3-5-moe"):
        pytest.skip("no other key can say another pattern of this family's layers than its own")
    if name.startswith("gemma4") and removed in ("rope_parameters", "layer_types"):
        pytest.skip("transformers 4 does not have the family")
    written.pop(removed, None)
    assert DecoderConfig.from_hugging_face(written, "config.json") == config


@pytest.mark.parametrize(
    ("raw", "changes", "words"),
    [
        (QWEN3, {"architecture": "GemmaForCausalLM"}, "architecture is 'GemmaForCausalLM'; accepted: Deep"),
        (QWEN3, {"qk_norm": False}, "qk_norm is False; Qwen3ForCausalLM in transformers would have True"),
        (LLAMA, {"output_bias": True}, "output_bias is True"),
        (LLAMA, {"windows": (None, 4, 4)}, "windows is (None, 4, 4)"),
        (QWEN3, {"windows": (None, 4, 8)}, "windows is (None, 4, 8)"),
        (QWEN3, {"rope": RotaryEmbedding(64, 10000.0)}, "rope is"),
    ],
)
def test_a_configuration_that_transformers_does_not_have_is_not_written(raw, changes, words):
    with pytest.raises(ValueError, match="to_hugging_face: ") as error:
        dataclasses.replace(read(raw), **changes).to_hugging_face()
    assert words in str(error.value)


def defaults(raw: dict[str, Any], config: dict[str, Any]) -> GenerationDefaults:
    return GenerationDefaults.from_hugging_face(raw, "generation_config.json", description(config, "config.json"))


@pytest.mark.parametrize(
    ("raw", "config", "expected"),
    [
        ({}, QWEN3, GenerationDefaults()),
        ({}, LLAMA, GenerationDefaults(eos_token_ids=(2,), bos_token_id=1)),
        ({}, LLAMA | {"eos_token_id": None, "bos_token_id": None}, GenerationDefaults()),
        ({}, QWEN3 | {"eos_token_id": [7, 8, 7], "pad_token_id": 0}, GenerationDefaults((7, 8), pad_token_id=0)),
        ({"eos_token_id": 3}, QWEN3 | {"eos_token_id": 7, "bos_token_id": 4}, GenerationDefaults((3,), 4)),
        ({"eos_token_id": None}, QWEN3 | {"eos_token_id": 7}, GenerationDefaults((7,))),
        (
            {"do_sample": True, "temperature": 1, "top_k": 0, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.05},
            QWEN3,
            GenerationDefaults(
                do_sample=True, temperature=1.0, top_k=0, top_p=0.5, min_p=0.1, unread='{"repetition_penalty": 1.05}'
            ),
        ),
    ],
)
def test_generation_defaults_are_those_stated_and_token_ids_fall_back_on_the_configuration(raw, config, expected):
    assert defaults(raw, config) == expected


@pytest.mark.parametrize(
    ("raw", "config", "words"),
    [
        ({"eos_token_id": "</s>"}, QWEN3, "generation_config.json: eos_token_id is '</s>'"),
        ({"eos_token_id": [1, -1]}, QWEN3, "generation_config.json: eos_token_id is [1, -1]"),
        ({}, QWEN3 | {"eos_token_id": 1.5}, "config.json: eos_token_id is 1.5"),
        ({"bos_token_id": [1]}, QWEN3, "generation_config.json: bos_token_id is [1]"),
        ({"repetition_penalty": 0}, QWEN3, "generation_config.json: repetition_penalty is 0"),
        ({"temperature": -1}, QWEN3, "generation_config.json: temperature is -1; accepted: a finite number >= 0"),
        ({"temperature": float("inf")}, QWEN3, "generation_config.json: temperature is inf"),
        ({"top_p": 1.5}, QWEN3, "generation_config.json: top_p is 1.5; accepted: a number from 0 to 1"),
        ({"top_k": 2.0}, QWEN3, "generation_config.json: top_k is 2.0"),
        ({"do_sample": "true"}, QWEN3, "generation_config.json: do_sample is 'true'"),
        ({"top_p": -0.1}, QWEN3, "generation_config.json: top_p is -0.1"),
        ({"min_p": 1.5}, QWEN3, "generation_config.json: min_p is 1.5; accepted: a number from 0 to 1"),
        ({"min_p": True}, QWEN3, "generation_config.json: min_p is True"),
        ({"top_k": -1}, QWEN3, "generation_config.json: top_k is -1"),
        ({"pad_token_id": -1}, QWEN3, "generation_config.json: pad_token_id is -1"),
        ({"eos_token_id": [True]}, QWEN3, "generation_config.json: eos_token_id is [True]"),
        ({"repetition_penalty": 1e7}, QWEN3, "generation_config.json: repetition_penalty is 10000000.0"),
        ({}, QWEN3 | {"pad_token_id": -1}, "config.json: pad_token_id is -1"),
    ],
)
def test_generation_defaults_of_the_wrong_kind_are_refused_by_file_and_key(raw, config, words):
    with pytest.raises(CheckpointError) as error:
        defaults(raw, config)
    assert str(error.value).startswith(words)


@pytest.mark.parametrize("name", ["qwen3", "llama3", "mistral"])
def test_generation_defaults_that_are_written_are_read_as_the_same(name):
    raw = json.loads((FIXTURES / name / "generation_config.json").read_text())
    read = defaults(raw, fixture(name))
    written = read.to_hugging_face()
    assert defaults(written, fixture(name)) == read
    assert written.items() >= raw.items()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in ("top_p", "min_p") for value in (0.0, 1.0)),
        *(("temperature", value) for value in (0.0, 7.5)),
        *(("top_k", value) for value in (0, 3)),
        *(("repetition_penalty", value) for value in (1e-6, 1e6)),
        *((f"{role}_token_id", 0) for role in ("bos", "pad")),
        ("do_sample", True),
    ],
)
def test_a_generation_default_alone_at_its_border_is_read_and_written(key, value):
    read = defaults({key: value}, QWEN3)
    assert getattr(read, key) == value
    unread = json.dumps({key: value} if key == "repetition_penalty" else {})
    changed = {} if key == "repetition_penalty" else {key: value}
    assert read == dataclasses.replace(GenerationDefaults(), **changed, unread=unread)
    assert read.to_hugging_face() == {"do_sample": False} | {key: value}
    assert defaults(read.to_hugging_face(), QWEN3) == read


def test_end_tokens_are_written_as_one_or_several():
    for ids, written in (((), None), ((3,), 3), ((3, 5), [3, 5])):
        read = GenerationDefaults(eos_token_ids=ids)
        assert read.token_ids_to_hugging_face() == {"bos_token_id": None, "eos_token_id": written, "pad_token_id": None}


def test_the_largest_integer_is_taken():
    assert read(QWEN3, vocab_size=2**31 - 1).vocab_size == 2**31 - 1


def test_an_architecture_is_registered_once():
    (first, second) = list(families().values())[:2]
    register(first)
    with pytest.raises(ValueError, match=f"register: {first.architecture} is registered already"):
        register(dataclasses.replace(second, architecture=first.architecture))
    assert families()[first.architecture] is first
