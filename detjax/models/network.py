"""A model's weights and its static part: the only module that splits an NNX module into the two and merges them again.

NNX modules are too slow to pass to a compiled program at every step: traversing one, and comparing its graph with the
graph that the program was compiled for, takes a millisecond or more. So programs take a `Network`, which is compared by
identity, and the weights as a flat tuple of arrays.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
from flax import nnx
from jaxtyping import PyTree

from detjax.operands.accumulated_weight import AccumulatedWeight
from detjax.operands.adapted_weight import AdaptedWeight
from detjax.operands.quantized_weight import QuantizedWeight, is_quantized

type Weights = tuple[Any, ...]
"""A module's weights in the order of their names: arrays, shapes and dtypes, or `AccumulatedWeight`s,
`AdaptedWeight`s and `QuantizedWeight`s."""

type Path = tuple[Any, ...]
"""Attributes and list indices that lead to a parameter."""

_NEVER_TRAINED: Final = "vision"
"""The part of a decoder without gradients: image rows are constants to them."""
_UNNAMED: Final = ("attention", "mlp", "weight")
"""Levels of a path that names leave out.

Digests of models and the order of a program's arguments depend on the names, so these stay as they were before layers
were composed of parts.
"""


def name_of(path: Path) -> str:
    """Returns a parameter's name, as in "['layers'][0]['qkv']"."""
    return "".join(f"[{level!r}]" for level in _named_levels(path))


def _named_levels(path: Path) -> Path:
    return tuple(level for level in path if level not in _UNNAMED)


@dataclasses.dataclass(frozen=True, eq=False)
class Network[M: nnx.Module]:
    """A module without its weights, for which programs are traced; the same object for equal modules.

    Attributes:
        graph: the module's static part.
        tree: the structure of its state.
        paths: the path of each weight.
        trained: for each weight, whether it is an `nnx.Param` of plain numbers outside the vision tower; gradients and
            optimizers leave the others unchanged.
        order: the index of each weight among the leaves of the state.
    """

    graph: nnx.GraphDef[M]
    tree: Any
    paths: tuple[Path, ...]
    trained: tuple[bool, ...]
    order: tuple[int, ...]

    def with_weights(self, weights: Weights) -> M:
        """Returns the module with weights."""
        return nnx.merge(self.graph, self.state(weights))

    def state(self, weights: Weights) -> PyTree:
        """Returns weights as a state like the module's `nnx.state`."""
        leaves = dict(zip(self.order, weights, strict=True))
        return jax.tree.unflatten(self.tree, [leaves[index] for index in range(len(leaves))])

    def weights(self, state: PyTree) -> Weights:
        """Returns the weights in a state like the module's `nnx.state`."""
        leaves = jax.tree.leaves(state, is_leaf=_is_weight)
        return tuple(leaves[index] for index in self.order)


def split[M: nnx.Module](module: M) -> tuple[Network[M], Weights]:
    """Returns a module's network, the same object for equal modules, and its weights.

    The weights of a module from `abstract` are shapes and dtypes.
    """
    graph, state = nnx.split(module)
    flat = nnx.to_flat_state(state)
    leaves = zip(flat.paths, flat.leaves, strict=True)
    trained = tuple(_is_trained(path, variable) for path, variable in leaves)
    network = _network(graph, jax.tree.structure(state, is_leaf=_is_weight), tuple(flat.paths), trained)
    return network, network.weights(state)


def _is_trained(path: Path, variable: Any) -> bool:
    return isinstance(variable, nnx.Param) and path[0] != _NEVER_TRAINED and not is_quantized(variable.get_value())


def _is_weight(x: Any) -> bool:
    return isinstance(x, AccumulatedWeight | AdaptedWeight | QuantizedWeight)


@functools.lru_cache(maxsize=64)
def _network(graph: nnx.GraphDef[Any], tree: Any, paths: tuple[Path, ...], trained: tuple[bool, ...]) -> Network[Any]:
    order = tuple(sorted(range(len(paths)), key=lambda index: _named_levels(paths[index])))
    return Network(graph, tree, tuple(paths[index] for index in order), tuple(trained[index] for index in order), order)


def abstract[T](make: Callable[[], T]) -> T:
    """Returns the result of `make` with shapes and dtypes in place of arrays; nothing is computed."""
    return nnx.eval_shape(make)


def parameters(module: nnx.Module) -> Mapping[Path, Any]:
    """Returns the module's weights by their paths, in the order of their names."""
    network, weights = split(module)
    return dict(zip(network.paths, weights, strict=True))


def part_with(module: nnx.Module, path: Path) -> Any:
    """Returns the part of a module that has the weight of a path as an attribute."""
    part: Any = module
    for level in path[:-1]:
        part = part[level] if isinstance(level, int) else getattr(part, level)
    return part
