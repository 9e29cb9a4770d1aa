"""Loops inside `jax.shard_map`, whose types say over which axes of the mesh a value varies.

There every value has a type that names these axes (`check_vma=True`, JAX's default), and the carry of a loop has to
begin with the type that it ends a step with. A carry that begins as zeros varies over no axis, and becomes something
that does. Elsewhere nothing here does anything.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import config  # JAX has no public way to ask whether types name axes here


def is_typed() -> bool:
    """Returns whether types say here over which axes of a mesh values vary."""
    return config._check_vma.value


def axes(x: Any) -> frozenset[str]:
    """Returns the axes of the mesh over which a value varies, by its type; none outside of `jax.shard_map`."""
    return jax.typeof(x).manual_axis_type.varying


def join(values: Any) -> frozenset[str]:
    """Returns the axes over which any array of a pytree varies."""
    if not is_typed():
        return frozenset()
    return frozenset().union(*map(axes, jax.tree.leaves(values)))


def sharded(values: Any) -> frozenset[str] | None:
    """Returns the axes of the mesh along which devices have other values of a pytree; None if types do not say it."""
    return join(values) if is_typed() else None


def shape(like: Any, sizes: Sequence[int], weak_type: bool = False) -> jax.ShapeDtypeStruct:
    """Returns the type of an array of these sizes, which has the dtype of another one and varies as that does."""
    kind: Any = jax.typeof(like)
    options: dict[str, Any] = {}
    if kind.manual_axis_type.varying:
        manual = jax.NamedSharding(kind.sharding.mesh, jax.P(*[None] * len(sizes)))
        options = {"sharding": manual, "manual_axis_type": kind.manual_axis_type}
    return jax.ShapeDtypeStruct(tuple(sizes), like.dtype, weak_type=weak_type, **options)


def over[T](values: T, names: frozenset[str]) -> T:
    """Returns a pytree of arrays that vary over these axes by their types too. No number changes.

    In a gradient, the cotangents of a value that did not vary over an axis are added over it.
    """

    def cast(x: Any) -> Any:
        missing = names - axes(x)
        return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(cast, values) if names else values


def carry[T](step: Callable[[T], T], initial: T) -> T:
    """Returns a loop's initial carry with the types that it has after a step.

    Args:
        step: gives the next carry.
        initial: the carry before the first step.
    """
    if not is_typed():
        return initial
    while True:
        after = jax.eval_shape(step, initial)
        names = [
            made.manual_axis_type.varying - axes(x)
            for x, made in zip(*map(jax.tree.leaves, (initial, after)), strict=True)
        ]
        if not any(names):
            return initial
        leaves, tree = jax.tree.flatten(initial)
        initial = jax.tree.unflatten(tree, [over(x, axes(x) | more) for x, more in zip(leaves, names, strict=True)])


def fori_loop[T](lower: Any, upper: Any, body: Callable[[Any, T], T], initial: T) -> T:
    """Returns what `jax.lax.fori_loop` does."""
    return lax.fori_loop(lower, upper, body, carry(lambda x: body(jnp.asarray(lower), x), initial))


def while_loop[T](goes_on: Callable[[T], Any], body: Callable[[T], T], initial: T) -> T:
    """Returns what `jax.lax.while_loop` does."""
    return lax.while_loop(goes_on, body, carry(body, initial))


def scan(step: Callable[[Any, Any], tuple[Any, Any]], initial: Any, xs: Any, *options: Any) -> tuple[Any, Any]:
    """Returns what `jax.lax.scan` does; its further arguments follow `xs`."""
    if not is_typed():
        return lax.scan(step, initial, xs, *options)
    first = jax.tree.map(lambda x: lax.index_in_dim(x, 0, 0, keepdims=False), xs)
    return lax.scan(step, carry(lambda x: step(x, first)[0], initial), xs, *options)


def switch(index: Any, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """Returns what `jax.lax.switch` does."""
    if is_typed():
        made = [jax.tree.leaves(jax.eval_shape(branch, *operands)) for branch in branches]
        names = [frozenset().union(*(x.manual_axis_type.varying for x in leaves)) for leaves in zip(*made, strict=True)]
        branches = [functools.partial(_alike, branch, names) for branch in branches]
    return lax.switch(index, branches, *operands)


def _alike(branch: Callable[..., Any], names: Sequence[frozenset[str]], *operands: Any) -> Any:
    """A branch's results, which vary over the axes over which other branches' do."""
    leaves, tree = jax.tree.flatten(branch(*operands))
    return jax.tree.unflatten(tree, list(map(over, leaves, names)))
