"""A watchdog that ends an engine whose devices no longer answer."""

import atexit
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

EXIT_CODE_OF_A_FAILED_ENGINE: Final = 70
"""EX_SOFTWARE of sysexits.h, with which a server exits whose engine fails, and any process whose devices are lost.
Supervisors restart them when they see it."""

_log: Final = logging.getLogger("detjax.engine")


class StepTimeout(RuntimeError):
    """The devices did not finish a step in time."""


class Watchdog:
    """Calls a function once if a wait for the devices takes longer than a limit.

    A wait cannot be interrupted: it is a call of the driver's, which may never return. So the function runs in the
    watchdog's thread while the waiting thread stays where it is. The interpreter would wait for the devices at its end
    as well, so from then on the process ends without that, with `EXIT_CODE_OF_A_FAILED_ENGINE`.
    """

    def __init__(
        self, limit: float, waiting_since: Callable[[], float | None], devices: str, end: Callable[[StepTimeout], None]
    ) -> None:
        """Starts watching.

        Args:
            limit: seconds that a wait may take; infinity: any time, and nothing is watched.
            waiting_since: returns the monotonic time at which the present wait began, or None.
            devices: names of the devices, for the message.
            end: called with the error in the watchdog's thread.
        """
        self._limit, self._waiting_since, self._devices, self._call_end = limit, waiting_since, devices, end
        self._stopped = threading.Event()
        if limit < math.inf:
            threading.Thread(target=self._watch, name="detjax-watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stops watching."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(min(1.0, self._limit / 4)):
            since = self._waiting_since()
            if since is None or (seconds := time.monotonic() - since) <= self._limit:
                continue
            atexit.register(_leave)
            self._call_end(
                StepTimeout(
                    f"the devices have not finished a step for {seconds:.0f} s; accepted: {self._limit:g} s "
                    f"(step_seconds). A device may have failed, or a process that shares the model may have ended. "
                    f"Devices: {self._devices}. Restart all processes that share them."
                )
            )
            return


def _leave() -> None:
    _log.critical("exiting with code %d without waiting for the devices", EXIT_CODE_OF_A_FAILED_ENGINE)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_CODE_OF_A_FAILED_ENGINE)
