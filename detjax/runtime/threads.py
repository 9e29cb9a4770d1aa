"""Calls from several threads, for work that lets other threads run: files, hashes, copies to and from devices."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

_MOST: Final = 16
"""More threads would not read a disk, hash or copy faster."""


def in_threads[T, R](function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yields a function's results in order. After an error no further call begins."""
    with ThreadPoolExecutor(min(_MOST, os.cpu_count() or 1)) as pool:
        yield from pool.map(function, items)
