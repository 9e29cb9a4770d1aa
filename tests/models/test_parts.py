"""Parts of layers: their initial weights, and what stays float32 in models of a narrower dtype."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from detjax import ops
from detjax.models import Decoder, network
from detjax.models.parts.delta_net import DeltaNet, DeltaNetOptions
from detjax.models.parts.embedding import Embedding
from detjax.models.parts.experts import Experts, ExpertsOptions, SoftmaxRouter
from detjax.models.parts.gated_experts import GatedExperts, GatedExpertsOptions
from detjax.models.parts.norm import LayerNorm, RMSNorm
from detjax.models.parts.parameters import random_weight
from detjax.models.parts.state import StateSize
from detjax.models.parts.vision import VisionOptions
from detjax.operands.kv_pages import Queries
from tests.models.shallow_models import shallow
from tests.support import towers
from tests.support.bits import assert_same_bits
from tests.support.towers import QWEN2_5_VL, QWEN3_5

NARROW = ("bfloat16", "float16")


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- initial weights --------------------------------------------------------------------------------------------------


def test_products_with_random_weights_keep_the_variance() -> None:
    shape = (5, 2, 30, 100)
    weight = np.asarray(random_weight(nnx.Rngs(0), shape, jnp.float32)[...])
    np.testing.assert_allclose(weight.std(), shape[-1] ** -0.5, rtol=0.02)
    assert abs(weight.mean()) < 0.02 * weight.std()
    again = random_weight(nnx.Rngs(0), shape, jnp.bfloat16)[...]
    assert_same_bits(again, weight.astype(jnp.bfloat16))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_new_norms_multiply_by_one(offset: float) -> None:
    x = drawn(3, 20)
    norm = RMSNorm(20, eps=0.5, dtype="float32", offset=offset)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.5)
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected, rtol=1e-6)
    normed, added = norm.after_adding(jnp.asarray(x), residual=jnp.asarray(x))
    assert_same_bits(added, x + x)
    assert_same_bits(normed, norm(added))


def test_new_layer_norms_have_mean_zero_and_variance_one() -> None:
    x = drawn(3, 20)
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 0.5)
    np.testing.assert_allclose(LayerNorm(20, eps=0.5, dtype="float32")(jnp.asarray(x)), expected, atol=1e-6)


DELTA = DeltaNetOptions(key_heads=2, value_heads=6, key_dim=8, value_dim=5, taps=3, layers=(True,))


def test_heads_of_a_new_delta_net_forget_at_different_rates() -> None:
    part = DeltaNet(20, DELTA, eps=1e-6, rngs=nnx.Rngs(0), dtype="float32")
    np.testing.assert_allclose(part.log_rate[...], np.linspace(-4, 0, 6), rtol=1e-6)
    assert_same_bits(part.time_bias[...], np.ones(6, np.float32))
    assert_same_bits(part.norm[...], np.ones(5, np.float32))


# --- what is trained --------------------------------------------------------------------------------------------------


def untrained(model: Decoder) -> set[str]:
    made, _ = network.split(model)
    return {str(path[-1]) for path, is_trained in zip(made.paths, made.trained, strict=True) if not is_trained}


def test_everything_is_trained_but_corrections_of_scores_and_the_tower() -> None:
    assert untrained(shallow("qwen3", 0, 1)) == set()
    assert untrained(shallow("deepseek-v3", 1, 2)) == {"correction"}
    model = towers.model("qwen3-5-vl")
    made, _ = network.split(model)
    in_tower = [path[0] == "vision" for path in made.paths]
    assert any(in_tower) and [not one for one in made.trained] == in_tower


@pytest.mark.parametrize("dtype", NARROW)
def test_the_factor_of_an_embedding_is_rounded_to_its_own_dtype(dtype: str) -> None:
    tokens, factor = jnp.arange(5), 0.123456789

    def rows(**options: Any) -> np.ndarray:
        return np.asarray(Embedding(5, 8, rngs=nnx.Rngs(0), dtype=dtype, **options)(tokens))

    plain = rows().astype(np.float32)
    assert_same_bits(rows(factor=factor), (plain * np.asarray(factor, dtype).astype(np.float32)).astype(dtype))
    exact = rows(factor=factor, factor_dtype="float32")
    assert_same_bits(exact, (plain * np.float32(factor)).astype(dtype))
    assert (exact != rows(factor=factor)).any()


def test_models_that_differ_in_an_option_or_a_dtype_have_different_networks() -> None:
    def made(eps: float = 1e-6, width: int = 8, dtype: str = "float32") -> Any:
        return network.split(RMSNorm(width, eps=eps, dtype=dtype))[0]

    assert made() is made()
    assert made(eps=1e-5) is not made()
    assert (
        network.split(Embedding(9, 8, rngs=nnx.Rngs(0), dtype="float32", soft_cap=3.0))[0]
        is not (network.split(Embedding(9, 8, rngs=nnx.Rngs(0), dtype="float32"))[0])
    )


# --- float32 in narrower models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NARROW)
def test_gates_of_the_delta_rule_and_its_state_are_float32(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The products before the gates are not rounded, as what a token leaves in the state stays there."""
    seen, decay_and_rate = list[Any](), ops.decay_and_rate

    def noted(a: Any, b: Any, *weights: Any) -> Any:
        seen.extend([a, b])
        return decay_and_rate(a, b, *weights)

    monkeypatch.setattr(ops, "decay_and_rate", noted)
    queries = Queries(*(jnp.asarray(x, jnp.int32) for x in ([[0]], [0], [7], [7])), slots=jnp.zeros(1, jnp.int32))
    state = DELTA.empty(StateSize(1, dtype, slots=1))

    def call(x: jax.Array) -> Any:
        return DeltaNet(20, DELTA, eps=1e-6, rngs=nnx.Rngs(0), dtype=dtype)(x, queries, state, residual=x)

    _, after = jax.eval_shape(call, jnp.zeros((1, 7, 20), dtype))
    assert [y.dtype.name for y in seen] == ["float32"] * 2
    assert [y.shape for y in seen] == [(1, 7, 6)] * 2
    assert after.rule.s.dtype == after.rule.decays.dtype == jnp.float32
    assert after.rule.keys.dtype == after.rule.updates.dtype == after.inputs.dtype == jnp.dtype(dtype)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("normalized", [True, False])
def test_a_softmax_router_does_not_round_its_logits(normalized: bool, dtype: str) -> None:
    options = ExpertsOptions(experts=7, chosen=3, inner_width=4, normalized=normalized, layers=(True,))
    router = SoftmaxRouter(20, options, rngs=nnx.Rngs(0), dtype=dtype)
    x = jnp.asarray(drawn(40, 20), dtype)
    ids, weights = router(x)
    logits = np.asarray(x, np.float64) @ np.asarray(router.weight[...], np.float64).T
    exact = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = np.sort(np.argsort(-exact, axis=1, kind="stable")[:, :3], axis=1)
    np.testing.assert_array_equal(ids, expected)
    chosen = np.take_along_axis(exact, expected, axis=1)
    np.testing.assert_allclose(weights, chosen / chosen.sum(1, keepdims=True) if normalized else chosen, rtol=2e-6)


def test_rows_of_experts_belong_to_the_sequences_of_their_tokens_and_padding_to_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, product = list[Any](), ops.grouped_matmul

    def noted(*arguments: Any, sequences: jax.Array, **options: Any) -> Any:
        seen.append(np.asarray(sequences))
        return product(*arguments, sequences=sequences, **options)

    monkeypatch.setattr(ops, "grouped_matmul", noted)
    options = ExpertsOptions(experts=3, chosen=2, inner_width=4, normalized=True, layers=(True,))
    part = Experts(20, options, "silu", rngs=nnx.Rngs(0), dtype="float32")
    x = jnp.asarray(drawn(2, 5, 20))
    # The second request's last two rows are padding.
    table, start, length, count = (jnp.asarray(numbers) for numbers in ([[0], [1]], [0, 0], [5, 3], [5, 3]))
    part(x, Queries(table, start, length, count), residual=x)
    gate_up, down = seen
    np.testing.assert_array_equal(gate_up, down)
    assert np.unique_counts(gate_up[gate_up >= 0])[1].tolist() == [5 * 2, 3 * 2]
    assert len(gate_up) > 8 * 2 and (gate_up[gate_up < 0] == -1).all()


@pytest.mark.parametrize("dtype", NARROW)
def test_the_gate_of_a_shared_expert_is_not_rounded(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: Any = {"experts": 2, "chosen": 1, "inner_width": 4, "shared_width": 6}
    options = GatedExpertsOptions(**sizes, normalized=True, layers=(True,))
    seen, sigmoid_gated = list[Any](), ops.sigmoid_gated

    def noted(y: Any, gate: Any) -> Any:
        seen.append(gate)
        return sigmoid_gated(y, gate)

    monkeypatch.setattr(ops, "sigmoid_gated", noted)

    def shared(x: jax.Array) -> Any:
        return GatedExperts(20, options, "silu", rngs=nnx.Rngs(0), dtype=dtype).shared(x)

    result = jax.eval_shape(shared, jnp.zeros((5, 20), dtype))
    assert (seen[0].dtype, seen[0].shape, result.dtype) == (jnp.float32, (5, 1), jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", NARROW)
def test_logits_are_not_rounded(dtype: str) -> None:
    head = Embedding(30, 20, rngs=nnx.Rngs(0), dtype=dtype)
    hidden = jnp.asarray(drawn(3, 20), dtype)
    logits = head.logits(hidden)
    assert logits.dtype == jnp.float32
    expected = np.asarray(hidden, np.float64) @ np.asarray(head.weight[...], np.float64).T
    np.testing.assert_allclose(logits, expected, atol=1e-6)


def test_a_head_bounds_its_logits_and_an_embedding_scales_its_rows() -> None:
    options: Any = {"rngs": nnx.Rngs(0), "dtype": "float32"}
    table = Embedding(30, 20, **options, factor=3.0, soft_cap=0.5)
    hidden, weight = drawn(3, 20), np.asarray(table.weight[...], np.float64)
    np.testing.assert_allclose(table.logits(jnp.asarray(hidden)), 0.5 * np.tanh(hidden @ weight.T / 0.5), atol=1e-6)
    np.testing.assert_allclose(table(jnp.asarray([29, 0])), 3 * weight[[29, 0]], rtol=1e-6)


# --- towers -----------------------------------------------------------------------------------------------------------


def test_sizes_of_towers_follow_from_their_options() -> None:
    def sizes(vision: VisionOptions) -> tuple[Any, ...]:
        return vision.head_dim, vision.patch_shape, vision.merged, vision.window_side, vision.window_patches

    assert sizes(QWEN2_5_VL) == (80, (3, 2, 14, 14), 4, 4, 64)
    assert sizes(QWEN3_5) == (72, (3, 2, 16, 16), 4, None, 128)
    assert QWEN2_5_VL.rope == ops.RotaryEmbedding(80, 10_000.0, sections=(20, 20), axial=True)
    assert (QWEN2_5_VL.has_learned_positions, QWEN3_5.has_learned_positions) == (False, True)


def test_the_text_of_a_tower_that_digests_depend_on_leaves_out_positions_that_are_none() -> None:
    assert repr(QWEN2_5_VL) == (
        "VisionOptions(width=1280, inner_width=3420, blocks=32, heads=16, activation='silu', channels=3, "
        "patch_size=14, temporal_patch_size=2, merge_size=2, window_size=112, full_blocks=(7, 15, 23, 31), "
        "output_width=3584, theta=10000.0, tokens_per_second=4)"
    )
    assert repr(QWEN3_5).endswith(", tokens_per_second=None, positions=2304)")
