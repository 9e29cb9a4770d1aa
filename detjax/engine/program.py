"""A program of the engine: its function, its arguments, and the model that it calls."""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jax.sharding import Mesh, NamedSharding

from detjax.models.decoder import Decoder
from detjax.models.network import Network, Weights
from detjax.models.parts.sharding import linked
from detjax.runtime import compilation
from detjax.runtime.device_links import DeviceLinks


class Parameters(NamedTuple):
    """The leading arguments of every program.

    Attributes:
        weights: the model's weights.
        links: connections between devices that share the model; None: one device, or XLA's collectives.
    """

    weights: Weights
    links: DeviceLinks | None = None


@runtime_checkable
class Programs(Protocol):
    """A set of programs, described by shapes and dtypes so that they can be pickled."""

    @property
    def network(self) -> Any:
        """The first argument of each program, which is static."""
        ...

    @property
    def networks(self) -> tuple[Network, ...]:
        """The networks in it."""
        ...

    @property
    def parameters(self) -> Any:
        """The second argument of each program."""
        ...

    @property
    def mesh(self) -> Mesh | None:
        """The devices that share the model; None: one device."""
        ...

    def by_key(self) -> Mapping[Hashable, "StepProgram"]:
        """Returns the programs, the essential ones first."""
        ...


class ModelPart(NamedTuple):
    """The part of a model that a program takes in place of the model.

    Attributes:
        network: the part without its weights.
        weights: the numbers of its weights among the model's.
    """

    network: Network
    weights: tuple[int, ...]


class StepProgram(NamedTuple):
    """A program and the arguments of a call.

    Attributes:
        fn: a function of `compilation.jit`; its first arguments are the network and its weights.
        size: the sizes that its arguments depend on.
        args: the arguments after the parameters: arrays, or their shapes and dtypes.
        static: the static keyword arguments.
        purpose: a description of the program.
        is_essential: whether a server waits for it before it takes requests. The other programs only make smaller or
            simpler steps faster.
        part: what it takes of the model; None: all of it.
        until: the key of the program that takes its place once that is compiled; None: none does.
    """

    fn: Callable[..., Any]
    size: Hashable
    args: tuple[Any, ...]
    static: dict[str, Any]
    purpose: str
    is_essential: bool = True
    part: ModelPart | None = None
    until: Hashable | None = None

    def leading(self, network: Any, parameters: Any) -> tuple[Any, Any]:
        """Returns the first two arguments of the program, given the ones of a program of the whole model."""
        if self.part is None:
            return network, parameters
        weights = tuple(parameters.weights[number] for number in self.part.weights)
        return self.part.network, parameters._replace(weights=weights)

    def compiled(self, network: Any, parameters: Any) -> Callable[..., Any]:
        """Compiles the program; see `leading`."""
        return compilation.compiled(self.fn, *self.leading(network, parameters), *self.args, **self.static)

    @property
    def key(self) -> Hashable:
        """The program's identity in its step loop, the same in all processes."""
        return self.fn.__name__, self.size, *self.static.values()


def shapes_of[T](tree: T, everywhere: NamedSharding | None = None) -> T:
    """Returns shapes and dtypes of arrays, with `everywhere` as the sharding of arrays without one."""

    def shape_of(x: Any) -> jax.ShapeDtypeStruct:
        if everywhere is None:
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        sharding = getattr(x, "sharding", None)
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=sharding if isinstance(sharding, NamedSharding) else everywhere
        )

    return jax.tree.map(shape_of, tree)


@contextlib.contextmanager
def model_of(network: Network[Decoder], parameters: Parameters) -> Iterator[Decoder]:
    """Yields the model, whose devices exchange by the links of the parameters in this context."""
    with linked(parameters.links):
        yield network.with_weights(parameters.weights)
