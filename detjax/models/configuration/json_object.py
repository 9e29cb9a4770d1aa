"""A checkpoint's JSON files, with errors that name the file, the key, its value and the accepted values."""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_POINTERS: Final = {
    b"version https://git-lfs.github.com/spec/": "a pointer of Git LFS (fetch it with git lfs pull",
    b"/annex/objects/": "a pointer of git-annex (fetch it with git annex get",
}
"""Beginnings of files that are pointers to contents which version control has not fetched."""
LONGEST_POINTER: Final = max(map(len, _POINTERS))
"""The number of bytes needed to recognize a pointer."""
LARGEST: Final = 2**31 - 1
"""The default maximum of integers."""
MAX_LAYERS: Final = 4096
"""The maximum number of layers of a network: each is a separate object."""
MAX_EXPERTS: Final = 65536
"""The maximum number of experts of a layer: each may have separate tensors."""


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete or not supported. The message names the file, and the tensor or the key."""


def read_file(path: Path) -> bytes:
    """Returns the contents of the file `path`.

    Raises:
        CheckpointError: the file is missing or cannot be read.
    """
    try:
        contents = path.read_bytes()
    except FileNotFoundError:
        raise missing(path) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    refuse_pointer(path, contents)
    return contents


def missing(path: Path) -> CheckpointError:
    """Returns the error for a missing file, or for a link to one."""
    if path.is_symlink():
        return CheckpointError(f"{path} is a link to {path.readlink()}, which is missing; fetch the file first")
    return CheckpointError(f"{path} is missing")


def refuse_pointer(path: Path, contents: bytes) -> None:
    """Refuses a file that is a pointer to contents that version control has not fetched, given their beginning.

    Raises:
        CheckpointError: the file is a pointer.
    """
    for beginning, kind in _POINTERS.items():
        if contents.startswith(beginning):
            raise CheckpointError(f"{path} is {kind}, or download it) and not the file itself")


def parse_json_object(contents: bytes, source: str) -> dict[str, Any]:
    """Returns the JSON object in the contents of a file, which errors call `source`.

    Raises:
        CheckpointError: the contents are not JSON, or not an object.
    """
    try:
        value = json.loads(contents.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{source} holds a {type(value).__name__}; accepted: a JSON object")
    return value


class JsonObject:
    """A JSON object that is read key by key. A null value counts as missing.

    Every method raises `CheckpointError` for a value that it does not accept, and for a missing key without a default.

    Attributes:
        raw: the object.
        source: the file's name in errors.
        prefix: text before keys in errors, such as "rope_scaling." for the keys of an object within the file.
        siblings: missing keys of the object that are next to it in the file; they have no prefix in errors.
    """

    def __init__(
        self, raw: Mapping[str, Any], source: str, prefix: str = "", siblings: Mapping[str, Any] | None = None
    ) -> None:
        siblings = siblings or {}
        self.siblings = frozenset(key for key in siblings if raw.get(key) is None)
        self.raw = {**raw, **{key: siblings[key] for key in self.siblings}}
        self.source = source
        self.prefix = prefix
        self._read: set[str] = set()

    def error(self, key: str, accepted: str) -> CheckpointError:
        """Returns the error for a key whose value is not accepted, or that is missing."""
        state = f"is {self.raw[key]!r}" if key in self.raw else "is missing"
        return CheckpointError(f"{self.source}: {self._place(key)} {state}; accepted: {accepted}")

    def _place(self, key: str) -> str:
        """Returns the key as errors show it."""
        return key if key in self.siblings else f"{self.prefix}{key}"

    def get(self, key: str) -> Any:
        """Returns the value of a key, or None if it is missing."""
        self._read.add(key)
        return self.raw.get(key)

    def unread(self) -> dict[str, Any]:
        """Returns the keys that were never read, with their values."""
        return {key: value for key, value in self.raw.items() if value is not None and key not in self._read}

    def integer(
        self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = LARGEST, why: str = ""
    ) -> int:
        """Returns an integer in a range; `why` explains the maximum."""
        value = self.optional_integer(key, minimum=minimum, maximum=maximum, why=why)
        return self._required(key, default if value is None else value, f"an integer >= {minimum}")

    def optional_integer(self, key: str, *, minimum: int, maximum: int = LARGEST, why: str = "") -> int | None:
        """Returns an integer, or None if the key is missing."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(key, f"an integer >= {minimum}")
        if value > maximum:
            raise self.error(key, f"an integer from {minimum} to {maximum}{why}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a finite number > 0."""
        accepted = "a finite number > 0"
        value = self.optional_number(key, minimum=math.nextafter(0, 1), accepted=accepted)
        return self._required(key, default if value is None else value, accepted)

    def _required[T](self, key: str, value: T | None, accepted: str) -> T:
        if value is None:
            raise self.error(key, accepted)
        return value

    def optional_number(
        self, key: str, *, minimum: float, maximum: float = sys.float_info.max, accepted: str
    ) -> float | None:
        """Returns a number in the range that `accepted` describes, or None if the key is missing."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self.error(key, accepted)
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """Returns a boolean."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true, false")
        return value

    def choice(self, key: str, default: str, accepted: tuple[str, ...]) -> str:
        """Returns one of the accepted strings."""
        value = self.get(key)
        if value is None:
            return default
        if value not in accepted:
            raise self.error(key, ", ".join(accepted))
        return value

    def object(self, key: str) -> "JsonObject | None":
        """Returns the object of a key, or None if it is missing or empty."""
        value = self.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, "an object")
        return JsonObject(value, self.source, f"{self._place(key)}.")
