"""Formats of quantized matrices other than blocks: each reads its tensors into `MatrixArrays`."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from detjax.models.checkpoint.matrix_arrays import E4M3, POWERS_OF_TWO, MatrixArrays, StoredMatrix
from detjax.models.checkpoint.weight_files import StoredTensor
from detjax.models.configuration.json_object import CheckpointError

type Parts = Mapping[str, StoredTensor]

_AWQ: Final = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])
"""For each of a word's eight columns, the four bits that hold it in AWQ."""
_V1_ZERO: Final = 15
"""The stored zero point of GPTQ's first format that readers disagree about."""
_FLOATS: Final = ("F32", "BF16", "F16")


@dataclasses.dataclass(frozen=True)
class MatrixFormat:
    """The tensors of a matrix and their meaning.

    Attributes:
        name: the format's name in errors.
        formats: the accepted dtypes of each tensor by the end of its name after the module's; the first one has codes.
        optional: the ends of names of tensors that may be missing.
        shape: returns the matrix's outputs and inputs, given its tensors.
        read: returns the matrix's arrays, given its tensors, outputs, inputs and group size.
        group: consecutive columns that share a scale; None: all.
    """

    name: str
    formats: Mapping[str, tuple[str, ...]]
    optional: tuple[str, ...]
    shape: Callable[[Parts], tuple[int, int]]
    read: Callable[[Parts, tuple[int, int], int], MatrixArrays]
    group: int | None = None

    def matrix(self, name: str, parts: dict[str, StoredTensor], scheme: object) -> StoredMatrix:
        """Returns the plain tensor of a module's tensors.

        Raises:
            CheckpointError: a tensor is missing, or has another dtype or shape.
        """
        codes = next(iter(self.formats))
        present = next(iter(parts.values()))
        missing = [end for end in self.formats if end not in parts and end not in self.optional]
        if missing:
            module = present.name.removesuffix(next(iter(parts)))
            accepted = ", ".join(repr(module + end) for end in self.formats if end not in self.optional)
            raise CheckpointError(
                f"{present.file}: tensor {module + missing[0]!r} is missing, which belongs to {present.name!r}; "
                f"accepted: all of {accepted}, as {self.name} has them"
            )
        for end, tensor in parts.items():
            if tensor.format not in self.formats[end]:
                raise CheckpointError(
                    f"{tensor.file}: tensor {tensor.name!r} is stored as {tensor.format}; accepted: "
                    f"{', '.join(self.formats[end])}, as {self.name} has it"
                )
        if len(parts[codes].shape) != 2 or 0 in parts[codes].shape:
            raise CheckpointError(
                f"{present.file}: tensor {parts[codes].name!r} has shape {parts[codes].shape}; accepted: two axes, "
                f"none of them 0, as {self.name} has it"
            )
        shape, size = self.shape(parts), sum(part.size for part in parts.values())
        return _Matrix(name, parts[codes].file, shape, self.name, size, None, 0, parts, scheme, False, self)


@dataclasses.dataclass(frozen=True, eq=False)
class _Matrix(StoredMatrix):
    """A matrix in a `MatrixFormat`."""

    matrix_format: MatrixFormat

    def arrays(self) -> MatrixArrays:
        """Returns the matrix in codes and scales."""
        rows, columns = self.shape
        return self.matrix_format.read(self.parts, (rows, columns), self.matrix_format.group or columns)


# --- checks -----------------------------------------------------------------------------------------------------------


def check_axes(tensor: StoredTensor, accepted: Sequence[tuple[int, ...]], because: str) -> None:
    """Raises unless a tensor has one of the accepted shapes."""
    if tensor.shape not in accepted:
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r} has shape {tensor.shape}; accepted: "
            f"{' or '.join(map(str, accepted))}, {because}"
        )


def _floats(tensor: StoredTensor) -> np.ndarray:
    """Returns finite numbers in their stored dtype."""
    values = tensor.read()
    if not np.isfinite(values.astype(np.float32)).all():
        raise CheckpointError(f"{tensor.file}: tensor {tensor.name!r} holds infinite scales or NaN; accepted: numbers")
    return values


def positive_scalar(tensor: StoredTensor) -> np.float32:
    """Returns the positive number of a tensor of one element."""
    check_axes(tensor, [(1,), ()], "one number")
    value = np.float32(_floats(tensor).reshape(-1)[0])
    if not value > 0:
        raise CheckpointError(f"{tensor.file}: tensor {tensor.name!r} holds {value}; accepted: a number > 0")
    return value


def _groups_of(tensor: StoredTensor | None, columns: int, count: int, group: int) -> np.ndarray | None:
    """Returns the group of each column, or None if groups are consecutive columns."""
    if tensor is None:
        return None
    check_axes(tensor, [(columns,)], "a group for each column")
    groups = tensor.read().astype(np.int32)
    if (groups == -1).all() or np.array_equal(groups, np.arange(columns) // group):
        return None
    if groups.min() < 0 or groups.max() >= count:
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r} holds groups from {groups.min()} to {groups.max()}; accepted: 0 to "
            f"{count - 1}"
        )
    return groups


def _nibbles(words: np.ndarray) -> np.ndarray:
    """Returns the eight numbers of each 32-bit word on a new last axis, the lowest four bits first."""
    words = np.ascontiguousarray(words)
    codes = words.view(np.uint8).reshape(*words.shape, 4)
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(*words.shape, 8)


def _in_pairs(numbers: np.ndarray) -> np.ndarray:
    """Packs numbers of four bits along the last axis, two in a byte, the low four bits first."""
    return np.ascontiguousarray(numbers[..., 0::2] | numbers[..., 1::2] << 4)


# --- GPTQ -------------------------------------------------------------------------------------------------------------


def gptq(group: int | None, *, symmetric: bool, first_version: bool, ordered: bool) -> MatrixFormat:
    """Returns GPTQ's format (Frantar et al. 2022): words along inputs, zero points along outputs.

    Args:
        group: the columns of a group; None: all.
        symmetric: whether every zero point is 8, as `sym` says.
        first_version: whether zero points are stored less one.
        ordered: whether `g_idx` must be present, as `desc_act` says.
    """

    def shape(parts: Parts) -> tuple[int, int]:
        words, outputs = parts[".qweight"].shape
        return outputs, words * 8

    def read(parts: Parts, shape: tuple[int, int], group: int) -> MatrixArrays:
        (rows, columns), count = shape, -(-shape[1] // group)
        check_axes(parts[".scales"], [(count, rows)], f"as groups of {group} columns have it")
        check_axes(parts[".qzeros"], [(count, rows // 8)], f"as groups of {group} columns have it")
        # A word's bytes hold eight consecutive inputs of one output.
        codes = parts[".qweight"].read().view(np.uint8).reshape(columns // 8, rows, 4)
        codes = np.ascontiguousarray(codes.transpose(1, 0, 2)).reshape(rows, columns // 2)
        stored = parts[".qzeros"]
        zeros = _nibbles(stored.read()).reshape(count, rows)
        if first_version and (zeros == _V1_ZERO).any():
            raise CheckpointError(
                f"{stored.file}: tensor {stored.name!r} holds the zero point {_V1_ZERO}, which readers of GPTQ's first "
                "format take as 0 or 16; accepted: 0 to 14. Export the model with checkpoint_format gptq_v2"
            )
        zeros = zeros + np.uint8(first_version)
        if symmetric and (zeros != 8).any():
            raise CheckpointError(
                f"{stored.file}: tensor {stored.name!r} holds other zero points than 8, though "
                "quantization_config.sym is true; accepted: sym false, or zero points of 8"
            )
        groups = _groups_of(parts.get(".g_idx"), columns, count, group)
        scales = np.ascontiguousarray(_floats(parts[".scales"]).T)
        points = None if (zeros == 8).all() else np.ascontiguousarray(zeros.T)
        return MatrixArrays("int4", columns, group, codes, scales, points, groups=groups)

    formats = {".qweight": ("I32",), ".qzeros": ("I32",), ".scales": _FLOATS, ".g_idx": ("I32", "I64")}
    return MatrixFormat("GPTQ", formats, () if ordered else (".g_idx",), shape, read, group)


# --- AWQ --------------------------------------------------------------------------------------------------------------


def awq(group: int | None, *, has_zeros: bool) -> MatrixFormat:
    """Returns AWQ's format "gemm" (Lin et al. 2023): words along outputs, in an order of their own."""

    def shape(parts: Parts) -> tuple[int, int]:
        columns, words = parts[".qweight"].shape
        return words * 8, columns

    def read(parts: Parts, shape: tuple[int, int], group: int) -> MatrixArrays:
        (rows, columns), count = shape, -(-shape[1] // group)
        check_axes(parts[".scales"], [(count, rows)], f"as groups of {group} columns have it")
        if columns % 2:
            stored = parts[".qweight"]
            raise CheckpointError(f"{stored.file}: tensor {stored.name!r} has {columns} inputs; accepted: even numbers")
        numbers = _nibbles(parts[".qweight"].read())[..., _AWQ].reshape(columns, rows)
        zeros = None
        if ".qzeros" in parts:
            check_axes(parts[".qzeros"], [(count, rows // 8)], f"as groups of {group} columns have it")
            zeros = np.ascontiguousarray(_nibbles(parts[".qzeros"].read())[..., _AWQ].reshape(count, rows).T)
        scales = np.ascontiguousarray(_floats(parts[".scales"]).T)
        return MatrixArrays("int4", columns, group, _in_pairs(np.ascontiguousarray(numbers.T)), scales, zeros)

    formats = {".qweight": ("I32",), ".qzeros": ("I32",), ".scales": _FLOATS}
    return MatrixFormat("AWQ", formats, () if has_zeros else (".qzeros",), shape, read, group)


# --- compressed-tensors -----------------------------------------------------------------------------------------------


def _stated_shape(parts: Parts, per_word: int) -> tuple[int, int]:
    """Returns the outputs and inputs of packed codes, whose shape a tensor may state."""
    codes, stated = parts[".weight_packed"], parts.get(".weight_shape")
    rows, columns = codes.shape[0], codes.shape[1] * per_word
    if stated is None:
        return rows, columns
    given = tuple(int(size) for size in stated.read().reshape(-1))
    if given[:-1] != (rows,) or not columns - per_word < given[-1] <= columns:
        raise CheckpointError(
            f"{stated.file}: tensor {stated.name!r} holds {given}; accepted: {(rows, columns)}, or up to "
            f"{per_word - 1} fewer columns, as the codes have"
        )
    return rows, given[-1]


def packed_int4(group: int | None, *, symmetric: bool) -> MatrixFormat:
    """Returns groups of four-bit integers along inputs, as compressed-tensors packs them."""

    def read(parts: Parts, shape: tuple[int, int], group: int) -> MatrixArrays:
        (rows, columns), count = shape, -(-shape[1] // group)
        check_axes(parts[".weight_scale"], [(rows, count)], f"as groups of {group} columns have it")
        words = parts[".weight_packed"].read()
        codes = np.ascontiguousarray(words.view(np.uint8)[:, : -(-columns // 2)])
        zeros = None
        if not symmetric:
            stored = parts[".weight_zero_point"]
            check_axes(stored, [(-(-rows // 8), count)], f"as groups of {group} columns have it")
            zeros = _nibbles(np.ascontiguousarray(stored.read().T)).reshape(count, -1)[:, :rows]
            zeros = np.ascontiguousarray(zeros.T)
        groups = _groups_of(parts.get(".weight_g_idx"), columns, count, group)
        return MatrixArrays("int4", columns, group, codes, _floats(parts[".weight_scale"]), zeros, groups=groups)

    formats = {".weight_packed": ("I32",), ".weight_scale": _FLOATS, ".weight_shape": ("I64", "I32")}
    formats |= {".weight_g_idx": ("I32", "I64")} | ({} if symmetric else {".weight_zero_point": ("I32",)})
    optional = (".weight_g_idx",)
    return MatrixFormat("pack-quantized", formats, optional, lambda parts: _stated_shape(parts, 8), read, group)


def packed_fp4(scale_dtype: str, *, has_inputs: bool) -> MatrixFormat:
    """Returns groups of four-bit floating-point numbers as compressed-tensors packs them: NVFP4 or MXFP4.

    Args:
        scale_dtype: "F8_E4M3" for groups of 16 with scales that are divided by the tensor's; "U8" for groups of 32 with
            powers of two.
        has_inputs: whether tensors for quantized activations are present.
    """
    is_nvfp4 = scale_dtype == "F8_E4M3"

    def read(parts: Parts, shape: tuple[int, int], group: int) -> MatrixArrays:
        rows, columns = shape
        check_axes(parts[".weight_scale"], [(rows, -(-columns // group))], f"as groups of {group} columns have it")
        table = POWERS_OF_TWO
        if is_nvfp4:
            with np.errstate(over="ignore", invalid="ignore"):
                table = (E4M3 / positive_scalar(parts[".weight_global_scale"])).astype(np.float32)
        codes = parts[".weight_packed"].read()
        return MatrixArrays("e2m1", columns, group, codes, _bytes(parts[".weight_scale"], table), table=table)

    formats = {".weight_packed": ("U8",), ".weight_scale": (scale_dtype,)}
    formats |= {".weight_global_scale": _FLOATS} if is_nvfp4 else {}
    formats |= {".input_global_scale": _FLOATS} if has_inputs and is_nvfp4 else {}
    name, group = ("NVFP4", 16) if is_nvfp4 else ("MXFP4", 32)
    return MatrixFormat(name, formats, (), lambda parts: _stated_shape(parts, 2), read, group)


def modelopt_nvfp4(group: int, *, has_inputs: bool) -> MatrixFormat:
    """Returns ModelOpt's NVFP4, whose scales are multiplied by the tensor's."""

    def shape(parts: Parts) -> tuple[int, int]:
        rows, pairs = parts[".weight"].shape
        return rows, pairs * 2

    def read(parts: Parts, shape: tuple[int, int], group: int) -> MatrixArrays:
        rows, columns = shape
        check_axes(parts[".weight_scale"], [(rows, -(-columns // group))], f"as groups of {group} columns have it")
        with np.errstate(over="ignore", invalid="ignore"):
            table = (E4M3 * positive_scalar(parts[".weight_scale_2"])).astype(np.float32)
        return MatrixArrays(
            "e2m1", columns, group, parts[".weight"].read(), _bytes(parts[".weight_scale"], table), table=table
        )

    formats = {".weight": ("U8",), ".weight_scale": ("F8_E4M3",), ".weight_scale_2": _FLOATS, ".input_scale": _FLOATS}
    return MatrixFormat("NVFP4", formats, () if has_inputs else (".input_scale",), shape, read, group)


def _bytes(tensor: StoredTensor, table: np.ndarray) -> np.ndarray:
    """Returns scales of one byte, which all have finite numbers in a table."""
    scales = tensor.read_bytes(0, tensor.size).reshape(tensor.shape)
    if not np.isfinite(table[np.unique(scales)]).all():
        raise CheckpointError(f"{tensor.file}: tensor {tensor.name!r} holds infinite scales or NaN; accepted: numbers")
    return scales


# --- fp8 --------------------------------------------------------------------------------------------------------------


def fp8(*, is_static: bool) -> MatrixFormat:
    """Returns e4m3 numbers with a scale for each output, or one for all.

    Args:
        is_static: whether the tensors have the scale of activations.
    """

    def read(parts: Parts, shape: tuple[int, int], group: int) -> MatrixArrays:
        rows, columns = shape
        stored = parts[".weight_scale"]
        check_axes(stored, [(rows, 1), (rows,), (1,), (1, 1), ()], "one scale for each output, or one for all")
        scales = np.ascontiguousarray(np.broadcast_to(_floats(stored).reshape(-1, 1), (rows, 1)))
        codes = e4m3_codes(parts[".weight"])
        static = positive_scalar(parts[".input_scale"]) if is_static else None
        return MatrixArrays("e4m3", columns, group, codes, scales, input_scale=static)

    formats = {".weight": ("F8_E4M3",), ".weight_scale": _FLOATS}
    formats |= {".input_scale": _FLOATS} if is_static else {}

    def matrix_shape(parts: Parts) -> tuple[int, int]:
        rows, columns = parts[".weight"].shape
        return rows, columns

    return MatrixFormat("fp8", formats, (), matrix_shape, read)


def e4m3_codes(tensor: StoredTensor) -> np.ndarray:
    """Returns the codes of e4m3 numbers.

    Raises:
        CheckpointError: a code is NaN.
    """
    codes = tensor.read_bytes(0, tensor.size).reshape(tensor.shape)
    if ((codes & 127) == 127).any():
        raise CheckpointError(f"{tensor.file}: tensor {tensor.name!r} holds NaN; accepted: finite values")
    return codes
