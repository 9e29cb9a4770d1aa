"""The statistics of sampled tokens: a thousand million draws by `ops.sample`, against their probabilities.

    python -m benchmarks noise --out benchmarks/results/noise-h100.json

Draws have consecutive positions, and share the rest. Their chi-square has a thousand cells, with probabilities of some
hundredths to some thousand-millionths. Pairs of draws at the same positions, with keys that differ in prompt, seed,
sample or one position, fill tables of a tenth as many draws, whose chi-square shows dependence. A deviation is the
number of standard deviations from the expected chi-square. Two controls must deviate: one with a slightly wrong
probability, and pairs with a few equal ones. Before all this, the device's random words and tokens are compared with
NumPy's.

The exit code is 1 if a word or token is another one, if a deviation is larger than `LARGEST`, or a control's is not.
`--small` draws 200,000 tokens on a CPU in seconds.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from benchmarks.study import Result, Run
from detjax import ops
from detjax.bench import command_line
from detjax.operands import noise
from detjax.runtime import compilation

LARGEST: Final = 5.0
"""The largest deviation that a study accepts: good noise exceeds it in one of three million cases."""
CLASSES: Final = 16
"""The kinds of tokens in tables of pairs: `token % CLASSES`."""
_PROMPT: Final = ops.prompt_digest([3, 1, 4])
_SEEDS: Final = 1, 2**32, 2**63, 2**64 - 1

type Key = tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a run.

    Attributes:
        draws: tokens to draw for the probabilities.
        pairs: pairs of tokens to draw for each table.
        rows: tokens of a call of `ops.sample`.
        calls: calls of one program.
        vocabulary: number of tokens.
        wrong: the error of a control's probability, relative to the right one.
        equal: the share of equal pairs of a control.
    """

    draws: int = 1_000_000_000
    pairs: int = 50_000_000
    rows: int = 1 << 16
    calls: int = 64
    vocabulary: int = 1024
    wrong: float = 1e-2
    equal: float = 1e-3


SMALL: Final = Sizes(200_000, 100_000, 1 << 12, 5, 640, 0.5, 0.1)


def study(run: Run) -> Result:
    sizes = SMALL if run.small else Sizes()
    content: dict[str, Any] = {"sizes": dataclasses.asdict(sizes), "deviations": {}, "controls": {}}
    for part, name, value in _parts(sizes):
        if name:
            content[part][name] = value
        else:
            content[part] = value
        command_line.print_line(f"{part}{', ' * bool(name)}{name}: {value}")
        run.save(content)
    return Result(content, problem(content))


def _parts(sizes: Sizes) -> Iterator[tuple[str, str, Any]]:
    """Yields the parts of a result in the order in which they are measured: field, name in the field, value."""
    yield "words", "", other_words()
    yield "tokens", "", other_tokens(sizes)
    counts, p = counted(sizes)
    yield "deviations", "probabilities", deviation(counts, p * counts.sum(), len(p) - 1)
    yield "controls", "a wrong probability", deviation(counts, _wrong(p, sizes) * counts.sum(), len(p) - 1)
    base, others = ops.noise_key(0, _PROMPT), {f"seed {seed}": ops.noise_key(seed, _PROMPT) for seed in _SEEDS}
    others |= {"sample 1": ops.noise_key(0, _PROMPT, 1), "prompt": ops.noise_key(0, ops.prompt_digest([3, 1, 5]))}
    for name, key in others.items():
        yield "deviations", name, dependence(table(sizes, (base, key)))
    yield "deviations", "next position", dependence(table(sizes, (base, base), shift=1))
    pairs = table(sizes, (base, others[f"seed {_SEEDS[0]}"]), equal=sizes.equal)
    yield "controls", "equal pairs", dependence(pairs)


def _wrong(p: np.ndarray, sizes: Sizes) -> np.ndarray:
    """The probabilities, with an error in the largest one."""
    wrong = p.copy()
    wrong[wrong.argmax()] *= 1 + sizes.wrong
    return wrong / wrong.sum()


def problem(content: Mapping[str, Any]) -> str:
    """Returns what is wrong with a result; empty: nothing."""
    for what in ("words", "tokens"):
        if content[what]["different"]:
            return f"{content[what]['different']} of {content[what]['compared']} {what} are not NumPy's"
    for name, deviation in content["deviations"].items():
        if not abs(deviation) <= LARGEST:
            return f"{name}: the deviation is {deviation:.2f}; accepted: up to {LARGEST}"
    for name, deviation in content["controls"].items():
        if not deviation > LARGEST:
            return f"the control, {name}, was not found: its deviation is {deviation:.2f}"
    return ""


# --- NumPy ------------------------------------------------------------------------------------------------------------


def words_in_numpy(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Returns the words of Philox-4x32-10, `[4, n]`, for counters `[4, n]` and keys `[2, n]`, all uint64 below 2^32."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    a, b, c, d = counter
    first, second = key
    for _ in range(10):
        p, q = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = q >> shift ^ b ^ first, q & low, p >> shift ^ d ^ second, p & low
        first, second = first + np.uint64(0x9E3779B9) & low, second + np.uint64(0xBB67AE85) & low
    return np.stack([a, b, c, d])


def other_words() -> dict[str, int]:
    """Returns the number of words compared, and of those that are not NumPy's."""
    random = np.random.default_rng(0).integers(0, 2**32, (6, 100_000), np.uint32)
    a, b, c, d, first, second = (jnp.asarray(word) for word in random)
    words = np.stack([np.asarray(word) for word in compilation.jit(noise.philox)((a, b, c, d), (first, second))])
    expected = words_in_numpy(random[:4].astype(np.uint64), random[4:].astype(np.uint64))
    return {"compared": words.size, "different": int((words != expected).sum())}


def other_tokens(sizes: Sizes) -> dict[str, int]:
    """Returns the number of tokens compared, and of those that are not NumPy's, where noise alone chooses them."""
    key = ops.noise_key(5, _PROMPT)
    token, position = np.arange(sizes.vocabulary)[None], np.arange(256)[:, None]
    group, word = token // 512 * 128 + token % 128, token // 128 % 4
    shape = len(position), sizes.vocabulary
    counter = np.stack([np.broadcast_to(x, shape) for x in (group, position, key[2], key[3])]).astype(np.uint64)
    keys = np.broadcast_to(np.array(key[:2], np.uint64)[:, None, None], (2, *shape))
    words = words_in_numpy(counter, keys)
    bits = np.take_along_axis(words, np.broadcast_to(word, words.shape[1:])[None], axis=0)[0]
    tokens = np.asarray(_tokens(_words(key), jnp.int32(0), jnp.zeros(sizes.vocabulary), len(position)))
    return {"compared": len(tokens), "different": int((tokens != bits.argmin(axis=1)).sum())}


# --- draws ------------------------------------------------------------------------------------------------------------


def _words(key: Key) -> Array:
    return jnp.asarray(key, jnp.uint32)


def _tokens(key: Array, first: Array, logits: Array, rows: int) -> Array:
    """Returns the tokens that a key draws at consecutive positions."""
    ones, zeros = jnp.ones(rows, jnp.float32), jnp.zeros(rows, jnp.int32)
    keys, positions = jnp.broadcast_to(key, (rows, 4)), first + jnp.arange(rows, dtype=jnp.int32)
    arrays = ops.SamplingArrays(keys, positions, ones, zeros, ones, 0 * ones)
    return ops.sample(jnp.broadcast_to(logits, (rows, len(logits))), arrays, filtered=False)[0]


@compilation.jit(static_argnames=("rows", "calls"))
def _counts(key: Array, first: Array, logits: Array, rows: int, calls: int) -> Array:
    """Returns how often each token is drawn."""

    def add(call: Array, counts: Array) -> Array:
        return counts.at[_tokens(key, first + call * rows, logits, rows)].add(1)

    return lax.fori_loop(0, calls, add, jnp.zeros(len(logits), jnp.int32))


@compilation.jit(static_argnames=("rows", "calls", "shift"))
def _pairs(keys: Array, first: Array, logits: Array, share: Array, rows: int, calls: int, shift: int) -> Array:
    """Returns how often each pair of kinds is drawn by two keys, the second `shift` positions later.

    A share of the pairs is replaced by equal ones.
    """

    def add(call: Array, table: Array) -> Array:
        start = first + call * rows
        one = _tokens(keys[0], start, logits, rows) % CLASSES
        other = _tokens(keys[1], start + shift, logits, rows) % CLASSES
        other = jnp.where(jnp.arange(rows, dtype=jnp.int32) < share, one, other)
        return table.at[one * CLASSES + other].add(1)

    return lax.fori_loop(0, calls, add, jnp.zeros(CLASSES**2, jnp.int32))


@functools.cache
def probabilities(vocabulary: int, draws: int) -> np.ndarray:
    """Returns the probabilities of tokens, float64: in no order of ids. The smallest one gives a few draws."""
    p = np.geomspace(1, 200 / draws, vocabulary)
    return np.random.default_rng(0).permutation(p / p.sum())


def counted(sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """Returns how often each token was drawn, and the probabilities under the logits in float32."""
    logits = np.log(probabilities(sizes.vocabulary, sizes.draws)).astype(np.float32)
    p, counts = np.exp(logits.astype(np.float64)), np.zeros(sizes.vocabulary, np.int64)
    step = sizes.rows * sizes.calls
    for first in range(0, sizes.draws, step):
        counts += np.asarray(
            _counts(_words(ops.noise_key(0, _PROMPT)), jnp.int32(first), jnp.asarray(logits), sizes.rows, sizes.calls)
        )
        if first // step % 20 == 19:
            command_line.print_line(f"{first + step} of {sizes.draws} tokens are drawn")
    return counts, p / p.sum()


def table(sizes: Sizes, keys: tuple[Key, Key], shift: int = 0, equal: float = 0) -> np.ndarray:
    """Returns how often each pair of kinds was drawn."""
    logits = jnp.asarray(np.log(probabilities(sizes.vocabulary, sizes.draws)), jnp.float32)
    result, share = np.zeros(CLASSES**2, np.int64), jnp.int32(equal * sizes.rows)
    both = jnp.stack([_words(key) for key in keys])
    for first in range(0, sizes.pairs, sizes.rows * sizes.calls):
        result += np.asarray(_pairs(both, jnp.int32(first), logits, share, sizes.rows, sizes.calls, shift))
    return result.reshape(CLASSES, CLASSES)


def deviation(observed: np.ndarray, expected: np.ndarray, freedoms: int) -> float:
    """Returns how far a chi-square lies from what is expected, in standard deviations (Wilson and Hilferty 1931)."""
    chi_square = float(np.sum((observed - expected) ** 2 / expected))
    spread = 2 / (9 * freedoms)
    return ((chi_square / freedoms) ** (1 / 3) - (1 - spread)) / spread**0.5


def dependence(pairs: np.ndarray) -> float:
    """Returns the deviation of a table of pairs from independence."""
    expected = pairs.sum(1, keepdims=True) * (pairs.sum(0, keepdims=True) / pairs.sum())
    return deviation(pairs, expected, (CLASSES - 1) ** 2)
