"""Sampling on TPUs: noise, tokens and logprobs in Pallas' interpreter, and one kernel text for every number of rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax import ops
from detjax.operands.sampling_arrays import SamplingArrays
from detjax.pallas.tpu import sampling, softmax
from detjax.pallas.tpu.rows import Problem, Schedule
from detjax.portable import sampling as portable_sampling
from detjax.portable import softmax as portable_softmax
from tests.pallas.tpu.interpreter import compiled, interpreted, normal, shape
from tests.pallas.tpu.rows_cases import rows_with_one_repeated
from tests.support.bits import assert_same_bits
from tests.support.kernel_texts import kernel_texts

BLOCK = 512


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are cut into blocks so short that a test can afford several."""
    for module in (softmax, portable_softmax):
        monkeypatch.setattr(module, "SOFTMAX_BLOCK", BLOCK)


def requests(rows: int, width: int, *, filters: bool = False, **fields: Any) -> dict[str, np.ndarray]:
    random = np.random.default_rng([rows, width])
    arguments = {
        "logits": 2 * random.standard_normal((rows, width)).astype(np.float32),
        "noise_key": random.integers(0, 2**32, (rows, 4)).astype(np.uint32),
        "position": random.integers(0, 1000, rows).astype(np.int32),
        "temperature": np.resize([0.7, 0.0, 1.0, 2.0], rows).astype(np.float32),
        "top_k": np.resize([3, 0, 40] if filters else [0], rows).astype(np.int32),
        "top_p": np.resize([1.0, 0.9] if filters else [1.0], rows).astype(np.float32),
        "min_p": np.resize([0.0, 0.05] if filters else [0.0], rows).astype(np.float32),
    }
    return arguments | fields


def nouns(arguments: dict[str, Any]) -> tuple[Any, SamplingArrays]:
    """The sampler's arguments as it takes them."""
    rows = arguments.copy()
    return rows.pop("logits"), SamplingArrays(**rows)


def sample(arguments: dict[str, np.ndarray], *, filtered: bool = False, cores: int = 1, **options: Any) -> Any:
    fn = functools.partial(sampling.sample, filtered=filtered, **options)
    return interpreted(lambda arguments: fn(*nouns(arguments)), cores=cores)(arguments)


def test_tokens_are_those_of_the_portable_backend_and_logprobs_have_the_bits_of_log_softmax(small_blocks: None) -> None:
    arguments = requests(11, 2 * BLOCK + 44, filters=True)
    arguments["logits"] = arguments["logits"].astype(jnp.bfloat16)
    arguments["logits"][[2, 7], 9:] = -np.inf  # fewer tokens than a filter keeps
    arguments["logits"][[4, 6, 8]] = -np.inf
    tokens, logprobs = sample(arguments, filtered=True)
    expected, _ = compiled(lambda arguments: portable_sampling.sample(*nouns(arguments), filtered=True))(arguments)
    assert_same_bits(tokens, expected)
    all_logprobs = interpreted(softmax.log_softmax)(arguments["logits"])
    assert np.isnan(logprobs[[4, 6, 8]]).all()
    numbers = np.delete(np.arange(11), [4, 6, 8])
    assert_same_bits(logprobs[numbers], all_logprobs[numbers, tokens[numbers]])


def test_sampling_logprobs_have_the_bits_of_log_softmax(small_blocks: None) -> None:
    arguments = requests(6, 2 * BLOCK + 44, temperature=np.float32([0.7, 1.0, 2.0, 0.1, 30.0, 0.0]))
    logits, tokens = arguments["logits"].astype(jnp.bfloat16), np.int32([0, 5, BLOCK, 2 * BLOCK + 43, 9, BLOCK - 1])
    logits[1, 6:] = logits[3, :9] = -np.inf
    result = interpreted(sampling.sampling_logprobs)(logits, tokens, arguments["temperature"])
    reciprocals = np.float32(1) / np.where(arguments["temperature"] == 0, np.float32(1), arguments["temperature"])
    scaled = logits.astype(np.float32) * reciprocals[:, None]
    assert_same_bits(result, interpreted(softmax.log_softmax)(scaled)[np.arange(6), tokens])


def test_many_tokens_of_flat_rows_are_those_of_the_portable_backend(small_blocks: None) -> None:
    """The noise decides alone, at every temperature above 0, so a token differs if one of its random bits does."""
    arguments = requests(24, BLOCK + 44)
    arguments["logits"] = np.round(arguments["logits"] / 4).astype(np.float32)
    tokens, _ = sample(arguments)
    expected, _ = compiled(lambda arguments: portable_sampling.sample(*nouns(arguments), filtered=False))(arguments)
    assert_same_bits(tokens, expected)


def test_bits_do_not_depend_on_rows_position_neighbours_or_their_filters(small_blocks: None) -> None:
    alone = {name: array[2:3] for name, array in requests(3, BLOCK + 44).items()}
    expected = sample(alone)
    positions = [0, 9, 18]
    logits = rows_with_one_repeated(alone["logits"][0], 19, positions)
    arguments = requests(19, BLOCK + 44, logits=logits)
    for name, array in alone.items():
        arguments[name][positions] = array
    result = sample(arguments, cores=2, schedule=Schedule(rows=16))
    for position in positions:
        assert_same_bits([x[[position]] for x in result], list(expected))
    arguments["top_k"][1::2] = 3
    arguments["top_k"][positions] = 0
    result = sample(arguments, filtered=True)
    for position in positions:
        assert_same_bits([x[[position]] for x in result], list(expected))


def test_ties_go_to_the_lowest_id_and_nan_counts_as_the_largest(small_blocks: None) -> None:
    logits = np.zeros((6, 2 * BLOCK + 44), np.float32)
    logits[0, [5, 133, BLOCK]] = 2.0
    logits[1, [BLOCK - 1, BLOCK]] = 2.0
    logits[2, [BLOCK + 129, 2 * BLOCK + 43]] = 2.0
    logits[3] = -np.inf
    logits[4, [BLOCK + 70, BLOCK + 200]] = np.nan
    logits[5, [70, BLOCK]] = np.inf
    # The rows of the first tile are all greedy, and no noise is made for it.
    rows = np.r_[:6, 8:14]
    logits = np.insert(np.concatenate([logits, logits]), [6, 6], 0.0, axis=0)
    temperature = np.where(np.arange(14) < 8, 0.0, 1.0).astype(np.float32)
    tokens, logprobs = sample(requests(*logits.shape, logits=logits, temperature=temperature))
    greedy, sampled = np.split(tokens[rows], 2)
    assert greedy.tolist() == [5, BLOCK - 1, BLOCK + 129, 0, BLOCK + 70, 70]
    assert sampled[3:].tolist() == greedy[3:].tolist()
    assert np.isnan(logprobs[rows].reshape(2, 6)[:, 3:]).all()


def test_the_likeliest_tokens_have_the_logprobs_of_log_softmax() -> None:
    logits = 2 * normal(3, 300)
    tokens, logprobs = interpreted(functools.partial(ops.top_logprobs, count=7))(logits)
    expected = interpreted(softmax.log_softmax)(logits)
    assert_same_bits(logprobs, np.take_along_axis(expected, tokens, axis=1))
    assert_same_bits(logprobs, -np.sort(-expected, axis=1)[:, :7])


def kernel_text(rows: int) -> str:
    logits = shape(rows, 2 * BLOCK + 44, dtype="float32")
    keys, positions = shape(rows, 4, dtype="uint32"), shape(rows, dtype="int32")
    operands = logits, logits, keys, positions, shape(rows, dtype="float32")
    (text,) = kernel_texts(lambda *args: sampling.sample_kept(*args), *operands)
    return text


def test_the_kernel_is_one_text_for_every_number_of_rows(small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = kernel_text(1)
    for rows in (8, 128, 500, 4096):
        assert kernel_text(rows) == expected
    # A change of bits would show in the text.
    monkeypatch.setattr(softmax, "SOFTMAX_BLOCK", 2 * BLOCK)
    assert kernel_text(1) != expected


def test_float16_is_refused() -> None:
    arguments = requests(3, 64)
    arguments["logits"] = arguments["logits"].astype(np.float16)
    with pytest.raises(NotImplementedError, match="sample: an argument or the result has dtype float16"):
        jax.eval_shape(functools.partial(sampling.sample, filtered=False), *nouns(arguments))
    with pytest.raises(NotImplementedError, match="sampling_logprobs: an argument or the result has dtype float16"):
        jax.eval_shape(sampling.sampling_logprobs, arguments["logits"], arguments["top_k"], arguments["temperature"])


def test_schedules_are_checked() -> None:
    problem = Problem("sample", 3 * 128, jnp.dtype("float32"))
    Schedule(8).check(problem)
    with pytest.raises(ValueError, match="sample: the schedule has tiles of 9 rows in float32"):
        Schedule(9).check(problem)
