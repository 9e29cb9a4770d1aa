"""Weights that a checkpoint stores as low-precision numbers in blocks, each with a scale.

A value is the stored number times its block's scale, as a float32 product, rounded once to the requested dtype, to
nearest even.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from jaxtyping import Float32

from detjax.models.checkpoint.matrix_arrays import POWERS_OF_TWO, MatrixArrays, StoredMatrix, beyond_range
from detjax.models.checkpoint.weight_files import StoredTensor
from detjax.models.configuration.json_object import CheckpointError
from detjax.operands.quantized_weight import CodeNumbers

_NUMBERS_AT_ONCE: Final = 1 << 20
"""The approximate number of numbers that are read and multiplied at a time."""

_CODE_BYTES: Final = {"U8": 1, "I8": 1, "F8_E4M3": 1, "I32": 4}


def finite_scales(scales: StoredTensor) -> Float32[np.ndarray, "..."]:
    """Returns scales that are stored as floating-point numbers.

    Raises:
        CheckpointError: a scale is infinite or NaN, or the file is unreadable.
    """
    if scales.format == "F8_E8M0":
        values = POWERS_OF_TWO[scales.read_bytes(0, scales.size).reshape(scales.shape)]
    else:
        values = scales.read(np.dtype(np.float32))
    if not np.isfinite(values).all():
        raise CheckpointError(f"{scales.file}: tensor {scales.name!r} holds infinite scales or NaN; accepted: numbers")
    return values


@dataclasses.dataclass(frozen=True, eq=False)
class BlockFormat:
    """A storage format of matrices `[..., rows, columns]` whose columns are consecutive.

    Attributes:
        name: the format's name in errors.
        codes: the suffix of the tensor of codes, after the name of the plain tensor.
        scales: the suffix of the tensor of scales, `[..., rows / block[0], columns / block[1]]`, each rounded up: the
            last blocks may be smaller.
        code_format: safetensors' name for the dtype of the codes.
        scale_formats: the dtypes that scales may have.
        numbers: the numbers that each byte of codes encodes, in order.
        block: the rows and the columns of a block.
        shape: the suffix of the tensor of the matrices' shape, for rows that do not fill their last code; None: no
            such tensor.
        row_axes: the number of trailing axes of the codes that make up a row.
        transposed: whether rows and columns are swapped in the plain tensor.
        read_scales: returns the scales as float32, or raises `CheckpointError`.
        kind: the numbers of codes as products know them.
        scale_table: the numbers of scales of one byte; None: scales are floating-point numbers.
    """

    name: str
    codes: str
    scales: str
    code_format: str
    scale_formats: tuple[str, ...]
    numbers: Float32[np.ndarray, "256 n"]
    block: tuple[int, int]
    shape: str | None = None
    row_axes: int = 1
    transposed: bool = False
    read_scales: Callable[[StoredTensor], np.ndarray] = finite_scales
    kind: CodeNumbers = "e4m3"
    scale_table: Float32[np.ndarray, "256"] | None = None

    @property
    def endings(self) -> tuple[str, ...]:
        """The suffixes of the tensors that encode one plain tensor: codes, scales, shape."""
        return (self.codes, self.scales) if self.shape is None else (self.codes, self.scales, self.shape)

    def plain_name(self, name: str, tensor: StoredTensor) -> str | None:
        """Returns the name of the plain tensor that the tensor of a name belongs to; None: it is plain already."""
        for ending in filter(None, self.endings):
            if name.endswith(ending):
                return name.removesuffix(ending)
        return name if not self.codes and tensor.format == self.code_format else None

    def dequantized(self, stored: Mapping[str, StoredTensor], scheme: object = None) -> dict[str, StoredTensor]:
        """Returns the tensors, by the same names, with codes, scales and shape replaced by plain tensors.

        Raises:
            CheckpointError: one of them is missing, or a shape or dtype does not match the format.
        """
        plain = dict(stored)
        for name in dict.fromkeys(itertools.starmap(self.plain_name, stored.items())):
            if name is not None:
                parts = {ending: plain.pop(name + ending, None) for ending in self.endings}
                plain[name] = self.matrix(name, {end: part for end, part in parts.items() if part is not None}, scheme)
        return plain

    def matrix(self, name: str, parts: dict[str, StoredTensor], scheme: object = None) -> StoredMatrix:
        """Returns the plain tensor of a name, given its tensors by the ends of their names.

        Raises:
            CheckpointError: one of them is missing, or a shape or dtype does not match the format.
        """
        for end in self.endings:
            if end not in parts:
                present = next(parts[ending] for ending in self.endings if ending in parts)
                raise CheckpointError(
                    f"{present.file}: tensor {name + end!r} is missing, which belongs to {present.name!r}; "
                    f"accepted: all of {', '.join(repr(name + ending) for ending in self.endings)}"
                )
        codes, scales, shape = parts[self.codes], parts[self.scales], parts.get(self.shape or "-")
        integers = ("I64", "I32")
        accepted = [(codes, (self.code_format,)), (scales, self.scale_formats), (shape, integers)]
        for tensor, formats in accepted:
            if tensor is not None and tensor.format not in formats:
                raise CheckpointError(
                    f"{tensor.file}: tensor {tensor.name!r} is stored as {tensor.format}; accepted: "
                    f"{', '.join(formats)}, as {self.name} has it"
                )
        if len(codes.shape) <= self.row_axes or 0 in codes.shape:
            raise CheckpointError(
                f"{codes.file}: tensor {codes.name!r} has shape {codes.shape}; accepted: at least {self.row_axes + 1} "
                f"axes, none of them 0, as {self.name} has it"
            )
        *others, rows = codes.shape[: -self.row_axes]
        per_code = _CODE_BYTES[self.code_format] * self.numbers.shape[-1]
        columns = math.prod(codes.shape[-self.row_axes :]) * per_code
        if shape is not None:
            columns = self._stated_columns(shape, (*others, rows), columns, per_code)
        grid = (*others, -(-rows // self.block[0]), -(-columns // self.block[1]))
        if scales.shape != grid:
            raise CheckpointError(
                f"{scales.file}: tensor {scales.name!r} has shape {scales.shape}; accepted: {grid}, as {codes.name!r} "
                f"has {codes.shape} and blocks of {self.name} have {self.block[0]} rows and {self.block[1]} columns"
            )
        axes = (*others, columns, rows) if self.transposed else (*others, rows, columns)
        size = sum(part.size for part in parts.values())
        return _Plain(name, codes.file, axes, self.name, size, None, 0, parts, scheme, self.transposed, self)

    def _stated_columns(self, shape: StoredTensor, rows: tuple[int, ...], columns: int, per_code: int) -> int:
        """Returns the columns that a shape tensor states, of at most `columns`, the codes' capacity."""
        stated = tuple(shape.read().reshape(-1).tolist())
        if stated[:-1] != rows or not columns - per_code < stated[-1] <= columns:
            raise CheckpointError(
                f"{shape.file}: tensor {shape.name!r} holds {stated}; accepted: {(*rows, columns)}, or up to "
                f"{per_code - 1} fewer columns, as the codes have"
            )
        return stated[-1]


@dataclasses.dataclass(frozen=True, eq=False)
class _Plain(StoredMatrix):
    """A plain tensor in a block format that is decoded from its parts: codes, scales and, if stored, the shape."""

    block_format: BlockFormat

    def arrays(self) -> MatrixArrays:
        """Returns the matrix in codes and scales; the scales of a block of several rows are repeated."""
        stored, codes = self.block_format, self.parts[self.block_format.codes]
        *others, rows, columns = self._axes
        content = codes.read_bytes(0, codes.size).reshape(*others, rows, -1)
        if stored.kind == "e4m3":
            if ((content & 127) == 127).any():
                raise beyond_range(codes, "NaN", self.dtype)
        else:
            content = np.ascontiguousarray(content[..., : -(-columns // 2)])
        scales = stored.read_scales(self.parts[stored.scales])
        if stored.scale_table is not None:
            raw = self.parts[stored.scales]
            scales = raw.read_bytes(0, raw.size).reshape(raw.shape)
        elif stored.block[0] == 1 and self.parts[stored.scales].format != "F8_E8M0":
            scales = self.parts[stored.scales].read()  # in the stored dtype, which may be smaller
        scales = scales.repeat(stored.block[0], axis=-2)[..., :rows, :]
        return MatrixArrays(stored.kind, columns, stored.block[1], content, scales, table=stored.scale_table)

    @property
    def _axes(self) -> tuple[int, ...]:
        """The shape with rows before columns."""
        *others, rows, columns = self.shape
        return (*others, columns, rows) if self.transposed else self.shape

    def read(self, dtype: np.dtype | None = None) -> np.ndarray:
        """Returns the values in a dtype (default: float32), rounded to nearest even.

        Codes are read and multiplied a few rows at a time, so that only the result is held in memory.

        Raises:
            CheckpointError: a file is unreadable, a code or a scale is NaN, or a value would overflow.
        """
        stored, codes = self.block_format, self.parts[self.block_format.codes]
        dtype = self.dtype if dtype is None else dtype
        scales = stored.read_scales(self.parts[stored.scales])
        *others, rows, columns = self._axes
        values = np.empty((math.prod(others), rows, columns), dtype)
        by_matrix = scales.reshape(len(values), *scales.shape[-2:])
        row_bytes = codes.size // (len(values) * rows)
        height, width = stored.block
        step = max(1, _NUMBERS_AT_ONCE // (columns * height)) * height
        for matrix, begin in itertools.product(range(len(values)), range(0, rows, step)):
            count = min(step, rows - begin)
            content = codes.read_bytes((matrix * rows + begin) * row_bytes, count * row_bytes)
            numbers = stored.numbers[content].reshape(count, -1)[:, :columns]
            factors = by_matrix[matrix, begin // height : -(-(begin + count) // height)]
            factors = factors.repeat(width, axis=1)[:, :columns].repeat(height, axis=0)[:count]
            with np.errstate(over="ignore"):
                values[matrix, begin : begin + count] = (numbers * factors).astype(dtype)
            if not np.isfinite(values[matrix, begin : begin + count]).all():
                raise beyond_range(
                    codes, "NaN" if np.isnan(numbers).any() else f"values beyond the range of {dtype}", dtype
                )
        values = values.reshape(*others, rows, columns)
        return values.swapaxes(-1, -2) if self.transposed else values
