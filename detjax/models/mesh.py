"""Models that the devices of a mesh share: where each device has its part of weights and state, and how calls run."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from detjax import compilation
from detjax.models.network import Network, Path, Weights, parameters, split
from detjax.models.parts.cuts import TENSOR, Cut

_TOWER: Final = "vision"
"""The part of a decoder that runs on every device as a whole."""


def checked(operation: str, mesh: Mesh) -> Mesh:
    """Returns a mesh whose devices can share a model, with an axis that the compiler need not be told of.

    Args:
        operation: what the error begins with.
        mesh: the mesh.

    Raises:
        ValueError: it has another axis than "tensor", or no device of this process.
    """
    if mesh.axis_names != (TENSOR,):
        raise ValueError(
            f"{operation}: the mesh has the axes {mesh.axis_names}; accepted: one axis, {TENSOR!r}, as "
            f"jax.make_mesh((2,), ({TENSOR!r},)) makes it for two devices"
        )
    if all(device.process_index != jax.process_index() for device in mesh.devices.flat):
        raise ValueError(
            f"{operation}: the mesh has no device of this process, which is number {jax.process_index()} of "
            f"{jax.process_count()}; accepted: a mesh that has devices of every process that calls {operation}, as "
            f"mesh_of({jax.device_count()}) makes it of all devices"
        )
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,))


def mesh_of(devices: int) -> Mesh | None:
    """Returns the first so many of JAX's devices as a mesh that can share a model; None for one device.

    After `jax.distributed.initialize`, JAX's devices are those of all processes.

    Raises:
        ValueError: JAX has fewer devices.

    Example:
        >>> detjax.models.mesh_of(1) is None
        True
    """
    if not 1 <= devices <= jax.device_count():
        raise ValueError(
            f"mesh_of: devices is {devices}; accepted: 1 to {jax.device_count()}, which JAX has. On a CPU the "
            "environment variable XLA_FLAGS=--xla_force_host_platform_device_count=8 simulates 8."
        )
    if devices == 1:
        return None
    return Mesh(np.array(jax.devices()[:devices]), (TENSOR,), axis_types=(AxisType.Auto,))


def sharded[M: Any](model: M, mesh: Mesh) -> M:
    """Returns a decoder whose weights the devices of a mesh share.

    Every answer has the bits that it has on one device: weights are cut along their outputs, so no number is added
    across devices. What does not divide into as many pieces as there are devices is cut into fewer, or every device has
    all of it.

    Args:
        model: a `Decoder` on one device, or on the host. It stays as it is.
        mesh: devices with one axis, "tensor".

    Raises:
        ValueError: the mesh has another axis or no device of this process, or the model is shared already.

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
        raise ValueError(f"sharded: the model is shared by {model.mesh.size} devices; accepted: one that is not shared")
    placed = [put(x) for put, x in zip(placement(model, mesh), split(model)[1], strict=True)]
    return with_mesh(model, tuple(placed), mesh)


def with_mesh[M: Any](model: M, weights: Weights, mesh: Mesh) -> M:
    """Returns a decoder with weights that lie on a mesh; of `model` nothing but the static part is looked at."""
    shared: M = split(model)[0].with_weights(weights)
    shared.mesh = mesh
    return shared


def cuts_of(model: Any, mesh: Mesh) -> list[Cut | None]:
    """Returns how each weight of a decoder is cut, in the order of `network.split`; None: devices have all of it."""
    return [_cut_of(model, path, mesh.size) for path in parameters(model)]


def _cut_of(model: Any, path: Path, devices: int) -> Cut | None:
    *levels, name = path
    if levels[0] == _TOWER:
        return None
    part: Any = model
    for level in levels:
        part = part[level] if isinstance(level, int) else getattr(part, level)
    cut = part.cuts(devices).get(name) if hasattr(part, "cuts") else None
    return cut if cut is not None and cut.is_cut else None


def place(x: Any, cut: Cut | None, mesh: Mesh) -> Array:
    """Returns an array on the devices of a mesh, each of which gets its part alone."""
    if cut is None:
        return put_everywhere(x, everywhere(mesh))
    sharding, devices = NamedSharding(mesh, _spec(x.ndim, cut)), mesh.size
    axis = x.ndim + cut.axis
    shape = (*x.shape[:axis], cut.length * devices, *x.shape[axis + 1 :])

    def part(index: Any) -> np.ndarray:
        begin = index[axis].start or 0
        return np.asarray(cut.pieces(x, begin // cut.length, devices))

    return jax.make_array_from_callback(shape, sharding, part)


def placement(model: Any, mesh: Mesh | None) -> list[Callable[[Any], Array]]:
    """Returns what puts each weight of a decoder on the devices of a mesh, or on the default device without one."""
    if mesh is None:
        return [jnp.asarray for _ in parameters(model)]
    return [functools.partial(place, cut=cut, mesh=mesh) for cut in cuts_of(model, mesh)]


def spans_processes(mesh: Mesh | None) -> bool:
    """Returns whether some of a mesh's devices belong to other processes."""
    return mesh is not None and any(device.process_index != jax.process_index() for device in mesh.devices.flat)


def everywhere(mesh: Mesh | None) -> NamedSharding | None:
    """Returns the sharding of arrays that every device has, or None, which is that of the default device."""
    return None if mesh is None else NamedSharding(mesh, P())


def put_everywhere(tree: PyTree, sharding: NamedSharding | None) -> Any:
    """Returns arrays that every device of a sharding has; with None, the default device.

    Where the devices are those of several processes, each process puts its copy on its own devices. `jax.device_put`
    would first compare the copies of all processes, which takes a program of its own each time.
    """
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def put(x: Any) -> Array:
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(put, tree)


def whole(x: Any, cut: Cut | None, mesh: Mesh | None) -> Any:
    """Returns the whole of a weight that lies on a mesh, on the host; others as they are.

    Where the mesh has devices of several processes, all of them must ask for it.
    """
    if mesh is None:
        return x
    if not x.is_fully_addressable:
        gathered = np.asarray(_gather(x, everywhere(mesh)))
        return gathered if cut is None else cut.whole(np.split(gathered, mesh.size, axis=x.ndim + cut.axis))
    shards: list[Any] = sorted(x.addressable_shards, key=lambda shard: list(mesh.devices).index(shard.device))
    if cut is None:
        return np.asarray(shards[0].data)
    return cut.whole([np.asarray(shard.data) for shard in shards])


def whole_shapes(model: Any) -> list[tuple[int, ...]]:
    """Returns the shapes of a decoder's weights in the order of `network.split`, as a model on one device has them."""
    shapes = [x.shape for x in split(model)[1]]
    if model.mesh is None:
        return shapes
    cuts = cuts_of(model, model.mesh)
    return [shape if cut is None else cut.whole_shape(shape) for shape, cut in zip(shapes, cuts, strict=True)]


def whole_weights(model: Any) -> list[Any]:
    """Returns a decoder's weights in the order of `network.split`, as a model on one device has them."""
    weights = split(model)[1]
    if model.mesh is None:
        return list(weights)
    return [whole(x, cut, model.mesh) for x, cut in zip(weights, cuts_of(model, model.mesh), strict=True)]


def _spec(ndim: int, cut: Cut | None) -> P:
    return P() if cut is None else P(*[None] * (ndim + cut.axis), TENSOR)


def state_on(mesh: Mesh, declarations: Sequence[Any], size: Any) -> Any:
    """Returns the state that layers declare, without any tokens, of which each device has what its weights need."""
    local = [declaration.shared_by(mesh.size) for declaration in declarations]
    make = jax.shard_map(
        lambda: tuple(declaration.empty(size) for declaration in local),
        mesh=mesh,
        in_specs=(),
        out_specs=specs_of(mesh, declarations),
        check_vma=False,
    )
    return jax.jit(make)()


def specs_of(mesh: Mesh, declarations: Sequence[Any]) -> tuple[Any, ...]:
    """Returns how the state of each layer lies on a mesh."""
    return tuple(declaration.spec(mesh.size) for declaration in declarations)


class Call(NamedTuple):
    """A call that every device of a mesh makes with its own weights.

    Attributes:
        method: the name of a method of the decoder.
        inputs: how its arguments lie on the mesh, each a tree of specs or the beginning of one.
        outputs: how its results lie there.
        options: further arguments by name.
    """

    method: str
    inputs: tuple[Any, ...]
    outputs: Any
    options: tuple[tuple[str, Any], ...] = ()


def run(model: Any, call: Call, *args: Any) -> Any:
    """Returns what a method of a decoder that devices share returns; see `Call`."""
    network, weights = split(model)
    if spans_processes(model.mesh):  # its programs cannot have what lies on a device of one process
        sharding = everywhere(model.mesh)
        args = jax.tree.map(lambda x: put_everywhere(x, sharding) if _is_here(x) else x, args)
    return _run(network, call, weights, args)


def _is_here(x: Any) -> bool:
    return not isinstance(x, Tracer) and not (isinstance(x, Array) and not x.is_fully_addressable)


@functools.partial(jax.jit, static_argnums=1)
def _gather(x: Array, sharding: NamedSharding) -> Array:
    return jax.lax.with_sharding_constraint(x, sharding)


@functools.partial(compilation.jit, static_argnums=(0, 1))
def _run(network: Network[nnx.Module], call: Call, weights: Weights, args: tuple[Any, ...]) -> Any:
    model: Any = network.with_weights(weights)
    mesh = model.mesh
    pairs = zip(weights, cuts_of(model, mesh), strict=True)
    specs = tuple(_spec(len(x.shape), cut) for x, cut in pairs)

    def on_device(weights: Weights, args: tuple[Any, ...]) -> Any:
        # XLA's partitioner crashes on arguments without elements, such as those of batches without prefills.
        args = jax.tree.map(lambda x: x if x.size else jnp.zeros(x.shape, x.dtype), args)
        return getattr(network.with_weights(weights), call.method)(*args, **dict(call.options))

    # Loops of the operations begin with zeros that every device has, and go on with what differs between devices.
    shared = jax.shard_map(on_device, mesh=mesh, in_specs=(specs, call.inputs), out_specs=call.outputs, check_vma=False)
    return shared(weights, args)
