"""Refuses calls that write into NNX modules among their arguments: the write would come from one row, and be lost."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax import tree_util
from jax.extend import core

from detjax.invariant import equations
from detjax.invariant.refusals import UnsafeFunction

_ADVICE = (
    "The write would come from one row, and be lost. Switch it off (module.eval()), or pass the state as an argument "
    "with rows and return it."
)


def check_unchanged(arguments: Any, leaves: Sequence[Any], tree: Any, is_array: Sequence[bool]) -> dict[int, str]:
    """Returns the paths of random streams' counters that a call advanced, by their indices among the arrays.

    A recurrent network draws a key for its first state, which is zeros whatever the key is. `check_counters` checks
    that no result depends on such a counter.

    Args:
        arguments: the arguments after the call.
        leaves: their leaves before the call.
        tree: their structure before the call.
        is_array: which leaves are arrays.

    Raises:
        UnsafeFunction: the call wrote anything else into an NNX module.
    """
    modules = [x for x in jax.tree.leaves(arguments, is_leaf=_is_module) if _is_module(x)]
    if not modules:
        return {}
    after, tree_after = jax.tree.flatten(arguments)
    changed = [k for k, (x, y) in enumerate(zip(after, leaves, strict=False)) if x is not y]
    if tree_after == tree and not changed:
        return {}
    known = {id(x) for x in leaves}
    paths = {
        id(x): tree_util.keystr(path)
        for module in modules
        for path, x in tree_util.tree_leaves_with_path(module)
        if id(x) not in known
    }
    if tree_after == tree:
        owners = [
            owner
            for owner in jax.tree.leaves(arguments, is_leaf=lambda x: isinstance(x, nnx.Variable))
            for _ in jax.tree.leaves(owner)
        ]
        if all(isinstance(owners[k], nnx.RngCount) for k in changed):
            return {sum(is_array[:k]): paths.get(id(after[k]), "a counter") for k in changed}
    names = ", ".join(sorted(set(paths.values()))) or "its structure"
    raise UnsafeFunction(f"batch_invariant: a call writes into {type(modules[0]).__name__}: {names}. {_ADVICE}")


def check_counters(jaxpr: core.Jaxpr, counters: Mapping[int, str]) -> None:
    """Checks that no result depends on the counters that `check_unchanged` returns.

    Raises:
        UnsafeFunction: a result does: rows would get the same random numbers in every call.
    """
    for index, path in counters.items():
        reader = next((eqn for eqn in jaxpr.eqns if any(v is jaxpr.invars[index] for v in eqn.invars)), None)
        if reader is not None:
            line = equations.line_outside(reader, "flax")
            raise UnsafeFunction(
                f"batch_invariant: a call writes into a module: {path}. Results depend on the random numbers that it "
                f"draws, at {line}. {_ADVICE}"
            )


def _is_module(x: Any) -> bool:
    return isinstance(x, nnx.Module)
