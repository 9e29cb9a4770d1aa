"""Errors and warnings of `batch_invariant` for functions that mix rows."""

import contextlib
import re
from collections.abc import Sequence
from typing import Any, Final

import jax

from detjax.invariant.findings import Finding, Mixing

_ADVICE: Final = {
    Mixing.SUM: (
        "A row would depend on the others. Compute it for each row (batch norm: use its running averages; a loss: "
        "return one number per row and average outside)"
    ),
    Mixing.SLOT: (
        "A row would depend on its position in the batch. Derive the value from the row (random numbers: pass a key "
        "per row, with a batch axis)"
    ),
    Mixing.MOVE: (
        "A row would depend on the others. Compute it within each row, or return moved rows to their positions: tokens "
        "that are sorted for experts return by the inverse of the same permutation"
    ),
    Mixing.SIZE: (
        "A row would depend on the number of rows. Use a size of the row's own axes, or divide by the number of rows "
        "outside"
    ),
    Mixing.DEVICES: (
        "A row would depend on the rows of other devices, or on their number. Return the terms and add them outside. "
        "Rows that all devices share may be combined where types say so (check_vma=True, JAX's default)"
    ),
    Mixing.OTHER: "Compute it for each row, or with operations that work within a row",
}


class UnsafeFunction(ValueError):
    """A function mixes rows. The message names the operations and their lines.

    Example:
        >>> try:
        ...     detjax.batch_invariant(lambda x: x - jnp.mean(x, axis=0, keepdims=True))(jnp.ones((2, 3)))
        ... except detjax.UnsafeFunction:
        ...     print("rows would mix")
        ...
        rows would mix
    """


class UnsafeFunctionWarning(UserWarning):
    """The message of `UnsafeFunction` as a warning, which `batch_invariant` gives with `on_unsafe="warn"`.

    Example:
        >>> import warnings
        >>> def centered(x):
        ...     return x - jnp.mean(x, axis=0, keepdims=True)
        ...
        >>> with warnings.catch_warnings(record=True) as seen:
        ...     warnings.simplefilter("always")
        ...     rows = detjax.batch_invariant(centered, on_unsafe="warn")(jnp.array([[1.0], [3.0]]))
        ...
        >>> [warning.category.__name__ for warning in seen]
        ['UnsafeFunctionWarning']
        >>> rows.tolist()  # each row is its own mean
        [[0.0], [0.0]]
    """


class TracedForBatchWarning(UserWarning):
    """A function cannot be traced for one row, so the program of one row is cut out of the batch's.

    Example:
        >>> import warnings
        >>> def doubled(x):
        ...     if len(x) < 2:
        ...         raise ValueError("a batch has rows")
        ...     return 2 * x
        ...
        >>> with warnings.catch_warnings(record=True) as seen:
        ...     warnings.simplefilter("always")
        ...     doubled_rows = detjax.batch_invariant(doubled)(jnp.ones((3, 2)))
        ...
        >>> [warning.category.__name__ for warning in seen]
        ['TracedForBatchWarning']
    """


def lines(findings: Sequence[Finding]) -> list[str]:
    """Returns a line for each finding, with advice."""
    return [f"  {finding}. {_ADVICE[finding.mixing]}." for finding in dict.fromkeys(findings)]


_MIXED: Final = "detjax_mixed_rows_"
_mixed: list[Sequence[Finding]] = []


def mixed(findings: Sequence[Finding]) -> Any:
    """Returns a context that marks the equations of a function that mixes rows, computed here for each row alone.

    `mixed_by` reads the mark: such a program proves nothing about the function.
    """
    if not findings:
        return contextlib.nullcontext()
    _mixed.append(findings)
    return jax.named_scope(f"{_MIXED}{len(_mixed) - 1}")


def mixed_by(scopes: str) -> Sequence[Finding]:
    """Returns the findings that `mixed` marked an equation with, given the names of its scopes."""
    scope = re.search(rf"{_MIXED}(\d+)", scopes)
    return _mixed[int(scope[1])] if scope else ()
