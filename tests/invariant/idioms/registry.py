"""The list of idioms: functions of rows, what `batch_invariant` makes of them, and what the documentation says."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import numpy as np

type Function = Callable[..., Any]
type Make = Callable[[], Any]

MAX_ROWS: Final = 33


def _normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal((MAX_ROWS + 1, *shape)).astype(dtype)


def _numbers(most: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(most).integers(0, most, (MAX_ROWS + 1, *shape)).astype("int32")


ROWS: Final[dict[str, tuple[np.ndarray, ...]]] = {
    "vectors": (_normal(8),),
    "sequences": (_normal(6, 8),),
    "steps": (_normal(1, 8),),
    "images": (_normal(8, 8, 3),),
    "matrices": (_normal(3, 3),),
    "tokens": (_numbers(16, 6),),
    "caches": (_normal(1, 8), _normal(6, 8), _numbers(6)),
    "sequences with lengths": (_normal(6, 8), 1 + _numbers(6)),
    "sequences with keys": (_normal(6, 8), _numbers(2**31 - 1, 2).astype("uint32")),
    "labelled": (_normal(8), _numbers(8)),
    "small integers": (_numbers(256, 8).astype("int8"),),
    "doubles": (_normal(8, dtype="float64"),),
}
"""Arguments with one more row than a batch has, along the first axis."""


@dataclasses.dataclass(frozen=True, eq=False)
class Idiom:
    """A way in which models are written.

    Attributes:
        name: of the function that makes it.
        group: the heading under which the documentation has it.
        form: how the documentation shows it.
        remark: why it is accepted or refused, or what to use instead.
        make: returns the function of rows, or a module.
        rows: the arguments, by their name in `ROWS`.
        is_accepted: whether `batch_invariant` accepts it.
        has_gradient: whether gradients are compared.
        message: what the refusal says, as a regular expression.
        around: what is put around the function of `batch_invariant`.
        has_float64: whether it runs with 64 bits enabled.
    """

    name: str
    group: str
    form: str
    remark: str
    make: Make
    rows: str
    is_accepted: bool
    has_gradient: bool = True
    message: str = ""
    around: Callable[[Function], Function] = lambda fn: fn
    has_float64: bool = False


ALL: Final[dict[str, Idiom]] = {}


def accepted(group: str, form: str, remark: str, rows: str = "sequences", **options: Any) -> Callable[[Make], Make]:
    """Registers the idiom that a function makes, which `batch_invariant` accepts."""
    return _registers(group, form, remark, rows, is_accepted=True, **options)


def refused(
    group: str, form: str, remark: str, message: str, rows: str = "sequences", **options: Any
) -> Callable[[Make], Make]:
    """Registers the idiom that a function makes, which `batch_invariant` refuses."""
    return _registers(group, form, remark, rows, is_accepted=False, message=message, **options)


def _registers(group: str, form: str, remark: str, rows: str, **options: Any) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        assert make.__name__ not in ALL
        ALL[make.__name__] = Idiom(make.__name__, group, form, remark, make, rows, **options)
        return make

    return register
