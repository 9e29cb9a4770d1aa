"""A pool of adapters on the devices: slots of one size, so that another adapter compiles nothing."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from detjax.models.adapters.adapted_model import adapted_with, placed_arrays
from detjax.models.adapters.adapter import Adapter
from detjax.models.adapters.targets import HEAD_PATH, AdaptedParameter, AdapterArrays, Targets
from detjax.models.configuration.json_object import CheckpointError
from detjax.models.decoder import Decoder
from detjax.models.mesh import replicate, shardings_of
from detjax.operands.adapted_weight import padded_rank
from detjax.operands.pytrees import array_dataclass
from detjax.runtime.threads import in_threads

type _Arrays = tuple[tuple[Any, Any, Any], ...]


@array_dataclass
@dataclasses.dataclass(frozen=True)
class SlotArrays:
    """The arrays of all slots.

    Attributes:
        arrays: the arrays `a`, `b` and `scales` of each adapted parameter; see `AdaptedWeight`.
        numbers: the parameters, by their numbers in `Network.paths`.
    """

    arrays: _Arrays
    numbers: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def adapted(self, model: Decoder, rows: Int[Array, "..."]) -> Decoder:
        """Returns a decoder whose rows have the adapters in given slots, or none."""
        return adapted_with(model, dict(zip(self.numbers, self.arrays, strict=True)), rows)


class AdapterPool:
    """Slots for adapters of a model, and the arrays that they lie in.

    Attributes:
        slots: the number of slots.
        rank: the largest rank of an adapter.
        numbers: the parameters that adapters may have factors for.
        arrays: the arrays of all slots, which `put` replaces; None before `make` and after `drop`.
    """

    def __init__(self, model: Decoder, slots: int, rank: int, adapters: Iterable[Adapter] = ()) -> None:
        """A pool for linear layers without experts, and for the parameters of some adapters. `make` allocates it.

        Raises:
            CheckpointError: one of these adapters does not fit the model.
        """
        self.slots, self.rank = slots, rank
        self.targets = Targets(model.config, np.dtype(model.dtype))
        dense = {number for number, one in self.targets.adaptable.items() if not one.experts}
        needed = {number for adapter in adapters for number in self.targets.factors_of(adapter)}
        heads = {number for number, path in enumerate(self.targets.paths) if path == HEAD_PATH}
        self.numbers = tuple(sorted((dense | needed) - heads))
        self._mesh = model.mesh
        count = len(self.targets.paths)
        self._shardings = [None] * count if model.mesh is None else shardings_of(model, model.mesh)
        self.arrays: SlotArrays | None = None

    def make(self) -> None:
        """Empties all slots."""
        arrays = tuple(self._placed(number, self._empty(number)) for number in self.numbers)
        self.arrays = SlotArrays(arrays, self.numbers)

    def drop(self) -> None:
        """Releases the devices' memory, until `make`."""
        self.arrays = None

    def _parameter(self, number: int) -> AdaptedParameter:
        return self.targets.adaptable[number]

    def _empty(self, number: int) -> AdapterArrays:
        parameter = self._parameter(number)
        dtypes = parameter.parameter.dtype, parameter.parameter.dtype, np.float32
        shapes = parameter.shapes(self.slots, padded_rank(self.rank))
        zeros = (np.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
        return AdapterArrays(*zeros)

    def _placed(self, number: int, arrays: AdapterArrays) -> tuple[Array, Array, Array]:
        return placed_arrays(arrays, self._shardings[number], self._mesh)

    def check(self, adapter: Adapter) -> None:
        """Raises unless a slot can hold an adapter.

        Raises:
            CheckpointError: the adapter does not fit the model or the pool.
        """
        if adapter.replaced:
            raise CheckpointError(
                f"adapter: it replaces {next(iter(adapter.replaced))!r}, by modules_to_save or its biases; accepted "
                "next to other adapters: factors alone. Serve it merged (detjax merge), or load the model with it alone"
            )
        if adapter.rank > self.rank:
            raise CheckpointError(
                f"adapter: it has rank {adapter.rank}; accepted: up to {self.rank}, the largest rank that was set"
            )
        for number, factors in self.targets.factors_of(adapter).items():
            if number not in self.numbers:
                module = self.targets.module_of(number, next(iter(factors)))
                raise CheckpointError(
                    f"adapter: it has factors for {module!r}, for which the pool has no room; accepted: linear layers "
                    "except for the head, and experts if an adapter that was given at the start has some"
                )

    def put(self, slot: int, adapter: Adapter) -> None:
        """Writes an adapter into a slot, in the order of the device's programs."""
        self.check(adapter)
        factors, rank = self.targets.factors_of(adapter), padded_rank(self.rank)

        def arrays_of(number: int) -> AdapterArrays:
            return self._parameter(number).arrays(factors.get(number, {}), rank)

        made = in_threads(arrays_of, self.numbers)
        if self._mesh is None:  # one call for all arrays: hundreds of calls take longer than the copies
            new = tuple(map(tuple, replicate(tuple(made), None)))
        else:
            new = tuple(self._placed(number, arrays) for number, arrays in zip(self.numbers, made, strict=True))
        axes = tuple(self._parameter(number).slot_axis for number in self.numbers)
        assert self.arrays is not None
        arrays = _written(self.arrays.arrays, new, np.int32(slot), axes)
        self.arrays = SlotArrays(arrays, self.numbers)


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _written(arrays: _Arrays, new: _Arrays, slot: Any, axes: tuple[int, ...]) -> _Arrays:
    """Returns the arrays with other contents in a slot."""

    def write(x: Array, value: Array, axis: int) -> Array:
        return lax.dynamic_update_slice_in_dim(x, value, slot, axis)

    return tuple(
        tuple(write(x, value, axis) for x, value in zip(old, values, strict=True))  # pyright: ignore[reportReturnType]
        for old, values, axis in zip(arrays, new, axes, strict=True)
    )
