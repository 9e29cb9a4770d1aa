"""Dataclasses of arrays as pytrees."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax


def array_dataclass[T](noun: type[T]) -> type[T]:
    """Registers a dataclass as a pytree that JAX rebuilds without calling its constructor.

    JAX rebuilds pytrees with placeholders for arrays, which the tests' check of annotations would refuse. Fields with
    `metadata={"static": True}` are static.
    """
    fields = dataclasses.fields(noun)  # pyright: ignore[reportArgumentType]
    static = [field.name for field in fields if field.metadata.get("static")]
    names = [field.name for field in fields if field.name not in static]

    def flatten(x: T) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(x, name) for name in names], tuple(getattr(x, name) for name in static)

    def flatten_with_keys(x: T) -> tuple[list[Any], tuple[Any, ...]]:
        leaves, values = flatten(x)
        return [(jax.tree_util.GetAttrKey(name), leaf) for name, leaf in zip(names, leaves, strict=True)], values

    def rebuild(values: tuple[Any, ...], leaves: Iterable[Any]) -> T:
        x = object.__new__(noun)
        x.__dict__.update(zip((*names, *static), (*leaves, *values), strict=True))
        return x

    jax.tree_util.register_pytree_with_keys(noun, flatten_with_keys, rebuild, flatten)
    return noun
