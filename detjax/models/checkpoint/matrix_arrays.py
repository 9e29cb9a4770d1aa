"""A stored matrix in the one form that all formats are read into: codes, scales and zero points by output."""

import dataclasses
from typing import Final

import ml_dtypes
import numpy as np

from detjax.models.checkpoint.weight_files import StoredTensor
from detjax.models.configuration.json_object import CheckpointError
from detjax.operands.quantized_weight import E2M1, INT4_ZERO, CodeNumbers

_NUMBERS_AT_ONCE: Final = 1 << 20
"""The approximate number of numbers that are widened at a time."""
_BYTES: Final = np.arange(256, dtype=np.uint8)
E4M3: Final = _BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
"""The numbers of e4m3 codes."""
POWERS_OF_TWO: Final = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))
"""The numbers of exponents of eight bits; the last one stands for NaN."""


@dataclasses.dataclass(frozen=True, eq=False)
class MatrixArrays:
    """A matrix `[..., N, K]`, or several of one shape, as codes and scales; see `operands.QuantizedWeight`.

    Attributes:
        numbers: the numbers of codes.
        columns: K.
        group: consecutive columns that share a scale.
        codes: bytes, `[..., N, K]` or `[..., N, ceil(K / 2)]`.
        scales: `[..., N, G]`, floating-point numbers or bytes that index `table`.
        zeros: zero points, bytes `[..., N, G]`; None: the usual one.
        table: the float32 numbers of scales that are bytes.
        groups: the group of each column; None: consecutive columns.
        input_scale: the static scale of activations; None: it is computed, or activations are plain.
    """

    numbers: CodeNumbers
    columns: int
    group: int
    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None
    table: np.ndarray | None = None
    groups: np.ndarray | None = None
    input_scale: np.float32 | None = None

    def widened(self, dtype: np.dtype) -> np.ndarray:
        """Returns the plain matrix, `[..., N, K]`: products in float32, rounded to a dtype, a few rows at a time."""
        *others, rows, _ = self.codes.shape
        result = np.empty((int(np.prod(others, dtype=int)) * rows, self.columns), dtype)
        codes, scales = (x.reshape(len(result), x.shape[-1]) for x in (self.codes, self.scales))
        zeros = None if self.zeros is None else self.zeros.reshape(scales.shape)
        step = max(1, _NUMBERS_AT_ONCE // self.columns)
        for begin in range(0, len(result), step):
            part = slice(begin, begin + step)
            numbers = self._numbers(codes[part], None if zeros is None else zeros[part])
            with np.errstate(over="ignore", invalid="ignore"):
                result[part] = (numbers * self._by_column(self._scales(scales[part]))).astype(dtype)
        return result.reshape(*others, rows, self.columns)

    def largest(self) -> float:
        """Returns a bound of the numbers' magnitudes."""
        largest = {"int4": 15.0, "e2m1": 6.0, "e4m3": 448.0}[self.numbers]
        with np.errstate(over="ignore"):
            return float(np.max(np.abs(self._scales(self.scales)))) * largest

    def smallest_scale(self) -> float:
        """Returns the smallest magnitude of a scale that is not zero; 1 if all are zero."""
        scales = np.abs(self._scales(self.scales))
        return float(np.min(scales, initial=1, where=scales > 0))

    def _numbers(self, codes: np.ndarray, zeros: np.ndarray | None) -> np.ndarray:
        if self.numbers == "e4m3":
            return E4M3[codes]
        nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)[:, : self.columns]
        if self.numbers == "e2m1":
            return E2M1[nibbles]
        points = INT4_ZERO if zeros is None else self._by_column(zeros).astype(np.int16)
        return (nibbles.astype(np.int16) - points).astype(np.float32)

    def _scales(self, scales: np.ndarray) -> np.ndarray:
        return scales.astype(np.float32) if self.table is None else self.table[scales]

    def _by_column(self, x: np.ndarray) -> np.ndarray:
        return x.repeat(self.group, -1)[..., : self.columns] if self.groups is None else x[..., self.groups]


@dataclasses.dataclass(frozen=True, eq=False)
class StoredMatrix(StoredTensor):
    """The plain tensor that several stored tensors encode.

    Attributes:
        parts: the stored tensors by the ends of their names.
        scheme: the matrix's scheme; see `quantization_schemes.Scheme`.
        transposed: whether rows and columns are swapped in the plain tensor.
    """

    parts: dict[str, StoredTensor]
    scheme: object
    transposed: bool
    has_parts = False

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the products."""
        return np.dtype(np.float32)

    def arrays(self) -> MatrixArrays:
        """Returns the matrix in codes and scales."""
        raise NotImplementedError

    def read(self, dtype: np.dtype | None = None) -> np.ndarray:
        """Returns the values in a dtype (default: float32), rounded to nearest even.

        Raises:
            CheckpointError: a file is unreadable, a code or a scale is NaN, or a value would overflow.
        """
        dtype = self.dtype if dtype is None else dtype
        values = self.arrays().widened(dtype)
        if not np.isfinite(values).all():
            raise beyond_range(next(iter(self.parts.values())), f"values beyond the range of {dtype}", dtype)
        return values.swapaxes(-1, -2) if self.transposed else values


def beyond_range(codes: StoredTensor, what: str, dtype: np.dtype) -> CheckpointError:
    """Returns the error for a matrix with a number that a dtype does not hold."""
    return CheckpointError(
        f"{codes.file}: tensor {codes.name!r} holds {what}; accepted: finite values that {dtype} holds, or another "
        "dtype"
    )
