"""What `batch_invariant` says of functions whose rows it cannot keep apart."""

import contextlib
import re
from collections.abc import Sequence
from typing import Any, Final

import jax

from detjax.invariant.findings import Finding, Mixing

_ADVICE: Final = {
    Mixing.SUM: (
        "A row would depend on the others. Compute it for each row (batch norm: use its running averages; a loss: "
        "return one number a row and average outside)"
    ),
    Mixing.SLOT: (
        "A row would depend on its place in the batch. Make the value from the row (random numbers: pass a key a row, "
        "with a batch axis)"
    ),
    Mixing.MOVE: (
        "A row would depend on the others. Compute it within each row, or put rows that were moved back to their "
        "places: tokens that are sorted for experts return by the inverse of the very permutation"
    ),
    Mixing.SIZE: (
        "A row would depend on how many there are. Use a number of the row's own axes, or divide outside by the number "
        "of rows"
    ),
    Mixing.DEVICES: (
        "A row would depend on the rows of other devices, or on how many there are. Return what is to be added, and "
        "add it outside. Rows that all devices share may meet, where types say so (check_vma=True, JAX's default)"
    ),
    Mixing.OTHER: "Compute it for each row, or with operations that keep to their row",
}


class UnsafeFunction(ValueError):
    """A function whose rows cannot be kept apart. Its message names the operations and their lines.

    Example:
        >>> try:
        ...     detjax.batch_invariant(lambda x: x - jnp.mean(x, axis=0, keepdims=True))(jnp.ones((2, 3)))
        ... except detjax.UnsafeFunction:
        ...     print("rows would meet")
        ...
        rows would meet
    """


class UnsafeFunctionWarning(UserWarning):
    """What `UnsafeFunction` says, as a warning: `batch_invariant` gives it with `on_unsafe="warn"`.

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
    """A function cannot be traced for one row, so its program for the whole batch is cut into rows.

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
    """Returns a line for each finding, with what to do."""
    return [f"  {finding}. {_ADVICE[finding.mixing]}." for finding in dict.fromkeys(findings)]


_MIXED: Final = "detjax_mixed_rows_"
_mixed: list[Sequence[Finding]] = []


def mixed(findings: Sequence[Finding]) -> Any:
    """Returns a context whose equations compute for each row alone what a function that mixes rows gives for it.

    `mixed_by` reads it back: such a program proves nothing of the function.
    """
    if not findings:
        return contextlib.nullcontext()
    _mixed.append(findings)
    return jax.named_scope(f"{_MIXED}{len(_mixed) - 1}")


def mixed_by(scopes: str) -> Sequence[Finding]:
    """Returns what is found of the function in whose place an equation stands, by the names of its scopes."""
    scope = re.search(rf"{_MIXED}(\d+)", scopes)
    return _mixed[int(scope[1])] if scope else ()
