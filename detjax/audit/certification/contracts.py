"""Recognizes equations under contract: operations of detjax, and functions of `batch_invariant`."""

import pathlib
from typing import Final

from jax._src import source_info_util  # JAX has no public way from an equation to its file
from jax.extend import core

from detjax import invariant
from detjax.invariant import equations
from detjax.runtime import backends

PREPARED: Final = "detjax.ops"
"""The name of an operation's code outside of its kernel, such as the sort of tokens by expert."""

_TRANSFORM: Final = str(pathlib.Path(invariant.__file__).with_name("transform.py"))


def contract_of(eqn: core.JaxprEqn) -> str | None:
    """Returns the operation of detjax that an equation calls or belongs to; None without a contract."""
    if backends.backend() == backends.STOCK:
        return None
    if eqn.primitive.name in ("jit", "pjit"):
        if (operation := equations.operation(eqn)) is not None:
            return operation
        traced = equations.body(eqn).debug_info
        if traced is not None and traced.func_filename == _TRANSFORM:
            return "batch_invariant"
    frame = next(iter(source_info_util.user_frames(eqn.source_info.traceback)), None)
    return PREPARED if frame is not None and equations.is_in_ops(frame.file_name) else None
