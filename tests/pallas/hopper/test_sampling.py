"""The sampler's Hopper kernels, in Pallas' interpreter and lowered for CUDA."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.models.parts.logits import Logits, vocabulary_sharding
from detjax.operands.sampling_arrays import SamplingArrays
from detjax.ops import vocabulary_blocks
from detjax.pallas.hopper import sampling, softmax
from detjax.pallas.hopper.softmax import Schedule
from detjax.portable import sampling as portable
from tests.pallas.hopper.interpreter import interpreted, kernels_interpreted, lowered
from tests.support.bits import assert_same_bits


def requests(rows: int, width: int, *, filters: bool = False, **fields: Any) -> dict[str, jax.Array]:
    """Arguments of the sampler: random ones, and those given."""
    random = np.random.default_rng([rows, width])
    arguments = {
        "logits": random.standard_normal((rows, width)).astype(np.float32) * 2,
        "noise_key": random.integers(0, 2**32, (rows, 4)).astype(np.uint32),
        "position": random.integers(0, 1000, rows).astype(np.int32),
        "temperature": np.resize([0.7, 0.0, 1.0, 2.0], rows).astype(np.float32),
        "top_k": np.resize([3, 0, 40] if filters else [0], rows).astype(np.int32),
        "top_p": np.resize([1.0, 0.9] if filters else [1.0], rows).astype(np.float32),
        "min_p": np.resize([0.0, 0.05] if filters else [0.0], rows).astype(np.float32),
    }
    return {name: jnp.asarray(array) for name, array in (arguments | fields).items()}


def nouns(arguments: dict[str, Any]) -> tuple[Any, SamplingArrays]:
    """The sampler's arguments as it takes them."""
    rows = arguments.copy()
    return rows.pop("logits"), SamplingArrays(**rows)


@functools.cache  # JAX compiles a program once for each function and shape
def sampler(filtered: bool, schedule: Schedule | None) -> Callable[[dict[str, jax.Array]], Any]:
    return lambda arguments: sampling.sample(*nouns(arguments), filtered=filtered, schedule=schedule)


def sample(arguments: dict[str, jax.Array], *, filtered: bool = False, schedule: Schedule | None = None) -> Any:
    return interpreted(sampler(filtered, schedule), arguments)


def _log_softmax(x: jax.Array) -> jax.Array:
    return softmax.log_softmax(x, Schedule(0, 4, 5))


def log_softmax(x: jax.Array) -> np.ndarray:
    return interpreted(_log_softmax, x)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("width", "filtered"), [(4097, True), (4097, False), (128, True), (5, True), (1, False)])
def test_tokens_are_those_of_the_portable_backend(width: int, filtered: bool) -> None:
    arguments = requests(4, width, filters=filtered)
    tokens, logprobs = sample(arguments, filtered=filtered)
    expected, expected_logprobs = portable.sample(*nouns(arguments), filtered=filtered)
    assert_same_bits(tokens, expected)
    np.testing.assert_allclose(logprobs, expected_logprobs, rtol=1e-6, atol=2e-6)


def test_the_temperature_divides_the_logits() -> None:
    arguments = requests(24, 40, temperature=np.resize(np.float32([0.25, 4.0]), 24))
    tokens, _ = sample(arguments)
    assert_same_bits(tokens, portable.sample(*nouns(arguments), filtered=False)[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_logprobs_have_the_bits_of_log_softmax(dtype: str) -> None:
    arguments = requests(4, 1100, filters=True)
    arguments["logits"] = arguments["logits"].astype(dtype)
    expected = log_softmax(arguments["logits"])
    for filtered in (False, True) if dtype == "bfloat16" else (False,):
        tokens, logprobs = sample(arguments, filtered=filtered)
        assert_same_bits(logprobs, expected[np.arange(4), tokens])


def test_rows_without_a_filter_have_the_bits_of_a_program_without_filters() -> None:
    arguments = requests(4, 1100)
    unfiltered = sample(arguments)
    assert_same_bits(sample(arguments, filtered=True), unfiltered)
    row = np.arange(4)
    arguments["top_k"] = jnp.asarray(np.where(row % 2, 0, 3), jnp.int32)
    mixed = sample(arguments, filtered=True)
    assert_same_bits([x[row % 2 == 1] for x in mixed], [x[row % 2 == 1] for x in unfiltered])


def test_every_schedule_gives_the_same_bits_and_rows_do_not_meet() -> None:
    arguments = requests(3, 4200)
    expected = sample(arguments, schedule=Schedule(0, 5, 4))
    assert_same_bits(sample(arguments, schedule=Schedule(0, 2, 1)), expected)
    others = requests(3, 4200, filters=True)
    among_others = {name: others[name].at[0].set(array[2]) for name, array in arguments.items()}
    assert_same_bits([x[0] for x in sample(among_others, schedule=Schedule(0, 2, 1))], [x[2] for x in expected])


@functools.cache
def logprobs_of_samples(schedule: Schedule | None) -> Callable[..., jax.Array]:
    return lambda *arrays: sampling.sampling_logprobs(*arrays, schedule=schedule)


def sampling_logprobs(
    arguments: dict[str, jax.Array], tokens: np.ndarray, schedule: Schedule | None = None
) -> np.ndarray:
    return interpreted(
        logprobs_of_samples(schedule), arguments["logits"], jnp.asarray(tokens, jnp.int32), arguments["temperature"]
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("width", [1100, 1, 130, 4200])
def test_sampling_logprobs_have_the_bits_of_log_softmax(width: int, dtype: str) -> None:
    arguments = requests(4, width, temperature=np.float32([0.7, 1.0, 2.0, 1e-30]))
    arguments["logits"] = arguments["logits"].astype(dtype)
    if width > 1:
        arguments["logits"] = arguments["logits"].at[1, 1:].set(-jnp.inf).at[2, 1::2].set(-jnp.inf)
    logits = np.asarray(arguments["logits"].astype(jnp.float32))
    expected = log_softmax(jnp.asarray(logits * (np.float32(1) / np.asarray(arguments["temperature"]))[:, None]))
    for tokens in ([0] * 4, [width - 1, width // 2, width // 3, width - 1], logits.argmax(axis=1)):
        assert_same_bits(sampling_logprobs(arguments, tokens), expected[np.arange(4), tokens])


def test_a_logit_that_the_temperature_makes_infinite_is_held_at_the_lowest_number() -> None:
    logits = np.float32([[-1e38, -3e38, -np.inf, -2e38]])
    arguments = requests(1, 4, logits=logits, temperature=np.float32([0.25]))
    result = [sampling_logprobs(arguments, np.asarray([token]))[0] for token in range(4)]
    np.testing.assert_allclose(np.exp(result), [1 / 3, 1 / 3, 0, 1 / 3], rtol=1e-6)


def test_no_schedule_and_no_row_changes_a_sampling_logprob() -> None:
    arguments, tokens = requests(3, 4200), np.asarray([7, 4096, 4199])
    expected = sampling_logprobs(arguments, tokens, Schedule(0, 5, 4))
    assert_same_bits(sampling_logprobs(arguments, tokens, Schedule(0, 2, 1)), expected)
    reversed_rows = {name: array[::-1] for name, array in arguments.items()}
    assert_same_bits(sampling_logprobs(reversed_rows, tokens[::-1], Schedule(0, 2, 1)), expected[::-1])


def test_ties_go_to_the_lowest_id_and_nan_counts_as_the_largest() -> None:
    logits = np.zeros((6, 4800), np.float32)
    logits[0, [5, 600, 4096]] = 2.0
    logits[1, [4095, 4096]] = 2.0
    logits[2, [4610, 4799]] = 2.0
    logits[3] = -np.inf
    logits[4, [4500, 4700]] = np.nan
    logits[5, [700, 4096]] = np.inf
    for temperature in (0.0, 1.0):
        arguments = requests(6, 4800, logits=logits, temperature=np.full(6, temperature, np.float32))
        tokens, logprobs = sample(arguments)
        assert tokens[3:].tolist() == [0, 4500, 700]
        assert np.isnan(logprobs[3:]).all()
        if temperature == 0:
            assert tokens[:3].tolist() == [5, 4095, 4610]


def test_the_likeliest_tokens_have_the_logprobs_of_log_softmax() -> None:
    logits = requests(3, 300)["logits"]
    with kernels_interpreted(), detjax.use_backend("hopper"):
        tokens, logprobs = (np.asarray(x) for x in ops.top_logprobs(logits, 7))
    expected = log_softmax(logits)
    assert_same_bits(logprobs, np.take_along_axis(expected, tokens, axis=1))
    assert_same_bits(logprobs, -np.sort(-expected, axis=1)[:, :7])


def test_engines_give_the_logprobs_of_given_tokens_that_the_sampler_gives() -> None:
    logits = requests(6, 4700)["logits"].at[3, 4500].set(jnp.nan).at[4, 7].set(jnp.inf).at[5, :100].set(-jnp.inf)
    tokens = jnp.asarray([0, 4699, 4096, 1, 7, 5], jnp.int32)
    with kernels_interpreted(), detjax.use_backend("hopper"):
        logprobs = jax.jit(lambda x: Logits(x, vocabulary_sharding(4700, 1)).logprobs(tokens))(logits)
    assert_same_bits(logprobs, log_softmax(logits)[np.arange(6), tokens])


def test_blocks_of_a_vocabulary_that_devices_share_give_the_token_and_its_logprob() -> None:
    arguments = requests(2, 4096 + 100)
    # Noise decides among the tokens of row 0 in the second block. Row 1 is greedy, and has equal tokens in both blocks.
    arguments["logits"] = arguments["logits"].at[0, 4096:].add(30.0).at[1, jnp.asarray([4095, 4097])].set(50.0)
    logits, arrays = nouns(arguments)
    whole = jnp.pad(logits, ((0, 0), (0, 2 * 4096 - logits.shape[1])), constant_values=-jnp.inf)

    def merged(whole: jax.Array) -> tuple[jax.Array, jax.Array]:
        parts = [(whole[:, begin : begin + 4096], jnp.int32(begin)) for begin in (0, 4096)]
        candidates = [vocabulary_blocks.block_candidates(x, arrays, begin, vocabulary=4196) for x, begin in parts]
        statistics = [vocabulary_blocks.block_statistics(x) for x, _ in parts]
        values, tokens, maxima, sums = (
            jnp.concatenate(x, axis=1) for pairs in (candidates, statistics) for x in zip(*pairs, strict=True)
        )
        token = vocabulary_blocks.best_candidate(values, tokens)
        first, second = vocabulary_blocks.merged_statistics(maxima, sums)
        return token, jnp.take_along_axis(whole, token[:, None], axis=1)[:, 0] - first - second

    with kernels_interpreted(), detjax.use_backend("hopper"):
        result = jax.jit(merged)(whole)
    assert result[0][0] >= 4096 and result[0][1] == 4095
    assert_same_bits(result, tuple(sample(arguments)))


def test_the_public_operation_samples_and_gives_the_logprobs_of_its_own_samples() -> None:
    logits, arrays = nouns(requests(5, 300, filters=True))
    with kernels_interpreted(), detjax.use_backend("hopper"):
        tokens, logprobs = ops.sample(logits, arrays)
        result = ops.sampling_logprobs(logits, tokens, arrays)
        once = ops.sampling_logprobs(ops.filter_logits(logits, arrays), tokens, arrays, filtered=False)
    assert_same_bits(tokens, portable.sample(logits, arrays, filtered=True)[0])
    assert_same_bits(logprobs, log_softmax(logits)[np.arange(5), tokens])
    kept = np.asarray(portable.masked(logits, arrays))
    temperature = np.asarray(arrays.temperature)
    reciprocals = np.float32(1) / np.where(temperature == 0, np.float32(1), temperature)
    expected = log_softmax(jnp.asarray(kept * reciprocals[:, None]))[np.arange(5), tokens]
    assert_same_bits(result, np.where(temperature == 0, np.float32(0), expected))
    assert_same_bits(once, result)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("width", "filtered"), [(128256, False), (151936, False), (1, False), (1_000_001, False), (50257, True)]
)
def test_samplers_lower_for_cuda(width: int, filtered: bool) -> None:
    def fn(arguments: dict[str, jax.Array]) -> Any:
        return sampling.sample(*nouns(arguments), filtered=filtered)

    for rows, dtype in ((1, "bfloat16"), (64, "float32"), (1024, "float32")):
        one = requests(1, 1).items()
        shapes = {name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for name, x in one}
        shapes["logits"] = jax.ShapeDtypeStruct((rows, width), jnp.dtype(dtype))
        lowered(fn, shapes)


@pytest.mark.parametrize("rows", [1, 64])
def test_candidates_of_later_blocks_lower_for_cuda(rows: int) -> None:
    def fn(arguments: dict[str, jax.Array], first: jax.Array) -> Any:
        return sampling.block_candidates(*nouns(arguments), first)

    shapes = {name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for name, x in requests(1, 5 * 4096).items()}
    lowered(fn, shapes, jax.ShapeDtypeStruct((), jnp.int32))


@pytest.mark.parametrize("width", [128256, 1, 50257])
def test_sampling_logprobs_lower_for_cuda(width: int) -> None:
    for rows, dtype in ((1, "bfloat16"), (64, "float32")):
        logits = jax.ShapeDtypeStruct((rows, width), jnp.dtype(dtype))
        tokens, temperature = (jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.int32, jnp.float32))
        lowered(sampling.sampling_logprobs, logits, tokens, temperature)
