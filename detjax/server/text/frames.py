"""Messages between the server and its text workers: lists of byte strings on a pipe.

They hold JSON and plain bytes, not the pickles of multiprocessing and its pools: a worker runs programs from a
checkpoint, and its answers must not be able to execute code in the server.
"""

import struct
from collections.abc import Iterable
from typing import IO, Final

_LENGTH: Final = struct.Struct("<q")
_END: Final = -1
"""The length that marks the end of a message."""


def send(pipe: IO[bytes], frames: Iterable[bytes]) -> None:
    """Writes a message. Frames may come from an iterator, so that a large message is never in memory as a whole."""
    for frame in frames:
        pipe.write(_LENGTH.pack(len(frame)))
        pipe.write(frame)
    pipe.write(_LENGTH.pack(_END))
    pipe.flush()


def receive(pipe: IO[bytes]) -> list[bytes]:
    """Returns the frames of the next message; raises an EOFError if the other end was closed."""
    frames = []
    while (length := _LENGTH.unpack(_read(pipe, _LENGTH.size))[0]) != _END:
        frames.append(_read(pipe, length))
    return frames


def _read(pipe: IO[bytes], length: int) -> bytes:
    data = pipe.read(length)
    if len(data) < length:
        raise EOFError("the other end of the pipe was closed")
    return data
