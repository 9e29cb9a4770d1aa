"""Launchers, which launch a step loop's steps immediately or in a separate thread."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from detjax.runtime.compilation import ExecutionChoices


class Launcher:
    """Calls functions in the order of submission: immediately, under the caller's JAX settings."""

    def submit[T](self, fn: Callable[[], T], /) -> Future[T]:
        """Returns a future of the result of `fn`. Here it is completed, and exceptions of `fn` are raised."""
        future: Future[T] = Future()
        future.set_result(fn())
        return future

    def close(self) -> None:
        """Waits for all submitted functions. Nothing may be submitted afterwards."""


class LauncherThread(Launcher):
    """Calls the functions in a separate thread.

    Launching a step takes XLA half as long as the device needs to compute it, mostly without the GIL. In the meantime
    the caller reads the tokens of the previous step and plans the next one.

    After a failure nothing more is called, because the state of the device is unknown. Later functions fail with the
    same exception.
    """

    def __init__(self) -> None:
        """Starts the thread with the caller's choices of backend and fusions."""
        self._choices = ExecutionChoices.here()
        self._failure: BaseException | None = None
        self._inbox: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="detjax-launcher", daemon=True)
        self._thread.start()

    def submit[T](self, fn: Callable[[], T], /) -> Future[T]:
        future: Future[T] = Future()
        self._inbox.put((fn, future))
        return future

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join()

    def _work(self) -> None:
        with self._choices.apply():  # choices are per thread
            while self._call_next():
                pass

    def _call_next(self) -> bool:
        """Waits for the next function and calls it. Returns False at the end."""
        item = self._inbox.get()
        if item is None:
            return False
        fn, future = item
        try:
            if self._failure is not None:
                raise self._failure
            future.set_result(fn())
        except BaseException as error:
            self._failure = error
            future.set_exception(error)
        return True
