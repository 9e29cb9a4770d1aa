"""A model's weights on the devices: they can be replaced, and rest on the host while the engine sleeps."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np
from jaxtyping import Array, PyTree

from detjax.models import Decoder
from detjax.models.mesh import placement, shardings_of, whole, whole_arrays
from detjax.models.network import Network, Weights
from detjax.operands.quantized_weight import is_quantized
from detjax.runtime.threads import in_threads

_PINNED: Final = "pinned_host"
"""JAX's name of host memory that devices reach directly."""


def committed[T: PyTree](arrays: T) -> T:
    """Returns arrays committed to their devices. JAX would compile all programs again if they later were not."""
    return jax.tree.map(lambda x: x if x.committed else jax.device_put(x, x.sharding), arrays)


class DeviceWeights:
    """The weights of a model, by their numbers in `Network.paths`.

    Attributes:
        arrays: the weights on the devices, None for lost ones; empty while they rest on the host.
    """

    def __init__(self, model: Decoder, weights: Weights) -> None:
        """The weights of `model`, which `network.split` has returned."""
        self.arrays: tuple[Any, ...] = committed(tuple(weights))
        self._mesh = model.mesh
        self._places = [jax.tree.map(lambda x: x.sharding, weight) for weight in weights]
        self._placements = placement(model, model.mesh)
        self._whole = whole_arrays(model)
        """The shapes and dtypes of the arrays of whole weights."""
        self._shardings = [None] * len(weights) if model.mesh is None else shardings_of(model, model.mesh)
        self._resting: list[Any] | None = None
        """The weights on the host while they are not on the devices, None for lost ones."""

    @property
    def are_complete(self) -> bool:
        """True if all weights are on the devices."""
        return self._resting is None and all(weight is not None for weight in self.arrays)

    # --- rest on the host ---------------------------------------------------------------------------------------------

    def rest(self, *, copies: bool) -> None:
        """Removes the weights from the devices, and copies them to the host if `copies`."""
        self._resting = [self._host_copy(number) if copies else None for number in range(len(self._whole))]
        jax.block_until_ready(self._resting)
        self.arrays = ()

    def put_back(self) -> None:
        """Puts the copies of `rest` back on the devices. Lost weights stay missing."""
        assert self._resting is not None
        resting, self._resting = self._resting, None
        self._set([self._from_host(number, copy) for number, copy in enumerate(resting)])

    def _host_copy(self, number: int) -> Any:
        """Starts to copy a weight to the host, and returns the copy; None: it is lost."""
        weight = self.arrays[number]
        if weight is None:
            return None
        try:
            # Devices copy to pinned memory at the speed of the link, and JAX keeps the memory for the next sleep.
            return jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind(_PINNED)), weight)
        except jax.errors.JaxRuntimeError:  # JAX takes a limited amount of pinned memory
            return self.whole(number)

    def _from_host(self, number: int, copy: Any) -> Any:
        """Starts to put a copy of a weight back on the devices."""
        if copy is not None and isinstance(jax.tree.leaves(copy)[0], jax.Array):
            return jax.tree.map(jax.device_put, copy, self._places[number])
        return None if copy is None else self._placements[number](copy)

    # --- other numbers ------------------------------------------------------------------------------------------------

    def whole(self, number: int) -> Any:
        """Returns a whole weight on the host; None: it is lost."""
        weight = self.arrays[number] if self._resting is None else self._resting[number]
        # Without a mesh, NumPy would share the device's memory on a CPU.
        return None if weight is None else jax.tree.map(np.array, whole(weight, self._shardings[number], self._mesh))

    def replace(self, new: Mapping[int, Any]) -> None:
        """Replaces some whole weights. The devices never hold both an old and a new one.

        If a device fails, the remaining weights are undefined.
        """
        assert self._resting is None
        weights = list(self.arrays)
        self.arrays = ()

        def replace(number: int) -> None:
            value = new[number]
            assert (value.shape, value.dtype) == (self._whole[number].shape, self._whole[number].dtype)
            weights[number] = None  # released before the new one comes
            weights[number] = self._placements[number](value)

        for _ in in_threads(replace, new):
            pass
        self._set(weights)

    def update(self, network: Network[Decoder], params: PyTree[Array]) -> None:
        """Replaces all weights by a result of `nnx.split(model)[1]` with the same shapes and dtypes.

        Raises:
            ValueError: the weights do not fit the model.
        """
        in_codes = sum(map(is_quantized, self._whole))
        if in_codes and not any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized))):
            raise ValueError(
                f"Engine.update_weights: {in_codes} weights are plain numbers; accepted: the model's codes and scales. "
                "An engine of quantized weights and a trainer of plain ones compute other logprobs, so that training "
                "would not be on-policy; load both with quantized='widened', or train what is not quantized"
            )
        _check_fit(network.state(tuple(self._whole)), params)
        self._set([put(x) for put, x in zip(self._placements, network.weights(params), strict=True)])

    def _set(self, weights: Sequence[Any]) -> None:
        self.arrays = committed(tuple(jax.block_until_ready(weights)))


def _check_fit(current: PyTree, new: PyTree[Array]) -> None:
    expected, given = (
        {jax.tree_util.keystr(path): (leaf.shape, leaf.dtype) for path, leaf in jax.tree.leaves_with_path(tree)}
        for tree in (current, new)
    )
    for name in sorted(expected.keys() | given.keys()):
        if expected.get(name) != given.get(name):
            raise ValueError(
                f"Engine.update_weights: {name} is {given.get(name, 'missing')}; accepted: "
                f"{expected.get(name, 'no such weight')}"
            )
