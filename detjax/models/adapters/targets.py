"""The parameters of a decoder that an adapter's modules belong to, and the arrays that its factors make there."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from detjax.models.adapters.adapter import Adapter, Factors
from detjax.models.checkpoint.loading import Parameter, parameters_of_checkpoint, without_weights
from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import family_named
from detjax.models.configuration.json_object import CheckpointError
from detjax.models.network import Path, parameters, part_with
from detjax.models.parts.experts import Experts

_LAYERS: Final = "layers"
_LINEAR: Final = ("qkv", "output", "gate_up", "down", "latents", "q_up", "qkvz", "ba")
"""Parameters of layers whose products take an `AdaptedWeight`."""
HEAD_PATH: Final = ("lm_head", "weight")


class Place(NamedTuple):
    """A tensor's parameter, by its number in `Network.paths`, and the tensor's number in it."""

    number: int
    tensor: int


class AdapterArrays(NamedTuple):
    """The arrays of one adapter for a parameter, in the shapes of `AdaptedWeight` with a single slot."""

    a: np.ndarray
    b: np.ndarray
    scales: np.ndarray


@dataclasses.dataclass(frozen=True)
class AdaptedParameter:
    """A parameter that may be adapted.

    Attributes:
        parameter: its tensors, shape and dtype.
        experts: the number of experts; 0: no experts.
    """

    parameter: Parameter
    experts: int

    @property
    def parts(self) -> int:
        """The tensors that have factors `A` of their own: of an expert, or of all."""
        return len(self.parameter.tensors.names) // max(self.experts, 1)

    @property
    def slot_axis(self) -> int:
        """The axis of slots in all arrays."""
        return int(self.experts > 0)

    def shapes(self, slots: int, rank: int) -> AdapterArrays:
        """Returns the shapes of the arrays of several slots, given the padded rank of a module."""
        ranks, shape = self.parts * rank, self.parameter.shape
        lead = shape[: self.slot_axis]
        outputs = (*lead, slots, *shape[len(lead) : -1])
        shapes = (*lead, slots, ranks, shape[-1]), (*outputs, ranks), outputs
        return AdapterArrays(*shapes)  # pyright: ignore[reportArgumentType]

    def arrays(self, factors: Mapping[int, Factors], rank: int) -> AdapterArrays:
        """Returns the arrays of an adapter, given its factors by the index of their tensor.

        Rows of `b` have zeros for the ranks of other tensors; missing factors are zeros.
        """
        dtype, tensors = self.parameter.dtype, self.parameter.tensors
        shapes = self.shapes(1, rank)
        a = np.zeros((max(self.experts, 1), self.parts * rank, self.parameter.shape[-1]), dtype)
        b_parts, scales = [], []
        for index, shape in enumerate(self.parameter.shapes.values()):
            expert, part = divmod(index, self.parts)
            b, first = np.zeros((shape[0], self.parts * rank), dtype), part * rank
            scale = np.float32(0)
            if index in factors:
                own_a, own_b, scale = factors[index]
                a[expert, first : first + len(own_a)] = _rounded(own_a, dtype)
                b[:, first : first + len(own_a)] = _rounded(own_b, dtype)
            b_parts.append(b)
            scales.append(np.full((shape[0], 1), scale, np.float32))
        joined_b, joined_scales = tensors.join(b_parts), tensors.join(scales)[..., 0]
        arrays = (a, joined_b, joined_scales)
        return AdapterArrays(*(x.reshape(shape) for x, shape in zip(arrays, shapes, strict=True)))

    def b_mask(self, rank: int) -> np.ndarray | None:
        """Returns where `b` of one adapter has the ranks of a row's own tensor; None: everywhere."""
        if self.parts == 1:
            return None
        masks = []
        for index, shape in enumerate(self.parameter.shapes.values()):
            mask, first = np.zeros((shape[0], self.parts * rank), bool), index % self.parts * rank
            mask[:, first : first + rank] = True
            masks.append(mask)
        return self.parameter.tensors.join(masks).reshape(self.shapes(1, rank).b)

    def factors(self, arrays: AdapterArrays) -> dict[int, Factors]:
        """Returns the factors by tensor, with padding ranks, given the arrays of one adapter; see `arrays`.

        Tensors without factors, whose scale is zero, are left out.
        """
        ranks = arrays.a.shape[-2] // self.parts
        a = arrays.a.reshape(max(self.experts, 1), self.parts, ranks, -1)
        tensors, shape = self.parameter.tensors, self.parameter.shape
        b_parts = tensors.split(arrays.b.reshape(*shape[:-1], -1))
        scale_parts = tensors.split(arrays.scales.reshape(*shape[:-1], 1))
        factors = {}
        for index, (b, scales) in enumerate(zip(b_parts, scale_parts, strict=True)):
            expert, part = divmod(index, self.parts)
            if scale := np.float32(scales.reshape(-1)[0]):
                factors[index] = Factors(a[expert, part], b[:, part * ranks : (part + 1) * ranks], scale)
        return factors


def _rounded(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns numbers in a dtype; `x` itself if it has the dtype."""
    return x if x.dtype == dtype else x.astype(np.float32, copy=False).astype(dtype)


class Targets:
    """The parameters of a model that adapters may change.

    Attributes:
        paths: the path of each parameter.
        adaptable: the parameters that may have factors, by number.
    """

    def __init__(self, config: DecoderConfig, dtype: np.dtype) -> None:
        """Reads the names and shapes of a model's parameters."""
        empty = without_weights(config, dtype)
        self._family = family_named("adapters", config.architecture)
        self._parameters: Sequence[Parameter] = parameters_of_checkpoint(empty)
        self.paths: tuple[Path, ...] = tuple(parameters(empty))
        self.adaptable: dict[int, AdaptedParameter] = {}
        self._places: dict[str, Place] = {}
        for number, (path, parameter) in enumerate(zip(self.paths, self._parameters, strict=True)):
            self._places |= {name: Place(number, index) for index, name in enumerate(parameter.shapes)}
            is_linear = path[0] == _LAYERS and path[-1] in _LINEAR
            if (is_linear or path == HEAD_PATH) and not parameter.tensors.transposed:
                part = part_with(empty, path)
                experts = part.options.experts if isinstance(part, Experts) else 0
                self.adaptable[number] = AdaptedParameter(parameter, experts)

    def module_of(self, number: int, index: int) -> str:
        """Returns the name in checkpoints of the module of a parameter's tensor."""
        name = list(self._parameters[number].shapes)[index]
        return self._family.written_name(name).removesuffix(".weight")

    def factors_of(self, adapter: Adapter) -> dict[int, dict[int, Factors]]:
        """Returns an adapter's factors by parameter and by tensor.

        Raises:
            CheckpointError: a module does not exist, cannot be adapted, or has another shape.
        """
        by_parameter: dict[int, dict[int, Factors]] = {}
        for module, factors in adapter.factors.items():
            place = self._place(f"{module}.weight", f"the factors of {module!r}")
            shape = list(self._parameters[place.number].shapes.values())[place.tensor]
            if place.number not in self.adaptable:
                raise CheckpointError(
                    f"adapter: the factors of {module!r} cannot be kept under contract; accepted: linear layers of "
                    "attention, of MLPs and of experts, and the head. Routers and embeddings are not, nor is kv_b_proj "
                    "of latent attention, whose weight is split among queries and results"
                )
            given = (factors.b.shape[0], factors.a.shape[1])
            if given != shape:
                raise CheckpointError(
                    f"adapter: the factors of {module!r} are for a weight of shape {given}; accepted: {shape}. Was the "
                    "adapter made for this model?"
                )
            by_parameter.setdefault(place.number, {})[place.tensor] = factors
        return by_parameter

    def replaced_by(self, adapter: Adapter) -> dict[int, dict[int, np.ndarray]]:
        """Returns the tensors that an adapter replaces, by parameter and by tensor.

        Raises:
            CheckpointError: the model has no such tensor, or one of another shape.
        """
        by_parameter: dict[int, dict[int, np.ndarray]] = {}
        for name, value in adapter.replaced.items():
            place = self._place(name, f"the tensor {name!r}")
            shape = list(self._parameters[place.number].shapes.values())[place.tensor]
            if value.shape != shape:
                raise CheckpointError(f"adapter: the tensor {name!r} has shape {value.shape}; accepted: {shape}")
            by_parameter.setdefault(place.number, {})[place.tensor] = value
        return by_parameter

    def with_replaced(self, number: int, whole: np.ndarray, tensors: Mapping[int, np.ndarray]) -> np.ndarray:
        """Returns a parameter with some of its tensors replaced."""
        parameter = self._parameters[number]
        parts = parameter.tensors.split(np.asarray(whole))
        for index, value in tensors.items():
            parts[index] = value.astype(np.float32).astype(parameter.dtype)
        return parameter.tensors.join(parts).reshape(parameter.shape)

    def _place(self, name: str, what: str) -> Place:
        place = self._places.get(self._family.decoder_name(name))
        if place is None:
            raise CheckpointError(
                f"adapter: the model has no weight for {what}; accepted: modules such as "
                f"{self.module_of(*next(iter(self._places.values())))!r}. Was the adapter made for this model?"
            )
        return place
