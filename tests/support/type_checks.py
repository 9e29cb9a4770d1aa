"""Checks the types of arguments and results while tests run.

beartype checks every function of the project. jaxtyping checks shapes as well, but it binds the arguments of each call,
which takes longer than most functions. So it only gets the functions whose annotations have shapes. For trees of
arrays, jaxtyping compiles a checker at each call, which took a twentieth of the time.
"""

import contextlib
import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jaxtyping
from beartype import beartype
from jaxtyping._pytree_type import _MetaPyTree


@contextlib.contextmanager
def checked(packages: list[str]) -> Iterator[None]:
    """A context in which imported modules of these packages are checked."""
    jaxtyped = jaxtyping.jaxtyped

    def jaxtyped_if_shaped(*, typechecker: Any) -> Callable[[Any], Any]:
        with_shapes = jaxtyped(typechecker=typechecker)
        return lambda checks: with_shapes(checks) if _has_shapes(checks) else beartype(checks)

    jaxtyping.jaxtyped = jaxtyped_if_shaped
    _MetaPyTree._check = _check
    try:
        with jaxtyping.install_import_hook(packages, "beartype.beartype"):
            yield
    finally:
        jaxtyping.jaxtyped = jaxtyped


def _check(cls: Any, obj: Any, pytree_memo: Any, _check: Callable[..., bool] = _MetaPyTree._check) -> bool:
    """Returns whether a value is a tree that an annotation accepts."""
    if cls.leaftype is jax.Array and cls.structure is None:
        return all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(obj))
    return _check(cls, obj, pytree_memo)


def _has_shapes(checks: Any) -> bool:
    """Returns whether a function has annotations with shapes; True for classes and descriptors."""
    return not inspect.isfunction(checks) or any(map(_is_shaped, checks.__annotations__.values()))


def _is_shaped(hint: Any) -> bool:
    if isinstance(hint, str | typing.ForwardRef):
        return True  # jaxtyping leaves names unchecked that exist for type checkers alone
    if isinstance(hint, typing.TypeAliasType):
        return _is_shaped(hint.__value__)
    if isinstance(hint, list):
        return any(map(_is_shaped, hint))
    if isinstance(hint, _MetaPyTree) and getattr(hint, "structure", None) is None:
        return _is_shaped(getattr(hint, "leaftype", Any))
    return type(hint).__module__.startswith("jaxtyping") or any(map(_is_shaped, typing.get_args(hint)))
