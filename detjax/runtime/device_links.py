"""Buffers through which the GPUs of one process exchange data, and their addresses.

XLA's collectives are started by the host, so they split a program into several graphs. A kernel of ours that writes to
another GPU's memory is a kernel like any other, so a whole step is one graph. The kernel needs the addresses of the
other GPUs' buffers. The buffers are allocated once, and their addresses are an argument of programs.
"""

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int32

UNIT: Final = 8
"""Bytes that a thread sends at once."""

PAIRED_UNIT: Final = 2 * UNIT
"""Bytes of a unit with its flags."""

CTA_BYTES: Final = 4096
"""Bytes that a CTA sends to each other device."""

MAX_CTAS: Final = 1024
"""CTAs that have counters and buffers."""

TURNS: Final = 2
"""Alternating buffers of a CTA."""


class DeviceLinks(NamedTuple):
    """The addresses that a program needs to send to other devices.

    Attributes:
        addresses: the address of each device's buffers, in the order of the mesh, the lower half first.
    """

    addresses: Int32[Array, "devices 2"]


class Buffers(NamedTuple):
    """The buffers of a mesh's devices.

    Attributes:
        arrays: the memory, which lives as long as this object. No XLA program accesses it.
        links: its addresses, replicated on all devices.
        nowhere: null links: kernels send nothing and wait for nothing, and use their own shard in place of all shards.
    """

    arrays: Array
    links: DeviceLinks
    nowhere: DeviceLinks

    @classmethod
    def for_mesh(cls, mesh: Mesh) -> "Buffers":
        """Allocates buffers on a mesh of GPUs of this process with peer access."""
        sharding = NamedSharding(mesh, P(mesh.axis_names))
        size = sum(region_bytes(mesh.shape, axes) for axes in regions(mesh.shape))
        empty = jax.jit(lambda: jnp.zeros(mesh.size * size // 4, jnp.int32), out_shardings=sharding)
        arrays = jax.block_until_ready(empty())
        by_device = {shard.device: shard.data.unsafe_buffer_pointer() for shard in arrays.addressable_shards}
        addresses = np.array([by_device[device] for device in mesh.devices.flat], np.uint64)
        halves = addresses.view(np.int32).reshape(-1, 2)
        links, nowhere = jax.device_put((halves, np.zeros_like(halves)), NamedSharding(mesh, P()))
        return cls(arrays, DeviceLinks(links), DeviceLinks(nowhere))


def regions(shape: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Returns the groups of axes that devices of a mesh of this shape exchange over. Each has a region of the
    buffers."""
    every = used_axes(shape, tuple(shape))
    return list(dict.fromkeys([every, *((axis,) for axis in every)]))


def used_axes(shape: Mapping[str, int], axes: Sequence[str]) -> tuple[str, ...]:
    """Returns the axes with several devices."""
    return tuple(axis for axis in axes if shape[axis] > 1)


def region_bytes(shape: Mapping[str, int], axes: Sequence[str]) -> int:
    """Returns the bytes of a group's region: counters of its CTAs, and their buffers."""
    devices = math.prod(shape[axis] for axis in axes)
    return MAX_CTAS * (4 + TURNS * devices * CTA_BYTES // UNIT * PAIRED_UNIT)


def region_begin(shape: Mapping[str, int], axes: Sequence[str]) -> int:
    """Returns the offset of a group's region in a device's buffers, in bytes."""
    all_of_them = regions(shape)
    return sum(region_bytes(shape, other) for other in all_of_them[: all_of_them.index(tuple(axes))])


def reach_one_another(devices: Sequence[Any]) -> bool:
    """Returns whether the devices are GPUs that can write to each other's memory."""
    if any(device.platform != "gpu" for device in devices):
        return False
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    ordinals, answer = [device.local_hardware_id for device in devices], ctypes.c_int()

    def reaches(one: int, other: int) -> bool:
        return cuda.cuDeviceCanAccessPeer(ctypes.byref(answer), one, other) == 0 and answer.value == 1

    return all(reaches(one, other) for one in ordinals for other in ordinals if one != other)
