"""Sharding of weights over the devices of a mesh: by their outputs, so that no number is ever added across devices.

Each element of a product then has one accumulator on one device, exactly as on a single device, and devices exchange
only results. So the number of devices is part of the schedule: it changes no bit.

The code of parts is the same on one device and on many. Within `jax.shard_map` over a mesh with the axes `AXES`, a part
sees its device's weights, and calls `sharded_matmul`, `gathered_matmul`, `gathered` and `local_columns`; elsewhere
these only compute. Its method `shardings(devices)` gives the sharding of its parameters by name; parameters without one
are replicated.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from detjax import ops
from detjax.operands.accumulated_weight import AccumulatedWeight, Weight
from detjax.operands.adapted_weight import AdaptedWeight
from detjax.operands.numerics import ceil_div, round_up
from detjax.operands.products import NormalizedRows
from detjax.operands.quantized_weight import QuantizedWeight, widened
from detjax.ops.collectives import gather_columns
from detjax.ops.grouped_matmul import shared_grouped_matmul
from detjax.ops.matmul import shared_matmul
from detjax.runtime import backends
from detjax.runtime.device_links import DeviceLinks, used_axes

TENSOR: Final = "tensor"
"""The mesh axis whose devices share every expert; each has some of its outputs."""

EXPERT: Final = "expert"
"""The mesh axis whose devices share the experts of a layer; each has whole experts."""

AXES: Final = (TENSOR, EXPERT)
"""The mesh axes whose devices share a model. Everything except the experts is sharded over both axes."""

_UNIT: Final = 8
"""The outputs of a shard are a multiple of this number if all outputs together are, so that kernels can load 16 bytes
at a time."""


@dataclasses.dataclass(frozen=True)
class ShardGroup:
    """Consecutive outputs of a weight, such as the queries of all heads, in shards of equal size.

    Attributes:
        size: the number of outputs.
        shards: the number of shards, a divisor of the number of devices. If it is smaller, adjacent devices have the
            same shard.
        unit: a shard has a multiple of this number of outputs. If shards are longer than all outputs together, the
            last ones are padded with zeros.
    """

    size: int
    shards: int
    unit: int = 1

    @property
    def length(self) -> int:
        """The outputs of a shard."""
        return round_up(ceil_div(self.size, self.shards), self.unit)

    @property
    def padded_size(self) -> int:
        """The outputs of all shards together, including padding."""
        return self.length * self.shards

    def shard_of(self, device: Any, devices: int) -> Any:
        """Returns the index of a device's shard."""
        return device * self.shards // devices


class ShardPlacement(NamedTuple):
    """The position of a group in a parameter.

    Attributes:
        group: the group.
        begin: its first output in the whole parameter.
        begin_in_part: its first output in a device's part.
    """

    group: ShardGroup
    begin: int
    begin_in_part: int

    @property
    def in_part(self) -> slice:
        """The outputs of the device's shard within its part."""
        return slice(self.begin_in_part, self.begin_in_part + self.group.length)


@dataclasses.dataclass(frozen=True)
class OutputSharding:
    """The sharding of a parameter over devices: each has a shard of every group, concatenated.

    Attributes:
        groups: the outputs.
        axis: the axis of the outputs in the parameter, counted from the end.
        over: the mesh axes whose devices have the shards.
        experts: the sharding of the first axis, the experts, over the devices of `EXPERT`; None: not an expert
            parameter, or every device has all experts.
    """

    groups: tuple[ShardGroup, ...]
    axis: int = -2
    over: tuple[str, ...] = AXES
    experts: ShardGroup | None = None

    @property
    def is_sharded(self) -> bool:
        """True if devices hold different shards."""
        groups = self.groups if self.experts is None else (self.experts, *self.groups)
        return any(group.shards > 1 for group in groups)

    @property
    def output_sharding(self) -> "OutputSharding":
        """The sharding of the experts that a device has."""
        return dataclasses.replace(self, experts=None)

    @property
    def length(self) -> int:
        """The outputs of one device."""
        return sum(group.length for group in self.groups)

    @property
    def size(self) -> int:
        """The outputs of all devices together."""
        return sum(group.size for group in self.groups)

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the whole array, given the shape of a part or of the parts of all devices together."""
        axis = len(shape) + self.axis
        first = shape[:axis] if self.experts is None else (self.experts.size, *shape[1:axis])
        return *first, self.size, *shape[axis + 1 :]

    def places(self) -> Iterator[ShardPlacement]:
        """Yields the placement of each group."""
        begin = begin_in_part = 0
        for group in self.groups:
            yield ShardPlacement(group, begin, begin_in_part)
            begin, begin_in_part = begin + group.size, begin_in_part + group.length

    def at(self, axis: int) -> "OutputSharding":
        """Returns the sharding of a parameter that has these outputs on another axis, such as a bias."""
        return dataclasses.replace(self, axis=axis)

    def shards(self, x: Any, device: int, devices: int) -> Any:
        """Returns a device's outputs of a whole NumPy or JAX array, or of anything that is indexed like one."""
        parts = []
        for place in self.places():
            length, end = place.group.length, place.begin + place.group.size
            first = place.begin + place.group.shard_of(device, devices) * length
            parts.append(slice_and_pad(x, first, min(first + length, end), length, x.ndim + self.axis))
        if len(parts) == 1:
            return parts[0]
        return jnp.concatenate(parts, self.axis) if isinstance(x, jax.Array) else np.concatenate(parts, self.axis)

    def whole(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the whole array, from the outputs of all devices in their order: the inverse of `shards`."""
        joined = []
        for place in self.places():
            some = parts[:: len(parts) // place.group.shards]
            shards = np.concatenate([self._taken(part, place.in_part) for part in some], self.axis)
            joined.append(self._taken(shards, slice(place.group.size)))
        return np.concatenate(joined, self.axis)

    def _taken(self, x: Any, outputs: slice) -> Any:
        """Slices the outputs of an array."""
        return x[(..., outputs, *[slice(None)] * (-1 - self.axis))]


class _Exchanges(NamedTuple):
    """The links of exchanges while a function is traced, and every gathered array with its own columns and sharding."""

    links: DeviceLinks | None
    gathered: list[tuple[Array, Array, OutputSharding]]


_exchanges: Final = contextvars.ContextVar[_Exchanges | None]("exchanges", default=None)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["part"], meta_fields=["sharding"])
@dataclasses.dataclass(frozen=True)
class DeviceColumns:
    """This device's columns of an array that has all of them, and the array's sharding."""

    part: Shaped[Array, "*N n"]
    sharding: OutputSharding


@contextlib.contextmanager
def linked(links: DeviceLinks | None, x: Array | None = None, columns: DeviceColumns | None = None) -> Iterator[None]:
    """Makes exchanges that are traced within the context use these links.

    A function of `jax.jit` that exchanges takes the links that `current_links` returns as an argument, and has its own
    context, since arrays of one trace cannot be used in another. The context may begin with an array `x` that was
    gathered in another one, and this device's columns of it; see `device_columns`.
    """
    gathered = [] if x is None or columns is None else [(x, columns.part, columns.sharding)]
    token = _exchanges.set(_Exchanges(links, gathered))
    try:
        yield
    finally:
        _exchanges.reset(token)


def current_links() -> DeviceLinks | None:
    """Returns the links of the context."""
    exchanges = _exchanges.get()
    return None if exchanges is None else exchanges.links


def device_columns(x: Shaped[Array, "*N D"]) -> DeviceColumns | None:
    """Returns this device's columns of an array that was gathered in this context; None for other arrays."""
    exchanges = _exchanges.get()
    for whole, part, sharding in [] if exchanges is None else exchanges.gathered:
        if whole is x:
            return DeviceColumns(part, sharding)
    return None


def slice_and_pad(x: Any, first: int, end: int, length: int, axis: int) -> Any:
    """Returns a slice of an axis, padded with zeros to a length, of an array or of anything indexed like one."""
    if first >= end:
        return np.zeros((*x.shape[:axis], length, *x.shape[axis + 1 :]), x.dtype)
    return pad_to(x[(..., slice(first, end), *[slice(None)] * (x.ndim - 1 - axis))], length, axis)


def pad_to(x: Any, length: int, axis: int) -> Any:
    """Returns a NumPy or JAX array padded with zeros at the end of an axis, up to a length."""
    if x.shape[axis] == length:
        return x
    zeros = np if isinstance(x, np.ndarray) else jnp
    missing = zeros.zeros((*x.shape[:axis], length - x.shape[axis], *x.shape[axis + 1 :]), x.dtype)
    return zeros.concatenate([x, missing], axis)


@functools.cache
def outputs(size: int, devices: int) -> OutputSharding:
    """Returns the sharding of `size` independent outputs, into as many shards as divide them evenly."""
    shards = math.gcd(size if size % _UNIT else size // _UNIT, devices)
    return OutputSharding((ShardGroup(size, shards),))


@functools.cache
def indivisible_shards(count: int, devices: int) -> int:
    """Returns the number of shards of `count` indivisible things, such as experts.

    It makes the longest shard as short as possible; of equally good numbers it is the smallest. A single thing has one
    shard.
    """
    divisors = [shards for shards in range(1, devices + 1) if devices % shards == 0]
    return min(divisors, key=lambda shards: (ceil_div(count, shards), shards))


@functools.cache
def head_shards(heads: int, shared_heads: int, devices: int) -> tuple[int, int]:
    """Returns the number of shards of heads, and of the heads that several of them share, such as key heads.

    A device has whole heads, and the ones that they share. If several devices need one shared head, each has it.
    """
    fitting = [
        count
        for count in range(1, devices + 1)
        if devices % count == 0 and heads % count == 0 and (shared_heads % count == 0 or count % shared_heads == 0)
    ]
    count = fitting[-1]
    return count, min(count, shared_heads)


def devices(over: Sequence[str] = AXES) -> int:
    """Returns the number of devices along mesh axes that share the model being traced; 1 outside of a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in over) if TENSOR in mesh.manual_axes else 1


def sharded_matmul(
    x: Float[Array, "*N K"] | NormalizedRows,
    weight: Weight | AdaptedWeight,
    *,
    sharding: OutputSharding,
    bias: Weight | None = None,
    residual: Float[Array, "*N D"] | None = None,
    **options: Any,
) -> Float[Array, "*N n"]:
    """Returns this device's outputs of `ops.matmul`; outside of a mesh, all of them.

    `weight` is this device's shard, with the layout "nk", and so is `bias`; `x` and `residual` have all columns.
    """
    weight, bias, is_whole = _multiplied(weight, bias, sharding)
    if residual is not None and not is_whole:
        residual = local_columns(residual, sharding)
    y = ops.matmul(x, weight, layout="nk", bias=bias, residual=residual, **options)
    return local_columns(y, sharding) if is_whole else y


def sharded_grouped_matmul(
    x: Float[Array, "M K"],
    weight: Weight | AdaptedWeight,
    group_sizes: Int[Array, "E"],
    *,
    sharding: OutputSharding,
    bias: Weight | None = None,
    **options: Any,
) -> Float[Array, "M n"]:
    """Returns this device's outputs of `ops.grouped_matmul`; see `sharded_matmul`."""
    weight, bias, is_whole = _multiplied(weight, bias, sharding)
    y = ops.grouped_matmul(x, weight, group_sizes, layout="nk", bias=bias, **options)
    return local_columns(y, sharding) if is_whole else y


def _multiplied(
    weight: Weight | AdaptedWeight, bias: Weight | None, sharding: OutputSharding
) -> tuple[Weight | AdaptedWeight, Weight | None, bool]:
    """Returns the weight and bias that a device multiplies by, and whether they include other devices' outputs.

    The bits of XLA's own products depend on the shape of the weight, so the portable backend takes the whole shape,
    with zeros for other devices' outputs. That costs as much as on a single device; kernels do not need it.
    """
    if devices(sharding.over) == 1 or not sharding.is_sharded or backends.backend() != "portable":
        return weight, bias, False
    whole_bias = None if bias is None else _at_its_place(_plain(bias), sharding.at(-1))
    if isinstance(weight, AdaptedWeight):
        base = widened(weight.value) if isinstance(weight.value, QuantizedWeight) else weight.value
        value, b = (_at_its_place(_plain(x), sharding.at(-2)) for x in (base, weight.b))
        scales = _at_its_place(weight.scales, sharding.at(-1))
        return dataclasses.replace(weight, value=value, b=b, scales=scales), whole_bias, True
    return _at_its_place(_plain(weight), sharding.at(-2)), whole_bias, True


def gathered_matmul(
    x: Float[Array, "*N K"] | NormalizedRows,
    weight: Weight | AdaptedWeight,
    *,
    sharding: OutputSharding,
    bias: Weight | None = None,
    residual: Float[Array, "*N D"] | None = None,
    **options: Any,
) -> Float[Array, "*N D"]:
    """Returns all outputs of `ops.matmul`; each device computes its share. See `sharded_matmul`."""
    if (links := _links_of_shared_results(weight, sharding)) is not None:

        def shared(x: Array, weight: Array, arrays: dict[str, Any]) -> Any:
            return shared_matmul(x, weight, sharding.over, links, **arrays, **options)

        # Kernels that can do so write each result to all devices as it is computed.
        y = refusing_gradients(shared)(x, _dense(weight), {"bias": bias, "residual": residual})
        if y is not None:
            return y
    return gathered(sharded_matmul(x, weight, sharding=sharding, bias=bias, residual=residual, **options), sharding)


def gathered_grouped_matmul(
    x: Float[Array, "M K"],
    weight: Weight | AdaptedWeight,
    group_sizes: Int[Array, "E"],
    *,
    sharding: OutputSharding,
    bias: Weight | None = None,
    sequences: Int[Array, "M"] | None = None,
    tiles: Int[Array, "T"] | None = None,
    **options: Any,
) -> Float[Array, "M D"]:
    """Returns all outputs of `ops.grouped_matmul`; each device computes its share. See `sharded_grouped_matmul`."""
    if (links := _links_of_shared_results(weight, sharding)) is not None:

        def shared(x: Array, weight: Array, group_sizes: Array, arrays: dict[str, Any]) -> Any:
            return shared_grouped_matmul(x, weight, group_sizes, sharding.over, links, **arrays, **options)

        y = refusing_gradients(shared)(x, _dense(weight), group_sizes, {"bias": bias, "tiles": tiles})
        if y is not None:
            return y
    given: dict[str, Any] = {"bias": bias, "sequences": sequences, "tiles": tiles, **options}
    return gathered(sharded_grouped_matmul(x, weight, group_sizes, sharding=sharding, **given), sharding)


def _links_of_shared_results(weight: Any, sharding: OutputSharding) -> DeviceLinks | None:
    """Returns the links by which kernels may write a product's results to all devices; None if they may not."""
    links, count = current_links(), devices(sharding.over)
    if links is None or count == 1 or len(sharding.groups) != 1 or isinstance(weight, AdaptedWeight):
        return None
    if isinstance(weight, QuantizedWeight) and weight.is_computed:
        return None
    # The shards differ on all devices and need no padding.
    (group,) = sharding.groups
    return links if group.shards == count and group.padded_size == sharding.size else None


def _dense(weight: Any) -> Any:
    return widened(weight) if isinstance(weight, QuantizedWeight) else _plain(weight)


def local_columns(x: Shaped[Array, "*N D"], sharding: OutputSharding) -> Shaped[Array, "*N n"]:
    """Returns this device's columns of an array that has all of them."""
    if devices(sharding.over) == 1 or not sharding.is_sharded:
        return x
    exchanges = _exchanges.get()
    for whole, part, whole_sharding in [] if exchanges is None else exchanges.gathered:
        # These columns were gathered from this device: taking the original avoids a slicing kernel.
        if whole is x and whole_sharding.groups == sharding.groups and _axes(whole_sharding) == _axes(sharding):
            return part
    count, device = devices(sharding.over), lax.axis_index(sharding.over)
    parts = []
    for place in sharding.places():
        group = place.group
        some = pad_to(x[..., place.begin : place.begin + group.size], group.padded_size, x.ndim - 1)
        first = group.shard_of(device, count) * group.length
        parts.append(lax.dynamic_slice_in_dim(some, first, group.length, x.ndim - 1))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def _axes(sharding: OutputSharding) -> Sequence[str]:
    """Returns the mesh axes along which shards differ."""
    return used_axes(jax.sharding.get_abstract_mesh().shape, sharding.over)


def gathered(x: Shaped[Array, "*N n"], sharding: OutputSharding) -> Shaped[Array, "*N D"]:
    """Returns all columns of an array, gathered from the devices' own."""
    if devices(sharding.over) == 1 or not sharding.is_sharded:
        return x
    everything, parts = all_gathered(x, sharding.over), []
    for place in sharding.places():
        some = everything[..., :: devices(sharding.over) // place.group.shards, place.in_part]
        parts.append(some.reshape(*x.shape[:-1], place.group.padded_size)[..., : place.group.size])
    whole = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)
    # Padding of a part is undefined, but `local_columns` gives zeros.
    is_filled = any(place.group.padded_size > place.group.size for place in sharding.places())
    if (exchanges := _exchanges.get()) is not None and not is_filled:
        exchanges.gathered.append((whole, x, sharding))
    return whole


def first_output(sharding: OutputSharding) -> Any:
    """Returns the index of this device's first output, for a sharding of one group."""
    (group,) = sharding.groups
    if not sharding.is_sharded:
        return 0
    return group.shard_of(lax.axis_index(sharding.over), devices(sharding.over)) * group.length


def all_rows(weight: Weight, sharding: OutputSharding) -> Weight:
    """Returns a whole weight `[N, K]`, gathered from the devices' rows."""
    if devices(sharding.over) == 1 or not sharding.is_sharded:
        return weight
    return gathered(_plain(weight).swapaxes(-1, -2), sharding).swapaxes(-1, -2)


def owned_rows(x: Shaped[Array, "*N D"], owner: Array, sharding: OutputSharding) -> Shaped[Array, "*N D"]:
    """Returns each row of `x` from the device whose shard is `owner`, `[*N]`; its values on other devices are ignored.

    The table that rows are read from has the sharding `sharding`, of one group.
    """
    everything = all_gathered(x, sharding.over)[..., :: devices(sharding.over) // sharding.groups[0].shards, :]
    return jnp.take_along_axis(everything, owner[..., None, None], axis=-2, mode="clip")[..., 0, :]


def refusing_gradients(function: Callable[..., Array]) -> Callable[..., Array]:
    """Returns a function of arrays without a gradient, since the gradient would be added across devices."""
    refusing = jax.custom_vjp(function)
    refusing.defvjp(lambda *args: (function(*args), None), _refuse)
    return refusing


def _refuse(_: None, gradient: Array) -> tuple[Array]:
    raise NotImplementedError(
        f"the gradient {gradient.shape} of a model that devices share would be added across devices; accepted: a model "
        "that each device has as a whole. Train with detjax.rl.Placement, whose devices share the batch."
    )


def all_gathered(x: Shaped[Array, "*N n"], over: Sequence[str]) -> Shaped[Array, "*N devices n"]:
    """Returns the columns of all devices of some axes, in their order."""
    columns = refusing_gradients(lambda x: gather_columns(x, tuple(over), current_links()))(x)
    return columns.reshape(*x.shape[:-1], devices(over), x.shape[-1])


def _plain(weight: Any) -> Any:
    assert not isinstance(weight, AccumulatedWeight), "devices that share a model train none of it"
    return weight


def _at_its_place(x: Any, sharding: OutputSharding) -> Any:
    """Places this device's part in an array of the whole shape that is zero elsewhere."""
    if isinstance(x, QuantizedWeight):
        return x.map_rows(lambda rows, axis: _at_its_place(rows, sharding.at(axis)))
    count, device, axis = devices(sharding.over), lax.axis_index(sharding.over), x.ndim + sharding.axis
    parts = []
    for place in sharding.places():
        group = place.group
        shard = lax.slice_in_dim(x, place.in_part.start, place.in_part.stop, axis=axis)
        zeros = jnp.zeros((*x.shape[:axis], group.padded_size, *x.shape[axis + 1 :]), x.dtype)
        whole = lax.dynamic_update_slice_in_dim(zeros, shard, group.shard_of(device, count) * group.length, axis)
        parts.append(lax.slice_in_dim(whole, 0, group.size, axis=axis))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=axis)
