"""Models that the devices of a mesh share: placement of weights and state, and calls that run on all devices."""

import dataclasses
import functools
import gc
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from detjax.models.network import Network, Path, Weights, parameters, part_with, split
from detjax.models.parts.sharding import (
    AXES,
    EXPERT,
    TENSOR,
    OutputSharding,
    ShardGroup,
    current_links,
    linked,
    slice_and_pad,
)
from detjax.operands.adapted_weight import AdaptedWeight
from detjax.operands.quantized_weight import QuantizedWeight
from detjax.runtime import backends, compilation
from detjax.runtime.device_links import Buffers, DeviceLinks, reach_one_another

_TOWER: Final = "vision"
"""The part of a decoder that is replicated on every device."""


def checked(operation: str, mesh: Mesh) -> Mesh:
    """Returns a mesh whose devices can share a model, with both of `AXES`, which the compiler handles automatically.

    Raises:
        ValueError: it has an axis other than "tensor" and "expert", or no device of this process.
    """
    names = mesh.axis_names
    if not names or not set(names) <= set(AXES):
        advice = (
            " For the axis 'data' run an engine for each replica: serve --data-parallel." if "data" in names else ""
        )
        raise ValueError(
            f"{operation}: the mesh has the axes {names}; accepted: {TENSOR!r}, {EXPERT!r} or both, as "
            f"jax.make_mesh((2, 1), {AXES}) makes them for two devices.{advice}"
        )
    if all(device.process_index != jax.process_index() for device in mesh.devices.flat):
        raise ValueError(
            f"{operation}: the mesh has no device of this process, which is number {jax.process_index()} of "
            f"{jax.process_count()}; accepted: a mesh with devices of every process that calls {operation}, such as "
            f"mesh_of({jax.device_count()})"
        )
    order = [names.index(axis) for axis in AXES if axis in names]
    shape = [mesh.shape.get(axis, 1) for axis in AXES]
    return Mesh(mesh.devices.transpose(order).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def mesh_of(tensor: int = 1, expert: int = 1) -> Mesh | None:
    """Returns the first of JAX's devices as a mesh that can share a model; None for one device.

    Args:
        tensor: the number of devices that share each expert, and everything except the experts.
        expert: the number of such groups of devices; each has some of the experts of a layer.

    After `jax.distributed.initialize`, JAX's devices include the devices of all processes.

    Raises:
        ValueError: JAX has fewer devices.

    Example:
        >>> detjax.models.mesh_of(tensor=1, expert=1) is None
        True
    """
    if min(tensor, expert) < 1 or tensor * expert > jax.device_count():
        raise ValueError(
            f"mesh_of: tensor is {tensor} and expert is {expert}; accepted: positive numbers whose product is at most "
            f"{jax.device_count()}, the devices of JAX. On a CPU the environment variable "
            "XLA_FLAGS=--xla_force_host_platform_device_count=8 simulates 8."
        )
    if tensor * expert == 1:
        return None
    devices = np.array(jax.devices()[: tensor * expert]).reshape(tensor, expert)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def sharded[M: Any](model: M, mesh: Mesh) -> M:
    """Returns a decoder whose weights the devices of a mesh share.

    Every result has the same bits as on one device: weights are sharded along their outputs, so no number is added
    across devices. A weight that does not divide evenly among the devices has fewer shards, or is replicated.

    Args:
        model: a `Decoder` on one device, or on the host. It is not modified.
        mesh: devices with the axes "tensor" and "expert", or with one of them.

    Raises:
        ValueError: the mesh has another axis or no device of this process, or the model is already sharded.

    Example:
        >>> import jax, detjax.demo
        >>> model, tokenizer = detjax.models.load(detjax.demo.CHECKPOINT, progress=False)
        >>> mesh = jax.make_mesh((jax.device_count(),), ("tensor",))
        >>> shared = detjax.models.sharded(model, mesh)
        >>> detjax.generate(shared, ["ROMEO:"], tokenizer=tokenizer) == detjax.generate(
        ...     model, ["ROMEO:"], tokenizer=tokenizer
        ... )
        True
    """
    mesh = checked("sharded", mesh)
    if model.mesh is not None:
        raise ValueError(f"sharded: the model is shared by {model.mesh.size} devices; accepted: a model on one device")
    placed = [put(x) for put, x in zip(placement(model, mesh), split(model)[1], strict=True)]
    return with_mesh(model, tuple(placed), mesh)


def with_mesh[M: Any](model: M, weights: Weights, mesh: Mesh) -> M:
    """Returns a decoder with weights that lie on a mesh; only the static part of `model` is used."""
    shared: M = split(model)[0].with_weights(weights)
    shared.mesh = mesh
    return shared


def shardings_of(model: Any, mesh: Mesh | AbstractMesh) -> list[OutputSharding | None]:
    """Returns the sharding of each weight of a decoder, in the order of `network.split`; None: replicated."""
    return [_sharding_of(model, path, mesh) for path in parameters(model)]


def _sharding_of(model: Any, path: Path, mesh: Mesh | AbstractMesh) -> OutputSharding | None:
    if path[0] == _TOWER:
        return None
    part = part_with(model, path)
    shardings: dict[str, OutputSharding] = {}
    if hasattr(part, "shardings"):
        shardings = part.shardings(mesh.size)
    elif hasattr(part, "expert_shardings"):
        shardings = part.expert_shardings(*(mesh.shape[axis] for axis in AXES))
    sharding = shardings.get(path[-1])
    return sharding if sharding is not None and sharding.is_sharded else None


def place(x: Any, sharding: OutputSharding | None, mesh: Mesh) -> Any:
    """Returns an array on the devices of a mesh; each gets only its part.

    Reads at most one device's part of `x` at a time, and waits until it is on the device before reading the next.
    """
    if isinstance(x, QuantizedWeight):
        return _by_array(x, sharding, lambda array, sharding: place(array, sharding, mesh))
    if sharding is None:
        return replicate(x if isinstance(x, jax.Array) else np.asarray(x), everywhere(mesh))
    placed, axis = NamedSharding(mesh, _spec(x.ndim, sharding)), x.ndim + sharding.axis
    devices = math.prod(mesh.shape[name] for name in sharding.over)
    shape = [*x.shape[:axis], sharding.length * devices, *x.shape[axis + 1 :]]
    if sharding.experts is not None:
        shape[0] = sharding.experts.length * mesh.shape[EXPERT]
    parts = []
    for device, index in placed.addressable_devices_indices_map(tuple(shape)).items():
        assert index is not None
        shard_experts = x if sharding.experts is None else _some_experts(x, sharding.experts, index[0].start or 0, mesh)
        part = sharding.shards(shard_experts, (index[axis].start or 0) // sharding.length, devices)
        part = part if isinstance(part, jax.Array) else np.asarray(part)
        parts.append(jax.block_until_ready(jax.device_put(part, device)))
        # JAX releases its copies only when garbage is collected.
        del shard_experts, part
        gc.collect(0)
    return jax.make_array_from_single_device_arrays(tuple(shape), placed, parts)


def _by_array(weight: QuantizedWeight, sharding: OutputSharding | None, function: Callable[..., Any]) -> Any:
    """Replaces each array of a quantized weight by `function(array, the array's sharding)`."""

    def replaced(x: Any, axis: int | None) -> Any:
        if sharding is None or (axis is None and sharding.experts is None):
            return function(x, None)
        # Every device of an expert has all of what its rows share.
        shared = dataclasses.replace(sharding, groups=(ShardGroup(x.shape[-1], 1),), axis=-1)
        return function(x, shared if axis is None else sharding.at(axis))

    return weight.map_arrays(replaced)


def _some_experts(x: Any, experts: ShardGroup, begin: int, mesh: Mesh) -> Any:
    """Slices the experts of one shard, given its start in the sharded array; missing experts are zeros."""
    if experts.shards == 1:
        return x
    first = experts.shard_of(begin // experts.length, mesh.shape[EXPERT]) * experts.length
    return slice_and_pad(x, first, min(first + experts.length, experts.size), experts.length, 0)


def placement(model: Any, mesh: Mesh | None) -> list[Callable[[Any], Array]]:
    """Returns a function per weight that puts it on the devices of a mesh, or without a mesh on the default device."""
    if mesh is None:
        return [_on_default_device for _ in parameters(model)]
    return [functools.partial(place, sharding=sharding, mesh=mesh) for sharding in shardings_of(model, mesh)]


def _on_default_device(x: Any) -> Any:
    if isinstance(x, QuantizedWeight):
        return jax.tree.map(_on_default_device, x)
    # `jnp.asarray` would compile a program for each shape, and an alias would follow later changes of a NumPy array.
    return x if isinstance(x, Array) else jax.device_put(np.asarray(x), may_alias=False)


def spans_processes(mesh: Mesh | None) -> bool:
    """Returns whether some of a mesh's devices belong to other processes."""
    return mesh is not None and any(device.process_index != jax.process_index() for device in mesh.devices.flat)


def device_buffers(mesh: Mesh | None) -> Buffers | None:
    """Returns buffers for exchanges between kernels on the devices of a mesh; None if XLA's collectives do that.

    Kernels exchange between GPUs of this process that have access to each other's memory.
    """
    if mesh is None or spans_processes(mesh) or backends.backend() != "hopper":
        return None
    return Buffers.for_mesh(mesh) if reach_one_another(list(mesh.devices.flat)) else None


def everywhere(mesh: Mesh | None) -> NamedSharding | None:
    """Returns the sharding of replicated arrays; None stands for the default device."""
    return None if mesh is None else NamedSharding(mesh, P())


def replicate(tree: PyTree, sharding: NamedSharding | None) -> Any:
    """Returns arrays replicated on the devices of a sharding; with None, on the default device."""
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)  # one call for all arrays: the engine does this at every step
    return jax.tree.map(lambda x: put(x, sharding), tree)


def put(x: Any, sharding: NamedSharding) -> Array:
    """Returns an array on the devices of a sharding, without a copy if it is there already.

    If the devices belong to several processes, each process puts its parts on its own devices: it has the whole array,
    or the array lies on devices of several processes. `jax.device_put` would first compare the copies of all processes,
    which takes a separate program each time.
    """
    if isinstance(x, Array) and x.committed and x.sharding == sharding:
        return x  # `jax.device_put` would take longer: an update of a model's weights asks for hundreds of arrays
    if sharding.is_fully_addressable or (isinstance(x, Array) and not x.is_fully_addressable):
        return jax.device_put(x, sharding)
    local = x if isinstance(x, Array) else np.asarray(x)
    return jax.make_array_from_callback(local.shape, sharding, lambda index: local[index])


def whole(x: Any, sharding: OutputSharding | None, mesh: Mesh | None) -> Any:
    """Returns a weight that lies on a mesh as a whole array on the host; without a mesh, the weight unchanged.

    If the mesh has devices of several processes, all of them must call this.
    """
    if mesh is None:
        return x
    if isinstance(x, QuantizedWeight):
        return _by_array(x, sharding, lambda array, sharding: whole(array, sharding, mesh))
    order = list(mesh.devices.flat)
    if x.is_fully_addressable:
        by_device = {shard.device: np.asarray(shard.data) for shard in x.addressable_shards}
    else:
        gathered = np.asarray(_gather(x, everywhere(mesh)))
        by_device = {device: gathered[index] for device, index in x.sharding.devices_indices_map(x.shape).items()}
    parts = [by_device[device] for device in order]
    if sharding is None:
        return parts[0]
    if sharding.experts is None:
        return sharding.whole(parts)
    sharing = mesh.shape[EXPERT]
    firsts = range(0, sharing, sharing // sharding.experts.shards)
    return np.concatenate([sharding.whole(parts[first::sharing]) for first in firsts])[: sharding.experts.size]


def whole_shapes(model: Any) -> list[tuple[int, ...]]:
    """Returns the shapes that a decoder's weights have on one device, in the order of `network.split`."""
    shapes = [x.shape for x in split(model)[1]]
    if model.mesh is None:
        return shapes
    shardings = shardings_of(model, model.mesh)
    return [
        shape if sharding is None else sharding.whole_shape(shape)
        for shape, sharding in zip(shapes, shardings, strict=True)
    ]


def whole_arrays(model: Any) -> list[Any]:
    """Returns the shapes and dtypes of the arrays of `whole_weights`."""
    weights = split(model)[1]
    shardings = [None] * len(weights) if model.mesh is None else shardings_of(model, model.mesh)

    def described(x: Any, sharding: OutputSharding | None) -> Any:
        if isinstance(x, QuantizedWeight):
            return _by_array(x, sharding, described)
        return jax.ShapeDtypeStruct(x.shape if sharding is None else sharding.whole_shape(x.shape), x.dtype)

    return [described(x, sharding) for x, sharding in zip(weights, shardings, strict=True)]


def whole_weights(model: Any) -> list[Any]:
    """Returns a decoder's weights as on one device, in the order of `network.split`."""
    weights = split(model)[1]
    if model.mesh is None:
        return list(weights)
    return [
        whole(x, sharding, model.mesh) for x, sharding in zip(weights, shardings_of(model, model.mesh), strict=True)
    ]


def _spec(ndim: int, sharding: OutputSharding | None) -> P:
    if sharding is None:
        return P()
    axes: list[Any] = [*[None] * (ndim + sharding.axis), sharding.over]
    if sharding.experts is not None:
        axes[0] = EXPERT
    return P(*axes)


def _weight_specs(weight: Any, sharding: OutputSharding | None) -> Any:
    """Returns the partition specs of a weight's arrays: of an adapted one, all outputs are sharded alike."""
    if isinstance(weight, QuantizedWeight):
        return _by_array(weight, sharding, lambda x, sharding: _spec(x.ndim, sharding))
    if not isinstance(weight, AdaptedWeight) or sharding is None:
        return _spec(len(weight.shape), sharding)
    a = P() if sharding.experts is None else P(EXPERT)
    value, b = _weight_specs(weight.value, sharding), _spec(len(weight.b.shape), sharding)
    scales, rows = _spec(weight.scales.ndim, sharding.at(-1)), None if weight.rows is None else P()
    mask = None if weight.b_mask is None else b
    specs: Any = AdaptedWeight(value, a, b, scales, rows, mask)  # pyright: ignore[reportArgumentType]
    return specs


def empty_state(mesh: Mesh | None, declarations: Sequence[Any], size: Any) -> Any:
    """Returns the state that layers declare, without any tokens; each device has the part that its weights need."""
    make = functools.partial(empty_state_of_a_device, mesh, declarations, size)
    if mesh is None:
        return make()
    shared = jax.shard_map(make, mesh=mesh, in_specs=(), out_specs=specs_of(mesh, declarations), check_vma=False)
    return jax.jit(shared)()


def empty_state_of_a_device(mesh: Mesh | AbstractMesh | None, declarations: Sequence[Any], size: Any) -> Any:
    """Returns one device's part of the state that layers declare; see `empty_state`."""
    devices = 1 if mesh is None else mesh.size
    return tuple(declaration.shared_by(devices).empty(size) for declaration in declarations)


def specs_of(mesh: Mesh, declarations: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the partition specs of each layer's state on a mesh."""
    return tuple(declaration.spec(mesh.size) for declaration in declarations)


class Call(NamedTuple):
    """A call that every device of a mesh makes with its own weights.

    Attributes:
        method: the name of a method of the decoder.
        inputs: partition specs of its arguments, each a tree of specs or a prefix of one.
        outputs: partition specs of its results.
        options: further static arguments by name.
        static: static arguments that come before all others.
    """

    method: str
    inputs: tuple[Any, ...]
    outputs: Any
    options: tuple[tuple[str, Any], ...] = ()
    static: tuple[Any, ...] = ()


def run(model: Any, call: Call, *args: Any) -> Any:
    """Calls a method of a decoder that devices share and returns its result; see `Call`."""
    network, weights = split(model)
    if spans_processes(model.mesh):  # its programs do not accept arrays on a device of one process
        sharding = everywhere(model.mesh)
        args = jax.tree.map(lambda x: replicate(x, sharding) if _is_here(x) else x, args)
    return _run(network, call, weights, current_links(), args)


def _is_here(x: Any) -> bool:
    return not isinstance(x, Tracer) and not (isinstance(x, Array) and not x.is_fully_addressable)


@functools.partial(jax.jit, static_argnums=1)
def _gather(x: Array, sharding: NamedSharding) -> Array:
    return jax.lax.with_sharding_constraint(x, sharding)


@functools.partial(compilation.jit, static_argnums=(0, 1))
def _run(
    network: Network[nnx.Module], call: Call, weights: Weights, links: DeviceLinks | None, args: tuple[Any, ...]
) -> Any:
    model: Any = network.with_weights(weights)
    mesh = model.mesh
    pairs = zip(weights, shardings_of(model, mesh), strict=True)
    specs = tuple(_weight_specs(x, sharding) for x, sharding in pairs)

    def on_device(weights: Weights, links: DeviceLinks | None, args: tuple[Any, ...]) -> Any:
        # XLA's partitioner crashes on arguments without elements, such as batches without prefills.
        args = jax.tree.map(lambda x: x if x.size else jnp.zeros(x.shape, x.dtype), args)
        local: Any = network.with_weights(weights)
        local.mesh = None  # it has this device's weights, and its methods compute on this device
        with linked(links):
            return getattr(local, call.method)(*call.static, *args, **dict(call.options))

    # Loops of the operations start from replicated zeros and continue with values that differ between devices.
    inputs = specs, P(), call.inputs
    shared = jax.shard_map(on_device, mesh=mesh, in_specs=inputs, out_specs=call.outputs, check_vma=False)
    return shared(weights, links, args)
