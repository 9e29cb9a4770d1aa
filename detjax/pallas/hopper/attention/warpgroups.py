"""A CTA of attention's larger kernels on Hopper: two warpgroups that multiply and take turns, and one that loads."""

from collections.abc import Callable
from typing import Any, Final

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array
from jax.experimental.mosaic.gpu import utils as mgpu

from detjax.pallas.hopper.attention.queries_on_rows import ROWS

WARPGROUPS: Final = 2
"""That multiply."""
TILE: Final = WARPGROUPS * ROWS
CONSUMERS: Final = 128 * WARPGROUPS
"""Threads of these."""

_TURN: Final = 4
FIRST_BARRIER: Final = _TURN + WARPGROUPS
"""The first named barrier, of 16, that is a kernel's own. Those below 4 are the compiler's, the others the turns'."""


def launch(
    name: str, body: Callable[..., None], out_type: Any, ctas: int, scratch: dict[str, Any]
) -> Callable[..., tuple[Array, ...]]:
    """The kernel whose CTAs, "cta", have the warpgroups 0 and 1 to multiply, and 2 to load."""
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        kernel_name=name,
    )


def take_turn(warpgroup: Array) -> None:
    """Waits until the other warpgroup has passed the matrix unit on."""
    sync(_TURN + warpgroup, CONSUMERS)


def pass_turn(warpgroup: Array) -> None:
    arrive(_TURN + 1 - warpgroup, CONSUMERS)


def named_barrier(operation: str, barrier_id: Any, num_threads: int) -> None:
    """Arrives at one of the hardware's barriers, or arrives and waits ("sync"), with all that use it `num_threads`."""

    def constant(_: Any) -> None:
        mgpu.inline_ptx(f"bar.{operation} {barrier_id}, {num_threads};", has_side_effects=True)

    def computed(_: Any, barrier: Any) -> None:
        text = f"bar.{operation} $0, {num_threads};"
        mgpu.inline_ptx(text, barrier.registers.item(), has_side_effects=True)

    inline: Any = plgpu.inline_mgpu
    if isinstance(barrier_id, int):
        inline()(constant)()
    else:
        inline(arg_types=(plgpu.Layout.WG_SPLAT,))(computed)(barrier_id)


def arrive(barrier_id: Any, num_threads: int) -> None:
    named_barrier("arrive", barrier_id, num_threads)


def sync(barrier_id: Any, num_threads: int) -> None:
    named_barrier("sync", barrier_id, num_threads)
