"""Products and lookups of examples with weights, computed for all examples at once by operations under contract.

A value that depends on the example has the examples as its first axis here.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core

from detjax import ops
from detjax.contract import INPUT_DTYPES
from detjax.invariant.equations import aval
from detjax.operands.numerics import round_up
from detjax.runtime import backends, varying

_MATRIX_UNITS: Final = "hopper", "mma"
"""Backends whose products do not take float32."""
_UNITS: Final = 128, 64, 32, 16, 8
"""Kernels run fastest on groups whose number of rows is a multiple of one of these."""

_SHARED: Final = frozenset(("dot_general", "gather", "ragged_dot_general"))


def is_shared(eqn: core.JaxprEqn, mapped: Sequence[bool]) -> bool:
    """Returns whether `shared_product` computes an equation, given which operands depend on the example."""
    name = eqn.primitive.name
    if name not in _SHARED or not is_under_contract(eqn):
        return False
    if name == "dot_general":
        (contracted, _), paired = eqn.params["dimension_numbers"]
        if paired[0] and not takes(eqn):
            return False
        return mapped[0] != mapped[1] and math.prod(aval(eqn.invars[0]).shape[k] for k in contracted) > 1
    if name == "ragged_dot_general":
        return mapped[0] and not mapped[1] and takes(eqn) and _is_grouped(eqn)
    return not mapped[0] and mapped[1] and _is_lookup(eqn)


def with_weight_as_stored(eqn: core.JaxprEqn, transposed: Mapping[core.Var, core.JaxprEqn]) -> core.JaxprEqn:
    """Returns an equation; a dot with a transposed weight reads the weight as it is stored.

    An output head that shares its weight with the embedding computes `x @ w.T`. Kernels take either layout, and a copy
    would cost as much as a small batch's product. `transposed` has the transpositions of shared values by result.
    """
    if eqn.primitive.name != "dot_general":
        return eqn
    contracted, paired = map(list, eqn.params["dimension_numbers"])
    invars = list(eqn.invars)
    for side, atom in enumerate(eqn.invars):
        transposition = None if isinstance(atom, core.Literal) else transposed.get(atom)
        if transposition is None:
            continue
        order = transposition.params["permutation"]
        free = [order[k] for k in range(len(order)) if k not in (*contracted[side], *paired[side])]
        if free == sorted(free):  # otherwise the result's axes would change order
            invars[side] = transposition.invars[0]
            contracted[side], paired[side] = (tuple(order[k] for k in axes[side]) for axes in (contracted, paired))
    numbers = tuple(contracted), tuple(paired)
    return eqn.replace(invars=invars, params=eqn.params | {"dimension_numbers": numbers})


def shared_product(eqn: core.JaxprEqn, operands: Sequence[Array], mapped: Sequence[bool]) -> Array:
    """Returns the result `[B, ...]` of an equation for which `is_shared` holds."""
    name = eqn.primitive.name
    operands = varying.over(list(operands), varying.join(operands))  # gradients of operations need operands alike
    if name == "gather":
        return _lookup(eqn, *operands)
    if name == "ragged_dot_general":
        sizes = operands[2] if mapped[2] else jnp.broadcast_to(operands[2], (operands[0].shape[0], *operands[2].shape))
        return _grouped(operands[0], operands[1], sizes, aval(eqn.outvars[0]).dtype)
    return _dot(eqn, *operands, rows_first=mapped[0])


def activations(x: Array, y: Array, dimensions: Any, out_dtype: Any) -> Array:
    """Returns `dot_general` of two operands `[B, ...]` for each example, with all matrix products under contract."""
    (x_contracted, y_contracted), (x_paired, y_paired) = dimensions
    left, shape_left = _matrices(x, [0, *(k + 1 for k in x_paired)], [k + 1 for k in x_contracted])
    right, shape_right = _matrices(y, [0, *(k + 1 for k in y_paired)], [k + 1 for k in y_contracted])
    if left.shape[2] == 1:
        products = lax.mul(left, jnp.swapaxes(right, 1, 2)).astype(out_dtype)
    else:
        products = _groups(left, right, out_dtype)
    pairs = [x.shape[0], *(x.shape[k + 1] for k in x_paired)]
    return products.reshape(*pairs, *shape_left, *shape_right)


def is_under_contract(eqn: core.JaxprEqn) -> bool:
    """Returns whether a contract covers the shapes and dtypes of a product's or lookup's operands and result."""
    floats = [aval(v).dtype for v in (*eqn.invars[:1], *eqn.outvars)]
    if eqn.primitive.name != "gather":
        floats.append(aval(eqn.invars[1]).dtype)
        if floats[0] != floats[2]:
            return False
    return all(str(dtype) in INPUT_DTYPES for dtype in floats) and all(
        math.prod(aval(v).shape) for v in (*eqn.invars, *eqn.outvars)
    )


def takes(eqn: core.JaxprEqn) -> bool:
    """Returns whether the backend multiplies matrices of an equation's dtype in groups."""
    return backends.backend() not in _MATRIX_UNITS or aval(eqn.invars[0]).dtype != jnp.float32


def _groups(x: Array, w: Array, out_dtype: Any) -> Array:
    """Returns the products `[G, M, N]` of groups of rows `[G, M, K]`, each with its matrix `[N, K]`."""
    groups, count, width = x.shape
    rows = round_up(count, _UNITS[-1])
    unit = next(unit for unit in _UNITS if rows % unit == 0)
    flat = jnp.pad(x, ((0, 0), (0, rows - count), (0, 0))).reshape(-1, width)
    sizes = jnp.full((groups,), rows, jnp.int32)
    products = ops.grouped_matmul(flat, w, sizes, layout="nk", unit=unit, out_dtype=out_dtype)
    return products.reshape(groups, rows, -1)[:, :count]


def _plain(x: Array, w: Array, **options: Any) -> Array:
    """Returns `ops.matmul`, by plain JAX if the backend's matrix unit does not support the dtype."""
    portable = backends.backend() in _MATRIX_UNITS and x.dtype == jnp.float32
    with backends.use_backend("portable" if portable else None):
        return ops.matmul(x, w, **options)


def _matrices(x: Array, paired: Sequence[int], contracted: Sequence[int]) -> tuple[Array, list[int]]:
    """Returns an operand as `[groups, rows, K]`, and the sizes of the axes that form its rows."""
    free = [k for k in range(x.ndim) if k not in (*paired, *contracted)]
    sizes = [[x.shape[k] for k in axes] for axes in (paired, free, contracted)]
    return x.transpose(*paired, *free, *contracted).reshape(*map(math.prod, sizes)), sizes[1]


def _dot(eqn: core.JaxprEqn, x: Array, w: Array, *, rows_first: bool) -> Array:
    """Returns the dot of examples and a weight; the examples are one more free axis."""
    contracted, paired = eqn.params["dimension_numbers"]
    if not rows_first:
        x, w, contracted, paired = w, x, contracted[::-1], paired[::-1]
    x_paired = [k + 1 for k in paired[0]]
    rows, free = _matrices(x, x_paired, [k + 1 for k in contracted[0]])
    out_dtype = aval(eqn.outvars[0]).dtype
    width = rows.shape[2]
    w_free = [k for k in range(w.ndim) if k not in (*paired[1], *contracted[1])]
    outputs = [w.shape[k] for k in w_free]
    if x_paired:
        result = _groups(rows, _matrices(w, paired[1], contracted[1])[0], out_dtype)
    elif tuple(contracted[1]) == tuple(range(len(contracted[1]))):
        result = _plain(rows[0], w.reshape(width, -1), out_dtype=out_dtype)
    else:
        result = ops.matmul(
            rows[0], w.transpose(*w_free, *contracted[1]).reshape(-1, width), layout="nk", out_dtype=out_dtype
        )
    pairs = [x.shape[k] for k in x_paired]
    result = result.reshape(*pairs, *free, *outputs)
    result = jnp.moveaxis(result, len(pairs), 0)  # the examples, which are the first free axis
    if not rows_first:  # the weight's free axes come before the example's
        first = 1 + len(pairs)
        after = len(free) - 1
        result = jnp.moveaxis(result, range(first, first + after), range(result.ndim - after, result.ndim))
    return result


def _is_lookup(eqn: core.JaxprEqn) -> bool:
    """Returns whether a gather takes whole rows of a table `[V, D]`."""
    numbers, table = eqn.params["dimension_numbers"], aval(eqn.invars[0])
    indices = aval(eqn.invars[1])
    return (
        table.ndim == 2
        and tuple(numbers.start_index_map) == tuple(numbers.collapsed_slice_dims) == (0,)
        and not numbers.operand_batching_dims
        and tuple(eqn.params["slice_sizes"]) == (1, table.shape[1])
        and tuple(numbers.offset_dims) == (indices.ndim - 1,)
        and (eqn.params["fill_value"] is None or math.isnan(eqn.params["fill_value"]))
    )


def _lookup(eqn: core.JaxprEqn, table: Array, indices: Array) -> Array:
    """Returns rows of a table; indices out of range are filled or clamped as the gather says."""
    tokens = indices[..., 0]
    inside = jnp.clip(tokens, 0, table.shape[0] - 1)
    rows = ops.embed(inside.astype(jnp.int32), table)
    if eqn.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return rows
    known = jnp.broadcast_to((inside == tokens)[..., None], rows.shape)
    return jnp.where(known, rows, jnp.full(rows.shape, jnp.nan, rows.dtype))


def _is_grouped(eqn: core.JaxprEqn) -> bool:
    """Returns whether a ragged dot is `x[m] @ w[group of m]` with groups along x's first axis."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    return (
        aval(eqn.invars[0]).ndim == 2
        and aval(eqn.invars[1]).ndim == 3
        and aval(eqn.invars[2]).ndim == 1
        and tuple(map(tuple, numbers.dot_dimension_numbers[0])) == ((1,), (1,))
        and not numbers.dot_dimension_numbers[1][0]
        and tuple(numbers.lhs_ragged_dimensions) == tuple(numbers.rhs_group_dimensions) == (0,)
    )


def _grouped(x: Array, w: Array, sizes: Array, out_dtype: Any) -> Array:
    """Returns the ragged dots `[B, M, N]` of examples `[B, M, K]`, by sorting the rows of all examples by group."""
    batch, count, width = x.shape
    ends = jnp.cumsum(sizes, axis=1, dtype=jnp.int32)
    group = jnp.sum(jnp.arange(count, dtype=jnp.int32)[None, :, None] >= ends[:, None, :], axis=2, dtype=jnp.int32)
    order = jnp.argsort(group.reshape(-1), stable=True)
    all_sizes = jnp.sum(sizes, axis=0, dtype=jnp.int32)
    result = ops.grouped_matmul(x.reshape(-1, width)[order], w, all_sizes, out_dtype=out_dtype)
    result = result[jnp.argsort(order)].reshape(batch, count, -1)
    known = jnp.broadcast_to((group < w.shape[0])[..., None], result.shape)
    return jnp.where(known, result, jnp.zeros_like(result))
