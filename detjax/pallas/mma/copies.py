"""A ring of stages in shared memory, filled ahead of their use by whichever copies the architecture has.

Since compute capability 9.0 a copy engine (TMA) fills a stage and arrives at the stage's barrier. Before, all threads
of the warpgroup copy, by `cp.async`, and each copy is a group whose end a thread can wait for. Which of the two serves
changes no bit.

The owner of a ring is one warpgroup:

    ring = Ring(steps, stages, fill, scratch)
    ring.start()

    @pl.loop(0, steps)
    def _(step):
        slot = ring.next(step)      # the stage of `step` has arrived, and a later one is on its way
        ...                         # read the buffers at `slot`

Kernels with rings are built with `NO_AUTO_BARRIERS`: the ring has the only barriers that its buffers need.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.pallas import nvidia
from detjax.pallas.hopper.mosaic import with_twin

Copies = Sequence[tuple[Any, Any]]
"""Pairs of a reference in device memory and one in shared memory, of equal shapes.

A source lies within its array: copies by threads are not clipped at the array's end. Its last axis is contiguous, and
it has two axes, besides leading ones that are indexed.
"""


def barriers(stages: int, copies: int) -> dict[str, Any]:
    """Returns the scratch types of a ring by name: the barriers of its stages, each for a number of copies.

    Threads that copy need none.
    """
    if not nvidia.has_copy_engine():
        return {}
    return {"loaded": plgpu.Barrier(num_arrivals=copies, num_barriers=stages)}


class Ring:
    """Stages of shared memory that a warpgroup fills in order and reads in order."""

    def __init__(
        self,
        steps: Array | int,
        stages: int,
        fill: Callable[[Array | int, Array | int], Copies],
        loaded: Any = None,
    ) -> None:
        """Describes a ring; `start` begins its copies.

        Args:
            steps: the number of fillings; may be 0.
            stages: the number of buffers, 2 or more. While one is read, the others are filled.
            fill: takes a step and its slot, and returns the copies that fill the slot, equally many at every step.
            loaded: the barriers of `barriers`, or None if threads copy.
        """
        assert stages >= 2
        self.steps, self.stages, self.fill, self.loaded = steps, stages, fill, loaded
        self.copies = 0

    def start(self) -> None:
        """Starts the first `stages - 1` fillings. All threads must be done with the buffers' previous contents."""
        for step in range(self.stages - 1):
            self._fill_if_any(step)

    def next(self, step: Array) -> Array:
        """Returns the slot of a step, after its copies have arrived, and starts the filling of a later step.

        The steps of the calls ascend from 0. The slot may be read until the next call.
        """
        slot = lax.rem(step, jnp.int32(self.stages))
        if self.loaded is not None:
            plgpu.barrier_wait(self.loaded.at[slot])
            # The copy engine overwrites what the other warps may still read at the previous step.
            plgpu.commit_smem()
        else:
            # Groups end in order. The groups of later steps may be unfinished; near the end there are fewer.
            later = self.stages - 2
            if later:
                whole = self.steps - 1 - step >= later
                pl.when(whole)(lambda: _await_copies(later * self.copies))
                pl.when(jnp.logical_not(whole))(lambda: _await_copies(0))
            else:
                _await_copies(0)
        self._fill_if_any(step + (self.stages - 1))
        return slot

    def _fill_if_any(self, step: Array | int) -> None:
        slot = step % self.stages if isinstance(step, int) else lax.rem(step, jnp.int32(self.stages))

        def fill() -> None:
            copies = self.fill(step, slot)
            self.copies = len(copies)
            for source, target in copies:
                if self.loaded is not None:
                    plgpu.copy_gmem_to_smem(source, target, self.loaded.at[slot])
                else:
                    _copy(source, target)

        if isinstance(step, int) and isinstance(self.steps, int):
            if step < self.steps:
                fill()
        else:
            pl.when(step < self.steps)(fill)


def _plain_copy(source: Any, target: Any) -> None:
    target[...] = source[...]


@with_twin(_plain_copy)
def _copy(source: Any, target: Any) -> None:
    plgpu.copy_gmem_to_smem(source, target, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def _plain_await(unfinished: int) -> None:
    del unfinished


@with_twin(_plain_await)
def _await_copies(unfinished: int) -> None:
    """Waits until at most this many of the warpgroup's copies are unfinished; all threads see what has arrived."""
    plgpu.wait_gmem_to_smem(unfinished)
