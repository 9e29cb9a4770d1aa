"""Loops inside `jax.shard_map`, where types name the mesh axes over which a value varies.

With `check_vma=True`, JAX's default, a loop's initial carry must have the type of the carry after a step. An initial
carry of zeros varies over no axis, but later carries may. These functions cast the initial carry; outside
`jax.shard_map` they change nothing.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import config  # JAX has no public function for this


def is_typed() -> bool:
    """Returns whether types name varying axes here."""
    return config._check_vma.value


def axes(x: Any) -> frozenset[str]:
    """Returns the mesh axes over which a value varies by its type; none outside `jax.shard_map`."""
    return jax.typeof(x).manual_axis_type.varying


def join(values: Any) -> frozenset[str]:
    """Returns the axes over which at least one array of a pytree varies."""
    if not is_typed():
        return frozenset()
    return frozenset().union(*map(axes, jax.tree.leaves(values)))


def sharded(values: Any) -> frozenset[str] | None:
    """Returns the mesh axes over which a pytree varies; None if types do not name them."""
    return join(values) if is_typed() else None


def shape(like: Any, sizes: Sequence[int], weak_type: bool = False) -> jax.ShapeDtypeStruct:
    """Returns the type of an array of these sizes with the dtype and varying axes of `like`."""
    kind: Any = jax.typeof(like)
    options: dict[str, Any] = {}
    if kind.manual_axis_type.varying:
        manual = jax.NamedSharding(kind.sharding.mesh, jax.P(*[None] * len(sizes)))
        options = {"sharding": manual, "manual_axis_type": kind.manual_axis_type}
    return jax.ShapeDtypeStruct(tuple(sizes), like.dtype, weak_type=weak_type, **options)


def over[T](values: T, names: frozenset[str]) -> T:
    """Casts a pytree to types that also vary over these axes. No number changes.

    In a gradient, cotangents are added over the new axes.
    """

    def cast(x: Any) -> Any:
        missing = names - axes(x)
        return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(cast, values) if names else values


def carry[T](step: Callable[[T], T], initial: T) -> T:
    """Casts a loop's initial carry to the types that it has after a step."""
    if not is_typed():
        return initial
    while True:
        after = jax.eval_shape(step, initial)
        names = [
            result.manual_axis_type.varying - axes(x)
            for x, result in zip(*map(jax.tree.leaves, (initial, after)), strict=True)
        ]
        if not any(names):
            return initial
        leaves, tree = jax.tree.flatten(initial)
        initial = jax.tree.unflatten(tree, [over(x, axes(x) | more) for x, more in zip(leaves, names, strict=True)])


def fori_loop[T](lower: Any, upper: Any, body: Callable[[Any, T], T], initial: T) -> T:
    """Like `jax.lax.fori_loop`."""
    return lax.fori_loop(lower, upper, body, carry(lambda x: body(jnp.asarray(lower), x), initial))


def while_loop[T](condition: Callable[[T], Any], body: Callable[[T], T], initial: T) -> T:
    """Like `jax.lax.while_loop`."""
    return lax.while_loop(condition, body, carry(body, initial))


def scan(step: Callable[[Any, Any], tuple[Any, Any]], initial: Any, xs: Any, *options: Any) -> tuple[Any, Any]:
    """Like `jax.lax.scan`; `options` are its arguments after `xs`."""
    if not is_typed():
        return lax.scan(step, initial, xs, *options)
    first = jax.tree.map(lambda x: lax.index_in_dim(x, 0, 0, keepdims=False), xs)
    return lax.scan(step, carry(lambda x: step(x, first)[0], initial), xs, *options)


def switch(index: Any, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """Like `jax.lax.switch`."""
    if is_typed():
        results = [jax.tree.leaves(jax.eval_shape(branch, *operands)) for branch in branches]
        names = [
            frozenset().union(*(x.manual_axis_type.varying for x in group)) for group in zip(*results, strict=True)
        ]
        branches = [functools.partial(_alike, branch, names) for branch in branches]
    return lax.switch(index, branches, *operands)


def _alike(branch: Callable[..., Any], names: Sequence[frozenset[str]], *operands: Any) -> Any:
    """Returns a branch's results, cast to vary over the axes of all branches."""
    leaves, tree = jax.tree.flatten(branch(*operands))
    return jax.tree.unflatten(tree, list(map(over, leaves, names)))
