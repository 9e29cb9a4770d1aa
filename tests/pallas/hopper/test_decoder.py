"""The decoder on the Hopper backend: which kernels serve it, and that its bits do not follow the batch."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import mosaic_gpu as plgpu

import detjax
from detjax.audit.certification.certify import risks
from detjax.models import Decoder, load, save
from detjax.models.checkpoint.quantized_export import quantize
from detjax.models.configuration.config import DecoderConfig
from detjax.runtime import backends
from tests.support.bits import assert_same_bits

LAYERS = 2
INTERPRETER = plgpu.InterpretGPUParams(inline_mgpu="_hack_model_inline_mgpu_tokamax")


def decoder(raw: dict[str, Any], layers: int = LAYERS) -> Decoder:
    config = DecoderConfig.from_hugging_face(raw | {"num_hidden_layers": layers}, "test")
    return Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)


QWEN: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 128,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def model() -> Decoder:
    return decoder(QWEN)


def kernel_counts(jaxpr: Any) -> collections.Counter[str]:
    """By name, the kernels of a program; "dot" and "scatter" stand for XLA's own."""
    counts: collections.Counter[str] = collections.Counter()
    for equation in jaxpr.eqns:
        meshes = equation.params.get("meshes")
        if meshes:
            counts[meshes[0].kernel_name] += 1
            continue
        counts += collections.Counter(name for name in ("dot", "scatter") if equation.primitive.name.startswith(name))
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                counts += kernel_counts(inner)
    return counts


def test_kernels_serve_every_linear_layer_norm_and_attention(model: Decoder) -> None:
    tokens = jnp.zeros((2, 3), jnp.int32)
    with detjax.use_backend("hopper"):
        counts = kernel_counts(jax.make_jaxpr(lambda tokens: model(tokens))(tokens).jaxpr)
    # Keys and values are written by the kernel that turns queries and keys.
    assert counts["scatter"] == 0
    # Of each layer qkv, output, gate and up, and down; at last the logits.
    assert counts["matmul"] == 4 * LAYERS + 1
    assert counts["rms_norm"] == 2 * LAYERS + 1
    assert counts["norm_rope_append_kv"] == LAYERS
    assert counts["attention_decode"] == LAYERS
    assert counts["dot"] == 0


DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "vocab_size": 128,
}


def primitives(jaxpr: Any) -> collections.Counter[str]:
    """By name, the primitives of a program outside of kernels."""
    counts: collections.Counter[str] = collections.Counter()
    for equation in jaxpr.eqns:
        counts[equation.primitive.name] += 1
        if equation.params.get("meshes"):
            continue
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                counts += primitives(inner)
    return counts


def test_latent_attention_multiplies_all_heads_by_one_kernel_and_no_step_loops() -> None:
    model = decoder(DEEPSEEK)
    with backends.tracing_for("gpu"), detjax.use_backend("hopper"):
        jaxpr = jax.make_jaxpr(lambda tokens: model(tokens))(jnp.zeros((2, 1), jnp.int32)).jaxpr
    kernels, outside = kernel_counts(jaxpr), primitives(jaxpr)
    # Every kernel of a loop's body would be launched once for each head, expert or token.
    assert not {"while", "scan"} & outside.keys()
    # Latents, queries, keys of all heads, values of all heads, and output; gate and up, and down of the MLP, of the
    # shared expert and of the chosen experts; the router; at last the logits.
    assert kernels["matmul"] == 5 * LAYERS + 2 + 4 + 1 + 1
    assert kernels["dot"] == 0


def test_a_prompt_has_attentions_other_kernel(model: Decoder) -> None:
    with detjax.use_backend("hopper"):
        counts = kernel_counts(jax.make_jaxpr(lambda tokens: model(tokens))(jnp.zeros((2, 20), jnp.int32)).jaxpr)
    assert counts["attention_prefill"] == LAYERS
    assert counts["dot"] == 0


GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 128,
    "sliding_window": 3,
    "sliding_window_pattern": 2,
    "final_logit_softcapping": 2.0,
    "query_pre_attn_scalar": 40,
}


@pytest.fixture(scope="module")
def gemma() -> Decoder:
    return decoder(GEMMA)


def test_kernels_serve_norms_of_branches_and_sums(gemma: Decoder) -> None:
    with detjax.use_backend("hopper"):
        counts = kernel_counts(jax.make_jaxpr(lambda tokens: gemma(tokens))(jnp.zeros((2, 3), jnp.int32)).jaxpr)
    assert counts["scatter"] == 0
    assert counts["matmul"] == 4 * LAYERS + 1
    assert counts["rms_norm"] == 4 * LAYERS + 1
    assert counts["norm_rope_append_kv"] == LAYERS
    # The factor of the embedding, and each layer's last sum.
    assert counts["map_elements"] == LAYERS + 1
    assert counts["dot"] == 0


@pytest.mark.usefixtures("matrix_unit", "attention_in_the_interpreter", "two_multiprocessors")
@pytest.mark.parametrize(
    ("raw", "layers", "tokens"),
    [
        (QWEN, 1, (3, 1)),
        pytest.param(QWEN, LAYERS, (3, 4), marks=pytest.mark.nightly),
        pytest.param(GEMMA, LAYERS, (3, 4), marks=pytest.mark.nightly),
    ],
    ids=["small", "qwen", "gemma"],
)
def test_a_request_is_the_same_anywhere_in_a_batch(raw: dict[str, Any], layers: int, tokens: tuple[int, int]) -> None:
    model, ids = decoder(raw, layers), np.random.default_rng(0).integers(0, 128, tokens)
    ids[-1] = ids[0]

    def logits(tokens: jax.Array) -> jax.Array:
        return detjax.jit(lambda tokens: model(tokens))(tokens)

    with detjax.use_backend("hopper"), plgpu.force_gpu_interpret_mode(INTERPRETER):
        together = logits(jnp.asarray(ids))
        if layers > 1:
            assert_same_bits(together[1:2], logits(jnp.asarray(ids[1:2])))
    assert_same_bits(together[-1], together[0])
    with detjax.use_backend("portable"):
        np.testing.assert_allclose(together, logits(jnp.asarray(ids)), atol=0.05)


@pytest.fixture(scope="module")
def in_fp8(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A decoder whose products take e4m3 codes, of rows of two groups of columns."""
    folder = tmp_path_factory.mktemp("fp8")
    save(decoder(QWEN | {"hidden_size": 256}), folder / "plain")
    quantize(folder / "plain", folder / "fp8", "fp8-block")
    return load(folder / "fp8", progress=False)[0]


@pytest.mark.parametrize("tokens", [(3, 1), (2, 20)], ids=["decode", "prefill"])
def test_norms_give_the_codes_of_their_products(in_fp8: Decoder, tokens: tuple[int, int]) -> None:
    """So two kernels of a layer quantize rows, not four: of attention's outputs, and of gate and up."""

    def counts() -> collections.Counter[str]:
        with detjax.use_backend("hopper"):
            return kernel_counts(jax.make_jaxpr(lambda tokens: in_fp8(tokens))(jnp.zeros(tokens, jnp.int32)).jaxpr)

    fused = counts()
    with detjax.without_fusions("rms_norm_codes"):
        separate = counts()
    assert fused["codes_matmul"] == 4 * LAYERS and fused["quantized_groups"] == 2 * LAYERS
    assert separate - fused == {"quantized_groups": 2 * LAYERS} and not fused - separate


def test_rows_of_a_decoder_with_codes_are_proven_separate(in_fp8: Decoder) -> None:
    with detjax.use_backend("hopper"):
        assert risks(lambda tokens: in_fp8(tokens), (jnp.zeros((3, 5), jnp.int32),)) == ()


@pytest.mark.usefixtures("matrix_unit", "attention_in_the_interpreter", "two_multiprocessors")
def test_no_bit_depends_on_what_gives_the_codes(in_fp8: Decoder) -> None:
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 128, (3, 2)))

    def logits() -> jax.Array:
        return detjax.jit(lambda tokens: in_fp8(tokens))(ids)

    with detjax.use_backend("hopper"), plgpu.force_gpu_interpret_mode(INTERPRETER):
        fused = logits()
        with detjax.without_fusions("rms_norm_codes"):
            assert_same_bits(logits(), fused)
