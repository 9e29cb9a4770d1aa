"""The devices of a training step, and the placement of batch and state on them."""

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
"""The mesh axis whose devices share a batch."""

type Flat = Float32[Array, "n"]
"""A weight's elements as one row, zero-padded to a multiple of `shards * contract.LANES`."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices that share a batch, and optionally the state. Only `shards` affects bits.

    Attributes:
        shards: the number of contiguous parts of the batch; a power of two.
        devices: the number of devices, taken from the start of JAX's list, or the devices themselves in the order of
            their shards; a power of two up to `shards`. 1 means a device of this process. After
            `jax.distributed.initialize` the list has the devices of all processes, and each process must make the same
            calls with the same samples.
        is_sharded: whether each leaf of the state is sharded over the devices or replicated.
    """

    shards: int = GRADIENT_SHARDS
    devices: int | tuple[Any, ...] = 1
    is_sharded: bool = False

    def __post_init__(self) -> None:
        """Raises `ValueError` unless the shards are a power of two and a multiple of the devices."""
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
        """The partition spec of a leaf of the state."""
        return P(AXIS) if self.is_sharded else P()

    @property
    def local_shards(self) -> int:
        """The number of a leaf's shards on each device."""
        return self.shards // self.count if self.is_sharded else self.shards

    def specs(self, tree: PyTree[Array]) -> PyTree[P]:
        """Returns the partition specs of a state's arrays: `spec` for leaves; scalars are replicated."""
        return jax.tree.map(lambda x: self.spec if jnp.ndim(x) else P(), tree)

    def placed[T](self, tree: T) -> T:
        """Returns a state on the devices, such as one restored from disk."""
        return jax.tree.map(lambda x, spec: put(x, NamedSharding(self.mesh, spec)), tree, self.specs(tree))

    def shared[T](self, tree: T) -> T:
        """Returns arrays whose first axis is sharded over the devices."""
        sharding = NamedSharding(self.mesh, P(AXIS))
        # A program of one process accepts host arrays, and copies only its shard to each device.
        return tree if sharding.is_fully_addressable else jax.tree.map(lambda x: put(x, sharding), tree)

    def everywhere[T](self, tree: T) -> T:
        """Replicates arrays on every device, without a copy where they already are."""
        return jax.tree.map(lambda x: put(x, NamedSharding(self.mesh, P())), tree)

    def like[T](self, tree: T, spec: P) -> T:
        """Returns the types of arrays with these shapes on the devices, sharded by a partition spec."""
        sharding = NamedSharding(self.mesh, spec)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    def flat(self, x: Array) -> Flat:
        """Returns an array's elements as one zero-padded row."""
        x = x.reshape(-1)
        return jnp.pad(x, (0, round_up(x.size, self.shards * LANES) - x.size))

    def added(self, x: Array) -> Array:
        """Returns the sum over the devices, within `on_devices`: only the device's shard if the state is sharded."""
        return ops.psum_scatter(x, AXIS) if self.is_sharded else ops.psum(x, AXIS)

    def gathered(self, x: Array) -> Array:
        """Gathers the shards of an array that is placed like the state, within `on_devices`."""
        return jax.lax.all_gather(x, AXIS, tiled=True) if self.is_sharded else x

    def on_devices(self, fn: Callable[..., Any], inputs: PyTree[P], outputs: PyTree[P]) -> Callable[..., Any]:
        """Returns a function that every device computes on its shards of the arguments."""
        # Loops in the operations start from replicated zeros and continue with values that vary over devices.
        return jax.shard_map(fn, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


@functools.cache
def _mesh(devices: int | tuple[Any, ...]) -> Mesh:
    if isinstance(devices, int):
        if jax.device_count() < devices:
            raise ValueError(f"Placement: devices is {devices}; accepted: up to {jax.device_count()}, JAX's devices")
        devices = tuple((jax.local_devices() if devices == 1 else jax.devices())[:devices])
    if all(device.process_index != jax.process_index() for device in devices):
        raise ValueError(
            f"Placement: none of the {len(devices)} devices belongs to this process, number {jax.process_index()} of "
            f"{jax.process_count()}; accepted: at least one device of each process"
        )
    return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))


def on_host(x: Any) -> np.ndarray:
    """Returns an array's elements. If several processes hold them, all processes must call this."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)
