"""The TPU kernels that work on rows (RMS norm, softmax, sampling): in Pallas' interpreter, and the text they have."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # JAX has no public name for the races it found
from jax.experimental.pallas import tpu as pltpu

from detjax import ops
from detjax.bench.deviceless import kernels_of
from detjax.pallas import gumbel
from detjax.pallas.tpu import norm, sampling, softmax
from detjax.pallas.tpu import rows as tpu_rows
from detjax.portable import norm as portable_norm
from detjax.portable import sampling as portable_sampling
from detjax.portable import softmax as portable_softmax
from detjax.portable.tiles import row_sum
from tests.support.bits import assert_same_bits

EPS = 1e-5
BLOCK = 256

NORM = functools.partial(norm.forward, eps=EPS, weight_offset=0.5)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax cuts its axis where a test can afford several blocks."""
    for module in (softmax, sampling, portable_softmax):
        monkeypatch.setattr(module, "SOFTMAX_BLOCK", BLOCK)


def interpreted(fn: Callable[..., Any], *args: Any, cores: int = 1) -> Any:
    """What `fn` gives, its kernels interpreted, as NumPy arrays; nothing is read that was not written."""
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", num_cores_or_threads=cores)
    with pltpu.force_tpu_interpret_mode(params):
        result = compiled(fn, *args)
    races = interpret_pallas_call.races
    assert races is not None and not races.races_found
    return result


def compiled(fn: Callable[..., Any], *args: Any) -> Any:
    # JAX remembers what it traced by function, and would not see that a test has changed a constant. Nearly all of the
    # time here is the compiler's.
    program = jax.jit(lambda *args: fn(*args), compiler_options={"xla_backend_optimization_level": 0})
    return jax.tree.map(np.asarray, program(*args))


def drawn(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    return (2 * np.random.default_rng([seed, *shape]).standard_normal(shape)).astype(jnp.dtype(dtype))


def among(row: np.ndarray, count: int, at: Sequence[int]) -> np.ndarray:
    """Rows of which those at the places given are this one, and the others are of no number, infinite or anything."""
    rows = drawn(count, *row.shape, seed=count).astype(row.dtype)
    rows[1::3], rows[2::3] = np.nan, np.inf
    rows[list(at)] = row
    return rows


def pieces(x: np.ndarray) -> list[jax.Array]:
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % tpu_rows.PIECE)))
    return [jnp.asarray(piece) for piece in np.split(padded, padded.shape[1] // tpu_rows.PIECE, axis=1)]


# --- sums -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 128, 300, 1152, 4096])
def test_rows_are_added_in_the_contracts_order(width: int) -> None:
    x = drawn(8, width)
    assert_same_bits(compiled(tpu_rows.row_sum, pieces(x)), compiled(row_sum, x))
    squares = compiled(lambda parts: tpu_rows.row_sum([tpu_rows.squares(part) for part in parts]), pieces(x))
    assert_same_bits(squares, compiled(row_sum, x * x))


def test_blocks_are_added_in_the_contracts_order(small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(3, 5 * BLOCK + 44)
    assert_same_bits(interpreted(softmax.row_sums, x), compiled(portable_softmax.sum_of_blocks, x))
    for module in (softmax, portable_softmax):
        # In place of the exponential, whose last places are the device's own: steps that each have one result.
        monkeypatch.setattr(module, "exp_difference", lambda x, m: 1 / (1 + (m - x)))
    assert_same_bits(interpreted(softmax.softmax, x), compiled(portable_softmax.softmax, x))


# --- RMS norm ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "width", "dtype", "tolerance"),
    [(3, 80, "bfloat16", 1e-2), (9, 640, "float32", 3e-6)],
)
def test_norms_have_the_values_of_float64(count: int, width: int, dtype: str, tolerance: float) -> None:
    x, residual, weight = drawn(count, width, dtype=dtype), drawn(count, width, dtype=dtype, seed=1), drawn(width)
    y, h = interpreted(NORM, x, weight, residual)
    assert_same_bits(h, (x.astype(np.float32) + residual.astype(np.float32)).astype(x.dtype))
    exact = h.astype(np.float64)
    exact = exact / np.sqrt((exact**2).mean(axis=-1, keepdims=True) + EPS) * (weight.astype(np.float64) + 0.5)
    scale = np.abs(exact).max()
    np.testing.assert_allclose(y.astype(np.float64) / scale, exact / scale, atol=tolerance, rtol=0)
    alone, none = interpreted(NORM, h, weight, None)
    assert none is None
    assert_same_bits(alone, y)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_norms_bits_do_not_depend_on_rows_position_or_neighbours(dtype: str) -> None:
    row, weight = drawn(384, dtype=dtype), drawn(384)
    expected, _ = interpreted(NORM, row[None], weight, None)
    at = (0, 17, 34)
    y, _ = interpreted(functools.partial(NORM, rows=16), among(row, 35, at), weight, None, cores=2)
    for position in at:
        assert_same_bits(y[position], expected[0])


# --- softmax ----------------------------------------------------------------------------------------------------------


def exact(x: Any) -> dict[str, np.ndarray]:
    x = np.asarray(x, np.float64)
    m = x.max(axis=-1)
    total = m + np.log(np.exp(x - m[..., None]).sum(axis=-1))
    logprobs = x - total[..., None]
    return {"softmax": np.exp(logprobs), "log_softmax": logprobs, "logsumexp": total}


@pytest.mark.parametrize(
    ("name", "width", "dtype"),
    [("log_softmax", 1, "float32"), *((name, 2 * BLOCK + 44, "bfloat16") for name in exact(np.zeros(1)))],
)
def test_softmaxes_have_the_values_of_float64(small_blocks: None, name: str, width: int, dtype: str) -> None:
    x = drawn(3, width, dtype=dtype)
    y = interpreted(getattr(softmax, name), x)
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, exact(x)[name], rtol=1e-6, atol=4e-6)


def test_blocks_of_the_contracts_size_have_the_values_of_float64() -> None:
    x = drawn(2, softmax.SOFTMAX_BLOCK + 1)
    np.testing.assert_allclose(interpreted(softmax.logsumexp, x), exact(x)["logsumexp"], rtol=1e-6)


@pytest.mark.parametrize("fn", [softmax.log_softmax, softmax.row_sums])
def test_a_softmaxs_bits_do_not_depend_on_rows_position_or_neighbours(
    small_blocks: None, fn: Callable[..., Any]
) -> None:
    row = drawn(BLOCK + 44)
    expected = interpreted(fn, row[None])
    at = (0, 9, 18)
    y = interpreted(functools.partial(fn, rows=8), among(row, 19, at), cores=2)
    for position in at:
        assert_same_bits(y[position], expected[0])


def test_infinities_and_nans_stay_in_their_row(small_blocks: None) -> None:
    x = drawn(6, BLOCK + 44)
    x[1, BLOCK + 3] = np.nan
    x[2, 7] = np.inf
    x[3] = -np.inf
    x[4, :BLOCK] = -np.inf
    x[5, 1::2] = -np.inf
    y = interpreted(softmax.log_softmax, x)
    assert np.isnan(y[1:4]).all()
    kept = [0, 4, 5]
    np.testing.assert_allclose(y[kept], exact(x[kept])["log_softmax"], rtol=1e-6, atol=4e-6)


def test_gradients_are_those_of_the_portable_backend(small_blocks: None) -> None:
    y, dy = compiled(portable_softmax.softmax, drawn(3, BLOCK + 44)), drawn(3, BLOCK + 44, seed=1)
    for name, argument in (("softmax_backward", y), ("log_softmax_backward", np.log(y))):
        expected = compiled(getattr(portable_softmax, name), argument, dy)
        np.testing.assert_allclose(interpreted(getattr(softmax, name), argument, dy), expected, atol=1e-5)
    total = exact(y)["logsumexp"].astype(np.float32)
    expected = compiled(portable_softmax.logsumexp_backward, y, total, dy[:, 0])
    found = compiled(softmax.logsumexp_backward, y, total, dy[:, 0])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert norm.backward is portable_norm.backward


# --- sampling ---------------------------------------------------------------------------------------------------------


def requests(rows: int, width: int, *, filters: bool = False, **fields: Any) -> dict[str, np.ndarray]:
    random = np.random.default_rng([rows, width])
    made = {
        "logits": 2 * random.standard_normal((rows, width)).astype(np.float32),
        "seed": random.integers(0, 2**32, (rows, 2)).astype(np.uint32),
        "position": random.integers(0, 1000, rows).astype(np.int32),
        "sample_index": random.integers(0, 8, rows).astype(np.int32),
        "temperature": np.resize([0.7, 0.0, 1.0, 2.0], rows).astype(np.float32),
        "top_k": np.resize([3, 0, 40] if filters else [0], rows).astype(np.int32),
        "top_p": np.resize([1.0, 0.9] if filters else [1.0], rows).astype(np.float32),
        "min_p": np.resize([0.0, 0.05] if filters else [0.0], rows).astype(np.float32),
    }
    return made | fields


def sample(arguments: dict[str, np.ndarray], *, filtered: bool = False, cores: int = 1, rows: int | None = None) -> Any:
    fn = functools.partial(sampling.sample, filtered=filtered, rows=rows)
    return interpreted(lambda arguments: fn(**arguments), arguments, cores=cores)


@pytest.mark.parametrize("seed", [0, 2**63 + 7])
def test_random_bits_are_those_of_jax_random(seed: int) -> None:
    words = jnp.asarray(ops.sampling.seed_words(seed), jnp.uint32)
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    ids = jnp.arange(152_064, dtype=jnp.int32)
    bits = jax.jit(lambda words: gumbel.threefry((words[0], words[1]), ids.astype(jnp.uint32)))(words)
    assert_same_bits(bits, jax.random.bits(key, ids.shape))
    noise = jax.jit(lambda words: gumbel.gumbel((words[0], words[1]), ids.astype(jnp.uint32)))(words)
    np.testing.assert_allclose(noise, jax.random.gumbel(key, ids.shape, jnp.float32), rtol=1e-6, atol=1e-6)


def test_tokens_are_those_of_the_portable_backend_and_logprobs_have_the_bits_of_log_softmax(small_blocks: None) -> None:
    arguments = requests(5, 2 * BLOCK + 44, filters=True)
    arguments["logits"] = arguments["logits"].astype(jnp.bfloat16)
    tokens, logprobs = sample(arguments, filtered=True)
    expected, _ = compiled(lambda a: portable_sampling.sample(**a, filtered=True), arguments)
    assert_same_bits(tokens, expected)
    all_logprobs = interpreted(softmax.log_softmax, arguments["logits"])
    assert_same_bits(logprobs, all_logprobs[np.arange(5), tokens])


def test_a_samples_bits_do_not_depend_on_rows_position_neighbours_or_filters_of_others(small_blocks: None) -> None:
    one = {name: array[2:3] for name, array in requests(3, BLOCK + 44).items()}
    expected = sample(one)
    at = [0, 9, 18]
    arguments = requests(19, BLOCK + 44, logits=among(one["logits"][0], 19, at))
    for name, array in one.items():
        arguments[name][at] = array
    result = sample(arguments, cores=2, rows=16)
    for position in at:
        assert_same_bits([x[[position]] for x in result], list(expected))
    arguments["top_k"][1::2] = 3
    arguments["top_k"][at] = 0
    result = sample(arguments, filtered=True)
    for position in at:
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
    at = np.r_[:6, 8:14]
    logits = np.insert(np.concatenate([logits, logits]), [6, 6], 0.0, axis=0)
    temperature = np.where(np.arange(14) < 8, 0.0, 1.0).astype(np.float32)
    tokens, logprobs = sample(requests(*logits.shape, logits=logits, temperature=temperature))
    greedy, warm = np.split(tokens[at], 2)
    assert greedy.tolist() == [5, BLOCK - 1, BLOCK + 129, 0, BLOCK + 70, 70]
    assert warm[3:].tolist() == greedy[3:].tolist()
    assert np.isnan(logprobs[at].reshape(2, 6)[:, 3:]).all()


def test_the_likeliest_tokens_have_the_logprobs_of_log_softmax() -> None:
    logits = drawn(3, 300)
    tokens, logprobs = interpreted(functools.partial(ops.top_logprobs, count=7), logits)
    expected = interpreted(softmax.log_softmax, logits)
    assert_same_bits(logprobs, np.take_along_axis(expected, tokens, axis=1))
    assert_same_bits(logprobs, -np.sort(-expected, axis=1)[:, :7])


# --- what is lowered --------------------------------------------------------------------------------------------------


def shape(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def _norm_arguments(rows: int) -> tuple[Any, ...]:
    x = shape(rows, 1024, dtype="bfloat16")
    return x, shape(1024), x


def _row_arguments(rows: int) -> tuple[Any, ...]:
    return (shape(rows, 2 * BLOCK + 44),)


def _sample_arguments(rows: int) -> tuple[Any, ...]:
    keys, temperature = shape(rows, 2, dtype="uint32"), shape(rows)
    return _row_arguments(rows) * 2, keys, temperature


@pytest.mark.parametrize(
    ("fn", "arguments"),
    [
        (NORM, _norm_arguments),
        (softmax.log_softmax, _row_arguments),
        (softmax.logsumexp, _row_arguments),
        (softmax.row_sums, _row_arguments),
        (sampling.chosen, _sample_arguments),
    ],
)
def test_kernels_do_not_know_how_many_rows_there_are(
    small_blocks: None, monkeypatch: pytest.MonkeyPatch, fn: Callable[..., Any], arguments: Callable[[int], Any]
) -> None:
    def text(rows: int) -> str:
        (kernel,) = kernels_of(lambda *args: fn(*args), *arguments(rows))
        return kernel

    one = text(1)
    for rows in (8, 128, 500, 4096):
        assert text(rows) == one
    # What changes bits shows in the text: blocks of another size, or lanes that are added in another order.
    if fn is NORM:
        monkeypatch.setattr(tpu_rows, "LANE_GROUP", 2)
    else:
        monkeypatch.setattr(softmax, "SOFTMAX_BLOCK", 2 * BLOCK)
        monkeypatch.setattr(sampling, "SOFTMAX_BLOCK", 2 * BLOCK)
    assert text(1) != one
