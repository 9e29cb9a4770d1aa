"""The safetensors files of a checkpoint: one file, or shards with an index."""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import BinaryIO, ClassVar, Final

import numpy as np
import safetensors
import safetensors.numpy
from jaxtyping import UInt8

from detjax.models.checkpoint.directory_files import unread_weights
from detjax.models.configuration.json_object import (
    LONGEST_POINTER,
    CheckpointError,
    missing,
    parse_json_object,
    read_file,
    refuse_pointer,
)

SINGLE_FILE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"

_DTYPES: Final = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_READ_AS: Final = _DTYPES | {"U8": "uint8", "I32": "int32", "I64": "int64"}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor as described by its file's header. The file is open. Several threads may read.

    Attributes:
        name: its name.
        file: the file that holds it.
        shape: its shape.
        format: safetensors' name for its dtype, such as BF16.
        size: its bytes in the file.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    format: str
    size: int
    _stream: BinaryIO | None
    _begin: int
    has_parts: ClassVar = True
    """True if a part of the tensor can be read separately."""

    @property
    def dtype(self) -> np.dtype:
        """The dtype.

        Raises:
            CheckpointError: weights of this dtype are not supported.
        """
        if self.format not in _DTYPES:
            raise CheckpointError(
                f"{self.file}: tensor {self.name!r} is stored as {self.format}; accepted: {', '.join(_DTYPES)}"
            )
        return np.dtype(_DTYPES[self.format])

    def read_bytes(self, first: int, count: int) -> UInt8[np.ndarray, "count"]:
        """Returns `count` bytes of the stored tensor, from byte `first` on.

        For dtypes that NumPy lacks, and for tensors that are too large to read at once.

        Raises:
            CheckpointError: the file has become unreadable.
        """
        assert self._stream is not None
        content, filled = np.empty(count, np.uint8), 0
        try:
            # Unlike safetensors, `preadv` lets other threads run, and it reads the file that was checked even if
            # another one has its name by now.
            while read := os.preadv(self._stream.fileno(), [content[filled:].data], self._begin + first + filled):
                filled += read
        except OSError as error:
            raise CheckpointError(f"{self.file}: tensor {self.name!r} cannot be read: {error}") from error
        if filled != count:
            raise CheckpointError(f"{self.file}: tensor {self.name!r} cannot be read: the file has become shorter")
        return content

    def read(self, dtype: np.dtype | None = None) -> np.ndarray:
        """Returns the tensor in a dtype (default: as stored), rounded to nearest even.

        Raises:
            CheckpointError: the file has become unreadable, or a finite value would overflow.
        """
        value = self.read_bytes(0, self.size).view(_READ_AS[self.format]).reshape(self.shape)
        return self._rounded(value, dtype)

    def read_part(self, axis: int, outputs: slice, dtype: np.dtype | None = None) -> np.ndarray:
        """Returns a slice along an axis, counted from the end, like `read`, and reads only this part."""
        position, count = len(self.shape) + axis, outputs.stop - outputs.start
        row = math.prod(self.shape[position + 1 :]) * self.dtype.itemsize
        begins = [index * self.shape[position] + outputs.start for index in range(math.prod(self.shape[:position]))]
        contents = [self.read_bytes(begin * row, count * row) for begin in begins]
        content = contents[0] if len(contents) == 1 else np.concatenate(contents)
        shape = (*self.shape[:position], count, *self.shape[position + 1 :])
        return self._rounded(content.view(self.dtype).reshape(shape), dtype)

    def _rounded(self, value: np.ndarray, dtype: np.dtype | None) -> np.ndarray:
        """Returns the values in a dtype, rounded to nearest even."""
        if dtype is None or dtype == value.dtype:
            return value
        with np.errstate(over="ignore"):
            rounded = value.astype(np.float32, copy=False).astype(dtype)
        if dtype != np.float32 and np.isinf(rounded).sum() != np.isinf(value).sum():
            raise CheckpointError(
                f"{self.file}: tensor {self.name!r} holds values beyond the range of {dtype}; accepted: {value.dtype}, "
                "as stored, or float32"
            )
        return rounded


def open_weights(directory: Path, stack: contextlib.ExitStack) -> tuple[Path, dict[str, StoredTensor]]:
    """Returns the file that lists the tensors of the checkpoint in `directory`, and the tensors by name.

    Headers are read and checked, tensors are not. Files stay open until `stack` closes. If the directory has both a
    single file and an index, the single file is used, as in transformers.

    Raises:
        CheckpointError: weights are missing, a file is missing, truncated or damaged, or the index and the shards
            disagree.
    """
    if (directory / SINGLE_FILE).exists(follow_symlinks=False):
        return directory / SINGLE_FILE, open_file(directory / SINGLE_FILE, stack)
    index = directory / INDEX
    if not index.exists(follow_symlinks=False):
        raise CheckpointError(
            f"{directory} has neither {SINGLE_FILE} nor {INDEX}; accepted: weights as safetensors."
            f"{unread_weights(directory)} Convert others, such as pytorch_model.bin, with save_pretrained of "
            "transformers"
        )
    files = parse_json_object(read_file(index), str(index)).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{index}: weight_map is {files!r}; accepted: an object of tensor names and file names")
    for name, file in files.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index}: tensor {name!r} lies in {file!r}; accepted: a file name without a folder")

    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(files.values())):
        for name, tensor in open_file(directory / file, stack).items():
            if files.get(name) != file:
                said = f"puts it into {files[name]}" if name in files else "does not list it"
                raise CheckpointError(f"{tensor.file}: tensor {name!r} lies here, but {INDEX} {said}")
            tensors[name] = tensor
    for name, file in files.items():
        if name not in tensors:
            raise CheckpointError(f"{directory / file}: tensor {name!r} is missing, though {INDEX} puts it here")
    return index, tensors


def write_weights(
    directory: Path, tensors: Iterable[tuple[int, Callable[[], Mapping[str, np.ndarray]]]], max_shard_bytes: int
) -> None:
    """Writes tensors into one file, or into shards with an index.

    `tensors` are groups to keep in one file: their size in bytes, and a function that returns them by name. Only a
    file with a single group may have more than `max_shard_bytes`.
    """
    shards: list[list[Callable[[], Mapping[str, np.ndarray]]]] = [[]]
    filled = 0
    for size, read in tensors:
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(read)
        filled += size

    files: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        name = SINGLE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        arrays = {key: np.ascontiguousarray(value) for read in shard for key, value in read().items()}
        safetensors.numpy.save_file(arrays, directory / name, metadata={"format": "pt"})
        # safetensors makes the files that it writes readable only by the owner.
        (directory / name).chmod(directory.stat().st_mode & 0o666)
        files |= dict.fromkeys(arrays, name)
        total += sum(value.nbytes for value in arrays.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def open_file(file: Path, stack: contextlib.ExitStack) -> dict[str, StoredTensor]:
    """Returns the tensors of a safetensors file by name. It stays open until `stack` closes.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        stream = stack.enter_context(file.open("rb"))
        refuse_pointer(file, stream.read(LONGEST_POINTER))
        with safetensors.safe_open(file, framework="numpy") as handle:
            headers = {name: handle.get_slice(name) for name in handle.keys()}
            shapes = {name: (tuple(header.get_shape()), header.get_dtype()) for name, header in headers.items()}
        places = _places(stream)
    except FileNotFoundError:
        raise missing(file) from None
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{file} is truncated or damaged: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return {
        name: StoredTensor(name, file, *shape_and_format, len(places[name]), stream, places[name].start)
        for name, shape_and_format in shapes.items()
    }


def _places(stream: BinaryIO) -> dict[str, range]:
    """Returns the byte range of each tensor in a file whose header safetensors has checked."""
    stream.seek(0)
    length = int.from_bytes(stream.read(8), "little")
    header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    data = 8 + length
    return {name: range(*(data + offset for offset in entry["data_offsets"])) for name, entry in header.items()}
