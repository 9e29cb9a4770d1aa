"""Exchanges between the GPUs of one process, in one kernel (Mosaic GPU).

Each device writes its part into the others' memory over NVLink. There are two ways, with the same result:

    few bytes     All data carry flags, and the receiver reads them in its buffer until the flags arrive. So an exchange
                  takes one trip over the link: no fence, and no second message that says that data are there.
    many bytes    Devices tell one another the addresses of their results, copy their parts into them, and say when they
                  are done. Only these messages carry flags, so the links carry half as many bytes.

A CTA exchanges only with the CTAs of the same number on the other devices, and sends before it waits, so any number of
CTAs may run at the same time. A flag is the number of the exchange, counted for each CTA in device memory, so nothing
has to be reset. A CTA has two buffers for each sender: a sender overwrites one only after the receiver has sent in the
exchange in between, and by then the receiver has read it.

Programs must run these kernels in sequence, and all devices in the same order: `compilation.chained`.
"""

import functools
from collections.abc import Callable
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Int32

from detjax.operands.numerics import ceil_div, round_up
from detjax.operands.options import AxisName
from detjax.pallas.hopper.mosaic.peers import (
    COPIED,
    PIECE_BYTES,
    close_results,
    copy_piece,
    exchange,
    open_results,
)
from detjax.pallas.hopper.rows import NO_AUTO_BARRIERS
from detjax.portable import collectives as portable
from detjax.runtime import compilation
from detjax.runtime.device_links import CTA_BYTES, MAX_CTAS, UNIT, DeviceLinks, region_begin, used_axes

psum, psum_scatter = portable.psum, portable.psum_scatter

_MOST_PAIRED_BYTES: Final = 1 << 20
"""Bytes of a part up to which all of it is sent in pairs with flags."""


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
    """See `detjax.ops.collectives.gather_columns`. XLA gathers without links."""
    if links is None or not x.size or not compilation.is_chained():
        return portable.gather_columns(x, axis_name, links)
    size, rows = x.shape[-1] * x.dtype.itemsize, x.size // x.shape[-1]
    is_paired = rows * size <= _MOST_PAIRED_BYTES
    padded_size = round_up(size, UNIT if is_paired else COPIED)
    flat = jnp.pad(x.reshape(rows, -1), ((0, 0), (0, (padded_size - size) // x.dtype.itemsize)))
    peers, gather = Peers.over(axis_name, links), _sent_in_pairs if is_paired else _copied
    y = gather(flat, peers.addresses, peers.number, devices=peers.devices, first=peers.first)
    return y.reshape(*x.shape[:-1], peers.devices, -1)[..., : x.shape[-1]].reshape(*x.shape[:-1], -1)


@functools.partial(jax.jit, static_argnames=("devices", "first"))
def _sent_in_pairs(
    x: Array, addresses: Int32[Array, "devices 2"], device: Int32[Array, "1"], *, devices: int, first: int
) -> Array:
    """Returns `[M, devices * n]`, the concatenated parts `[M, n]` of all devices. All of it is sent with flags."""

    def body(x: Array, addresses: Array, device: Array, y: Array) -> None:
        line = x.shape[1] * x.dtype.itemsize // UNIT
        exchange(x, y, addresses, device, lax.axis_index("cta"), devices=devices, line=line, first=first)

    return _kernel(body, x, ceil_div(x.nbytes, CTA_BYTES), devices)(x, addresses, device)


@functools.partial(jax.jit, static_argnames=("devices", "first"))
def _copied(
    x: Array, addresses: Int32[Array, "devices 2"], device: Int32[Array, "1"], *, devices: int, first: int
) -> Array:
    """Returns `[M, devices * n]` like `_sent_in_pairs`. Only the addresses of results are sent with flags, and that
    all copies are done: the links carry half as many bytes, but two messages more."""
    pieces = ceil_div(x.nbytes, PIECE_BYTES)
    ctas = min(pieces, MAX_CTAS)

    def body(x: Array, addresses: Array, device: Array, y: Array) -> None:
        cta, options = lax.axis_index("cta"), {"devices": devices, "first": first}
        arrays = open_results(y, addresses, device, cta, **options)

        @pl.loop(0, lax.div(pieces - cta + (ctas - 1), jnp.int32(ctas)))
        def _(step: Array) -> None:
            copy_piece(x, y, device, cta + step * ctas, *arrays, devices=devices)

        close_results(addresses, device, cta, **options)

    return _kernel(body, x, ctas, devices)(x, addresses, device)


def _kernel(body: Callable[..., None], x: Array, ctas: int, devices: int) -> Callable[..., Array]:
    """Returns a kernel of independent CTAs whose result has the columns of all devices."""
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((x.shape[0], devices * x.shape[1]), x.dtype),
        grid=(ctas,),
        grid_names=("cta",),
        kernel_name="gather_columns",
        compiler_params=NO_AUTO_BARRIERS,
    )
