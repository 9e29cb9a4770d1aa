"""Certificates name every planted defect with its line, prove what has none, and find the smallest counterexample."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

import detjax
from detjax import audit, models, ops
from detjax.audit import Outcome, Role
from detjax.audit.certification.trials import Rows, Trial
from tests.audit import defects, planted
from tests.audit.defects import W, X

FIXTURES = Path(__file__).parents[1] / "fixtures"
ARCHITECTURES = {
    path.parent.name: json.loads(path.read_text())["architectures"][0]
    for path in sorted(FIXTURES.glob("*/config.json"))
}
QUICK_MODELS = (
    "deepseek-v3",
    "gemma3",
    "gemma4",
    "gemma4-moe",
    "glm4",
    "glm4-moe",
    "gpt-oss",
    "granite",
    "mixtral",
    "phi3",
    "qwen2_5_vl-tiny",
    "qwen3",
    "qwen3-5-moe",
    "smollm3",
)
"""Models that together have every part: latent, windowed and partly rotated attention, sinks, experts, factors, states,
images."""
QUICK = (1, 2, 5)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("fn", [*defects.MIXES, *defects.CHOSEN], ids=lambda fn: fn.__name__)
def test_a_planted_defect_is_named_with_its_line(fn: Callable[[Array], Array]) -> None:
    role, why = (Role.MIXES, defects.MIXES[fn]) if fn in defects.MIXES else (Role.CHOSEN, defects.CHOSEN[fn])
    certificate = audit.certify(fn, (X,), batch_sizes=QUICK)
    assert certificate.outcome is not Outcome.PROVEN
    named = [(risk.role, risk.line.split(" (in ")[0]) for risk in certificate.risks if why in risk.why]
    assert (role, defects.marked_line(fn)) in named, certificate.risks


@pytest.mark.parametrize(
    "fn",
    [
        defects.sum_over_the_batch,
        defects.scale_of_the_batch,
        defects.number_of_the_slot,
        defects.mask_by_position_in_the_batch,
        defects.first_row_read_by_all,
        defects.cumulative_sum_over_the_batch,
        defects.capacity_of_experts,
    ],
    ids=lambda fn: fn.__name__,
)
def test_rows_that_meet_are_refuted_by_the_smallest_batch(fn: Callable[[Array], Array]) -> None:
    certificate = audit.certify(fn, (X,), batch_sizes=(1, 8))
    counterexample = certificate.counterexample
    assert certificate.outcome is Outcome.REFUTED
    assert counterexample is not None
    assert counterexample.batch == (3 if fn is defects.mask_by_position_in_the_batch else 2)
    # The counterexample is what the function gives.
    batch = Rows([X], [0]).batch(
        Trial(counterexample.batch, counterexample.row, counterexample.position, counterexample.neighbours)
    )
    assert np.asarray(detjax.jit(fn)(*batch))[counterexample.position][counterexample.element] == counterexample.given
    assert (
        np.asarray(detjax.jit(fn)(X[counterexample.row : counterexample.row + 1]))[0][counterexample.element]
        == counterexample.expected
    )
    assert counterexample.ulps > 0


@pytest.mark.parametrize("defect", planted.IN_ROWS)
def test_a_defect_that_bisections_find_is_named_with_its_line(defect: str) -> None:
    arguments = (planted.weights(), planted.tokens(3, 0)), (None, 0)
    sound = set(audit.risks(functools.partial(planted.model, None), *arguments))
    named = set(audit.risks(functools.partial(planted.model, defect), *arguments)) - sound
    lines = Path(planted.__file__).read_text().splitlines()
    texts = [
        lines[int(risk.line.split(" (in ")[0].rpartition(":")[2]) - 1] for risk in named if risk.role is Role.MIXES
    ]
    assert not any(risk.role is Role.MIXES for risk in sound)
    assert any(planted.LINES[defect] in text for text in texts), texts


def test_batch_norm_is_named_with_the_layer() -> None:
    certificate = audit.certify(defects.batch_norm_in_training, (X,), batch_sizes=QUICK)
    assert certificate.outcome is Outcome.REFUTED
    assert certificate.risks[0].role is Role.MIXES
    assert "BatchNorm" in certificate.risks[0].line


def test_a_layer_is_named() -> None:
    def network(x: Array) -> Array:
        for layer in range(3):
            with jax.named_scope(f"layer_{layer}"):
                x = x[..., ::-1] if layer != 1 else x - x.mean(axis=0, keepdims=True)
        return x

    (risk,) = audit.certify(network, (X,), batch_sizes=QUICK).risks
    assert "layer_1" in risk.line


def _picked(x: Array, lengths: Array, keys: Array) -> tuple[Array, Array]:
    last = jnp.take_along_axis(x, lengths[:, None, None], axis=1)[:, 0]
    masked = jnp.where(jnp.arange(x.shape[1])[None, :, None] < lengths[:, None, None], x, -jnp.inf)
    bits = jax.vmap(lambda key: jax.random.bits(jax.random.fold_in(key, 7), (4,)))(keys)
    counts = jax.vmap(lambda ids: jnp.zeros(4, jnp.int32).at[ids].add(1))(jnp.argsort(x, axis=-1)[:, 0] % 4)
    return jax.lax.map(lambda row: row.max(axis=0), jnp.abs(masked)) + last, bits + counts.astype(jnp.uint32)


def test_what_keeps_rows_apart_is_proven() -> None:
    certificate = audit.certify(_picked, (X, jnp.asarray([1, 2, 5]), jax.random.split(defects.KEY, 3)))
    assert certificate.risks == ()
    assert certificate.outcome is Outcome.PROVEN
    assert certificate.cases == 68


def test_rows_may_lie_on_any_axis() -> None:
    def turned(x: Array, w: Array) -> Array:
        return jnp.maximum(x.transpose(1, 0, 2), w[None, None])

    assert audit.certify(turned, (X, W[0]), (1, None), 0, batch_sizes=QUICK).outcome is Outcome.PROVEN
    assert audit.certify(turned, (X, W[0]), (0, None), 1, batch_sizes=QUICK).outcome is Outcome.PROVEN


def test_results_without_rows_are_not_read() -> None:
    def losses(x: Array) -> tuple[Array, Array]:
        return jnp.abs(x).max(axis=(1, 2)), x.mean()

    assert audit.certify(losses, (X,), 0, (0, None), batch_sizes=QUICK).outcome is Outcome.PROVEN


def test_gradients_of_operations_are_under_contract() -> None:
    def loss(x: Array) -> Array:
        return ops.matmul(ops.rms_norm(x, W[0], eps=1e-6), W).sum()

    certificate = audit.certify(jax.grad(loss), (X,), batch_sizes=QUICK)
    assert certificate.outcome is Outcome.PROVEN
    assert certificate.contracts == {"matmul": 1, "rms_norm": 2}


def test_operations_of_detjax_are_contracts_and_stock_ones_are_not() -> None:
    def layer(x: Array) -> Array:
        return ops.matmul(ops.rms_norm(x, W[0], eps=1e-6), W, residual=x)

    certificate = audit.certify(layer, (X,), batch_sizes=QUICK)
    assert certificate.outcome is Outcome.PROVEN
    assert certificate.contracts == {"matmul": 1, "rms_norm": 1}
    with detjax.use_backend("stock"):
        stock = audit.certify(layer, (X,), batch_sizes=QUICK)
        experts = audit.certify(lambda x: ops.choose_experts(ops.softmax(x[:, :4]), 2), (X[:, 0],), batch_sizes=QUICK)
    assert stock.contracts == experts.contracts == {}
    assert {"dot_general", "reduce_sum"} <= {risk.primitive for risk in stock.risks}


def test_an_operation_along_the_batch_is_no_contract_for_its_rows() -> None:
    along = audit.certify(lambda x: ops.softmax(x.T).T, (X[:, 0],), batch_sizes=QUICK)
    assert along.outcome is Outcome.REFUTED
    assert [risk.why for risk in along.risks] == ["works along the batch in softmax"]
    weights = audit.certify(lambda x, w: ops.matmul(x, w.T).max(axis=-1), (W[:3], W[3:6]), batch_sizes=QUICK)
    assert weights.outcome is Outcome.REFUTED
    assert weights.risks[0].why == "has rows in the weight of matmul"

    def learned(x: Array) -> Array:  # a weight that depends on all rows
        return ops.matmul(x, jax.grad(lambda w: ops.matmul(x, w).sum())(W))

    assert "has rows in the weight of matmul" in {risk.why for risk in audit.risks(learned, (X,))}


def test_rows_in_the_order_of_experts_are_followed_no_further() -> None:
    def mixture(x: Array, change: Callable[[Array, ops.ExpertRows], Array]) -> Array:
        ids, weights = ops.choose_experts(ops.softmax(x[:, :4]), 2)
        rows = ops.expert_rows(ids, experts=4)
        return ops.combine_experts(change(rows.gather(x), rows), weights, rows, residual=x)

    changes: dict[Callable[[Array, ops.ExpertRows], Array], list[str]] = {
        lambda y, rows: jnp.maximum(y, 0): [],
        lambda y, rows: jnp.maximum(y, y[:1]): ["slice"],
        lambda y, rows: jnp.maximum(y, jnp.arange(len(y), dtype=y.dtype)[:, None]): ["max"],
        lambda y, rows: jnp.maximum(y, rows.token[:, None].astype(y.dtype)): ["convert_element_type"],
    }
    for change, primitives in changes.items():
        risks = audit.risks(lambda x, change=change: mixture(x, change), (X[:, 0],))
        assert [risk.primitive for risk in risks] == primitives
        assert {risk.why for risk in risks} <= {"works on rows that an operation has reordered"}


def test_what_mixes_in_a_loop_is_named_whatever_its_last_round_sees() -> None:
    def looped(x: Array) -> Array:
        return jax.lax.fori_loop(0, 2, lambda _, x: jnp.maximum(x[:, ::-1], x.max(axis=0, keepdims=True)), x)

    assert [(risk.role, risk.primitive) for risk in audit.risks(looped, (X,))] == [(Role.MIXES, "reduce_max")]


def test_batch_invariant_functions_are_proven_and_the_same_by_xla_are_refuted() -> None:
    def layer(x: Array) -> Array:
        y = x @ W
        return jax.nn.silu(y / jnp.sqrt(jnp.mean(y * y, axis=-1, keepdims=True))) @ W

    assert audit.certify(detjax.batch_invariant(layer), (X,)).outcome is Outcome.PROVEN
    stock = audit.certify(jax.jit(layer), (X,))
    assert stock.outcome is not Outcome.PROVEN
    assert stock.compiled_by == "the caller"


def test_precision_that_xla_may_keep_is_a_risk_without_pinned_options() -> None:
    def rounded(x: Array) -> Array:
        return x.astype(jnp.bfloat16).astype(jnp.float32)

    assert audit.certify(rounded, (X,), batch_sizes=QUICK).outcome is Outcome.PROVEN
    (risk, *_) = audit.certify(jax.jit(rounded), (X,), batch_sizes=QUICK).risks
    assert "more precision" in risk.why


def test_bits_are_compared_and_not_numbers() -> None:
    def signed(x: Array) -> Array:
        return jnp.zeros_like(x) * (-1.0 if x.shape[0] > 2 else 1.0)

    counterexample = audit.certify(signed, (X,), batch_sizes=(1, 5)).counterexample
    assert counterexample is not None
    assert (counterexample.batch, counterexample.ulps, counterexample.expected, counterexample.given) == (
        3,
        1,
        0.0,
        -0.0,
    )


def test_a_module_is_a_function() -> None:
    model = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
    certificate = audit.certify(model, (X,), batch_sizes=QUICK)
    assert certificate.function == "Linear"
    assert "dot_general" in {risk.primitive for risk in certificate.risks}
    assert audit.certify(detjax.batch_invariant(model), (X,), batch_sizes=QUICK).outcome is Outcome.PROVEN


def test_a_certificate_is_json() -> None:
    certificate = audit.certify(defects.sum_over_the_batch, (X,), batch_sizes=QUICK)
    content = json.loads(json.dumps(certificate.as_dict()))
    assert content["outcome"] == "refuted"
    assert content["risks"][0]["line"] == defects.marked_line(defects.sum_over_the_batch)
    assert content["counterexample"] == json.loads(json.dumps(dataclasses.asdict(certificate.counterexample)))


@functools.cache
def _model(name: str) -> models.Decoder:
    return models.load(FIXTURES / name, progress=False)[0]


def _tokens(model: models.Decoder) -> Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, model.config.vocab_size, (3, 5)), jnp.int32)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK_MODELS else pytest.param(name, marks=pytest.mark.nightly) for name in ARCHITECTURES],
)
def test_models_of_detjax_are_proven_by_construction(name: str) -> None:
    model = _model(name)
    assert audit.risks(model, (_tokens(model),), batch_sizes=(1,)) == ()


def test_a_defect_in_a_model_of_detjax_is_named() -> None:
    model = _model("qwen3")

    def capped(tokens: Array) -> Array:
        logits = model(tokens)
        return logits / jnp.abs(logits).max()

    (risk, *_) = audit.risks(capped, (_tokens(model),))
    assert (risk.role, risk.primitive, risk.why) == (Role.MIXES, "reduce_max", "reduces over the batch")
    with detjax.use_backend("stock"):
        assert "dot_general" in {risk.primitive for risk in audit.risks(model, (_tokens(model),))}


def test_an_engines_programs_are_under_contract_and_stock_ones_are_not() -> None:
    model = _model("qwen3")
    with detjax.Engine(model, config=detjax.EngineConfig(max_samples=2, token_budget=16)) as engine:
        programs = engine.programs()
        assert audit.engine_risks(model, programs) == {}
        with detjax.use_backend("stock"):
            risks = audit.engine_risks(model, programs)
    assert {program.purpose for program in programs if program.purpose.startswith("layers")} <= risks.keys()


@pytest.mark.parametrize(
    ("fn", "arguments", "options", "message"),
    [
        (lambda x: x, (X,), {"batch_sizes": ()}, "batch_sizes are"),
        (lambda x: x, (X,), {"batch_axes": None}, "no argument has rows"),
        (lambda x, y: x, (X, X[:2]), {}, "batches have 2, 3 rows"),
        (lambda x: x.mean(), (X,), {}, "out_axes is 0"),
        (lambda x: x.swapaxes(0, 1), (X,), {}, "out_axes is 0"),
        (lambda x: jnp.maximum(x[:, None], x[None]), (X,), {}, "out_axes is 0"),
        (lambda x: x + jnp.ones((3, 1, 1)), (X,), {}, "cannot be traced for a batch of"),
        (lambda x: x, (X,), {"batch_axes": (0, 0)}, "batch_axes does not fit"),
    ],
)
def test_bad_arguments_are_refused(fn: Any, arguments: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"certify: .*{message}"):
        audit.certify(fn, arguments, **options)


def test_an_argument_with_rows_is_an_array() -> None:
    with pytest.raises(TypeError, match="certify: an argument with rows is float; accepted: arrays"):
        audit.certify(lambda x, y: x, (X, 1.0))
