"""Files of new weights: paths below the server's directory of weights, and uploads."""

import asyncio
import contextlib
import errno
import os
import shutil
import tempfile
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from pathlib import Path
from typing import Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from detjax.server.http.errors import ApiError, quote

_WRITTEN_TOGETHER: Final = 4 << 20
"""Bytes of an upload that are written at once, in a thread."""


class WeightFiles:
    """The files that updates may read."""

    def __init__(self, directory: Path | None, most_bytes: int, seconds: float) -> None:
        """Files below `directory`, and uploads of up to `most_bytes`, whose parts arrive within `seconds` each."""
        self._root = None if directory is None else directory.resolve()
        self._most_bytes, self._seconds = most_bytes, seconds
        self._uploads: Path | None = None
        self._number = 0

    def below(self, given: str) -> Path:
        """Returns a path below the directory. Raises an ApiError if it is outside, also if a link leads outside."""
        if self._root is None:
            raise ApiError(
                400,
                "the server has no directory of weights; accepted: PUT /weights, or a server that was started with "
                "--weights-directory",
                param="model_path",
            )
        try:
            path = (self._root / given).resolve()
            # All files of a directory, because an index may name any of them.
            read = [path, *path.iterdir()] if path.is_dir() else [path]
            inside = all(file.resolve().is_relative_to(self._root) for file in read)
        except (OSError, ValueError, RuntimeError):  # a null character, or a loop of links
            inside, path, read = False, self._root, []
        if not inside:
            raise ApiError(
                400,
                f"model_path is {quote(given)}; accepted: a path below the server's directory of weights, and no links "
                "to other places",
                param="model_path",
            )
        if not path.exists():
            raise ApiError(400, f"model_path is {quote(given)}, which does not exist", param="model_path")
        if not all(file.is_file() or file.is_dir() for file in read):  # reading a pipe may never end
            raise ApiError(
                400,
                f"model_path is {quote(given)}; accepted: a file, or a directory of files, and no pipes or devices",
                param="model_path",
            )
        return path

    @contextlib.asynccontextmanager
    async def named(self, given: str) -> AsyncGenerator[Path]:
        """A context with the path of `below`."""
        yield self.below(given)

    @contextlib.asynccontextmanager
    async def received(self, request: Request, kept: Callable[[], Collection[Path]]) -> AsyncGenerator[Path]:
        """A context with the file of an upload, which is deleted at the end unless it is one of the kept files.

        Raises an ApiError if the upload is too large, does not fit on the disk, stalls or breaks off.
        """
        directory = self._upload_directory()
        size = self._announced_size(request, directory)
        self._number += 1
        path = directory / f"{self._number:06}.safetensors"
        try:
            await self._write(request, path, size)
            yield path
        finally:
            for file in set(self.uploads()) - set(kept()):
                file.unlink(missing_ok=True)

    def uploads(self) -> Iterator[Path]:
        """Returns the files of uploads that have not been deleted."""
        return iter(()) if self._uploads is None else self._uploads.glob("*.safetensors")

    def _upload_directory(self) -> Path:
        if self._uploads is None:
            self._uploads = Path(tempfile.mkdtemp(prefix=".detjax-uploads-", dir=self._root))
            weakref.finalize(self, shutil.rmtree, self._uploads, ignore_errors=True)
        return self._uploads

    def _announced_size(self, request: Request, directory: Path) -> int | None:
        """Returns the size that the headers announce, if they do, and refuses it before the body is read."""
        encoding = request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise ApiError(415, f"the content encoding is {encoding!r}; accepted: none")
        length = request.headers.get("content-length")
        if length is None or not length.isdecimal():
            return None
        size = int(length)
        self._check_size(size)
        free = shutil.disk_usage(directory).free
        if size > free:
            raise ApiError(
                507,
                f"the upload has {size} bytes; accepted: up to {free}, the free space of the server's disk. Free some, "
                "or choose another disk with --weights-directory",
            )
        return size

    def _check_size(self, size: int) -> None:
        if size > self._most_bytes:
            raise ApiError(
                413,
                f"the upload has at least {size} bytes; accepted: up to {self._most_bytes}, the size of all of the "
                "model's tensors in float32",
            )

    async def _write(self, request: Request, path: Path, size: int | None) -> None:
        written, pending = 0, bytearray()
        stream = request.stream()
        try:
            with path.open("wb") as file:
                while True:
                    async with asyncio.timeout(self._seconds):
                        part = await anext(stream, None)
                    pending += part or b""
                    self._check_size(written + len(pending))
                    if len(pending) >= _WRITTEN_TOGETHER or part is None:
                        await run_in_threadpool(file.write, bytes(pending))
                        written, pending = written + len(pending), bytearray()
                    if part is None:
                        break
        except TimeoutError:
            raise ApiError(
                408, f"the upload stalled for {self._seconds:g} s, the server's limit", code="timeout"
            ) from None
        except ClientDisconnect:
            raise ApiError(400, "the client disconnected before it sent all weights; nothing has changed") from None
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise ApiError(
                507, f"the server's disk is full ({os.strerror(error.errno)}); nothing has changed"
            ) from None
        if size is not None and written != size:
            raise ApiError(400, f"the upload has {written} bytes; accepted: {size}, its content length")
