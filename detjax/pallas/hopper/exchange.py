"""Exchanges between the GPUs of one process, in one kernel (Mosaic GPU).

Each device writes its part into the others' memory over NVLink, and reads what they have written into its own. Data
come with flags, so an exchange takes one trip over the link. A CTA talks only to the CTAs of the same number on the
other devices, so any number of them may run at the same time.

Programs must run these kernels one after the other, and all devices in the same order: `compilation.chained`.
"""

import functools
from typing import Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int32

from detjax import compilation
from detjax.device_links import CTA_BYTES, MOST_CTAS, UNIT, DeviceLinks, region_begin, used_axes
from detjax.numerics import ceil_div
from detjax.options import AxisName
from detjax.pallas.hopper.device import WARPGROUP
from detjax.pallas.hopper.mosaic.peers import exchange
from detjax.portable import collectives as portable

psum, psum_scatter = portable.psum, portable.psum_scatter

_UNITS: Final = CTA_BYTES // (WARPGROUP * UNIT)
"""Units that a thread sends to each other device."""


def gather_columns(x: Array, axis_name: AxisName, links: DeviceLinks | None) -> Array:
    """See `detjax.ops.collectives.gather_columns`. XLA gathers what has no links, or is too large for the buffers."""
    size = x.shape[-1] * x.dtype.itemsize
    filled = size + -size % UNIT
    rows = x.size // x.shape[-1]
    if links is None or not 0 < rows * filled <= MOST_CTAS * CTA_BYTES or not compilation.is_chained():
        return portable.gather_columns(x, axis_name, links)
    shape = jax.sharding.get_abstract_mesh().shape
    axes = used_axes(shape, (axis_name,) if isinstance(axis_name, str) else axis_name)
    flat = x.reshape(rows, -1)
    if filled != size:
        flat = jnp.pad(flat, ((0, 0), (0, (filled - size) // x.dtype.itemsize)))
    devices = lax.axis_size(axes)
    group = links.addresses.reshape(*shape.values(), 2)
    for axis in range(len(shape))[::-1]:
        if (name := tuple(shape)[axis]) not in axes:
            group = lax.dynamic_index_in_dim(group, lax.axis_index(name), axis, keepdims=False)
    number = lax.axis_index(axes).astype(jnp.int32).reshape(1)
    y = _gathered(flat, group.reshape(devices, 2), number, devices=devices, first=region_begin(shape, axes))
    return y.reshape(*x.shape[:-1], devices, -1)[..., : x.shape[-1]].reshape(*x.shape[:-1], -1)


@functools.partial(jax.jit, static_argnames=("devices", "first"))
def _gathered(
    x: Array, addresses: Int32[Array, "devices 2"], device: Int32[Array, "1"], *, devices: int, first: int
) -> Array:
    """`[M, devices * n]`: the parts `[M, n]` of all devices, one after the other in each row."""
    rows, columns = x.shape
    line = columns * x.dtype.itemsize // UNIT
    ctas = ceil_div(rows * line, _UNITS * WARPGROUP)

    def body(*refs: Array) -> None:
        x, addresses, device, y = refs
        cta = lax.axis_index("cta")
        exchange(x, y, addresses, device, cta, devices=devices, line=line, units=_UNITS, first=first)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, devices * columns), x.dtype),
        grid=(ctas,),
        grid_names=("cta",),
        kernel_name="gather_columns",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(x, addresses, device)
