"""The devices of a training step, and where each of them has its part of the batch and of the state."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float32, PyTree

from detjax import ops
from detjax.contract import GRADIENT_SHARDS, LANES
from detjax.models.mesh import put
from detjax.operands.numerics import round_up

AXIS: Final = "data"
"""The axis of the mesh whose devices share a batch."""

type Flat = Float32[Array, "n"]
"""A weight's elements as one row, with zeros behind them up to a multiple of `shards * contract.LANES`."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices that share a batch, and whether they share the state too. Bits depend on `shards` alone.

    Attributes:
        shards: the contiguous parts of the batch; a power of two.
        devices: how many devices, the first ones of JAX's list, or the devices themselves in the order of their shards;
            a power of two up to `shards`. 1 is a device of this process. After `jax.distributed.initialize` the list
            has the devices of all processes, each of which then makes the same calls with the same samples.
        is_sharded: whether each of them has a part of every leaf of the state, or all of it.
    """

    shards: int = GRADIENT_SHARDS
    devices: int | tuple[Any, ...] = 1
    is_sharded: bool = False

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            ValueError: the shards are no power of two, or the devices do not divide them.
        """
        if self.shards < 1 or self.shards & (self.shards - 1):
            raise ValueError(f"Placement: shards is {self.shards}; accepted: powers of two")
        if self.count < 1 or self.shards % self.count:
            raise ValueError(f"Placement: devices is {self.count}; accepted: powers of two up to shards, {self.shards}")

    @property
    def count(self) -> int:
        """The number of devices."""
        return self.devices if isinstance(self.devices, int) else len(self.devices)

    @property
    def mesh(self) -> Mesh:
        """The devices as a mesh of one axis.

        Raises:
            ValueError: JAX has fewer devices.
        """
        return _mesh(self.devices)

    @property
    def spec(self) -> P:
        """How a leaf of the state lies on the mesh."""
        return P(AXIS) if self.is_sharded else P()

    @property
    def local_shards(self) -> int:
        """The shards of a leaf that a device has."""
        return self.shards // self.count if self.is_sharded else self.shards

    def specs(self, tree: PyTree[Array]) -> PyTree[P]:
        """Returns how the arrays of a state lie on the mesh: leaves as `spec` says, numbers on every device."""
        return jax.tree.map(lambda x: self.spec if jnp.ndim(x) else P(), tree)

    def placed[T](self, tree: T) -> T:
        """Returns the arrays of a state on the devices, such as ones that were read from a disk."""
        return jax.tree.map(lambda x, spec: put(x, NamedSharding(self.mesh, spec)), tree, self.specs(tree))

    def shared[T](self, tree: T) -> T:
        """Returns arrays whose first axis is divided among the devices."""
        sharding = NamedSharding(self.mesh, P(AXIS))
        # A program of one process takes arrays of the host, and copies to each device its part alone.
        return tree if sharding.is_fully_addressable else jax.tree.map(lambda x: put(x, sharding), tree)

    def everywhere[T](self, tree: T) -> T:
        """Returns arrays on every device, without a copy where they are there already."""
        return jax.tree.map(lambda x: put(x, NamedSharding(self.mesh, P())), tree)

    def flat(self, x: Array) -> Flat:
        """Returns an array's elements as one row, with zeros behind them."""
        x = x.reshape(-1)
        return jnp.pad(x, (0, round_up(x.size, self.shards * LANES) - x.size))

    def added(self, x: Array) -> Array:
        """Returns the sum over the devices, within `on_devices`: a device's part of it if the state is sharded."""
        return ops.psum_scatter(x, AXIS) if self.is_sharded else ops.psum(x, AXIS)

    def gathered(self, x: Array, axis: int = 0) -> Array:
        """Returns all parts of an array that lies like the state, within `on_devices`."""
        return jax.lax.all_gather(x, AXIS, axis=axis, tiled=True) if self.is_sharded else x

    def on_devices(self, fn: Callable[..., Any], inputs: PyTree[P], outputs: PyTree[P]) -> Callable[..., Any]:
        """Returns a function that every device computes with its parts of the arguments."""
        # Loops of the operations begin with zeros that every device has, and go on with what differs between devices.
        return jax.shard_map(fn, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


@functools.cache
def _mesh(devices: int | tuple[Any, ...]) -> Mesh:
    if isinstance(devices, int):
        if jax.device_count() < devices:
            raise ValueError(f"Placement: devices is {devices}; accepted: up to {jax.device_count()}, which JAX has")
        devices = tuple((jax.local_devices() if devices == 1 else jax.devices())[:devices])
    if all(device.process_index != jax.process_index() for device in devices):
        raise ValueError(
            f"Placement: none of the {len(devices)} devices belongs to this process, which is number "
            f"{jax.process_index()} of {jax.process_count()}; accepted: devices among which each process has some"
        )
    return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))


def on_host(x: Any) -> np.ndarray:
    """Returns an array's elements. Where they lie on devices of several processes, all of them must ask for it."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)
