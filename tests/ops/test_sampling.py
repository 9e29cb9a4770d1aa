"""Sampling: what is kept, how often it is drawn, and what a draw depends on."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from bits import assert_same_bits

from detjax import ops


def draw(
    logits: np.ndarray,
    *,
    seed: int | Sequence[int] = 0,
    position: Any = 0,
    sample_index: Any = 0,
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    filtered: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """`ops.sample`, every argument spread over the rows."""
    rows = len(logits)

    def spread(value: Any, dtype: Any) -> Any:
        return jnp.asarray(np.broadcast_to(value, rows), dtype)

    seeds = [seed] * rows if isinstance(seed, int) else seed
    tokens, logprobs = ops.sample(
        jnp.asarray(logits),
        jnp.asarray([ops.seed_words(one) for one in seeds], jnp.uint32),
        spread(position, jnp.int32),
        spread(sample_index, jnp.int32),
        spread(temperature, jnp.float32),
        spread(top_k, jnp.int32),
        spread(top_p, jnp.float32),
        spread(min_p, jnp.float32),
        filtered=filtered,
    )
    return np.asarray(tokens), np.asarray(logprobs)


def kept(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """What the filters keep of one row, in float64 and with loops."""
    weights = np.exp(logits.astype(np.float64) / temperature)
    order = np.argsort(-weights, kind="stable")
    if top_k:
        order = order[:top_k]
    shares = weights[order] / weights[order].sum()
    nucleus, reached = [], 0.0
    for token, share in zip(order, shares, strict=True):
        if nucleus and reached >= top_p:
            break
        nucleus.append(token)
        reached += share
    return {int(token) for token in nucleus if weights[token] >= min_p * weights[order[0]]}


FILTERS = [(1.0, 0, 1.0, 0.0), (1.0, 5, 1.0, 0.0), (0.7, 0, 0.6, 0.0), (1.5, 0, 1.0, 0.2), (1.2, 12, 0.8, 0.05)]


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), FILTERS)
def test_filters_keep_what_they_should_and_all_of_it_is_drawn(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row = np.random.default_rng(3).standard_normal(24).astype(np.float32)
    tokens, _ = draw(
        np.broadcast_to(row, (4096, 24)),
        position=np.arange(4096),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )
    assert set(tokens.tolist()) == kept(row, temperature, top_k, top_p, min_p)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_their_probability_says(temperature: float) -> None:
    row = np.float32([0.0, 1.0, 2.0, -1.0, 0.5])
    draws = 20_000
    tokens, _ = draw(
        np.broadcast_to(row, (draws, 5)), position=np.arange(draws), temperature=temperature, filtered=False
    )
    expected = np.exp(row / temperature)
    expected *= draws / expected.sum()
    chi_square = ((np.bincount(tokens, minlength=5) - expected) ** 2 / expected).sum()
    assert chi_square < 18.5  # exceeded once in a thousand times with 4 degrees of freedom; the seed is fixed


def test_a_draw_depends_on_seed_position_and_sample_index_and_on_nothing_else() -> None:
    row = np.zeros((1, 100_000), np.float32)
    base = draw(row, seed=7, position=3, sample_index=2)[0]
    assert draw(row, seed=7, position=3, sample_index=2)[0] == base
    others = [
        draw(row, seed=8, position=3, sample_index=2)[0],
        draw(row, seed=7 + 2**32, position=3, sample_index=2)[0],
        draw(row, seed=7, position=4, sample_index=2)[0],
        draw(row, seed=7, position=3, sample_index=3)[0],
        draw(row, seed=7, position=2, sample_index=3)[0],
    ]
    assert len({int(base[0]), *(int(other[0]) for other in others)}) == 6


def test_noise_is_that_of_the_contract() -> None:
    """key(seed), fold_in(position), fold_in(sample index), Gumbel, as JAX itself computes it."""
    import jax

    row = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(11, impl="threefry2x32"), 5), 1)
    expected = int(jnp.argmax(row + jax.random.gumbel(key, (1000,), jnp.float32)))
    assert draw(row[None], seed=11, position=5, sample_index=1)[0][0] == expected


def test_the_likeliest_token_wins_at_temperature_zero_and_the_lowest_id_among_equals() -> None:
    logits = np.float32([[0, 3, 3, 1], [2, 2, 2, 2], [-np.inf, -5, -5, -np.inf]])
    for filtered in (False, True):
        tokens, _ = draw(logits, temperature=0.0, top_k=1, filtered=filtered)
        assert tokens.tolist() == [1, 0, 1]


def test_top_k_of_equals_keeps_the_lowest_ids() -> None:
    tokens, _ = draw(np.zeros((512, 10), np.float32), position=np.arange(512), top_k=3)
    assert set(tokens.tolist()) == {0, 1, 2}


def test_logprobs_are_those_of_the_model_before_temperature_and_filters() -> None:
    logits = np.random.default_rng(1).standard_normal((9, 50)).astype(np.float32)
    tokens, logprobs = draw(logits, position=np.arange(9), temperature=0.3, top_k=4, top_p=0.7)
    expected = np.asarray(ops.log_softmax(jnp.asarray(logits)))[np.arange(9), tokens]
    assert_same_bits(logprobs, expected)


def test_rows_without_a_filter_have_the_same_bits_whether_others_have_one() -> None:
    logits = np.random.default_rng(2).standard_normal((33, 77)).astype(np.float32)
    arguments = {"position": np.arange(33), "temperature": np.resize([0.0, 0.8, 1.0], 33)}
    filtered = draw(logits, **arguments, top_k=np.resize([0, 0, 0, 5], 33), filtered=True)
    unfiltered = draw(logits, **arguments, filtered=False)
    plain = np.resize([True, True, True, False], 33)
    assert_same_bits([x[plain] for x in filtered], [x[plain] for x in unfiltered])


def test_top_logprobs_are_sorted_and_ties_go_to_the_lowest_id() -> None:
    logits = np.float32([[1, 3, 3, 2, 3], [0, 0, 0, 0, 0]])
    tokens, logprobs = ops.top_logprobs(jnp.asarray(logits), 4)
    assert np.asarray(tokens).tolist() == [[1, 2, 4, 3], [0, 1, 2, 3]]
    expected = np.take_along_axis(np.asarray(ops.log_softmax(jnp.asarray(logits))), np.asarray(tokens), axis=-1)
    assert_same_bits(logprobs, expected)


def test_seeds_have_64_bits() -> None:
    assert ops.seed_words(2**64 - 1) == (2**32 - 1, 2**32 - 1)
    assert ops.seed_words(5) == (0, 5)
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match=rf"seed is {seed}; accepted: 0 to 2\^64 - 1"):
            ops.seed_words(seed)
