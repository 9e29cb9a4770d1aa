"""Parameters that keep the codes and scales of their stored matrices."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from detjax.models.checkpoint.matrix_arrays import MatrixArrays, StoredMatrix
from detjax.models.checkpoint.quantization_schemes import Quantized, Scheme
from detjax.models.checkpoint.weight_files import StoredTensor
from detjax.models.configuration.json_object import CheckpointError
from detjax.models.parts.parameters import Tensors
from detjax.operands.quantized_weight import INT4_ZERO, QuantizedActivations, QuantizedFormat, QuantizedWeight

_SMALLEST_SCALE: Final = 2.0**-100
"""Smaller scales may have subnormal products, which some devices take as zeros."""


@dataclasses.dataclass(frozen=True)
class QuantizedParameter:
    """A parameter that is read as codes and scales.

    Attributes:
        tensors: how the parameter is made of the stored matrices.
        matrices: these matrices, in order.
        shape: the parameter's shape.
        dtype: the dtype of the widened weight.
        activations: the scales of quantized activations; None: they are plain.
    """

    tensors: Tensors
    matrices: tuple[StoredMatrix, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    activations: QuantizedActivations | None

    def read(self) -> QuantizedWeight | None:
        """Returns the weight, its arrays on the host; None: only plain numbers have the bits of the plain weight.

        Raises:
            CheckpointError: a file is unreadable, or a matrix does not match its format.
        """
        arrays = [matrix.arrays() for matrix in self.matrices]
        kinds = {(one.numbers, one.columns, one.group, one.table is None) for one in arrays}
        if len(kinds) > 1:
            if self.activations is not None:
                raise _mixture(self.matrices, "different formats")
            return None
        if self.activations is None and not all(map(self._is_in_range, arrays)):
            return None
        return self._joined(arrays)

    def _is_in_range(self, arrays: MatrixArrays) -> bool:
        """Returns whether products are neither subnormal nor beyond the range of the dtype."""
        largest = float(np.finfo(np.float16).max) if self.dtype == np.float16 else 3e38
        return arrays.largest() <= largest and arrays.smallest_scale() >= _SMALLEST_SCALE

    def _joined(self, arrays: Sequence[MatrixArrays]) -> QuantizedWeight:
        """Joins matrices as the parameter joins its tensors."""
        first, tensors = arrays[0], dataclasses.replace(self.tensors, transposed=False)
        zeros = None
        if any(one.zeros is not None for one in arrays):
            usual = [
                np.full(one.scales.shape, INT4_ZERO, np.uint8) if one.zeros is None else one.zeros for one in arrays
            ]
            zeros = tensors.join(usual)
        dtypes = {one.scales.dtype for one in arrays}
        scales = [one.scales if len(dtypes) == 1 else one.scales.astype(np.float32) for one in arrays]
        codes = tensors.join(one.codes for one in arrays)
        numbers = [np.full((*one.codes.shape[:-1], 1), index, np.int32) for index, one in enumerate(arrays)]
        shared, source = _shared(arrays, tensors.join(numbers)[..., 0])
        activations = self.activations
        described = QuantizedFormat(first.numbers, first.columns, first.group, self.dtype.name, activations)
        return QuantizedWeight(codes, tensors.join(scales), zeros, source, **shared, format=described)


def _shared(arrays: Sequence[MatrixArrays], index: np.ndarray) -> tuple[dict[str, Any], np.ndarray | None]:
    """Returns the arrays that rows share, and the source of each row, given each row's index in `arrays`.

    Equal entries are one source. The matrices of a stack have the same number of sources.
    """
    entries = {"tables": [one.table for one in arrays], "input_scales": [one.input_scale for one in arrays]}
    entries["groups"] = [one.groups for one in arrays]
    if any(groups is not None for groups in entries["groups"]):
        usual = np.arange(arrays[0].columns, dtype=np.int32) // arrays[0].group
        entries["groups"] = [usual if groups is None else groups for groups in entries["groups"]]
    present = {name: values for name, values in entries.items() if values[0] is not None}
    if not present:
        return {}, None
    keys = [b"".join(np.asarray(values[i]).tobytes() for values in present.values()) for i in range(len(arrays))]
    first = [keys.index(key) for key in keys]
    flat = np.array(first)[index.reshape(-1, index.shape[-1])]
    sources = [np.unique(rows) for rows in flat]
    count = max(map(len, sources))
    padded = np.stack([np.resize(one, count) for one in sources]).reshape(*index.shape[:-1], count)
    shared = {}
    for name, values in present.items():
        table = np.stack([np.asarray(value) for value in values])
        shared[name] = table[padded]
    if count == 1:
        return shared, None
    source = np.stack([np.searchsorted(one, rows) for one, rows in zip(sources, flat, strict=True)])
    return shared, source.reshape(index.shape).astype(np.uint8)


def quantized_parameter(
    tensors: Tensors,
    stored: Sequence[StoredTensor],
    shape: tuple[int, ...],
    dtype: np.dtype,
    *,
    quantized: Quantized,
    is_product: bool,
    is_always_widened: bool,
) -> QuantizedParameter | None:
    """Returns the parameter that keeps its codes; None: it is read as plain numbers.

    Args:
        tensors: how the parameter is made of its tensors.
        stored: its tensors.
        shape: its shape.
        dtype: its dtype in the model.
        quantized: the reading of quantized weights.
        is_product: whether the parameter is only multiplied by, in a product that takes codes.
        is_always_widened: whether the contract reads it as plain numbers, whatever activations the checkpoint asks for.

    Raises:
        CheckpointError: the checkpoint asks for quantized activations of a product that does not take them.
    """
    matrices = [tensor for tensor in stored if isinstance(tensor, StoredMatrix)]
    if quantized == "widened" or not matrices:
        return None
    schemes = [one.scheme for one in matrices if isinstance(one.scheme, Scheme)]
    activations: set[QuantizedActivations | None] = {None}
    if quantized == "computed":
        activations = {scheme.computed(one.name, str(one.file)) for one, scheme in zip(matrices, schemes, strict=True)}
    if is_always_widened:
        return None
    if len(activations) > 1 or (activations != {None} and len(matrices) < len(stored)):
        raise _mixture(stored, "quantized and plain activations")
    (chosen,) = activations
    if not is_product:
        if chosen is not None:
            raise CheckpointError(
                f"{matrices[0].file}: tensor {matrices[0].name!r} is quantized ({matrices[0].format}) with quantized "
                "activations; accepted: plain tensors of embeddings, heads and routers, or quantized='weights' or "
                "'widened'"
            )
        return None
    if len(matrices) < len(stored) or any(one.transposed != tensors.transposed for one in matrices):
        if chosen is not None:
            raise _mixture(stored, "inputs as rows")
        return None
    return QuantizedParameter(tensors, tuple(matrices), shape, dtype, chosen)


def _mixture(stored: Sequence[StoredTensor], what: str) -> CheckpointError:
    names = ", ".join(repr(one.name) for one in stored[:4]) + (", ..." if len(stored) > 4 else "")
    formats = ", ".join(sorted({one.format for one in stored}))
    return CheckpointError(
        f"{stored[0].file}: tensors {names} of one product have {what} ({formats}); accepted: one scheme for all of "
        "them, or quantized='weights' or 'widened'"
    )
