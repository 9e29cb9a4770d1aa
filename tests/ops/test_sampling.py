"""Sampling compared with a sampler written in NumPy: kept tokens, frequencies, and dependence on the seed."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax import ops
from tests.contract import emulation
from tests.support.bits import assert_same_bits

PROMPT = ops.prompt_digest([3, 1, 4])


def sample(logits: Any, *, filtered: bool = True, **fields: Any) -> tuple[np.ndarray, np.ndarray]:
    """`ops.sample` of rows `[B, V]`; fields are per row or for all."""
    logits = jnp.asarray(logits)
    made = ops.sample(logits, arrays_of(len(logits), **fields), filtered=filtered)
    return np.asarray(made[0]), np.asarray(made[1])


def sampling_logprobs(logits: Any, tokens: Any, *, filtered: bool = True, **fields: Any) -> np.ndarray:
    """`ops.sampling_logprobs` of rows `[B, V]`; fields are per row or for all."""
    logits, tokens = jnp.asarray(logits), jnp.asarray(tokens, jnp.int32)
    return np.asarray(ops.sampling_logprobs(logits, tokens, arrays_of(len(logits), **fields), filtered=filtered))


def arrays_of(rows: int, **fields: Any) -> ops.SamplingArrays:
    """Sampling parameters; fields are per row or for all rows."""

    def per_row(name: str, default: float, dtype: Any) -> jax.Array:
        return jnp.asarray(np.broadcast_to(fields.pop(name, default), rows).astype(dtype))

    named = (np.broadcast_to(fields.pop(name, default), rows) for name, default in (("seed", 7), ("sample_index", 0)))
    keys = [ops.noise_key(int(seed), PROMPT, int(index)) for seed, index in zip(*named, strict=True)]
    arrays = ops.SamplingArrays(
        jnp.asarray(keys, jnp.uint32),
        per_row("position", 0, np.int32),
        per_row("temperature", 1.0, np.float32),
        per_row("top_k", 0, np.int32),
        per_row("top_p", 1.0, np.float32),
        per_row("min_p", 0.0, np.float32),
    )
    assert not fields
    return arrays


def kept(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Returns the entries of a row that may be chosen, in float64: filters in sequence over ids, the likeliest
    first."""
    p = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    ids = sorted(range(len(p)), key=lambda i: (-p[i], i))
    if top_k:
        ids = ids[:top_k]
    nucleus, reached, total = [], 0.0, sum(p[ids])
    for i in ids:
        if reached >= top_p and top_p < 1 and nucleus:
            break
        nucleus.append(i)
        reached += p[i] / total
    return np.isin(np.arange(len(p)), [i for i in nucleus if p[i] >= min_p * p.max()])


@functools.cache
def noise(seed: int, position: int, index: int, size: int) -> np.ndarray:
    return emulation.gumbel(emulation.random_bits(ops.noise_key(seed, PROMPT, index), position, range(size)))


FILTERS = {
    "none": {},
    "top-k": {"top_k": 3},
    "top-k of one": {"top_k": 1},
    "top-k beyond the vocabulary": {"top_k": 10_000},
    "top-p": {"top_p": 0.7},
    "top-p of the likeliest alone": {"top_p": 1e-6},
    "min-p": {"min_p": 0.2},
    "min-p of the likeliest alone": {"min_p": 1.0},
    "all of them": {"top_k": 12, "top_p": 0.8, "min_p": 0.1},
}


@pytest.mark.parametrize("name", FILTERS)
def test_tokens_are_the_gumbel_argmax_of_what_the_filters_keep(name: str) -> None:
    rows, size, temperature = 64, 40, 1.3
    options = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | FILTERS[name]
    logits = np.random.default_rng(0).standard_normal((rows, size)).astype(np.float32) * 2
    row = np.arange(rows)
    tokens, _ = sample(
        logits,
        seed=5 + row,
        position=3 * row,
        sample_index=row % 4,
        temperature=temperature,
        **options,
    )
    for i in row:
        left = kept(logits[i], temperature, **options)
        score = np.where(left, logits[i] / np.float32(temperature) + noise(5 + i, 3 * i, i % 4, size), -np.inf)
        assert tokens[i] == np.argmax(score)


@pytest.mark.parametrize("name", FILTERS)
def test_exactly_the_kept_tokens_are_sampled(name: str) -> None:
    options = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | FILTERS[name]
    logits = np.asarray([0.0, 1.0, -1.0, 2.0, 1.0, 0.5, -3.0, 1.5], np.float32)
    tokens, _ = sample(np.tile(logits, (4000, 1)), sample_index=np.arange(4000), **options)
    assert set(tokens.tolist()) == set(np.flatnonzero(kept(logits, 1.0, **options)).tolist())


def test_top_k_among_equals_keeps_the_lowest_ids() -> None:
    logits = np.asarray([[0.0, 3.0, 1.0, 3.0, 3.0]], np.float32)
    tokens, _ = sample(np.tile(logits, (500, 1)), sample_index=np.arange(500), top_k=2)
    assert set(tokens.tolist()) == {1, 3}


def test_a_token_that_is_ruled_out_is_never_chosen() -> None:
    logits = np.full((300, 6), -np.inf, np.float32)
    logits[:, 2] = -50.0
    logits[:, 4] = -51.0
    for filtered in (True, False):
        tokens, logprobs = sample(logits, sample_index=np.arange(300), filtered=filtered)
        assert set(tokens.tolist()) == {2, 4}
        assert np.all(np.isfinite(logprobs))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_frequencies_of_samples_are_the_probabilities(temperature: float) -> None:
    count = 20_000
    logits = np.asarray([0.0, 1.0, -1.0, 2.0, 1.0, 0.5], np.float32)
    index = np.arange(count)
    tokens, _ = sample(
        np.tile(logits, (count, 1)),
        position=index // 100,
        sample_index=index % 100,
        temperature=temperature,
        filtered=False,
    )
    expected = np.exp(logits.astype(np.float64) / temperature)
    expected *= count / expected.sum()
    observed = np.bincount(tokens, minlength=6)
    # 20.5 is exceeded in 1 of 1000 seeds by a chi-square of 5 degrees of freedom; this is one seed.
    assert np.sum((observed - expected) ** 2 / expected) < 20.5


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_greedy_ties_go_to_the_lowest_id(dtype: str) -> None:
    logits = np.zeros((40, 300), np.float32)
    row = np.arange(40)
    logits[row, 5 + row] = logits[row, 6 + row] = logits[row, 299] = 2.0
    tokens, _ = sample(jnp.asarray(logits, dtype), temperature=0.0, sample_index=row, top_k=7, top_p=0.2)
    assert_same_bits(tokens, (5 + row).astype(np.int32))
    likeliest, _ = ops.top_logprobs(jnp.asarray(logits, dtype), 5)
    assert_same_bits(likeliest, np.stack([5 + row, 6 + row, row * 0 + 299, row * 0, row * 0 + 1], 1).astype(np.int32))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [80, 5000])
def test_logprobs_are_the_models_own_in_the_bits_of_log_softmax(dtype: str, size: int) -> None:
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((9, size)) * 3, dtype)
    expected = np.asarray(ops.log_softmax(logits))
    for filtered in (True, False):
        tokens, logprobs = sample(
            logits, temperature=np.resize([0.0, 0.3, 2.0], 9), top_k=5 if filtered else 0, filtered=filtered
        )
        assert_same_bits(logprobs, expected[np.arange(9), tokens])
    tokens, logprobs = (np.asarray(x) for x in ops.top_logprobs(logits, 7))
    assert_same_bits(logprobs, np.take_along_axis(expected, tokens, axis=1))
    assert_same_bits(logprobs, -np.sort(-expected, axis=1)[:, :7])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_without_a_filter_have_the_bits_of_a_program_without_filters(dtype: str) -> None:
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((60, 300)) * 3, dtype)
    row = np.arange(60)
    fields = {"sample_index": row, "position": row % 7, "temperature": np.resize([0.0, 0.5, 1.0, 4.0], 60)}
    unfiltered = sample(logits, filtered=False, **fields)
    assert_same_bits(sample(logits, **fields), unfiltered)
    mixed = sample(logits, top_k=np.where(row % 2, 0, 3), **fields)
    assert_same_bits([x[row % 2 == 1] for x in mixed], [x[row % 2 == 1] for x in unfiltered])


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_sampling_logprobs_are_those_of_the_kept_tokens_in_float64(name: str, temperature: float) -> None:
    options = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | FILTERS[name]
    logits = np.random.default_rng(0).standard_normal(40).astype(np.float32) * 2
    left = kept(logits, temperature, **options)
    p = np.where(left, np.exp(logits.astype(np.float64) / temperature), 0.0)
    result = sampling_logprobs(np.tile(logits, (40, 1)), np.arange(40), temperature=temperature, **options)
    assert np.isneginf(result).tolist() == (~left).tolist()
    np.testing.assert_allclose(result[left], np.log(p[left] / p.sum()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "size", "name"),
    [
        ("bfloat16", 81, "all of them"),
        ("float32", 4097, "top-p"),
        *(
            pytest.param(dtype, size, name, marks=pytest.mark.nightly)
            for dtype in ("float32", "bfloat16", "float16")
            for size, name in ((80, "all of them"), (5000, "none"), (5000, "top-k"), (5000, "top-p"))
        ),
    ],
)
def test_sampling_logprobs_have_the_bits_of_log_softmax(dtype: str, size: int, name: str) -> None:
    options = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | FILTERS[name]
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((18, size)) * 3, dtype)
    logits = logits.at[::5, 3].set(-jnp.inf)
    temperature = np.resize(np.float32([0.3, 0.7, 1.0, 1.9]), 18)
    rounded = np.asarray(logits.astype(jnp.float32))
    scaled = rounded * (np.float32(1) / temperature)[:, None]
    for row in range(18):
        scaled[row, ~kept(rounded[row], temperature[row], **options)] = -np.inf
    expected = np.asarray(ops.log_softmax(jnp.asarray(scaled)))
    fields = {"temperature": temperature, **options}
    tokens, _ = sample(logits, **fields)
    assert_same_bits(sampling_logprobs(logits, tokens, **fields), expected[np.arange(18), tokens])
    assert np.isfinite(expected[np.arange(18), tokens]).all()
    others = np.resize([3, 0, size - 1], 18)
    assert_same_bits(sampling_logprobs(logits, others, **fields), expected[np.arange(18), others])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_at_temperature_1_without_filters_they_are_the_logprobs(dtype: str) -> None:
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((20, 5000)) * 3, dtype)
    logits = logits.at[::3, 100:4700].set(-jnp.inf)
    tokens, logprobs = sample(logits, sample_index=np.arange(20))
    for filtered in (True, False):
        assert_same_bits(sampling_logprobs(logits, tokens, filtered=filtered), logprobs)
    forbidden = sampling_logprobs(logits, np.full(20, 200))
    assert_same_bits(forbidden, np.asarray(ops.log_softmax(logits))[:, 200])
    assert np.isneginf(forbidden[::3]).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("filtered", [True, False])
def test_at_temperature_0_the_distribution_lies_on_the_greedy_token(filtered: bool) -> None:
    logits = np.random.default_rng(0).standard_normal((20, 300)).astype(np.float32)
    logits[:, [40, 200]] = logits.max() + 1
    temperature = np.resize(np.float32([0.0, 2.0]), 20)
    fields = {"temperature": temperature, "top_k": 1 if filtered else 0, "filtered": filtered}
    tokens, _ = sample(logits, **fields)
    greedy = temperature == 0
    assert tokens[greedy].tolist() == [40] * 10
    assert_same_bits(sampling_logprobs(logits, tokens, **fields)[greedy], np.zeros(10, np.float32))
    # The other token with the largest logit loses the tie, so it cannot be drawn.
    assert np.isneginf(sampling_logprobs(logits, np.full(20, 200), **fields)[greedy]).all()
    assert np.isfinite(sampling_logprobs(logits, np.full(20, 40), **fields)).all()


@pytest.mark.parametrize("filtered", [True, False])
def test_a_token_that_cannot_be_drawn_has_probability_0(filtered: bool) -> None:
    logits = np.full((5, 6), -np.inf, np.float32)
    logits[:3, 2] = [-50.0, -3e38, 2e38]
    logits[4] = [0, np.nan, 0, 0, 0, 0]
    fields = {"temperature": 0.7, "filtered": filtered}
    # However low the only token's logit is: the others are not held at the lowest finite number.
    assert_same_bits(sampling_logprobs(logits[:3], [2] * 3, **fields), np.zeros(3, np.float32))
    assert np.isneginf(sampling_logprobs(logits[:3], [4] * 3, **fields)).all()
    assert np.isnan(sampling_logprobs(logits[3:], [2, 2], **fields)).all()


def test_an_id_outside_of_the_vocabulary_has_no_logprob() -> None:
    logits = np.random.default_rng(0).standard_normal((4, 30)).astype(np.float32)
    for filtered in (True, False):
        result = sampling_logprobs(logits, [-1, 29, 30, 2**31 - 1], temperature=[1, 1, 1, 0], filtered=filtered)
        assert np.isnan(result).tolist() == [True, False, True, True]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FILTERS)
def test_filtered_logits_are_sampled_without_filters_as_logits_are_with_them(name: str) -> None:
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((60, 300)) * 3, "bfloat16")
    logits = logits.at[7, 5].set(jnp.nan).at[8].set(-jnp.inf).at[9, :290].set(-jnp.inf)
    row = np.arange(60)
    fields = {"sample_index": row, "temperature": np.resize([0.5, 0.0, 1.0, 4.0], 60)}
    filters = {field: np.where(row % 5, value, 0 if field != "top_p" else 1) for field, value in FILTERS[name].items()}
    filtered = ops.filter_logits(logits, arrays_of(60, **fields, **filters))
    tokens, _ = sample(logits, **fields, **filters)
    assert_same_bits(sample(filtered, filtered=False, **fields)[0], tokens)
    expected = sampling_logprobs(logits, tokens, **fields, **filters)
    assert_same_bits(sampling_logprobs(filtered, tokens, filtered=False, **fields), expected)
    greedy = fields["temperature"] == 0
    assert_same_bits(np.asarray(filtered)[greedy], np.asarray(logits.astype(jnp.float32))[greedy])


def test_sampling_has_no_gradient() -> None:
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((3, 20)), jnp.float32)
    one, zero, ids = jnp.ones(3), jnp.zeros(3), jnp.zeros(3, jnp.int32)
    arrays = ops.SamplingArrays(jnp.zeros((3, 4), jnp.uint32), ids, one, ids, one, zero)
    gradient = jax.grad(lambda x: ops.sample(x, arrays)[1].sum())(logits)
    assert_same_bits(gradient, np.zeros((3, 20), np.float32))
    for op in (lambda x: ops.sampling_logprobs(x, ids, arrays), lambda x: ops.filter_logits(x, arrays)):
        assert_same_bits(jax.grad(lambda x, op=op: op(x).sum())(logits), np.zeros((3, 20), np.float32))
    assert_same_bits(jax.grad(lambda x: ops.top_logprobs(x, 3)[1].sum())(logits), np.zeros((3, 20), np.float32))
