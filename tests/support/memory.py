"""Measures the memory that Python allocates."""

import contextlib
import gc
import tracemalloc
from collections.abc import Iterator


@contextlib.contextmanager
def allocated() -> Iterator[list[int]]:
    """A context whose list holds, after it, the bytes that were allocated within it and are still in use."""
    gc.collect()
    tracemalloc.start()
    result: list[int] = []
    try:
        before, _ = tracemalloc.get_traced_memory()
        yield result
        gc.collect()
        result.append(tracemalloc.get_traced_memory()[0] - before)
    finally:
        tracemalloc.stop()
