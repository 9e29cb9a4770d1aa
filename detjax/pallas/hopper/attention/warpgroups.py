"""CTAs of attention's kernels on Hopper, and the turns of two warpgroups that multiply beside one that loads."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array

from detjax.pallas.hopper.device import WARP, WARPGROUP, shared_registers
from detjax.pallas.hopper.mosaic.barriers import arrive, sync
from detjax.pallas.hopper.mosaic.layouts import ROWS

WARPGROUPS: Final = 2
"""Warpgroups that multiply."""
TILE: Final = WARPGROUPS * ROWS
"""Rows that they multiply at once."""
CONSUMERS: Final = WARPGROUP * WARPGROUPS
"""Threads that multiply."""

MULTIPLYING_REGISTERS, _, LOADING_REGISTERS = shared_registers(240, 240, 24)
"""Registers of a thread that multiplies, and of one that loads: enough for addresses, so that the others have more."""

_TURN: Final = 4
FIRST_BARRIER: Final = _TURN + WARPGROUPS
"""The first of the 16 named barriers that a kernel may use. Those below 4 are the compiler's, the others the turns'."""
NAMED_BARRIERS: Final = 16

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
    """Runs a kernel on CTAs with the axis name "cta", whose warpgroups have the axis name "warpgroup".

    Args:
        name: the kernel's name in profiles.
        body: takes references to the operands, to the results, and to shared memory.
        operands: a pytree of arrays.
        out_type: a sequence of the results' shapes and dtypes.
        ctas: number of CTAs.
        scratch: shared memory and barriers by name.
        warpgroups: warpgroups of a CTA; default: two that multiply and one that loads.
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


def take_turn(warpgroup: Array) -> None:
    """Waits until the other warpgroup has passed the matrix unit on."""
    sync(_TURN + warpgroup, CONSUMERS)


def pass_turn(warpgroup: Array) -> None:
    """Passes the matrix unit on to the other warpgroup."""
    arrive(_TURN + 1 - warpgroup, CONSUMERS)


def sync_with_consumers(barrier: Array | int) -> None:
    """A loading warp waits until both warpgroups have arrived at a barrier."""
    sync(barrier, CONSUMERS + WARP)


def arrive_for_loader(barrier: Array | int) -> None:
    """A warpgroup arrives at a barrier that both warpgroups and a loading warp use."""
    arrive(barrier, CONSUMERS + WARP)
