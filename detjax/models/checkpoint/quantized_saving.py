"""Weights that are written in the format that they were read from, byte for byte."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import ml_dtypes
import numpy as np

from detjax.models.checkpoint.matrix_arrays import StoredMatrix
from detjax.models.checkpoint.stored_formats import KEY, stored_formats
from detjax.models.checkpoint.weight_files import StoredTensor, open_weights
from detjax.models.configuration.family import description
from detjax.models.configuration.json_object import parse_json_object, read_file
from detjax.operands.quantized_weight import is_quantized

_DTYPES: Final = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
_LISTS: Final = {
    "fp8": "modules_to_not_convert",
    "awq": "modules_to_not_convert",
    "compressed-tensors": "ignore",
    "modelopt": "ignore",
}
"""The lists of modules that are not quantized, by `quant_method`."""


@dataclasses.dataclass(frozen=True)
class StoredCodes:
    """The checkpoint that a model's codes come from, while it is open.

    Attributes:
        stored: its tensors by their names in the decoder.
        described: its `quantization_config`.
    """

    stored: Mapping[str, StoredTensor]
    described: Mapping[str, Any]

    def are_in(self, weight: Any, read: Callable[[], Any], names: Sequence[str]) -> bool:
        """Returns whether a weight is what its stored tensors are read as.

        Raises:
            ValueError: it has other codes.
        """
        matrices = [self.stored[name] for name in names if isinstance(self.stored[name], StoredMatrix)]
        if not matrices:
            return False
        if have_same_bits(weight, read()):
            return True
        if is_quantized(weight):
            raise ValueError(
                f"save: {matrices[0].name!r} has other codes or scales than {matrices[0].file}, which the model was "
                "loaded from; accepted: the codes of that file, unchanged"
            )
        return False

    def tensors(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Returns the stored tensors of a parameter by their names in the file."""
        parts: list[StoredTensor] = []
        for name in names:
            one = self.stored[name]
            parts += one.parts.values() if isinstance(one, StoredMatrix) else [one]
        return {one.name: one.read_bytes(0, one.size).view(_DTYPES[one.format]).reshape(one.shape) for one in parts}

    def size(self, names: Sequence[str]) -> int:
        """Returns the bytes of a parameter's stored tensors."""
        return sum(self.stored[name].size for name in names)

    def configuration(self, plain: Sequence[str]) -> dict[str, Any]:
        """Returns `quantization_config` for a checkpoint where modules of these names are plain as well."""
        key = _LISTS.get(self.described["quant_method"])
        if not plain or key is None:
            return {KEY: dict(self.described)}
        return {KEY: dict(self.described) | {key: [*(self.described.get(key) or []), *plain]}}


@contextlib.contextmanager
def opened_codes(
    directory: Path, by_decoder_name: Callable[[Mapping[str, StoredTensor]], dict[str, StoredTensor]]
) -> Iterator[StoredCodes]:
    """Yields the checkpoint of a directory.

    Raises:
        CheckpointError: it is gone, or has become another one.
    """
    config = directory / "config.json"
    file = description(parse_json_object(read_file(config), str(config)), str(config)).file
    formats = stored_formats(file)
    with contextlib.ExitStack() as files:
        stored = by_decoder_name(open_weights(directory, files)[1])
        yield StoredCodes(stored if formats is None else formats.read(stored), dict(file.raw.get(KEY) or {}))


def have_same_bits(one: Any, other: Any) -> bool:
    """Returns whether two weights, plain or in codes, are equal in form and in every bit."""
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(_are_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


def _are_equal(a: np.ndarray, b: np.ndarray) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    a, b = (np.atleast_1d(np.ascontiguousarray(x)) for x in (a, b))
    return np.array_equal(a.view(np.uint8), b.view(np.uint8))
