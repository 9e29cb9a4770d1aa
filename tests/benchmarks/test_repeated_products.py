"""Products that are launched again and again: differences of numbers are counted."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.repeated_products import Counts, Group, Product, compared, noted, problems


def right(x: Any, w: Any) -> Any:
    """Rows that do not depend on each other."""
    return x * w


def mixed(x: Any, w: Any) -> Any:
    """Rows that a NaN of another one reaches."""
    return right(x, w) * (1 + 0 * x.sum())


def wrong(x: Any, w: Any) -> Any:
    """The same rows, but one number of the first one."""
    return right(x, w).at[0, 2].add(1)


def refused(x: Any, w: Any) -> Any:
    raise ValueError("no plan serves this")


@pytest.mark.parametrize(
    ("multiply", "counts"),
    [
        # In half of the launches all rows are compared, in the others each third one.
        (right, Counts(2 * 7 * 4 + 2 * 3 * 4, 0)),
        # All are NaN, but one is expected to be.
        (mixed, Counts(2 * 7 * 4 + 2 * 3 * 4, 2 * (7 * 4 - 1) + 2 * 3 * 4)),
        (wrong, Counts(2 * 7 * 4 + 2 * 3 * 4, 4)),
        (refused, Counts(0, 0, "ValueError: no plan serves this")),
    ],
)
def test_numbers_that_differ_are_counted(multiply: Any, counts: Counts) -> None:
    described = jax.ShapeDtypeStruct((1, 4), jnp.bfloat16)
    product = Product("product", 7, multiply)
    group = Group("group", 4, 4, described, lambda: jnp.ones((1, 4), jnp.bfloat16), right, [product])
    content: dict[str, Any] = {}
    (line,) = noted(content, compared([group], rows=9, launches=4))
    assert content == {
        "compared": counts.compared,
        "different": counts.different,
        "products": {"product": counts._asdict()},
    }
    assert line.startswith(f"product: {counts.failure or f'{counts.different} of'}")
    assert len(problems(content)) == (multiply is not right)
