"""CTAs of the attention kernels on Hopper: their launch, registers and barriers, and turns at the matrix unit."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array, lax

from detjax.contract import KV_BLOCK
from detjax.pallas.hopper.device import WARP, WARPGROUP, shared_registers
from detjax.pallas.hopper.mosaic.barriers import arrive, sync
from detjax.pallas.hopper.mosaic.layouts import ROWS

WARPGROUPS: Final = 2
"""Multiplying warpgroups."""
TILE: Final = WARPGROUPS * ROWS
"""Rows that they multiply at once."""
CONSUMERS: Final = WARPGROUP * WARPGROUPS
"""Threads of the multiplying warpgroups."""

# A CTA of three warpgroups begins with 168 registers per thread, 504 in all. The loader needs addresses only, so it
# leaves all but 24. 240 each is what the others can then have; a warpgroup that asked for 8 more would wait forever.
MULTIPLYING_REGISTERS, _, LOADING_REGISTERS = shared_registers(240, 240, 24)
"""Registers of a multiplying and of a loading thread."""

_COPIED_ROWS: Final = 32
"""Rows of a page are copied in multiples of this."""

_TURN: Final = 4
FIRST_BARRIER: Final = _TURN + WARPGROUPS
"""The first of the 16 named barriers that kernels may use. The compiler uses those below 4, and turns the next two."""
NAMED_BARRIERS: Final = 16

# `approx_math` makes exp2 the hardware's instruction. Kernels place every barrier themselves, as their warpgroups have
# roles of their own, and reduce in primitives, which need no scratch memory of the compiler's. Primitives are code for
# one thread, hence the lane semantics.
COMPILER_PARAMS: Final = plgpu.CompilerParams(
    approx_math=True,
    unsafe_no_auto_barriers=True,
    reduction_scratch_bytes=0,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
)


def launch(
    name: str,
    body: Callable[[Any, list[Any], dict[str, Any]], None],
    operands: Any,
    out_type: Any,
    ctas: int,
    scratch: dict[str, Any],
    *,
    warpgroups: int = WARPGROUPS + 1,
) -> Sequence[Array]:
    """Runs a kernel on CTAs (axis "cta") of warpgroups (axis "warpgroup").

    Args:
        name: the kernel's name in profiles.
        body: takes references to the operands, to the results, and to shared memory.
        operands: a pytree of arrays.
        out_type: shapes and dtypes of the results.
        ctas: number of CTAs.
        scratch: shared memory and barriers by name.
        warpgroups: warpgroups per CTA; default: two that multiply and one that loads.
    """
    leaves, tree = jax.tree.flatten(operands)

    def run(*refs: Any, **scratch: Any) -> None:
        body(jax.tree.unflatten(tree, refs[: len(leaves)]), list(refs[len(leaves) :]), scratch)

    kernel = plgpu.kernel(
        run,
        out_type=out_type,
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=COMPILER_PARAMS,
        kernel_name=name,
    )
    return kernel(*leaves)


# The multiplying warpgroups take turns at the matrix unit, so that one exponentiates while the other multiplies. Each
# waits at a barrier of its own, at which the other one arrives. Every arrival has its wait: a kernel begins with
# warpgroup 1 passing the first turn to warpgroup 0, and ends with warpgroup 0 taking the turn that warpgroup 1 passed
# last.


def take_turn(warpgroup: Array) -> None:
    """Waits until the other warpgroup has passed the matrix unit on."""
    sync(_TURN + warpgroup, CONSUMERS)


def pass_turn(warpgroup: Array) -> None:
    """Passes the matrix unit on to the other warpgroup."""
    arrive(_TURN + 1 - warpgroup, CONSUMERS)


def sync_with_consumers(barrier: Array | int) -> None:
    """Has a loading warp wait until both multiplying warpgroups have arrived at a barrier."""
    sync(barrier, CONSUMERS + WARP)


def arrive_for_loader(barrier: Array | int) -> None:
    """Arrives, in a multiplying warpgroup, at a barrier that a loading warp waits at."""
    arrive(barrier, CONSUMERS + WARP)


def copy_rows(copy: Callable[[int], None], remaining: Array) -> None:
    """Starts the copy of the rows of a page that a request has, rounded up to a part of the page.

    Kernels that compute single tokens take as long as their copies. What shared memory holds after the copied rows does
    not matter: scores of such keys are replaced, and such values are cleared.

    Args:
        copy: takes a number of rows, and starts to copy as many from the page's first one on. Each number has a box of
            the copy engine, so that one copy fills a buffer, whatever its size.
        remaining: rows of the request from this page on.
    """
    start = functools.partial(copy, _COPIED_ROWS)
    for rows in range(2 * _COPIED_ROWS, KV_BLOCK + 1, _COPIED_ROWS):
        # Most pages are whole, so their condition comes first.
        larger = remaining > rows - _COPIED_ROWS
        start = functools.partial(lax.cond, larger, functools.partial(copy, rows), start)
    start()
