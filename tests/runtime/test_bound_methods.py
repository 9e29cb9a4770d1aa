"""Methods whose object is an argument of the program: what of it is traced, and where arguments move to."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.runtime import bound_methods, compilation


class Scale:
    """Multiplies by an array and adds a static number."""

    def __init__(self, factor: Any, more: int) -> None:
        self.factor, self.more = factor, more

    @bound_methods.reads_object
    def apply(self, x: Any, times: int = 1) -> Any:
        return self.factor * x * times + self.more

    def unmarked(self, x: Any) -> Any:
        return x

    __call__ = apply


jax.tree_util.register_pytree_node(Scale, lambda one: ((one.factor, one.more), None), lambda _, parts: Scale(*parts))


def test_only_marked_methods_of_objects_have_their_object_as_an_argument() -> None:
    one = Scale(jnp.ones(2), 3)
    for fn in (one.apply, one):
        method = bound_methods.method(fn)
        assert method is not None and method.__self__ is one
    for fn in (one.unmarked, Scale.apply, len, lambda x: x):
        assert bound_methods.method(fn) is None


def test_an_objects_arrays_are_traced_and_everything_else_is_static() -> None:
    traced = []

    class Noting(Scale):
        @bound_methods.reads_object
        def apply(self, x: Any, times: int = 1) -> Any:
            traced.append((self.more, times))
            return super().apply(x, times)

    jax.tree_util.register_pytree_node(
        Noting, lambda one: ((one.factor, one.more), None), lambda _, parts: Noting(*parts)
    )
    one = Noting(jnp.array([2, 3]), 1)
    program = compilation.jit(one.apply, static_argnums=1)
    assert program(jnp.array([5, 7]), 2).tolist() == [21, 43]
    one.factor = jnp.array([1, 1])  # each call uses the current array
    assert program(jnp.array([5, 7]), 2).tolist() == [11, 15]
    assert traced == [(1, 2)]
    one.more = 4  # and the current number, for which the program is traced again
    assert program(jnp.array([5, 7]), 2).tolist() == [14, 18]
    assert traced == [(1, 2), (4, 2)]
    compiled = compilation.compiled(program, jnp.array([5, 7]), 3)
    assert compiled(jnp.array([5, 7])).tolist() == [19, 25]


def test_arrays_are_those_of_jax_and_numpy() -> None:
    leaves = [jnp.ones(1), np.ones(1), 1.0, "x", None, np.float32(1), jnp.zeros(2)]
    assert bound_methods.are_arrays(leaves) == (True, True, False, False, False, False, True)
    jax.jit(lambda x: bound_methods.are_arrays([x, 1]) == (True, False) or pytest.fail("a tracer is an array"))(1.0)


@pytest.mark.parametrize(
    ("given", "moved"),
    [
        ({}, {}),
        ({"static_argnums": 0}, {"static_argnums": (1,)}),
        ({"static_argnums": (0, 2, -1)}, {"static_argnums": (1, 3, -1)}),
        ({"donate_argnums": [1], "static_argnames": "x"}, {"donate_argnums": (2,), "static_argnames": "x"}),
        ({"in_shardings": ("a", "b")}, {"in_shardings": (bound_methods._AS_IT_IS, "a", "b")}),
        ({"in_shardings": "a"}, {"in_shardings": (bound_methods._AS_IT_IS, "a", "a")}),
        ({"out_shardings": "a"}, {"out_shardings": "a"}),
    ],
)
def test_numbers_of_arguments_make_room_for_the_object(given: dict[str, Any], moved: dict[str, Any]) -> None:
    before = dict(given)
    assert bound_methods.shifted(given, 2) == moved
    assert given == before
