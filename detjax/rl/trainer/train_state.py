"""The state of a training run: float32 masters, from which weights are rounded, and their optimizer states.

The update of an element depends only on that element, the number of updates and the norm of all gradients. Hence leaves
are updated in groups by programs that groups of equal shapes share, and devices may share the state.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float32

from detjax.contract import ACCUMULATOR
from detjax.models.network import Weights
from detjax.operands.adapted_weight import AdaptedWeight
from detjax.operands.rounding import rounded
from detjax.ops.elements import map_elements, row_squares, sums_in_order
from detjax.rl.trainer.optimizers import OnePassOptimizer, norm_of_slices
from detjax.rl.trainer.placement import Flat, Placement
from detjax.rl.trainer.trained_weights import (
    UNTRAINED,
    split,
    trained_arrays,
    trained_numbers,
    with_arrays,
    without_masters,
)
from detjax.rl.trainer.update_groups import update_groups
from detjax.runtime import compilation
from detjax.runtime.ahead import Call

type _Shapes = tuple[jax.ShapeDtypeStruct, ...]
"""The shapes and the dtype of the arrays of a weight that are trained; see `trained_arrays`."""


class TrainState(NamedTuple):
    """The state from which a run of the same configuration continues.

    Attributes:
        masters: the weights in float32.
        optimizer: each master's optimizer state; None for frozen weights.
    """

    masters: tuple[Flat, ...]
    optimizer: tuple[Any, ...]


def initial_state(
    weights: Weights,
    optimizer: optax.GradientTransformation,
    placement: Placement,
    *,
    trained: Sequence[bool] | None = None,
) -> TrainState:
    """Returns the state before the first step. A weight without masters has a single zero; see `trained_weights`.

    Args:
        optimizer: such as `detjax.rl.trainer.optimizers.adamw`.
        trained: whether each weight is trained, such as `Network.trained`; None: all are.
    """

    def leaf(weight: Any, is_trained: bool, is_fixed: bool) -> tuple[Flat, Any]:
        numbers = jnp.zeros(UNTRAINED, ACCUMULATOR) if is_fixed else jnp.asarray(trained_numbers(weight), ACCUMULATOR)
        master = placement.flat(numbers)
        # Each leaf is placed before the next one is created, so the default device never holds the whole state.
        return placement.placed((master, optimizer.init(master) if is_trained else None))

    are_trained = (True,) * len(weights) if trained is None else trained
    leaves = zip(weights, are_trained, without_masters(weights), strict=True)
    masters, states = zip(*(leaf(*one) for one in leaves), strict=True)
    return TrainState(masters, states)


def update(
    state: TrainState,
    gradients: Sequence[Flat],
    weights: Weights,
    optimizer: optax.GradientTransformation,
    placement: Placement,
    *,
    max_norm: float | None = None,
    donated: bool = True,
) -> tuple[TrainState, Weights, Float32[Array, ""]]:
    """Returns the next state, the weights rounded from it, and the norm of the gradients of trained weights.

    Args:
        gradients: each weight's gradient, as `detjax.rl.trainer.step.batch_gradients` returns them.
        weights: the present weights. Those that are not trained are returned as they are, on every device.
        optimizer: such as `detjax.rl.trainer.optimizers.adamw`. It sees one leaf at a time.
        max_norm: gradients with a larger norm are scaled down to it; None: no clipping.
        donated: donates the state's buffers, which must not be used afterwards.
    """
    trained, groups = _groups(state.optimizer, gradients)
    squares: dict[int, Array] = {}
    for indices in groups:
        squares |= zip(indices, _squares_program(placement)(tuple(gradients[i] for i in indices)), strict=True)
    norm, scale = _norm_program(placement, max_norm)(tuple(squares[index] for index in trained))
    program = _update_program(optimizer, placement, donated)
    masters, optimizer_states = list(state.masters), list(state.optimizer)
    del state
    arrays: dict[int, tuple[Array, ...]] = {}
    for indices in groups:
        leaves = [tuple(values[i] for i in indices) for values in (masters, optimizer_states, gradients)]
        results = program(*leaves, scale, shapes=tuple(_shapes_of(weights[i]) for i in indices))
        for index, master, one, rounded_ones in zip(indices, *results, strict=True):
            masters[index], optimizer_states[index], arrays[index] = master, one, rounded_ones
    return TrainState(tuple(masters), tuple(optimizer_states)), _with_arrays(weights, arrays, placement), norm


def update_calls(
    state: TrainState,
    weights: Weights,
    optimizer: optax.GradientTransformation,
    placement: Placement,
    *,
    max_norm: float | None = None,
    donated: bool = True,
) -> Iterator[Call]:
    """Yields the calls of `update`, for `compile_ahead`; it takes the arguments of `update` except the gradients."""
    masters = state.masters  # whose shapes and shardings gradients have
    trained, groups = _groups(state.optimizer, masters)
    squares: dict[int, jax.ShapeDtypeStruct] = {}
    for indices in groups:
        call = Call(_squares_program(placement), (tuple(masters[i] for i in indices),))
        yield call
        results = compilation.lowered(call.fn, *call.args).out_info
        squares |= zip(indices, placement.like(results, placement.spec), strict=True)
    norm = Call(_norm_program(placement, max_norm), (tuple(squares[index] for index in trained),))
    yield norm
    _, scale = placement.like(compilation.lowered(norm.fn, *norm.args).out_info, P())
    for indices in groups:
        leaves = [tuple(values[i] for i in indices) for values in (masters, state.optimizer, masters)]
        shapes = tuple(_shapes_of(weights[i]) for i in indices)
        yield Call(_update_program(optimizer, placement, donated), (*leaves, scale), {"shapes": shapes})


def _groups(states: Sequence[Any], gradients: Sequence[Flat]) -> tuple[list[int], list[tuple[int, ...]]]:
    """Returns the indices of trained weights, and groups of them that are updated together."""
    trained = [index for index, one in enumerate(states) if one is not None]
    return trained, [tuple(trained[i] for i in group) for group in update_groups([gradients[i] for i in trained])]


@functools.lru_cache(maxsize=32)
def _squares_program(placement: Placement) -> Callable[[tuple[Flat, ...]], tuple[Array, ...]]:
    # Leaves of equal shapes share the kernel of a function that JAX traces and lowers once.
    squares_of_leaf = jax.jit(functools.partial(row_squares, slices=placement.local_shards))

    def squares(leaves: tuple[Flat, ...]) -> tuple[Array, ...]:
        return tuple(map(squares_of_leaf, leaves))

    return compilation.jit(placement.on_devices(squares, (placement.spec,), placement.spec))


@functools.lru_cache(maxsize=32)
def _norm_program(
    placement: Placement, max_norm: float | None
) -> Callable[[tuple[Array, ...]], tuple[Array, Array | None]]:
    def norm_and_scale(squares: tuple[Array, ...]) -> tuple[Array, Array | None]:
        # One program for all leaves: a long sum in order is bound by latency, and many take as long as the longest.
        norm = norm_of_slices(jnp.stack([placement.gathered(x) for x in sums_in_order(squares)]))
        if max_norm is None:
            return norm, None
        return norm, jax.lax.optimization_barrier(jnp.float32(max_norm) / jnp.maximum(norm, jnp.float32(max_norm)))

    return compilation.jit(placement.on_devices(norm_and_scale, (placement.spec,), P()))


@functools.lru_cache(maxsize=32)
def _update_program(
    optimizer: optax.GradientTransformation, placement: Placement, donated: bool
) -> Callable[..., tuple[tuple[Flat, ...], tuple[Any, ...], tuple[tuple[Array, ...], ...]]]:
    def step(masters: Any, states: Any, gradients: Any, scale: Array | None, shapes: Any) -> Any:
        def on_device(masters: Any, states: Any, gradients: Any, scale: Array | None) -> Any:
            leaves = zip(masters, states, gradients, shapes, strict=True)
            results = [next_leaf(optimizer, *leaf[:3], scale, leaf[3][0].dtype) for leaf in leaves]
            masters, states, weights = zip(*results, strict=True)
            return masters, states, tuple(map(functools.partial(_shaped, placement), weights, shapes))

        specs = placement.specs((masters, states, gradients))
        return placement.on_devices(on_device, (*specs, P()), (*specs[:2], P()))(masters, states, gradients, scale)

    return compilation.jit(step, donate_argnums=(0, 1) if donated else (), static_argnames="shapes")


def next_leaf(
    optimizer: optax.GradientTransformation, master: Flat, state: Any, gradient: Flat, scale: Array | None, dtype: Any
) -> tuple[Flat, Any, Array]:
    """Returns a leaf's next master and optimizer state, in place if the buffers are donated, and the rounded master."""
    if isinstance(optimizer, OnePassOptimizer):
        return optimizer.next_leaf(gradient, scale, state, master, dtype)
    if scale is not None:
        gradient = map_elements(lambda g, s: g * s, gradient, scalars=(scale,))
    change, state = optimizer.update(gradient, state, master)
    master = map_elements(jnp.add, master, jnp.asarray(change), overwritten={0: 0})
    return master, state, rounded(master, dtype)


def weights_of(state: TrainState, like: Weights, placement: Placement) -> Weights:
    """Rounds the masters to weights with the shapes and dtypes of `like`, on every device; those without masters stay.

    Of an adapted weight, the factors come from the master.
    """
    indices = [index for index, is_fixed in enumerate(without_masters(like)) if not is_fixed]
    shapes = {index: _shapes_of(like[index]) for index in indices}
    arrays: dict[int, tuple[Array, ...]] = {}
    for places in update_groups(tuple(shapes.values())):
        group = [indices[place] for place in places]
        program = _weights_program(placement, tuple(shapes[index] for index in group))
        arrays |= zip(group, program(tuple(state.masters[index] for index in group)), strict=True)
    return _with_arrays(like, arrays, placement)


@functools.lru_cache(maxsize=32)
def _weights_program(
    placement: Placement, shapes: tuple[_Shapes, ...]
) -> Callable[[tuple[Flat, ...]], tuple[tuple[Array, ...], ...]]:
    def weights(masters: tuple[Flat, ...]) -> tuple[tuple[Array, ...], ...]:
        pairs = zip(masters, shapes, strict=True)
        return tuple(_shaped(placement, rounded(master, like[0].dtype), like) for master, like in pairs)

    return compilation.jit(placement.on_devices(weights, (placement.spec,), P()))


def _shapes_of(weight: Any) -> _Shapes:
    """Returns the shapes and the dtype of the arrays of a weight that are trained."""
    return tuple(jax.ShapeDtypeStruct(array.shape, weight.dtype) for array in trained_arrays(weight))


def _shaped(placement: Placement, numbers: Array, like: _Shapes) -> tuple[Array, ...]:
    """Gathers a weight's numbers from the devices of a placement, within `on_devices`, as the arrays that have them."""
    return split(placement.gathered(numbers), [one.shape for one in like])


def _with_arrays(weights: Weights, arrays: Mapping[int, tuple[Array, ...]], placement: Placement) -> Weights:
    """Returns weights with other trained arrays at some indices. All other weights are on every device."""

    def weight(index: int, present: Any) -> Any:
        if index in arrays and not isinstance(present, AdaptedWeight):
            return arrays[index][0]
        weight = placement.everywhere(present)  # an adapter's scales, too
        return with_arrays(weight, arrays[index]) if index in arrays else weight

    return tuple(weight(index, present) for index, present in enumerate(weights))
