"""Matmul of rows sorted by expert, on `mma.sync`: `hopper.grouped_matmul` with this backend's kernels.

Tiles have 16 rows or more: the rows of one instruction.
"""

import functools

from detjax.operands.options import WeightLayout
from detjax.pallas.hopper import grouped_matmul as hopper
from detjax.pallas.hopper.grouped_matmul import TAKES_TILES as TAKES_TILES
from detjax.pallas.hopper.matmul import apply_epilogue as apply_epilogue
from detjax.pallas.mma.group_sums import product_sums
from detjax.pallas.mma.matmul.kernel import product, product_keeping_sums
from detjax.pallas.mma.matmul.plan import Schedule


def _schedule(tile: int, outputs: int, layout: WeightLayout) -> Schedule:
    """Returns the schedule for a tile size: small tiles stream weights, large ones keep the matrix unit busy."""
    del outputs
    if tile == 16:
        return Schedule(16, 64 if layout == "kn" else 32, 1, line=64, lines=2)
    if tile == 32:
        return Schedule(32, 64 if layout == "kn" else 32, 2, line=64)
    return Schedule(tile, 64, 2)


_KERNELS = hopper.Kernels(product, product_keeping_sums, product_sums, _schedule, tiles=(128, 64, 32, 16))

group_unit = functools.partial(hopper.group_unit, kernels=_KERNELS)
forward = functools.partial(hopper.forward, kernels=_KERNELS)
forward_keeping_sums = functools.partial(hopper.forward_keeping_sums, kernels=_KERNELS)
backward = functools.partial(hopper.backward, kernels=_KERNELS)
