"""gpt-oss: what its files say and what is refused, MXFP4, the router, and sinks in training."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import detjax
from detjax import ops
from detjax.contract import KV_BLOCK, QUERY_UNIT
from detjax.models import CheckpointError, DecoderConfig, digest, load, save
from detjax.models.families.gpt_oss import LogitRouter
from detjax.models.network import split
from detjax.models.parts.experts import ExpertsOptions
from detjax.operands.accumulated_weight import AccumulatedWeight
from detjax.operands.kv_pages import KVPages, Queries
from detjax.operands.options import Clamp
from detjax.operands.quantized_weight import is_quantized, widened
from detjax.ops.rotary import RotaryEmbedding, YarnScaling
from tests.models.hugging_face import (
    FIXTURES,
    SINGLE,
    changed_json,
    changed_tensors,
    copied,
    mxfp4_numbers,
    plain_tensors,
    tensors,
)
from tests.support.bits import assert_same_bits, same_bits
from tests.support.unchecked import unchecked

RAW: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 50,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
}
PUBLISHED = "gpt-oss-mxfp4"
DOWN = "model.layers.1.mlp.experts.down_proj"


def read(**changes: Any) -> DecoderConfig:
    return DecoderConfig.from_hugging_face(RAW | changes, "some/config.json")


# --- config.json ------------------------------------------------------------------------------------------------------


def test_keys_that_are_left_out_have_the_values_of_transformers() -> None:
    config = read()
    assert config.experts == ExpertsOptions(
        experts=128, chosen=4, inner_width=48, normalized=True, layers=(True,) * 3, bias=True, clamp=Clamp(7.0, 1.702)
    )
    assert config.rope == RotaryEmbedding(64, 150_000.0, YarnScaling(32.0, 4096, truncate=False))
    assert config.windows == (128, None, 128)
    assert (config.kv_heads, config.head_dim, config.norm_eps, config.max_positions) == (8, 64, 1e-5, 131072)
    assert (config.qkv_bias, config.output_bias, config.tied_embeddings) == (True, True, False)


def test_the_published_form_is_read() -> None:
    raw = json.loads((FIXTURES / PUBLISHED / "config.json").read_text())
    assert raw["quantization_config"]["quant_method"] == "mxfp4"
    config = DecoderConfig.from_hugging_face(raw, "config.json")
    assert config.rope.scaling == YarnScaling(32.0, 128, truncate=False)
    assert config.experts is not None
    assert config.experts.clamp == Clamp(2.0, 1.702)
    assert "quantization_config" not in config.to_hugging_face()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; accepted: silu"),
        ({"num_local_experts": 3}, "num_experts_per_tok is missing; accepted: 1 to 3, which is num_local_experts"),
        ({"swiglu_limit": 0}, "swiglu_limit is 0; accepted: a finite number > 0"),
        ({"swiglu_alpha": -1.0}, "swiglu_alpha is -1.0; accepted: a finite number > 0"),
        ({"sliding_window": None}, "sliding_window is None; accepted: an integer >= 1"),
        ({"layer_types": ["full_attention"]}, "layer_types is ['full_attention']; accepted: a list with"),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{re.escape(f'some/config.json: {words}')}"):
        read(**changes)


# --- MXFP4 ------------------------------------------------------------------------------------------------------------


def drawn_mxfp4(directory: Path, lowest: int, highest: int) -> np.ndarray:
    """Every byte of blocks with exponents from `lowest` to `highest`; returns the numbers, float64."""
    random = np.random.default_rng(0)
    with changed_tensors(directory / SINGLE) as stored:
        shape = stored[f"{DOWN}_blocks"].shape
        blocks = random.permutation(np.resize(np.arange(256), int(np.prod(shape)))).astype(np.uint8).reshape(shape)
        scales = random.integers(lowest, highest + 1, shape[:-1]).astype(np.uint8)
        stored |= {f"{DOWN}_blocks": blocks, f"{DOWN}_scales": scales}
    return mxfp4_numbers(blocks, scales)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_all_numbers_of_mxfp4_are_exact(tmp_path: Path, dtype: str) -> None:
    directory = copied(PUBLISHED, tmp_path)
    numbers = drawn_mxfp4(directory, 0, 252)
    down = np.asarray(load(directory, dtype=dtype, quantized="widened")[0].layers[1].mlp.down[...])
    assert (down.astype(np.float64) == numbers).all()
    assert (np.signbit(down) == np.signbit(numbers)).all()


def test_float16_rounds_to_nearest_even(tmp_path: Path) -> None:
    directory = copied(PUBLISHED, tmp_path)
    numbers = drawn_mxfp4(directory, 95, 139)
    down = np.asarray(load(directory, dtype="float16", quantized="widened")[0].layers[1].mlp.down[...])
    assert_same_bits(down, numbers.astype(np.float16))
    assert (down.astype(np.float64) != numbers).any()


@pytest.mark.parametrize(("highest", "dtype"), [(254, "bfloat16"), (254, "float32"), (145, "float16")])
def test_numbers_beyond_the_range_of_a_dtype_are_refused(tmp_path: Path, highest: int, dtype: str) -> None:
    directory = copied(PUBLISHED, tmp_path)
    drawn_mxfp4(directory, highest, highest)
    with pytest.raises(CheckpointError, match=f"down_proj_blocks' holds values beyond the range of {dtype}"):
        load(directory, dtype=dtype)


def test_the_exponent_that_stands_for_nan_is_refused(tmp_path: Path) -> None:
    directory = copied(PUBLISHED, tmp_path)
    with changed_tensors(directory / SINGLE) as stored:
        stored[f"{DOWN}_scales"] = stored[f"{DOWN}_scales"].copy()
        stored[f"{DOWN}_scales"][-1, -1, -1] = 255
    with pytest.raises(CheckpointError, match=r"down_proj_scales' holds 255, .*; accepted: exponents from 0 to 254"):
        load(directory)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"scales": None},
            "down_proj_scales' is missing, which belongs to 'model.layers.1.mlp.experts.down_proj_blocks'",
        ),
        (
            {"blocks": None},
            "down_proj_blocks' is missing, which belongs to 'model.layers.1.mlp.experts.down_proj_scales'",
        ),
        ({"scales": (5, 64, 2)}, "down_proj_scales' has shape (5, 64, 2); accepted: (5, 64, 1)"),
        ({"blocks": (5, 64, 16)}, "down_proj_scales' has shape (5, 64, 1); accepted: (5, 64), as 'model.layers.1"),
        ({"blocks": (64, 16)}, "down_proj_blocks' has shape (64, 16); accepted: at least 3 axes"),
        ({"blocks": (5, 63, 1, 16), "scales": (5, 63, 1)}, "down_proj' has shape (5, 32, 63); accepted: (5, 32, 64)"),
    ],
)
def test_tensors_that_are_not_mxfp4_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    directory = copied(PUBLISHED, tmp_path)
    with changed_tensors(directory / SINGLE) as stored:
        for ending, shape in changes.items():
            stored.pop(f"{DOWN}_{ending}")
            if shape is not None:
                stored[f"{DOWN}_{ending}"] = np.zeros(shape, np.uint8)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        load(directory)


def test_blocks_of_another_dtype_are_refused(tmp_path: Path) -> None:
    directory = copied(PUBLISHED, tmp_path)
    with changed_tensors(directory / SINGLE) as stored:
        stored[f"{DOWN}_blocks"] = stored[f"{DOWN}_blocks"].astype(np.int8)
    with pytest.raises(CheckpointError, match="down_proj_blocks' is stored as I8; accepted: U8"):
        load(directory)


def test_blocks_that_the_configuration_does_not_name_are_refused(tmp_path: Path) -> None:
    directory = copied(PUBLISHED, tmp_path)
    with changed_json(directory / "config.json") as raw:
        del raw["quantization_config"]
    with pytest.raises(CheckpointError, match=r"tensor 'model\.layers\.0\.mlp\.experts\.down_proj' is missing"):
        load(directory)


def test_plain_tensors_serve_though_the_configuration_names_a_quantization(tmp_path: Path) -> None:
    directory = copied(PUBLISHED, tmp_path)
    states = [nnx.to_pure_dict(nnx.state(load(directory, quantized="widened")[0]))]
    plain = {name: np.ascontiguousarray(value) for name, value in plain_tensors(directory).items()}
    safetensors.numpy.save_file(plain, directory / SINGLE, metadata={"format": "pt"})
    states.append(nnx.to_pure_dict(nnx.state(load(directory, quantized="widened")[0])))
    assert_same_bits(*states)


def test_experts_stay_in_mxfp4() -> None:
    models = [load(FIXTURES / PUBLISHED, quantized=way, progress=False)[0] for way in ("computed", "widened")]
    kept = 0
    for weight, plain in zip(*(split(model)[1] for model in models), strict=True):
        kept += is_quantized(weight)
        assert_same_bits(widened(weight) if is_quantized(weight) else weight, plain)
    assert kept == 2 * models[0].config.layers
    assert digest(models[0]) == digest(models[1])


def test_what_is_saved_is_plain_bfloat16_without_a_quantization(tmp_path: Path) -> None:
    save(load(FIXTURES / PUBLISHED, quantized="widened")[0], tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    stored = tensors(tmp_path / "saved")
    assert {value.dtype for value in stored.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert stored[DOWN].shape == (5, 32, 64)


# --- the router -------------------------------------------------------------------------------------------------------


def test_the_highest_logits_are_chosen_and_weighted_among_themselves() -> None:
    random = np.random.default_rng(0)
    options = ExpertsOptions(experts=7, chosen=3, inner_width=4, normalized=True, layers=(True,))
    router = LogitRouter(20, options, rngs=nnx.Rngs(0), dtype="float32")
    weight = random.standard_normal((7, 20)).astype(np.float32)
    weight[5] = weight[2]  # two experts of equal logits: the one of the lower id is chosen first
    bias = random.standard_normal(7).astype(np.float32)
    bias[5] = bias[2]
    router.weight[...], router.bias[...] = weight, bias
    x = random.standard_normal((200, 20)).astype(np.float32)
    ids, weights = detjax.jit(lambda x: router(x))(x)
    logits = x.astype(np.float64) @ weight.T.astype(np.float64) + bias
    logits[:, 5] = logits[:, 2]
    expected = np.sort(np.argsort(-logits, axis=1, kind="stable")[:, :3], axis=1)
    np.testing.assert_array_equal(ids, expected)
    assert ((expected == 2).any(1) & (expected != 5).all(1)).any()
    chosen = np.exp(np.take_along_axis(logits, expected, axis=1))
    np.testing.assert_allclose(weights, chosen / chosen.sum(1, keepdims=True), atol=2e-6)


# --- sinks ------------------------------------------------------------------------------------------------------------


def attended(sinks: Any) -> jax.Array:
    q, k, v = (jax.random.normal(jax.random.key(seed), (1, 5, 2, 16)) for seed in range(3))
    return unchecked(ops.dot_product_attention)(q, k, v, sinks=sinks).sum()


def test_the_gradient_of_sinks_goes_on_from_their_sum() -> None:
    assert_same_bits(attended(AccumulatedWeight(jnp.zeros(2))), attended(jnp.zeros(2)))
    fresh = jax.grad(attended)(jnp.ones(2))
    assert (fresh != 0).all()
    sums = [jax.grad(lambda total: attended(AccumulatedWeight(jnp.ones(2), total)))(jnp.full(2, x)) for x in (0.0, 3.0)]
    assert_same_bits(sums[0], fresh)
    np.testing.assert_allclose(sums[1], fresh + 3.0, rtol=1e-6)


@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_sequences_at_once_and_one_after_another_give_one_sum_of_sinks(packed: bool) -> None:
    lengths, start = (40, 17, 3), jnp.asarray([0.5, -2.0])
    draws = [jax.random.normal(jax.random.key(seed), (3, 48, 2, 16), jnp.bfloat16) for seed in range(4)]

    @detjax.jit
    def rectangular(
        q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array, length: jax.Array, total: jax.Array
    ) -> Any:
        def fn(total: jax.Array) -> jax.Array:
            sinks = AccumulatedWeight(jnp.ones(2, jnp.bfloat16), total)
            pages = {"kv_length": length, "q_start": jnp.zeros_like(length)}
            return unchecked(ops.dot_product_attention)(q, k, v, sinks=sinks, **pages)

        present = (jnp.arange(48)[None] < length[:, None])[..., None, None]
        return jax.vjp(fn, total)[1](jnp.where(present, do, jnp.zeros((), do.dtype)))[0]

    @functools.partial(detjax.jit, static_argnames="rows")
    def in_a_row(arrays: Any, requests: jax.Array, length: jax.Array, total: jax.Array, rows: int) -> Any:
        ends = jnp.cumsum(-(-length // QUERY_UNIT) * QUERY_UNIT)
        first = jnp.append(jnp.zeros_like(ends[:1]), ends[:-1])
        row = jnp.arange(rows)
        owner = jnp.minimum(jnp.searchsorted(ends, row, side="right"), len(length) - 1)
        place = row - first[owner]
        q, k, v, do = arrays
        kv = KVPages(ops.in_pages(k[requests]), ops.in_pages(v[requests]))
        table = ops.contiguous_page_table(len(length), 48)
        queries = Queries(table, jnp.zeros_like(length), length, length, first)
        q, do = (x[requests[owner], jnp.clip(place, 0, 47)] for x in (q, do))
        do = jnp.where((place < length[owner])[:, None, None], do, jnp.zeros((), do.dtype))

        def fn(total: jax.Array) -> jax.Array:
            sinks = AccumulatedWeight(jnp.ones(2, jnp.bfloat16), total)
            return unchecked(ops.attention)(q, kv, queries, sinks=sinks)

        return jax.vjp(fn, total)[1](do)[0]

    def added(chosen: list[int], total: jax.Array) -> jax.Array:
        length = jnp.asarray([lengths[one] for one in chosen], jnp.int32)
        if packed:
            return in_a_row(draws, jnp.asarray(chosen), length, total, rows=112)
        return rectangular(*(x[jnp.asarray(chosen)] for x in draws), length, total)  # pyright: ignore[reportCallIssue]

    together = added([0, 1, 2], start)
    assert_same_bits(added([2], added([0, 1], start)), together)
    assert_same_bits(added([1, 2], added([0], start)), together)
    assert not same_bits(added([0, 1, 2], jnp.zeros(2)) + start, together)


def test_a_sum_of_sinks_is_refused_where_packed_requests_decode() -> None:
    one = jnp.ones(1, jnp.int32)
    kv = KVPages(*(jnp.zeros((1, 2, KV_BLOCK, 16)) for _ in range(2)))
    queries = Queries(jnp.zeros((1, 1), jnp.int32), 0 * one, one, one, jnp.zeros(0, jnp.int32))
    with pytest.raises(NotImplementedError, match=r"attention: sinks .* queries\.num_decodes is 1; accepted: 0"):
        unchecked(ops.attention)(jnp.zeros((1, 2, 16)), kv, queries, sinks=AccumulatedWeight(jnp.ones(2), jnp.ones(2)))


def test_stock_attention_adds_the_gradient_of_sinks_to_their_sum() -> None:
    with detjax.use_backend("stock"):
        fresh = jax.grad(attended)(jnp.ones(2))
        total = jax.grad(lambda total: attended(AccumulatedWeight(jnp.ones(2), total)))(jnp.full(2, 3.0))
    np.testing.assert_allclose(total, fresh + 3.0, rtol=1e-6)
