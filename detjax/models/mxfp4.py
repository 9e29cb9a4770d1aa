"""Weights in MXFP4 (Open Compute Project 2023): groups of 32 four-bit numbers that share a power of two.

They are read as the plain tensors that they stand for. bfloat16 and float32 hold these exactly.
"""

import dataclasses
from collections.abc import Mapping
from typing import Final

import ml_dtypes
import numpy as np

from detjax.models.json_object import CheckpointError
from detjax.models.weight_files import StoredTensor

_BLOCKS: Final = "_blocks"
_SCALES: Final = "_scales"
_FORMAT: Final = "U8"
_GROUP: Final = 32
_BIAS: Final = 127
"""What is subtracted from a stored exponent."""
_NAN: Final = 255
"""The exponent that stands for no number."""

_MAGNITUDES: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_NIBBLES: Final = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
_BYTES: Final = np.stack([np.tile(_NIBBLES, 16), np.repeat(_NIBBLES, 16)], axis=-1)
"""The two numbers of each byte, that of the low four bits first."""


@dataclasses.dataclass(frozen=True)
class _Mxfp4Tensor(StoredTensor):
    """Weights of experts `[E, inputs, outputs]`, stored with the outputs as rows.

    Attributes:
        blocks: the numbers, `[E, outputs, inputs / 32, 16]`, two in a byte.
        scales: the exponents, `[E, outputs, inputs / 32]`.
    """

    blocks: StoredTensor
    scales: StoredTensor

    @property
    def dtype(self) -> np.dtype:
        """The narrowest dtype that holds every such number."""
        return np.dtype(ml_dtypes.bfloat16)

    @property
    def size(self) -> int:
        """The size in the file in bytes."""
        return int(np.prod(self.blocks.shape, dtype=np.int64) + np.prod(self.scales.shape, dtype=np.int64))

    def read(self, dtype: np.dtype | None = None) -> np.ndarray:
        """Returns the numbers in a dtype (default: bfloat16), rounded to nearest even.

        Raises:
            CheckpointError: the file is unreadable, an exponent stands for no number, or a number would overflow.
        """
        dtype = self.dtype if dtype is None else dtype
        blocks, scales = self.blocks.read(), self.scales.read()
        if (scales == _NAN).any():
            raise CheckpointError(
                f"{self.scales.file}: tensor {self.scales.name!r} holds {_NAN}, which MXFP4 has for NaN; accepted: "
                f"exponents from 0 to {_NAN - 1}"
            )
        experts, inputs, outputs = self.shape
        weights = np.empty((experts, outputs, inputs), dtype)
        for expert in range(experts):
            with np.errstate(over="ignore"):
                groups = _BYTES[blocks[expert]].reshape(outputs, -1, _GROUP)
                exponents = scales[expert].astype(np.int32)[..., None] - _BIAS
                weights[expert] = np.ldexp(groups, exponents).reshape(outputs, inputs).astype(dtype)
            if not np.isfinite(weights[expert]).all():
                raise CheckpointError(
                    f"{self.blocks.file}: tensor {self.blocks.name!r} holds values beyond the range of {dtype}; "
                    "accepted: those that it holds, or another dtype"
                )
        return weights.swapaxes(1, 2)


def dequantized(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns stored tensors with a plain one in place of each pair of blocks and scales.

    Raises:
        CheckpointError: one of a pair is missing, or shapes or dtypes are not those of MXFP4.
    """
    plain = dict(stored)
    for name in stored:
        base = name.removesuffix(_BLOCKS).removesuffix(_SCALES)
        if base == name or base in plain:
            continue
        blocks, scales = (plain.pop(base + ending, None) for ending in (_BLOCKS, _SCALES))
        if blocks is None or scales is None:
            missing, present = (_BLOCKS, _SCALES) if blocks is None else (_SCALES, _BLOCKS)
            raise CheckpointError(
                f"{stored[name].file}: tensor {base + missing!r} is missing, which belongs to {base + present!r}; "
                "accepted: both"
            )
        _check(blocks, scales)
        experts, outputs, groups, _ = blocks.shape
        shape = experts, groups * _GROUP, outputs
        plain[base] = _Mxfp4Tensor(base, blocks.file, shape, "MXFP4", None, blocks, scales)
    return plain


def _check(blocks: StoredTensor, scales: StoredTensor) -> None:
    """Raises unless blocks and scales have the shapes and the dtype of MXFP4."""
    for tensor in (blocks, scales):
        if tensor.format != _FORMAT:
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.name!r} is stored as {tensor.format}; accepted: {_FORMAT}"
            )
    if len(blocks.shape) != 4 or blocks.shape[-1] != _GROUP // 2:
        raise CheckpointError(
            f"{blocks.file}: tensor {blocks.name!r} has shape {blocks.shape}; accepted: (experts, outputs, inputs / "
            f"{_GROUP}, {_GROUP // 2})"
        )
    if scales.shape != blocks.shape[:-1]:
        raise CheckpointError(
            f"{scales.file}: tensor {scales.name!r} has shape {scales.shape}; accepted: {blocks.shape[:-1]}, as "
            f"{blocks.name!r} has {blocks.shape}"
        )
