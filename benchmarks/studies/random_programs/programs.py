"""Random small programs of rows: certified, then run in batches of many sizes. A proof is false if bits change.

A program is a list of steps over arrays `[B, N]`. Each step reads earlier arrays, so a program can shrink one step at a
time. Rows contain zeros of both signs, small and large numbers, and some rows infinities, NaN and subnormal numbers.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import detjax
from detjax.audit.certification.certify import reading
from detjax.audit.certification.freedoms import Exclusion
from detjax.invariant.equations import EXTREMES

DTYPES: Final = ("float32", "float32", "bfloat16", "float16")
WIDTHS: Final = (3, 7, 16, 33, 64, 128)
MAX_ROWS: Final = 1000
BATCHES: Final = (1, 2, 3, 17, 33, 129, 257)
"""Batch sizes: a program runs with one of them, and with `MAX_ROWS`."""

COMPILATIONS: Final[Mapping[str, Callable[..., Any]]] = {"detjax.jit": detjax.jit, "jax.jit": jax.jit}


def _number(value: float, x: Array) -> Array:
    return jnp.asarray(value, x.dtype)


def _segments(x: Array) -> Array:
    """The maximum over every third column, broadcast to these columns."""
    groups = jnp.arange(x.shape[1]) % 3
    return jax.vmap(lambda row: jax.ops.segment_max(row, groups, 3)[groups])(x)


def _window(x: Array) -> Array:
    start = np.asarray(-np.inf, x.dtype)  # with other arrays JAX assumes a custom reduction
    return lax.reduce_window(x, start, lax.max, (1, 3), (1, 1), "SAME")


def _spread(reduction: Callable[..., Array]) -> Callable[[Array], Array]:
    return lambda x: jnp.broadcast_to(reduction(x, axis=-1, keepdims=True).astype(x.dtype), x.shape)


def _whole_numbers(x: Array) -> Array:
    return jnp.clip(x, _number(-100, x), _number(100, x)).astype(jnp.int32).astype(x.dtype)


def _narrow(x: Array) -> Array:
    return x.astype(jnp.bfloat16).astype(x.dtype)


def _called(fn: Callable[..., Array]) -> Callable[..., Array]:
    return jax.jit(fn)


def _looped(x: Array) -> Array:
    return lax.fori_loop(0, 2, lambda _, y: jnp.maximum(y[:, ::-1], x), x)


STEPS: Final[Mapping[str, tuple[int, Callable[..., Array]]]] = {
    "negative": (1, lambda x: -x),
    "absolute": (1, jnp.abs),
    "sign": (1, jnp.sign),
    "floor": (1, jnp.floor),
    "ceiling": (1, jnp.ceil),
    "round": (1, lambda x: jnp.round(x)),
    "relu": (1, jax.nn.relu),
    "at most 0": (1, lambda x: jnp.minimum(x, _number(0, x))),
    "at least -0": (1, lambda x: jnp.maximum(x, _number(-0.0, x))),
    "clip": (1, lambda x: jnp.clip(x, _number(-0.5, x), _number(0.5, x))),
    "square": (1, jnp.square),
    "times -3.1": (1, lambda x: x * _number(-3.1, x)),
    "times 0.3": (1, _called(lambda x: x * _number(0.3, x))),
    "plus 0": (1, lambda x: x + _number(0, x)),
    "plus 1.7": (1, lambda x: x + _number(1.7, x)),
    "0 minus": (1, lambda x: _number(0, x) - x),
    "over 3": (1, lambda x: x / _number(3, x)),
    "inverse": (1, lambda x: _number(1, x) / x),
    "root": (1, lambda x: jnp.sqrt(jnp.abs(x))),
    "whole": (1, _whole_numbers),
    "narrow": (1, _narrow),
    "sign bit": (1, lambda x: jnp.copysign(_number(1, x), x)),
    "positive": (1, lambda x: jnp.where(x > _number(0, x), x, _number(0, x))),
    "zeros": (1, lambda x: jnp.where(x > _number(0, x), _number(0, x), _number(-0.0, x))),
    "reversed": (1, lambda x: x[:, ::-1]),
    "rolled": (1, lambda x: jnp.roll(x, 1, axis=1)),
    "sorted": (1, lambda x: jnp.sort(x, axis=-1)),
    "looped": (1, _looped),
    "counted": (1, lambda x: x * jnp.arange(x.shape[1]).astype(x.dtype)[None]),
    "tanh": (1, jnp.tanh),
    "exp": (1, jnp.exp),
    "sum": (1, _spread(jnp.sum)),
    "largest": (1, _spread(jnp.max)),
    "smallest": (1, _spread(jnp.min)),
    "place of largest": (1, _spread(jnp.argmax)),
    "so far largest": (1, lambda x: lax.cummax(x, axis=1)),
    "so far smallest": (1, lambda x: lax.cummin(x, axis=1)),
    "largest of windows": (1, _window),
    "largest of segments": (1, _segments),
    "top 2": (1, lambda x: jnp.concatenate([lax.top_k(x, 2)[0], x[:, 2:]], axis=1)),
    "add": (2, lambda x, y: x + y),
    "subtract": (2, lambda x, y: x - y),
    "multiply": (2, lambda x, y: x * y),
    "divide": (2, lambda x, y: x / y),
    "larger": (2, jnp.maximum),
    "smaller": (2, _called(jnp.minimum)),
    "larger by selection": (2, lambda x, y: jnp.where(x > y, x, y)),
    "where equal": (2, lambda x, y: jnp.where(x == y, x, -y)),
}
"""The steps by name: the number of arrays that each reads, and its function."""

_REDUCTIONS: Final = ("largest", "smallest", "largest of windows", "so far largest", "largest of segments", "top 2")
_SELDOM: Final = frozenset(("tanh", "exp", "sum"))
"""Steps that prevent a proof of any program."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A step by its name in `STEPS`, and the earlier arrays it reads: 0 is the argument, k the result of step k."""

    name: str
    reads: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of rows; its result is the last step's.

    Attributes:
        seed: the seed of the program and its rows.
        dtype: the dtype of its arrays.
        width: the length of a row.
        steps: the steps in order.
    """

    seed: int
    dtype: str
    width: int
    steps: tuple[Step, ...]

    @classmethod
    def from_seed(cls, seed: int) -> "Program":
        """Returns the program of a seed: up to four steps, a reduction, and often one more."""
        rng = np.random.default_rng(seed)
        names = list(STEPS)
        weights = np.array([0.2 if name in _SELDOM else 1.0 for name in names])

        def drawn(count: int, name: str | None = None) -> Step:
            name = name or names[rng.choice(len(names), p=weights / weights.sum())]
            # The latest results are read most often.
            reads = [count if rng.random() < 0.7 else int(rng.integers(count + 1)) for _ in range(STEPS[name][0])]
            return Step(name, tuple(reads))

        steps = [drawn(k) for k in range(int(rng.integers(1, 5)))]
        if rng.random() < 0.8:
            steps.append(drawn(len(steps), str(rng.choice(_REDUCTIONS))))
        if rng.random() < 0.5:
            steps.append(drawn(len(steps)))
        return cls(seed, str(rng.choice(DTYPES)), int(rng.choice(WIDTHS)), tuple(steps))

    def arrays(self, x: Array) -> list[Array]:
        """Returns the argument and the results of all steps."""
        made = [x]
        for step in self.steps:
            made.append(STEPS[step.name][1](*(made[k] for k in step.reads)))
        return made

    def __call__(self, x: Array) -> Array:
        """Returns the result for rows `[B, width]`."""
        return self.arrays(x)[-1]

    def rows(self) -> np.ndarray:
        """Returns the program's `random_rows`."""
        return random_rows(self.seed, self.dtype, self.width)

    def smaller(self) -> Iterator["Program"]:
        """Yields programs without one step, whose readers read its first operand instead."""
        for gone, step in enumerate(self.steps, 1):
            kept = [
                Step(one.name, tuple(_without(k, gone, step.reads[0]) for k in one.reads))
                for number, one in enumerate(self.steps, 1)
                if number != gone
            ]
            if kept:
                yield dataclasses.replace(self, steps=tuple(kept))

    def __str__(self) -> str:
        steps = (f"{k} = {one.name} of {', '.join(map(str, one.reads))}" for k, one in enumerate(self.steps, 1))
        return f"seed {self.seed}, {self.dtype}[B, {self.width}]: {'; '.join(steps)}"


def _without(number: int, gone: int, instead: int) -> int:
    return instead if number == gone else number - (number > gone)


def random_rows(seed: int, dtype: str, width: int) -> np.ndarray:
    """Returns `MAX_ROWS` rows: most have ordinary numbers and zeros of both signs, the rest numbers of all kinds."""
    rng = np.random.default_rng((seed, 1))
    shape = MAX_ROWS, width
    x = rng.standard_normal(shape) * rng.choice([0.3, 1.0, 100.0], (MAX_ROWS, 1))
    zeros = rng.random(shape) < rng.choice([0.0, 0.2, 0.9, 1.0], (MAX_ROWS, 1))
    x = np.where(zeros, rng.choice([0.0, -0.0], shape), x)
    tiny = float(jnp.finfo(dtype).smallest_subnormal)
    rare = rng.choice([np.inf, -np.inf, tiny, -tiny, 3 * tiny], shape)
    x = np.where((rng.random(shape) < 0.2) & (np.arange(MAX_ROWS) % 5 == 4)[:, None], rare, x)
    numbers = x.astype(jnp.dtype(dtype))
    # Signs and payloads of NaN are written as bits, so that nothing canonicalizes them.
    words = _words(numbers)
    (quiet,) = _words(np.array([np.nan], numbers.dtype))
    sign = np.array(1 << (8 * words.itemsize - 1), words.dtype)
    payloads = quiet | rng.choice([0, 1, 5], shape).astype(words.dtype)
    payloads ^= sign * rng.integers(2, size=shape).astype(words.dtype)
    among = (rng.random(shape) < 0.2) & (np.arange(MAX_ROWS) % 10 == 9)[:, None]
    words[among] = payloads[among]
    return numbers


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verdict on a program under one compilation.

    Attributes:
        program: the program.
        compilation: the name in `COMPILATIONS`.
        is_proven: whether its certificate finds no risk.
        by_old_rule: whether the certificate would find no risk if every maximum and minimum were exact. Only such
            programs run.
        batch: the size of a batch in which a certified row has other bits than among `MAX_ROWS`; None if not observed.
    """

    program: Program
    compilation: str
    is_proven: bool
    by_old_rule: bool
    batch: int | None

    @property
    def is_false_proof(self) -> bool:
        """True if the bits of a proven program differ."""
        return self.is_proven and self.batch is not None

    @property
    def outcome(self) -> str:
        """The outcome in a word; "unproven" if the program did not run."""
        if not self.by_old_rule:
            return "unproven"
        return "refuted" if self.batch is not None else "proven" if self.is_proven else "observed"


def judged(programs: Sequence[Program], compilation: str, small: int | None = None) -> list[Verdict]:
    """Certifies each program, and runs the ones that the certificate may prove in batches.

    Programs are compiled together, as one function with a result per program, to save time.

    Args:
        programs: the programs.
        compilation: a name in `COMPILATIONS`.
        small: the batch size to compare with `MAX_ROWS`. Default: chosen by the first program's seed.
    """
    jit = COMPILATIONS[compilation]
    small = small or BATCHES[programs[0].seed // len(programs) % len(BATCHES)]
    rows = {program: program.rows() for program in programs}
    read = {}
    for program, x in rows.items():
        # Certificates compile with `detjax.jit` unless the function is already compiled.
        read[program] = reading(jit(program) if compilation == "jax.jit" else program, (x[:2],), batch_sizes=(1,))
    run = [one for one in programs if all(risk.primitive in EXTREMES for risk in read[one][0])]
    together = jit(lambda arrays: [program(x) for program, x in zip(run, arrays, strict=True)])
    many, few = (together([rows[one][:count] for one in run]) if run else [] for count in (MAX_ROWS, small))
    moved: dict[Program, int | None] = {}
    for program, expected, made in zip(run, many, few, strict=True):
        differing = (_words(made) != _words(expected)[:small]).any(axis=1)
        if differing.any():
            differing &= ~excluded_rows(program, rows[program], read[program][1])[:small]
        moved[program] = small if differing.any() else None
    return [Verdict(one, compilation, not read[one][0], one in moved, moved.get(one)) for one in programs]


def excluded_rows(program: Program, x: np.ndarray, exclusions: Sequence[Exclusion]) -> np.ndarray:
    """Returns which rows, bool `[B]`, contain numbers that the proof excludes, in any step."""
    if not exclusions:
        return np.zeros(len(x), bool)
    return met(jax.jit(program.arrays)(x), exclusions)


def met(arrays: Sequence[Any], exclusions: Sequence[Exclusion]) -> np.ndarray:
    """Returns which rows, bool `[B]`, of arrays contain numbers that the proof excludes."""
    rows = np.zeros(len(arrays[0]), bool)
    for array in arrays:
        if not jnp.issubdtype(array.dtype, jnp.floating):
            continue
        numbers, tiny = np.asarray(array).astype(np.float64), float(jnp.finfo(array.dtype).tiny)
        kinds = {Exclusion.NAN: np.isnan(numbers), Exclusion.SUBNORMAL: (np.abs(numbers) < tiny) & (numbers != 0)}
        for exclusion in exclusions:
            rows |= kinds[exclusion].reshape(len(rows), -1).any(axis=1)
    return rows


def smallest(program: Program, is_wrong: Callable[[Program], bool]) -> Program:
    """Shrinks a program by every step without which it is still wrong."""
    while (next_one := next(filter(is_wrong, program.smaller()), None)) is not None:
        program = next_one
    return program


def _words(x: Any) -> np.ndarray:
    """The bits of numbers."""
    numbers = np.ascontiguousarray(np.asarray(x))
    return numbers.view(f"u{numbers.dtype.itemsize}")
