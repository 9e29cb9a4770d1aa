"""Mixtures of experts: ties, order of addition, gradients, and rows that depend on themselves alone."""

import functools
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.operands.options import Aggregation
from detjax.runtime import backends
from tests.support.bits import assert_same_bits, same_bits
from tests.support.unchecked import unchecked

EXPERTS, COUNT, D = 6, 3, 40


def drawn(*shape: int, dtype: str = "float32", seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype)


def mixture(x: Any, w: Any, logits: Any, present: Any = None, residual: Any = None) -> Any:
    """Tokens through the experts that they choose: a matrix for each expert."""
    ids, weights = ops.choose_experts(ops.softmax(logits), COUNT, normalized=True)
    rows = ops.expert_rows(ids, EXPERTS, present)
    y = ops.grouped_matmul(rows.gather(x), w, rows.group_sizes)
    return ops.combine_experts(y, weights, rows, residual=residual)


def exact(x: np.ndarray, w: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """The same in float64 for every expert, with zeros as the weights of those that were not chosen."""
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    ids = np.argsort(-p, axis=1, kind="stable")[:, :COUNT]
    weights = np.zeros_like(p)
    np.put_along_axis(weights, ids, np.take_along_axis(p, ids, 1), 1)
    return np.einsum("nk,ekd,ne->nd", x, w, weights / weights.sum(1, keepdims=True))


def test_the_lowest_ids_win_ties_and_come_first() -> None:
    scores = jnp.asarray([[1, 3, 3, 2, 3, 3], [0, 0, 0, 0, 0, 0], [5, 4, 3, 2, 1, 0]], jnp.float32)
    ids, weights = detjax.jit(functools.partial(ops.choose_experts, count=COUNT))(scores)
    assert ids.tolist() == [[1, 2, 4], [0, 1, 2], [0, 1, 2]]
    assert weights.tolist() == [[3, 3, 3], [0, 0, 0], [5, 4, 3]]
    by_others = detjax.jit(lambda scores, ranks: ops.choose_experts(scores, COUNT, ranks=ranks))
    assert by_others(scores, -scores)[0].tolist() == [[0, 1, 3], [0, 1, 2], [3, 4, 5]]


def test_weights_are_normalized_by_their_sum_in_ascending_order_of_experts() -> None:
    scores = np.abs(np.asarray(drawn(50, EXPERTS)))
    ids, weights = detjax.jit(functools.partial(ops.choose_experts, count=COUNT, normalized=True, eps=1e-3))(scores)
    chosen = np.take_along_axis(scores, np.asarray(ids), 1)
    total = ((chosen[:, 0] + chosen[:, 1]) + chosen[:, 2]) + np.float32(1e-3)
    assert_same_bits(weights, chosen * (np.float32(1) / total)[:, None])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_are_added_in_ascending_order_of_experts(dtype: str) -> None:
    """NumPy states the contract: rounded products, left to right, then what all tokens share, then the residual."""
    n, ids = 20, np.sort(np.argsort(np.asarray(drawn(20, EXPERTS)), axis=1)[:, :COUNT], axis=1).astype(np.int32)
    weights, y = np.asarray(drawn(n, COUNT)), drawn(n * COUNT, D, dtype=dtype)
    shared, residual = drawn(n, D, dtype=dtype, seed=1), drawn(n, D, dtype=dtype, seed=2)

    def fn(ids: Any, y: Any, weights: Any, shared: Any, residual: Any) -> Any:
        rows = ops.expert_rows(ids, EXPERTS)
        return rows, ops.combine_experts(y, weights, rows, shared=shared, residual=residual)

    rows, result = detjax.jit(fn)(ids, y, weights, shared, residual)
    wide = np.asarray(y, np.float32)[np.asarray(rows.place)]
    total = wide[:, 0] * weights[:, :1]
    for j in range(1, COUNT):
        total = total + wide[:, j] * weights[:, j : j + 1]
    total = total + np.asarray(shared, np.float32) + np.asarray(residual, np.float32)
    assert_same_bits(result, total.astype(jnp.dtype(dtype)))
    assert rows.group_sizes.tolist() == np.bincount(ids.reshape(-1), minlength=EXPERTS).tolist()
    for token in range(n):
        assert [int(rows.token[row]) for row in np.asarray(rows.place)[token]] == [token] * COUNT


def test_a_mixture_is_that_of_float64() -> None:
    x, w, logits = drawn(33, 24), drawn(EXPERTS, 24, D), drawn(33, EXPERTS)
    expected = exact(*(np.asarray(a, np.float64) for a in (x, w, logits)))
    np.testing.assert_allclose(detjax.jit(mixture)(x, w, logits), expected, atol=2e-5)


def test_a_token_depends_on_itself_alone() -> None:
    x, w, logits = drawn(37, 24, dtype="bfloat16"), drawn(EXPERTS, 24, D, dtype="bfloat16"), drawn(37, EXPERTS)
    x, logits = np.asarray(x), np.asarray(logits)
    program = detjax.jit(mixture)
    expected = np.asarray(program(x, w, logits))
    for chosen in (slice(7, 8), slice(2, 37, 2)):
        assert_same_bits(program(x[chosen], w, logits[chosen]), expected[chosen])
    # Absent tokens cause no work, and NaN in neighbours has no effect.
    present = np.arange(37) % 3 > 0
    poisoned = np.where(present[:, None], x, np.array(np.nan, x.dtype))
    assert_same_bits(np.asarray(program(poisoned, w, logits, present))[present], expected[present])
    strange, strange_logits = x.copy(), logits.copy()
    strange[5], strange_logits[9] = np.nan, np.nan
    others = np.delete(np.arange(37), [5, 9])
    assert_same_bits(np.asarray(program(strange, w, strange_logits))[others], expected[others])


def test_under_stock_numerics_a_token_depends_on_its_neighbours() -> None:
    """The control: XLA chooses how it multiplies by the number of rows."""
    x, w, logits = drawn(70, 600), drawn(EXPERTS, 600, D), drawn(70, EXPERTS)
    with detjax.use_backend("stock"):
        program = detjax.jit(mixture)
        together = program(x, w, logits)
        assert not same_bits([program(x[i : i + 1], w, logits[i : i + 1]) for i in range(8)], list(together[:8, None]))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 2e-2)])
def test_gradients_are_those_of_float64_and_rows_depend_on_themselves_alone(dtype: str, tolerance: float) -> None:
    x, w, dout = drawn(19, 24, dtype=dtype), drawn(EXPERTS, 24, D, dtype=dtype), drawn(19, D, dtype=dtype, seed=1)
    logits = drawn(19, EXPERTS)

    def gradients(x: Any, w: Any, logits: Any, dout: Any) -> Any:
        return jax.vjp(lambda x, logits, residual: mixture(x, w, logits, residual=residual), x, logits, dout)[1](dout)

    program = detjax.jit(gradients)
    *actual, dresidual = program(x, w, logits, dout)
    assert_same_bits(dresidual, dout)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a).astype(np.float64)) for a in (x, w, logits, dout)]

        def reference(x: Any, logits: Any) -> Any:
            p = jax.nn.softmax(logits)
            kept = p >= jax.lax.top_k(p, COUNT)[0][:, -1:]
            weights = jnp.where(kept, p, 0.0)
            return jnp.einsum("nk,ekd,ne->nd", x, wide[1], weights / weights.sum(1, keepdims=True))

        pullback = jax.jit(lambda x, logits, dout: jax.vjp(reference, x, logits)[1](dout))
        expected = [np.asarray(gradient) for gradient in pullback(wide[0], wide[2], wide[3])]
    for one, other in zip(actual, expected, strict=True):
        error = np.abs(np.asarray(one).astype(np.float64) - other).max()
        assert error <= tolerance * np.abs(other).max()
    if dtype == "float32":
        part = program(*(np.asarray(a)[5:12] if a is not w else w for a in (x, w, logits, dout)))
        assert_same_bits(part[:2], [np.asarray(a)[5:12] for a in actual])


def test_bad_arguments_are_refused() -> None:
    scores, choose = jnp.ones((3, 4)), unchecked(ops.choose_experts)
    with pytest.raises(ValueError, match="choose_experts: count is 5; accepted: 1 to 4, the number of experts"):
        choose(scores, 5)
    with pytest.raises(TypeError, match="choose_experts: scores has dtype bfloat16; accepted: float32"):
        choose(scores.astype("bfloat16"), 2)
    rows = ops.expert_rows(jnp.zeros((3, 1), jnp.int32), 4)
    with pytest.raises(
        ValueError, match="combine_experts: aggregation is 'other'; accepted: contract, hf_eager_float32"
    ):
        unchecked(ops.combine_experts)(jnp.ones((3, 8)), jnp.ones((3, 1)), rows, aggregation="other")
    with pytest.raises(ValueError, match=r"combine_experts: weights has shape \(3, 2\); accepted: \(3, 1\)"):
        unchecked(ops.combine_experts)(jnp.ones((3, 8)), jnp.ones((3, 2)), rows)


def test_absent_tokens_have_no_rows() -> None:
    ids = jnp.asarray([[0, 1], [0, 2], [1, 2]], jnp.int32)
    rows = ops.expert_rows(ids, 3, jnp.asarray([True, False, True]))
    assert rows.group_sizes.tolist() == [1, 2, 1]
    assert rows.token.tolist() == [0, 0, 2, 2, 3, 3]
    assert rows.place.tolist() == [[0, 1], [6, 6], [2, 3]]


def test_ids_of_experts_elsewhere_have_no_rows_and_add_nothing() -> None:
    """The id after the last expert stands for experts of other devices, any number of times."""
    ids = jnp.asarray([[0, 2, 3], [3, 3, 3], [1, 3, 3]], jnp.int32)
    rows = ops.expert_rows(ids, 3)
    assert rows.group_sizes.tolist() == [1, 1, 1]
    assert rows.token.tolist() == [0, 2, 0, *[3] * 6]
    assert rows.place.tolist() == [[0, 2, 9], [9, 9, 9], [1, 9, 9]]
    y, weights = jnp.arange(18.0).reshape(9, 2), jnp.asarray([[1, 2, 4]] * 3, jnp.float32)
    assert ops.combine_experts(y, weights, rows).tolist() == [[8, 11], [0, 0], [2, 3]]
    assert rows.results(y)[0].tolist() == [[0, 1], [4, 5], [0, 0]]
    assert rows.gather(jnp.asarray([[5.0], [6.0], [7.0]]))[:, 0].tolist() == [5, 7, 5, 0, 0, 0, 0, 0, 0]


def test_few_choices_have_rows_for_the_experts_that_they_can_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are filled up to 8 rows, and no choice can make a group of an expert that nobody chose."""
    monkeypatch.setattr(ops.experts, "group_unit", lambda rows, experts: 8)  # pyright: ignore[reportAttributeAccessIssue]
    for ids in (np.array([[3, 9, 40]]), np.array([[3, 9, 40], [3, 41, 50]]), np.array([[7, 8, 9]] * 9)):
        rows = jax.jit(lambda ids: ops.expert_rows(ids, 64))(ids.astype(np.int32))
        assert len(rows.token) <= 8 * ids.size
        kept = np.asarray(rows.token)[np.asarray(rows.place)]
        assert kept.tolist() == [[token] * 3 for token in range(len(ids))]
        assert int(rows.group_sizes.sum()) <= len(rows.token)


def test_rows_are_those_of_a_stable_sort_by_expert() -> None:
    """There are more choices than are compared at once, and experts that nobody chose."""
    experts, absent = 40, np.arange(300) % 7 == 0
    ids = np.argsort(np.asarray(drawn(300, experts - 3)), axis=1)[:, :COUNT].astype(np.int32)
    rows = detjax.jit(lambda ids, present: ops.expert_rows(ids, experts, present))(ids, ~absent)
    keys = np.where(absent[:, None], experts, ids).reshape(-1)
    order = [choice for choice in np.argsort(keys, kind="stable") if keys[choice] < experts]
    sizes = np.bincount(keys, minlength=experts)[:experts]
    assert rows.group_sizes.tolist() == sizes.tolist()
    assert rows.token.tolist() == [*(choice // COUNT for choice in order), *[300] * (absent.sum() * COUNT)]
    place = np.full(ids.size, ids.size)
    place[order] = np.arange(len(order))
    assert rows.place.tolist() == place.reshape(ids.shape).tolist()


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_ids_ascend_whatever_the_order_of_the_ranks(count: int) -> None:
    scores = drawn(200, 8)
    ids, _ = detjax.jit(functools.partial(ops.choose_experts, count=count))(scores)
    assert ids.tolist() == np.sort(np.argsort(-np.asarray(scores), axis=1)[:, :count], axis=1).tolist()


def test_nothing_sorts_or_searches_in_loops_but_the_choice() -> None:
    """XLA's GPU compiler compiles each sort separately, so the sorts of all layers took most of an engine's start."""
    scores, ids = jnp.ones((16, EXPERTS)), jnp.zeros((16, COUNT), jnp.int32)
    with backends.tracing_for("gpu"):
        rows = str(jax.make_jaxpr(lambda ids: ops.expert_rows(ids, EXPERTS))(ids))
        chosen = str(jax.make_jaxpr(lambda scores: ops.choose_experts(scores, COUNT))(scores))
    for operation in (" sort[", " while[", " scan["):
        assert operation not in rows + chosen
    assert chosen.count(" top_k[") == 1


def test_aggregations_of_transformers_have_the_bits_of_torch() -> None:
    stored = dict(np.load(Path(__file__).parents[1] / "fixtures" / "aggregation.npz"))
    bfloat16 = {name: array.view(jnp.bfloat16) for name, array in stored.items() if array.dtype == np.uint16}
    width = bfloat16["y"].shape[-1]
    ascending = np.argsort(stored["ids"], axis=1)
    ids, weights = (np.take_along_axis(stored[name], ascending, 1) for name in ("ids", "weights"))
    y = np.take_along_axis(bfloat16["y"], ascending[..., None], 1)

    def combined(y: Any, ids: Any, weights: Any, aggregation: Any) -> Any:
        rows = ops.expert_rows(ids, 16)
        by_row = jnp.zeros((len(rows.token), width), y.dtype).at[rows.place].set(y)
        return ops.combine_experts(by_row, weights, rows, aggregation=aggregation)

    def all_of_them(*operands: Any) -> dict[str, Any]:
        return {name: combined(*operands, aggregation=name) for name in get_args(Aggregation)}

    results = jax.tree.map(np.asarray, detjax.jit(all_of_them)(y, ids, weights))
    for name in ("hf_eager", "hf_eager_float32", "hf_grouped", "finalize"):
        assert_same_bits(results[name], bfloat16[name])
    # Order alone changes few results, and places of rounding about half of them.
    differing = {name: np.mean(result != results["contract"]) for name, result in results.items()}
    assert differing["finalize"] < 0.01
    assert all(0.3 < differing[name] < 0.8 for name in ("hf_eager", "hf_eager_float32", "hf_grouped", "deepep"))
