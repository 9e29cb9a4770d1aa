"""Equations that are attention, which `batch_invariant` gives to `ops.attention` on accelerators."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from detjax.invariant import attention_patterns, batched, patterns
from detjax.invariant.equations import Program
from tests.support.bits import assert_same_bits

RANDOM = np.random.default_rng(11)
COUNT = 3


def _array(*shape: int, dtype: Any = jnp.float32) -> Array:
    return jnp.asarray(RANDOM.standard_normal(shape), dtype)


def _mask(*shape: int) -> Array:
    """A third of the keys; the first query sees none."""
    return jnp.asarray(RANDOM.random(shape) < 0.3).at[..., 0, :].set(False)


def _plain(scores: str, result: str, scale: float = 1.0) -> Callable[..., Array]:
    def attend(q: Array, k: Array, v: Array) -> Array:
        s = jnp.einsum(scores, q, k, preferred_element_type=jnp.float32) * scale
        return jnp.einsum(result, jax.nn.softmax(s, axis=-1).astype(v.dtype), v)

    return attend


def _masked(scores: str, result: str, fill: float) -> Callable[..., Array]:
    def attend(q: Array, k: Array, v: Array, mask: Array) -> Array:
        s = jnp.einsum(scores, q, k, preferred_element_type=jnp.float32) / 4
        p = jax.nn.softmax(jnp.where(mask, s, fill))
        return jnp.einsum(result, p.astype(v.dtype), v)

    return attend


def _masked_the_other_way(q: Array, k: Array, v: Array, mask: Array) -> Array:
    s = jnp.einsum("thd,shd->hts", q, k)
    return jnp.einsum("hts,shd->thd", jax.nn.softmax(jnp.where(mask, -1e30, s)), v)


LOWEST = float(jnp.finfo(jnp.float32).min)
HEADS = _array(COUNT, 5, 2, 16), _array(COUNT, 7, 2, 16), _array(COUNT, 7, 2, 8)
GROUPED = _array(COUNT, 1, 5, 2, 3, 16), _array(COUNT, 1, 7, 2, 16), _array(COUNT, 1, 7, 2, 8)
CASES: dict[str, tuple[Callable[..., Array], tuple[Array, ...]]] = {
    "one head": (_plain("td,sd->ts", "ts,sd->td"), (_array(COUNT, 5, 16), _array(COUNT, 7, 16), _array(COUNT, 7, 8))),
    "heads": (_plain("thd,shd->hts", "hts,shd->thd", 0.3), HEADS),
    "heads, bfloat16": (_plain("thd,shd->hts", "hts,shd->thd"), tuple(x.astype(jnp.bfloat16) for x in HEADS)),
    "heads first": (
        _plain("htd,hsd->hts", "hts,hsd->htd"),
        (_array(COUNT, 2, 5, 16), _array(COUNT, 2, 7, 16), _array(COUNT, 2, 7, 8)),
    ),
    "columns first": (
        _plain("hdt,dsh->hts", "hts,hds->dht"),
        (_array(COUNT, 2, 16, 5), _array(COUNT, 16, 7, 2), _array(COUNT, 2, 8, 7)),
    ),
    "values as queries, one query": (_plain("d,sd->s", "s,sd->d"), (_array(COUNT, 16), *2 * (_array(COUNT, 7, 16),))),
    "keys shared by heads": (_plain("btkgd,bskd->bkgts", "bkgts,bskd->btkgd"), GROUPED),
    "axes in turns": (
        _plain("tagbc,sabc->abtgs", "abtgs,sabe->tagbe"),
        (_array(COUNT, 5, 2, 3, 2, 16), _array(COUNT, 7, 2, 2, 16), _array(COUNT, 7, 2, 2, 8)),
    ),
    "masked by -inf": (_masked("thd,shd->hts", "hts,shd->thd", -jnp.inf), (*HEADS, _mask(COUNT, 5, 7))),
    "masked by the lowest number": (_masked("thd,shd->hts", "hts,shd->thd", LOWEST), (*HEADS, _mask(COUNT, 2, 5, 7))),
    "masked, keys shared": (
        _masked("btkgd,bskd->bkgts", "bkgts,bskd->btkgd", LOWEST),
        (*GROUPED, _mask(COUNT, 3, 5, 7)),
    ),
    "masked by keys": (
        _masked("thd,shd->hts", "hts,shd->thd", -jnp.inf),
        (*HEADS, jnp.asarray(RANDOM.random((COUNT, 1, 7)) < 0.5).at[:, :, 0].set(True)),
    ),
    "masked the other way": (_masked_the_other_way, (*HEADS, _mask(COUNT, 5, 7))),
}


def _program(fn: Callable[..., Any], operands: tuple[Array, ...]) -> Program:
    return Program.from_jaxpr(jax.make_jaxpr(fn)(*(x[0] for x in operands)))


def _attentions(program: Program) -> list[attention_patterns.Attention]:
    uses = patterns.Uses.from_program(program)
    return attention_patterns.attentions(uses, patterns.softmaxes(uses))


LIKE_OTHERS = "one head", "heads first", "masked by the lowest number"


@pytest.mark.parametrize("name", LIKE_OTHERS)
def test_attention_is_recognized(name: str) -> None:
    (attention,) = _attentions(_program(*CASES[name]))
    assert attention.is_served(COUNT)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in LIKE_OTHERS else name for name in CASES]
)
def test_attention_is_that_of_ops_on_accelerators(name: str) -> None:
    fn, operands = CASES[name]
    program = _program(fn, operands)
    (attention,) = _attentions(program)
    assert attention.is_served(COUNT)
    (made,) = batched.run(program, operands, [])
    expected = jax.vmap(fn)(*operands)
    tolerance = 2e-2 if made.dtype == jnp.bfloat16 else 1e-6
    np.testing.assert_allclose(
        np.asarray(made, np.float32), np.asarray(expected, np.float32), rtol=0, atol=tolerance, equal_nan=True
    )
    if name in ("heads", "masked, keys shared"):
        (alone,) = batched.run(program, [x[1:2] for x in operands], [])
        assert_same_bits(made[1], alone[0])


def test_a_mask_that_all_examples_share_is_read_once() -> None:
    fn, (*operands, mask) = CASES["masked by -inf"]
    (made,) = batched.run(_program(fn, (*operands, mask)), operands, [mask[0]])
    expected = jax.vmap(fn, in_axes=(0, 0, 0, None))(*operands, mask[0])
    np.testing.assert_allclose(made, expected, rtol=0, atol=1e-6)


def test_attention_that_no_example_has_a_part_in_is_computed_once() -> None:
    fn, shared = CASES["heads"][0], [x[0] for x in HEADS]

    def looped(x: Array, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """The second carry depends on no example."""

        def step(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
            counted, q = carry
            return (counted + 1, jnp.pad(fn(q, k, v), ((0, 0), (0, 0), (0, 8)))), None

        return jax.lax.scan(step, (x, q), length=2)[0]

    x = _array(COUNT, 3)
    program = Program.from_jaxpr(jax.make_jaxpr(looped)(x[0], *shared))
    counted, made = batched.run(program, [x], shared)
    expected = looped(x[0], *shared)[1]
    np.testing.assert_allclose(counted, x + 2, rtol=0, atol=0)
    np.testing.assert_allclose(made, jnp.broadcast_to(expected, made.shape), rtol=0, atol=1e-6)


def _scores_kept(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    s = jnp.einsum("thd,shd->hts", q, k)
    return jnp.einsum("hts,shd->thd", jax.nn.softmax(s), v), s


def _products_kept(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    s = jnp.einsum("thd,shd->hts", q, k)
    return jnp.einsum("hts,shd->thd", jax.nn.softmax(2 * s), v), s


def _masked_scores_kept(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    s = jnp.einsum("thd,shd->hts", q, k)
    return jnp.einsum("hts,shd->thd", jax.nn.softmax(jnp.where(jnp.arange(7) < 4, s, -jnp.inf)), v), s


def _probabilities_kept(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    p = jax.nn.softmax(jnp.einsum("thd,shd->hts", q, k))
    return jnp.einsum("hts,shd->thd", p, v), p


def _biased(q: Array, k: Array, v: Array) -> Array:
    return jnp.einsum("hts,shd->thd", jax.nn.softmax(jnp.einsum("thd,shd->hts", q, k) + 1), v)


def _masked_with_a_score(q: Array, k: Array, v: Array) -> Array:
    s = jnp.where(jnp.arange(7) < 4, jnp.einsum("thd,shd->hts", q, k), -1e4)
    return jnp.einsum("hts,shd->thd", jax.nn.softmax(s), v)


def _turned_around(q: Array, k: Array, v: Array) -> Array:
    return jnp.einsum("hts,shd->thd", jax.nn.softmax(-2 * jnp.einsum("thd,shd->hts", q, k)), v)


def _heads_added(q: Array, k: Array, v: Array) -> Array:
    return jnp.einsum("hts,shd->td", jax.nn.softmax(jnp.einsum("thd,shd->hts", q, k)), v)


def _queries_added(q: Array, k: Array, v: Array) -> Array:
    return jnp.einsum("hts,thd->shd", jax.nn.softmax(jnp.einsum("thd,shd->hts", q, k)), q)


def _divided(q: Array, k: Array, v: Array) -> Array:
    return jnp.einsum("hts,shd->thd", jax.nn.softmax(1 / jnp.einsum("thd,shd->hts", q, k)), v)


@pytest.mark.parametrize(
    "fn",
    [
        _scores_kept,
        _products_kept,
        _masked_scores_kept,
        _probabilities_kept,
        _biased,
        _masked_with_a_score,
        _turned_around,
        _heads_added,
        _queries_added,
        _divided,
    ],
)
def test_what_is_not_exactly_attention_is_none(fn: Callable[..., Any]) -> None:
    program = _program(fn, HEADS)
    assert not _attentions(program)


def test_what_looks_like_attention_keeps_its_numbers() -> None:
    program = _program(_scores_kept, HEADS)
    expected = jax.tree.leaves(jax.vmap(_scores_kept)(*HEADS))
    for made, number in zip(batched.run(program, HEADS, []), expected, strict=True):
        np.testing.assert_allclose(made, number, rtol=0, atol=3e-6)
