"""Products with adapters at the widths of Qwen3-8B, for `repeated_products`: each kernel against sorted rows.

What is expected of `wide_groups` has its rows sorted by adapter, and separate kernels for the weight, both factors, and
their sum. `groups_of_forms` has the other forms of the kernel that adds one adapter, against separate kernels.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.repeated_products import ROWS, WIDTHS, Group, Product
from detjax import ops
from detjax.contract import ACCUMULATOR
from detjax.operands.adapted_weight import NO_ADAPTER, AdaptedWeight
from detjax.operands.options import Activation, Epilogue, WeightLayout
from detjax.operands.products import AdapterOperands, MatmulOperands
from detjax.ops.adapter_places import BlocksOfRows, SortedRows
from detjax.ops.single_adapter import padded_factors
from detjax.pallas.hopper import grouped_matmul, matmul

RANKS: Final = {"queries, keys and values": 48, "output": 16, "gate and up": 32, "down": 16}
"""Ranks of weights if adapters have 16 on each tensor of a checkpoint."""
SLOTS: Final = 8
"""Adapters."""
ROWS_OF_FORMS: Final = (1, 65, 256, 4096)
"""Numbers of rows of `FORMS`."""


class Form(NamedTuple):
    """A form of the product with one adapter."""

    width: str
    """The name of the weight."""
    ranks: int
    layout: WeightLayout = "nk"
    """With "kn", the product is a gradient of rows, and nothing is scaled."""
    keeps: bool = False
    """True if the kernel also returns the sums that the epilogue consumed."""
    is_added: bool = False
    """True if there are a bias and a residual."""
    activation: Activation | None = None
    """The activation; gate and up have "silu"."""

    @property
    def name(self) -> str:
        """The form in words."""
        named = {"gradient of rows": self.layout == "kn", "kept sums": self.keeps, "bias and residual": self.is_added}
        return ", ".join([self.width, *(name for name, holds in named.items() if holds), f"{self.ranks} ranks"])


FORMS: Final = (
    Form("queries, keys and values", 48, layout="kn"),
    Form("output", 128, layout="kn"),
    Form("down", 256, layout="kn"),
    Form("gate and up", 32, keeps=True),
    Form("gate and up", 128, keeps=True),
    Form("gate and up", 256, keeps=True, is_added=True),
    Form("down", 16, keeps=True, activation="relu"),
    Form("output", 16, is_added=True),
    Form("gate and up", 32, is_added=True),
    Form("queries, keys and values", 128),
    Form("down", 256, is_added=True),
)
"""Forms of the kernel that `wide_groups` does not launch."""


def wide_groups(
    widths: Mapping[str, tuple[int, ...]] = WIDTHS, rows: Sequence[int] = ROWS, slots: int = SLOTS
) -> Iterator[Group]:
    """Yields the products of rows with different adapters, and of rows that have the same one."""
    for (name, shape), is_one in itertools.product(widths.items(), (False, True)):
        if name not in RANKS:
            continue
        *parts, outputs, inputs = shape
        count = 1 if is_one else slots
        draw = functools.partial(_drawn, tuple(parts), outputs, inputs, RANKS[name], count, max(rows))
        epilogue = Epilogue("silu", gated=True) if parts else Epilogue()
        expected = functools.partial(_by_sorted_rows, epilogue=epilogue)
        multiply = functools.partial(_by_one_kernel if is_one else _by_blocks, epilogue=epilogue)
        full_name = f"{name}, {'one adapter' if is_one else f'{count} adapters'}"
        products = [
            Product(f"{full_name}, {number} rows", number, multiply)
            for number in rows
            if is_one or number <= grouped_matmul.MOST_ROWS_OF_BLOCKS
        ]
        yield Group(full_name, inputs, outputs, jax.eval_shape(draw), draw, expected, products)


def _drawn(parts: tuple[int, ...], outputs: int, inputs: int, ranks: int, slots: int, rows: int) -> AdaptedWeight:
    """Returns a random weight with adapters. Neighbouring rows often have the same one, and some have none."""
    shapes = (*parts, outputs, inputs), (slots, ranks, inputs), (slots, *parts, outputs, ranks)

    @jax.jit
    def drawn() -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(0), len(shapes))
        pairs = zip(keys, shapes, strict=True)
        return [jax.random.normal(key, shape, jnp.bfloat16) * shape[-1] ** -0.5 for key, shape in pairs]

    random = np.random.default_rng(0)
    slot = np.repeat(random.integers(NO_ADAPTER if slots > 1 else 0, slots, rows), random.integers(1, 12, rows))[:rows]
    value, a, b = drawn()
    scales = jax.random.normal(jax.random.key(1), (slots, *parts, outputs))
    return AdaptedWeight(value, a, b, scales, jnp.asarray(slot, jnp.int32))


def _with_rows(weight: AdaptedWeight, count: int, places: Callable[[jax.Array], Any]) -> AdaptedWeight:
    """Returns the weight for the first rows, in places."""
    assert weight.rows is not None
    rows = weight.rows[:count]
    return dataclasses.replace(weight, rows=rows, places=places(rows))


def _multiply(x: jax.Array, weight: AdaptedWeight, epilogue: Epilogue) -> jax.Array:
    return ops.matmul(x, weight, layout="nk", activation=epilogue.activation, gated=epilogue.gated)


def _by_sorted_rows(x: jax.Array, weight: AdaptedWeight, epilogue: Epilogue) -> jax.Array:
    """Computes sorted rows."""
    places = functools.partial(SortedRows.for_rows, slots=len(weight.scales))
    return _multiply(x, _with_rows(weight, len(x), places), epilogue)


def _by_blocks(x: jax.Array, weight: AdaptedWeight, epilogue: Epilogue) -> jax.Array:
    """Computes blocks of rows where they lie."""
    places = functools.partial(BlocksOfRows.for_rows, size=grouped_matmul.BLOCK)
    return _multiply(x, _with_rows(weight, len(x), places), epilogue)


def _by_one_kernel(x: jax.Array, weight: AdaptedWeight, epilogue: Epilogue) -> jax.Array:
    """Adds the adapter in the kernel of the weight's sums."""
    a, b, scales = padded_factors(weight)
    operands, adapter = MatmulOperands(x, weight.value), AdapterOperands(ops.matmul(x, a, layout="nk"), b, scales)
    options: dict[str, Any] = {"layout": "nk", "epilogue": epilogue, "out_dtype": x.dtype, "keeps": False}
    return matmul.forward_with_adapter(operands, adapter, **options)[0]


# --- forms of the product with one adapter ----------------------------------------------------------------------------


class Adapted(NamedTuple):
    """The arrays of a product with one adapter."""

    weight: AdaptedWeight
    bias: jax.Array | None
    residual: jax.Array | None


def groups_of_forms(
    widths: Mapping[str, tuple[int, ...]] = WIDTHS, rows: Sequence[int] = ROWS_OF_FORMS, forms: Sequence[Form] = FORMS
) -> Iterator[Group]:
    """Yields the products of forms. Kept sums follow the result in the last axis, so that they are compared, too."""
    for form in forms:
        *parts, outputs, inputs = widths[form.width]
        draw = functools.partial(_drawn_form, form, tuple(parts), outputs, inputs, max(rows))
        epilogue = Epilogue("silu", gated=True) if parts else Epilogue(form.activation)
        kernels = matmul.forward_with_adapter, _by_separate_kernels
        multiply, expected = (functools.partial(_by_form, kernel, form, epilogue) for kernel in kernels)
        products = [Product(f"{form.name}, {number} rows", number, multiply) for number in rows]
        columns, width = (inputs, outputs) if form.layout == "nk" else (outputs, inputs)
        results = 1 + form.keeps * (1 + epilogue.gated)
        yield Group(form.name, columns, results * width, jax.eval_shape(draw), draw, expected, products)


def _drawn_form(form: Form, parts: tuple[int, ...], outputs: int, inputs: int, rows: int) -> Adapted:
    """Returns a random weight with one adapter, and if they are added, a bias and a residual."""
    weight = _drawn(parts, outputs, inputs, form.ranks, 1, rows)
    if not form.is_added:
        return Adapted(weight, None, None)
    keys = jax.random.split(jax.random.key(2))
    shapes = (*parts, outputs), (rows, outputs)
    return Adapted(weight, *(jax.random.normal(*pair, jnp.bfloat16) for pair in zip(keys, shapes, strict=True)))


def _by_form(multiply: Callable[..., Any], form: Form, epilogue: Epilogue, x: jax.Array, adapted: Adapted) -> jax.Array:
    """Returns the result of `forward_with_adapter`, or of a function with its arguments, and the kept sums."""
    weight, bias, residual = adapted
    a, b, scales = padded_factors(weight)
    first, second = (a, b) if form.layout == "nk" else (b, a)
    u = ops.matmul(x, first, layout=form.layout)
    adapter = AdapterOperands(u, second, scales if form.layout == "nk" else None)
    operands = MatmulOperands(x, weight.value, bias, None if residual is None else residual[: len(x)])
    options: dict[str, Any] = {"layout": form.layout, "epilogue": epilogue, "out_dtype": x.dtype, "keeps": form.keeps}
    y, z = multiply(operands, adapter, **options)
    return jnp.concatenate([y, *z], axis=1)


def _by_separate_kernels(
    operands: MatmulOperands, adapter: AdapterOperands, *, layout: WeightLayout, epilogue: Epilogue, **options: Any
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns what `forward_with_adapter` does: by products of the weight and of the adapter, and by their sum."""
    x, w, bias, residual = operands
    u, b, scales = adapter
    wide = functools.partial(ops.matmul, layout=layout, out_dtype=ACCUMULATOR)
    if scales is None:  # nothing comes after the sum, so that it is a residual
        return ops.matmul(u, b, layout=layout, residual=wide(x, w), out_dtype=options["out_dtype"]), ()
    parts = range(2) if epilogue.gated else [...]
    sums = [wide(x, w[part], bias=None if bias is None else bias[part]) for part in parts]
    products, factors = [wide(u, b[part]) for part in parts], [scales[part] for part in parts]
    return matmul.add_adapter(sums, products, factors, residual, dtype=x.dtype, epilogue=epilogue, **options)
