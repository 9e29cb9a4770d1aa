"""Exchanges between the GPUs of one process, in one kernel (Mosaic GPU).

Each device writes its part into the others' memory over NVLink, and reads the parts that arrive in its own. Data carry
flags, so an exchange takes one trip over the link: no fence, and no second message that says that data are there.

A CTA exchanges only with the CTAs of the same number on the other devices, and sends before it waits, so any number of
CTAs may run at the same time. A flag is the number of the exchange, counted for each CTA in device memory, so nothing
has to be reset. A CTA has two buffers for each sender: a sender overwrites one only after the receiver has sent in the
exchange in between, and by then the receiver has read it.

Programs must run these kernels in sequence, and all devices in the same order: `compilation.chained`.
"""

import functools
from typing import Final, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int32

from detjax.operands.numerics import ceil_div, round_up
from detjax.operands.options import AxisName
from detjax.pallas.hopper.mosaic.peers import exchange
from detjax.pallas.hopper.rows import NO_AUTO_BARRIERS
from detjax.portable import collectives as portable
from detjax.runtime import compilation
from detjax.runtime.device_links import CTA_BYTES, MAX_CTAS, UNIT, DeviceLinks, region_begin, used_axes

psum, psum_scatter = portable.psum, portable.psum_scatter

_MAX_PIECES: Final = 8
"""Most pieces that a CTA exchanges in sequence. Larger arrays are gathered by XLA."""


class Peers(NamedTuple):
    """The devices that take part in an exchange, as kernels take them.

    Attributes:
        addresses: the addresses of their buffers.
        number: the number of this device among them.
        devices: the number of devices.
        first: the offset of their counters in the buffers, in bytes.
    """

    addresses: Int32[Array, "devices 2"]
    number: Int32[Array, "1"]
    devices: int
    first: int

    @classmethod
    def over(cls, axis_name: AxisName, links: DeviceLinks) -> "Peers":
        """Returns the devices along some axes of the mesh that the program is traced for."""
        shape = jax.sharding.get_abstract_mesh().shape
        axes = used_axes(shape, (axis_name,) if isinstance(axis_name, str) else axis_name)
        group = links.addresses.reshape(*shape.values(), 2)
        for axis in range(len(shape))[::-1]:
            if (name := tuple(shape)[axis]) not in axes:
                group = lax.dynamic_index_in_dim(group, lax.axis_index(name), axis, keepdims=False)
        number, devices = lax.axis_index(axes).astype(jnp.int32).reshape(1), lax.axis_size(axes)
        return cls(group.reshape(devices, 2), number, devices, region_begin(shape, axes))


def gather_columns(x: Array, axis_name: AxisName, links: DeviceLinks | None) -> Array:
    """See `detjax.ops.collectives.gather_columns`. XLA gathers without links, and arrays too large for the buffers."""
    size = x.shape[-1] * x.dtype.itemsize
    padded_size = round_up(size, UNIT)
    rows = x.size // x.shape[-1]
    max_bytes = _MAX_PIECES * MAX_CTAS * CTA_BYTES
    if links is None or not 0 < rows * padded_size <= max_bytes or not compilation.is_chained():
        return portable.gather_columns(x, axis_name, links)
    flat = jnp.pad(x.reshape(rows, -1), ((0, 0), (0, (padded_size - size) // x.dtype.itemsize)))
    peers = Peers.over(axis_name, links)
    y = _gathered(flat, peers.addresses, peers.number, devices=peers.devices, first=peers.first)
    return y.reshape(*x.shape[:-1], peers.devices, -1)[..., : x.shape[-1]].reshape(*x.shape[:-1], -1)


@functools.partial(jax.jit, static_argnames=("devices", "first"))
def _gathered(
    x: Array, addresses: Int32[Array, "devices 2"], device: Int32[Array, "1"], *, devices: int, first: int
) -> Array:
    """Returns `[M, devices * n]`, the concatenated parts `[M, n]` of all devices."""
    rows, columns = x.shape
    line = columns * x.dtype.itemsize // UNIT
    ctas = min(ceil_div(rows * line * UNIT, CTA_BYTES), MAX_CTAS)

    def body(*refs: Array) -> None:
        x, addresses, device, y = refs
        cta = lax.axis_index("cta")
        exchange(x, y, addresses, device, cta, devices=devices, line=line, ctas=ctas, first=first)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, devices * columns), x.dtype),
        grid=(ctas,),
        grid_names=("cta",),
        kernel_name="gather_columns",
        compiler_params=NO_AUTO_BARRIERS,
    )(x, addresses, device)
