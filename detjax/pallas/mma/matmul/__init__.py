"""Matmul on `mma.sync`: the forward and backward pass of `hopper.matmul` with this backend's products.

The kernel is in `kernel.py`, its schedules and their choice in `plan.py`.
"""

import functools
from typing import Any

from detjax.pallas.hopper import matmul as hopper
from detjax.pallas.hopper.matmul import RANK_UNIT as RANK_UNIT
from detjax.pallas.hopper.matmul import add_adapter as add_adapter
from detjax.pallas.hopper.matmul import add_adapters_of_rows as add_adapters_of_rows
from detjax.pallas.hopper.matmul import apply_epilogue as apply_epilogue
from detjax.pallas.mma.matmul.kernel import product, product_keeping_sums

forward = functools.partial(hopper.forward, multiply=product)
forward_keeping_sums = functools.partial(hopper.forward_keeping_sums, multiply=product_keeping_sums)
backward = functools.partial(hopper.backward, multiply=product)
weight_gradient = functools.partial(hopper.weight_gradient, multiply=product)
biased_sums = functools.partial(hopper.biased_sums, multiply=product_keeping_sums)


def multiplies_adapters(*_: Any) -> bool:
    """Returns False: no kernel adds the product of an adapter."""
    return False


def shared_forward(*_: Any, **__: Any) -> None:
    """Returns None: no kernel writes to other devices, so XLA gathers the columns of each."""
