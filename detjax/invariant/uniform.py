"""Arrays without rows: the axes along which they are uniform, and what is known of their integers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core

from detjax.invariant import equations
from detjax.invariant.equations import aval
from detjax.invariant.places import Grid, Place, Rows, Shared, grid_axis

REDUCTIONS: Final = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin".split()
)
"""Primitives that reduce axes to one element."""

ALONG: Final[Mapping[str, str]] = {
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "top_k"), "axis"),
    "sort": "dimension",
    "rev": "dimensions",
}
"""Primitives that mix elements along some axes, and the parameter that names these axes."""

_MAX_CONSTANT: Final = 1 << 20
"""Maximum size of a constant that is read, in elements: constants that a function fills for a batch are small."""


def constant_place(value: Any) -> Shared | None:
    """Returns the place of a constant, with the axes along which its elements are equal; None if it is large."""
    is_concrete = isinstance(value, (np.ndarray, jax.Array)) and not isinstance(value, Tracer)
    if not is_concrete or not 0 < value.size <= _MAX_CONSTANT or value.dtype.itemsize not in (1, 2, 4, 8):
        return None
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return None
    bits = np.ascontiguousarray(np.asarray(value)).view(f"u{value.dtype.itemsize}").reshape(value.shape)
    return Shared(frozenset(k for k in range(bits.ndim) if (bits == bits.take([0], axis=k)).all()))


def is_uniform(place: Shared, var: Any, axis: int) -> bool:
    shape = aval(var).shape
    return not shape or axis in place.uniform or shape[axis] == 1


def is_uniform_along(place: Place, var: Any, axis: int) -> bool:
    return isinstance(place, Shared) and is_uniform(place, var, axis)


def parameter_axes(eqn: core.JaxprEqn, parameter: str) -> tuple[int, ...]:
    axes = eqn.params.get(parameter, -1)
    ndim = aval(eqn.invars[0]).ndim
    return tuple(int(axis) % ndim for axis in (axes if isinstance(axes, (tuple, list)) else (axes,)))


def shifted(place: Place, by: int) -> Place:
    """Returns the place in an array with `by` more axes in front."""
    if isinstance(place, Rows):
        return place.on(place.axis + by)
    if isinstance(place, Shared):
        return Shared(frozenset(axis + by for axis in place.uniform if axis + by >= 0))
    return place


def integers(eqn: core.JaxprEqn, places: Sequence[Shared]) -> tuple[Grid | None, int | None]:
    """Returns the grid of integers without rows, and the number that all of them equal, where known."""
    name = eqn.primitive.name
    if name == "iota":
        shape, axis = eqn.params["shape"], eqn.params["dimension"]
        return Grid(math.prod(shape[axis + 1 :]), shape[axis]), None
    if not places:
        return None, None
    grid, number = places[0].grid, places[0].number
    if name not in ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "convert_element_type", "copy"):
        return None, None
    old, new = aval(eqn.invars[0]), aval(eqn.outvars[0])
    if name == "convert_element_type" and not jnp.issubdtype(old.dtype, jnp.integer):
        return None, None
    if grid is None or math.prod(old.shape) == math.prod(new.shape):
        return grid, number
    axis = grid_axis(grid, old.shape)
    if name != "broadcast_in_dim" or axis is None:
        return None, number
    axis = eqn.params["broadcast_dimensions"][axis]
    return Grid(math.prod(new.shape[axis + 1 :]), grid.size) if new.shape[axis] == grid.size else None, number


def keeps_order(eqn: core.JaxprEqn, places: Sequence[Place]) -> bool:
    """Returns whether an equation keeps rows separate that an operation has reordered along their first axis."""
    name = eqn.primitive.name
    makes_inexact = any(map(equations.is_inexact, eqn.outvars))
    if name == "gather":  # each row looks up an integer, such as its request's index, which operations take
        return isinstance(places[0], Shared) and not makes_inexact
    if name in equations.ELEMENTWISE:
        operands = [(place, v) for place, v in zip(places, eqn.invars, strict=True) if isinstance(place, Shared)]
        is_numbered = any(aval(v).shape and 0 not in place.uniform for place, v in operands)
        return not is_numbered and (not makes_inexact or any(map(equations.is_inexact, eqn.invars)))
    return name in ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose")


def uniform_axes(eqn: core.JaxprEqn, places: list[Shared], var: Any) -> frozenset[int]:
    name, params = eqn.primitive.name, eqn.params
    if name == "iota":
        return frozenset(range(len(params["shape"]))) - {params["dimension"]}
    if not places:
        return frozenset()
    uniform = places[0].uniform
    ndim = getattr(aval(eqn.invars[0]), "ndim", 0)
    if name == "broadcast_in_dim":
        old, new = aval(eqn.invars[0]).shape, params["shape"]
        dims = params["broadcast_dimensions"]
        varied = {axis for k, axis in enumerate(dims) if k not in uniform and old[k] == new[axis] != 1}
        return frozenset(range(len(new))) - varied
    if name in equations.ELEMENTWISE:
        arrays = [place.uniform for place, v in zip(places, eqn.invars, strict=True) if aval(v).shape]
        return frozenset.intersection(*arrays) if arrays else frozenset()
    if name == "transpose":
        return frozenset(k for k, axis in enumerate(params["permutation"]) if axis in uniform)
    if name == "reshape":
        old, new = ([k for k, size in enumerate(aval(v).shape) if size != 1] for v in (eqn.invars[0], var))
        sizes = [[aval(v).shape[k] for k in axes] for v, axes in ((eqn.invars[0], old), (var, new))]
        return (
            frozenset(n for k, n in zip(old, new, strict=True) if k in uniform) if sizes[0] == sizes[1] else frozenset()
        )
    if name in ("squeeze", *REDUCTIONS):
        axes = parameter_axes(eqn, "dimensions" if name == "squeeze" else "axes" if "axes" in params else "axis")
        kept = [k for k in range(ndim) if k not in axes]
        return frozenset(n for n, k in enumerate(kept) if k in uniform)
    if name in ("slice", "dynamic_slice", "split"):
        return uniform
    if name == "pad":
        unpadded = {k for k, widths in enumerate(params["padding_config"]) if tuple(widths) == (0, 0, 0)}
        return uniform & unpadded
    if name == "tile":
        return uniform | {axis for axis, size in enumerate(aval(eqn.invars[0]).shape) if size == 1}
    if name in ALONG:
        return uniform - set(parameter_axes(eqn, ALONG[name]))
    if name == "concatenate":
        return frozenset.intersection(*(place.uniform for place in places)) - {params["dimension"]}
    if name == "dynamic_update_slice":
        whole = {k for k in range(ndim) if aval(eqn.invars[0]).shape[k] == aval(eqn.invars[1]).shape[k]}
        return uniform & places[1].uniform & whole
    if name == "gather":
        numbers = params["dimension_numbers"]
        batch_axes = [k for k in range(aval(var).ndim) if k not in numbers.offset_dims]
        paired = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
        indices = places[1].uniform
        looked_up = {
            axis for n, axis in enumerate(batch_axes) if n in indices and (n not in paired or paired[n] in uniform)
        }
        removed = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        kept = [k for k in range(ndim) if k not in removed]
        return frozenset(looked_up | {axis for k, axis in zip(kept, numbers.offset_dims, strict=True) if k in uniform})
    if name == "dot_general":
        contracted, paired = params["dimension_numbers"]
        pairs = [i in places[0].uniform and j in places[1].uniform for i, j in zip(*paired, strict=True)]
        for place, v, c, b in zip(places, eqn.invars, contracted, paired, strict=True):
            pairs += [k in place.uniform for k in range(aval(v).ndim) if k not in (*c, *b)]
        return frozenset(k for k, same in enumerate(pairs) if same)
    return frozenset()
