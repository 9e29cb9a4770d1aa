"""Launchers: where a step loop gives the device its steps, at once or in a thread of its own."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

from detjax.runtime.compilation import Choices


@runtime_checkable
class Launcher(Protocol):
    """Calls functions one after the other, in the order in which they are submitted."""

    def submit[T](self, fn: Callable[[], T], /) -> Future[T]:
        """Returns a future of what `fn` returns or raises."""
        ...

    def close(self) -> None:
        """Waits for the functions that were submitted. None is submitted afterwards."""
        ...


class ImmediateLauncher:
    """Calls each function where and when it is submitted, under the caller's JAX settings."""

    def submit[T](self, fn: Callable[[], T], /) -> Future[T]:
        """Returns a future with the result of `fn`, whose exceptions the caller gets at once."""
        future: Future[T] = Future()
        future.set_result(fn())
        return future

    def close(self) -> None:
        """Returns at once."""


class LauncherThread:
    """Calls the functions in a thread of its own.

    To give the device one step takes XLA half as long as the device takes to compute it, most of this time without the
    interpreter. In the meantime the caller reads the tokens of the step before, and plans the next one.

    A function that fails is the last one that is called: those after it would find the device in a state that nobody
    knows. They fail with the same exception.
    """

    def __init__(self) -> None:
        """Starts the thread, whose choices of backend and fusions are those made here."""
        self._choices = Choices.here()
        self._failure: BaseException | None = None
        self._inbox: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="detjax-launcher", daemon=True)
        self._thread.start()

    def submit[T](self, fn: Callable[[], T], /) -> Future[T]:
        """Returns at once a future of what `fn` will return or raise."""
        future: Future[T] = Future()
        self._inbox.put((fn, future))
        return future

    def close(self) -> None:
        """Waits for the functions that were submitted, and ends the thread. None is submitted afterwards."""
        self._inbox.put(None)
        self._thread.join()

    def _work(self) -> None:
        with self._choices.held():  # every thread makes its own
            while self._call_next():
                pass

    def _call_next(self) -> bool:
        """Calls the next function, and waits for one if there is none. Returns False at the end."""
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
