"""Timeouts of tests."""

from typing import Final

HANGS_AFTER: Final = 600
"""Seconds after which a test that waits is taken to hang: a first step, which compiles, may take minutes."""
