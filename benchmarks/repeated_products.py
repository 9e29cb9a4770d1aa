"""Products of a kernel at the widths of models, launched again and again: counts of numbers whose bits differ.

A race of a kernel's threads shows in some launches only, and in long loops rather than in short ones. So each product
runs many times, with its inputs in the cache and in memory, and every result is compared on the device. What is
expected is computed once for all rows: products of fewer rows must have the bits of its first rows. In every other
launch, most rows are replaced by larger ones, zeros and NaN, which must not change the rest.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import detjax
from benchmarks.study import Run
from detjax.bench import command_line
from detjax.bench.failures import reason
from detjax.bench.timing import CACHE_BYTES
from detjax.runtime import compilation
from detjax.runtime.threads import in_threads

WIDTHS: Final[dict[str, tuple[int, ...]]] = {
    "queries, keys and values": (6144, 4096),
    "output": (4096, 4096),
    "gate and up": (2, 12288, 4096),
    "down": (4096, 12288),
    "expert": (7168, 2048),
}
"""Shapes of weights: four of Qwen3-8B's, and the second one of an expert of DeepSeek-V3."""
ROWS: Final = (1, 3, 16, 64, 65, 256, 1024, 4096)
"""Numbers of rows."""
LAUNCHES: Final = 20
"""Launches of each product."""

type Multiply = Callable[[Array, Any], Array]
"""A function of rows `[M, K]` and a weight that returns `[M, N]`."""


class Product(NamedTuple):
    """A product that is launched again and again."""

    name: str
    rows: int
    multiply: Multiply


class Group(NamedTuple):
    """Products with one weight."""

    name: str
    columns: int
    """K."""
    outputs: int
    """N."""
    described: Any
    """The shapes and dtypes of the weight's arrays."""
    draw: Callable[[], Any]
    """Returns the weight."""
    expected: Multiply
    """The product that the others are compared with."""
    products: Sequence[Product]


class Counts(NamedTuple):
    """The result of a product's launches."""

    compared: int
    different: int
    failure: str = ""
    """The reason for comparing nothing; empty: something was compared."""


def compared(
    groups: Sequence[Group], *, rows: int = ROWS[-1], dtype: str = "bfloat16", launches: int = LAUNCHES
) -> Iterator[tuple[str, Counts]]:
    """Yields the names of products and their counts; `rows` are the most rows of any. Programs compile in threads."""
    jobs = [(group, product) for group in groups for product in (None, *group.products)]
    compiled = zip(jobs, in_threads(lambda job: _compiled(*job, rows, dtype), jobs), strict=True)
    other = jnp.zeros(2 * CACHE_BYTES if jax.default_backend() == "gpu" else 8, jnp.uint8)
    evict = detjax.jit(lambda x: x + jnp.uint8(1))
    for _, members in itertools.groupby(compiled, lambda member: member[0][0].name):
        ((group, _), expect), *rest = members
        if isinstance(expect, str):
            yield group.name, Counts(0, 0, expect)
            continue
        kept = np.arange(rows) % 3 == 0
        masks = np.ones_like(kept), kept
        w, x = group.draw(), drawn_rows(rows, group.columns)
        pairs = zip((x, with_other_rows(x, kept)), masks, strict=True)
        inputs = [(jnp.asarray(some, dtype), jnp.asarray(mask)) for some, mask in pairs]
        expected = expect(inputs[0][0], w)
        for (_, product), program in rest:
            assert product is not None
            if isinstance(program, str):
                yield product.name, Counts(0, 0, program)
                continue
            counts = []
            for launch in range(launches):
                some, mask = inputs[launch % 2]
                if launch % 4 >= 2:
                    other = evict(other)
                counts.append(program(some, w, expected, mask))
            numbers = sum(int(masks[launch % 2][: product.rows].sum()) for launch in range(launches)) * group.outputs
            yield product.name, Counts(numbers, sum(int(count) for count in counts))


def drawn_rows(rows: int, columns: int) -> np.ndarray:
    """Returns rows of different magnitudes; the second one is zero, and the third one has a NaN."""
    x = np.random.default_rng(rows).standard_normal((rows, columns), np.float32)
    x[4::4] *= 1e4
    x[1:2], x[2:3, 1] = 0, np.nan
    return x


def with_other_rows(x: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Returns the rows, changed unless they are kept: larger, the second one NaN, and the third one zero."""
    changed = np.where(kept[:, None], x, 1e4 * x + 1)
    changed[1:2], changed[2:3] = np.nan, 0
    return changed


def _compiled(group: Group, product: Product | None, rows: int, dtype: str) -> Callable[..., Array] | str:
    """Returns the program that computes what is expected, or that counts the differences of a product; or its error."""
    x = jax.ShapeDtypeStruct((rows, group.columns), jnp.dtype(dtype))
    try:
        if product is None:
            return compilation.compiled(detjax.jit(group.expected), x, group.described)

        def count(x: Array, w: Any, expected: Array, kept: Array) -> Array:
            y, expected = product.multiply(x[: product.rows], w), expected[: product.rows]
            bits = [lax.bitcast_convert_type(array, f"uint{8 * array.itemsize}") for array in (y, expected)]
            # The bits of NaN do not matter.
            differs = (bits[0] != bits[1]) & ~(jnp.isnan(y) & jnp.isnan(expected))
            return jnp.sum(differs & kept[: product.rows, None], dtype=jnp.int32)

        expected = jax.eval_shape(group.expected, x, group.described)
        kept = jax.ShapeDtypeStruct((rows,), jnp.bool_)
        return compilation.compiled(detjax.jit(count), x, group.described, expected, kept)
    except Exception as failure:  # the other products still have to be compared
        return reason(failure)


def compare(run: Run, content: Mapping[str, Any], widths: dict[str, Any], groups: Iterable[Group]) -> None:
    """Compares products, notes them in `widths`, which is a part of a study's content, and prints and saves each."""
    for line in noted(widths, compared(list(groups))):
        command_line.print_line(line)
        run.save(content)


def noted(content: dict[str, Any], results: Iterator[tuple[str, Counts]]) -> Iterator[str]:
    """Adds the results of `compared` to a part of a study's content, one by one, and yields a line about each."""
    content |= {"compared": 0, "different": 0, "products": {}}
    for name, counts in results:
        content["products"][name] = counts._asdict()
        content["compared"] += counts.compared
        content["different"] += counts.different
        yield f"{name}: {counts.failure or f'{counts.different} of {counts.compared} numbers differ'}"


def problems(content: dict[str, Any]) -> list[str]:
    """Returns what is wrong in a part that `noted` has filled."""
    return [
        f"{name}: {one['failure'] or 'bits differ'}"
        for name, one in content["products"].items()
        if one["failure"] or one["different"]
    ]
