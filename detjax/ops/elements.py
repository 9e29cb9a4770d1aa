"""Arithmetic of single elements, and sums of squares, whose bits depend on neither shapes nor the program around."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from jaxtyping import Array, Float, Float32, PyTree

from detjax.ops.dispatch import Operation

_MODULES = {
    "portable": "detjax.portable.elements",
    "hopper": "detjax.pallas.hopper.elements",
    "tpu": "detjax.portable.elements",
    "stock": "detjax.portable.elements",
}
_MAP_ELEMENTS = Operation("map_elements", _MODULES)
_SLICE_SQUARES = Operation("slice_squares", _MODULES)


def map_elements(
    fn: Callable[..., PyTree[Array]],
    *arrays: Array,
    scalars: Sequence[Array] = (),
    overwritten: Mapping[int, int] = MappingProxyType({}),
) -> PyTree[Array]:
    """Returns `fn(*arrays, *scalars)`, where each element depends on the elements at the same place alone.

    Compilers fuse products with sums as they see fit, and CPUs compute the last elements of an array by other
    instructions than those before. Here the function's own barriers say what is rounded, and nothing around it matters.

    Args:
        fn: a function of arrays of one shape and of scalars, which returns arrays of that shape.
        arrays: of one shape, with one element at least.
        scalars: what all elements share.
        overwritten: for some results, by their index among the leaves, the index of the array whose memory they take if
            the program may overwrite it, because it was donated. Both have one dtype.
    """
    return _MAP_ELEMENTS.module().map_elements(fn, *arrays, scalars=scalars, overwritten=overwritten)


def slice_squares(leaf: Float[Array, "..."], slices: int) -> Float32[Array, "slices"]:
    """Returns the sum of the squares of each slice of an array.

    The elements, filled up with zeros, are cut into so many slices of rows of `contract.LANES` elements. A row is added
    as the contract adds rows, and then to the rows before it.

    Args:
        leaf: the array.
        slices: their number.
    """
    return _SLICE_SQUARES.module().slice_squares(leaf, slices)
