"""Updates of a loaded model from safetensors files: all tensors, or some of them, by their names in the checkpoint."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from detjax.models.checkpoint import loading
from detjax.models.checkpoint.digest import ModelDigest, weight_digest
from detjax.models.checkpoint.directory_files import refuse_adapter
from detjax.models.checkpoint.stored_formats import StoredFormats, stored_formats
from detjax.models.checkpoint.weight_files import StoredTensor, open_file, open_weights
from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import description, family_named
from detjax.models.configuration.json_object import CheckpointError, parse_json_object, read_file
from detjax.models.decoder import Decoder
from detjax.models.network import split
from detjax.models.text.tokenizer import Tokenizer
from detjax.operands.quantized_weight import QuantizedWeight, is_quantized
from detjax.runtime.threads import in_threads

_HEADER_BYTES: Final = 1 << 10
"""Bytes of a file's header for each tensor, at most."""


@dataclasses.dataclass(frozen=True)
class WeightUpdate:
    """New weights in host memory, which fit their model.

    Attributes:
        weights: whole weights by their numbers in the model's `Network.paths`.
        digest: the parts of the digest of the model with these weights.
        is_whole: True if all weights are new.
    """

    weights: Mapping[int, Any]
    digest: ModelDigest
    is_whole: bool


class UpdatableWeights:
    """The facts about a loaded model's weights that its updates are checked against.

    Attributes:
        digest: the parts of the model's digest.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer | None = None) -> None:
        """Reads all weights of the model for their digest, and keeps none of them."""
        self.digest = ModelDigest.from_model(model, tokenizer)
        self._config = model.config
        self._family = family_named("UpdatableWeights", model.config.architecture)
        self._empty = loading.without_weights(model.config, model.dtype)
        # Weights in codes are only replaced by codes and scales of the same form.
        forms = enumerate(map(_form, split(model)[1]))
        self._in_codes = {number: form for number, form in forms if form is not None}
        self._formats: StoredFormats | None = None
        if model.quantized_from is not None:
            self._formats = stored_formats(self._checked_configuration(Path(model.quantized_from) / loading.CONFIG))

    def read(self, path: Path, current: Callable[[int], np.ndarray | None], *, needs_all: bool = False) -> WeightUpdate:
        """Reads and checks an update, and changes nothing.

        Tensors are rounded to the dtype of the weights, to nearest even, as `load` does.

        Args:
            path: a safetensors file, or a directory with `model.safetensors` or shards of it and their index. If the
                directory has a `config.json`, it must describe this model, perhaps with another storage format.
            current: returns the present whole weight of a number, for tensors that are a part of one.
            needs_all: refuse an update of some weights, because the others are lost.

        Raises:
            CheckpointError: a file is missing or damaged; a tensor is surplus, misshapen, of an unsupported dtype, or
                beyond the range of the weights' dtype; no tensor is given; or a tensor is missing.
        """
        with contextlib.ExitStack() as files:
            stored = self._opened(path, files)
            parameters = loading.parameters_of_checkpoint(self._empty, stored)
            self._check(path, parameters, stored)
            numbers = _numbers_given(path, parameters, stored, needs_all)

            def read(number: int) -> tuple[Any, str]:
                form = self._in_codes.get(number)
                if form is not None:
                    weight = _new_codes(path, parameters[number], stored, form)
                else:
                    weight = _new_weight(path, parameters[number], stored, lambda: current(number))
                return weight, weight_digest(weight)

            read_weights = dict(zip(numbers, in_threads(read, numbers), strict=True))
        weights = {number: weight for number, (weight, _) in read_weights.items()}
        digests = {number: digest for number, (_, digest) in read_weights.items()}
        return WeightUpdate(weights, self.digest.with_weights(digests), len(weights) == len(parameters))

    def _opened(self, path: Path, files: contextlib.ExitStack) -> dict[str, StoredTensor]:
        """Returns the tensors by their names in the decoder, without quantization."""
        formats = self._formats
        if path.is_dir():
            refuse_adapter(path)
            if (path / loading.CONFIG).exists(follow_symlinks=False):
                formats = stored_formats(self._checked_configuration(path / loading.CONFIG))
            _, tensors = open_weights(path, files)
        else:
            tensors = open_file(path, files)
            # A file without a configuration may hold plain tensors of modules that the checkpoint has in codes.
            formats = None if formats is None else dataclasses.replace(formats, is_complete=False)
        stored = loading.by_decoder_name(tensors, self._family, self._config)
        if formats is not None:
            stored = formats.read(stored)
        has_head = self._config.pooling is None or self._config.pooling.has_answers
        if has_head and self._config.tied_embeddings and loading.LM_HEAD in stored:
            self._remove_tied_head(stored)
        return stored

    def _checked_configuration(self, file: Path):
        """Returns a `config.json` that describes the loaded model."""
        described = description(parse_json_object(read_file(file), str(file)), str(file))
        given = DecoderConfig.from_description(described)
        # Weights may be stored in another dtype, and tied or not, as the tensors show.
        given = dataclasses.replace(given, dtype=self._config.dtype, tied_embeddings=self._config.tied_embeddings)
        # Other files than this one may limit the positions and say how the model pools.
        given = dataclasses.replace(given, pooling=self._config.pooling, max_positions=self._config.max_positions)
        for field in dataclasses.fields(DecoderConfig):
            here, there = getattr(self._config, field.name), getattr(given, field.name)
            if here != there:
                raise CheckpointError(
                    f"{file}: {field.name} is {there!r}; accepted: {here!r}, as the model has it. To serve another "
                    "model, start another server"
                )
        return described.file

    def _remove_tied_head(self, stored: dict[str, StoredTensor]) -> None:
        """Removes a head that repeats the embedding."""
        head, embedding = stored[loading.LM_HEAD], stored.get(loading.EMBEDDING)
        if embedding is None or not loading.are_equal(head, embedding):
            raise CheckpointError(
                f"{head.file}: tensor {head.name!r} differs from the embedding, which the model uses as its head; "
                "accepted: the embedding alone, or both with the same numbers"
            )
        del stored[loading.LM_HEAD]

    def _check(self, path: Path, parameters: list[loading.Parameter], stored: Mapping[str, StoredTensor]) -> None:
        """Checks names, shapes and dtypes before anything is read."""
        expected = {name: shape for parameter in parameters for name, shape in parameter.shapes.items()}
        skips = loading.skipped_names(self._family, self._config)
        given = 0
        for name, tensor in stored.items():
            if name not in expected:
                if not any(re.fullmatch(pattern, name) for pattern in skips):
                    raise CheckpointError(
                        f"{tensor.file}: tensor {tensor.name!r} is surplus; accepted: tensors of the loaded model, by "
                        "the names of its checkpoint"
                    )
                continue
            given += 1
            if tensor.shape != expected[name]:
                raise CheckpointError(
                    f"{tensor.file}: tensor {tensor.name!r} has shape {tensor.shape}; accepted: {expected[name]}"
                )
            _ = tensor.dtype  # raises if it is not supported
        if not given:
            raise CheckpointError(f"{path} has no tensors of the model; accepted: at least one")


def most_update_bytes(config: DecoderConfig) -> int:
    """Returns the maximum bytes of a safetensors file with all weights of a model, in float32."""
    shapes = loading.tensor_shapes(config)
    return sum(4 * int(np.prod(shape, dtype=np.int64)) + _HEADER_BYTES for shape in shapes.values()) + _HEADER_BYTES


def _numbers_given(
    path: Path, parameters: Sequence[loading.Parameter], stored: Collection[str], needs_all: bool
) -> list[int]:
    """Returns the numbers of the parameters that some stored tensors are a part of."""
    if needs_all:
        for name in (name for parameter in parameters for name in parameter.shapes if name not in stored):
            raise _missing(path, name)
    return [number for number, one in enumerate(parameters) if any(name in stored for name in one.shapes)]


def _new_weight(
    path: Path,
    parameter: loading.Parameter,
    stored: Mapping[str, StoredTensor],
    current: Callable[[], np.ndarray | None],
) -> np.ndarray:
    """Reads a parameter. Its tensors that are not stored keep the numbers of the current weight."""
    given = [name for name in parameter.shapes if name in stored]
    if len(given) == len(parameter.shapes):
        return np.asarray(parameter.unread(stored))
    before = current()
    if before is None:
        raise _missing(path, next(name for name in parameter.shapes if name not in stored))
    tensors = dict(zip(parameter.shapes, parameter.tensors.split(before), strict=True))
    read = {name: stored[name].read(parameter.dtype) for name in given}
    return parameter.tensors.join((tensors | read).values())


type _Form = tuple[Any, tuple[tuple[int, ...], ...], tuple[np.dtype, ...]]
"""The structure of a quantized weight, and the shapes and dtypes of its arrays."""


def _form(weight: Any) -> _Form | None:
    """Returns the form of a quantized weight; None for a plain one. The rows of a shard are not the weight's."""
    if not is_quantized(weight):
        return None
    rowless = [weight.tables, weight.groups, weight.input_scales]
    shapes = weight.codes.shape[-1:], weight.scales.shape[-1:], *(x.shape for x in rowless if x is not None)
    return jax.tree.structure(weight), shapes, tuple(np.dtype(x.dtype) for x in jax.tree.leaves(weight))


def _new_codes(
    path: Path, parameter: loading.Parameter, stored: Mapping[str, StoredTensor], form: _Form
) -> QuantizedWeight:
    """Reads a parameter whose present weight has codes and scales of a form."""
    for name in parameter.shapes:
        if name not in stored:
            raise CheckpointError(
                f"{path}: tensor {name!r} is missing; accepted: all tensors of a product whose weight is quantized"
            )
    structure: Any = form[0]
    is_computed = structure.unflatten(range(structure.num_leaves)).is_computed
    codes = parameter.in_codes(stored, "computed" if is_computed else "weights")
    weight = None if codes is None else codes.read()
    if weight is None or _form(weight) != form:
        names = ", ".join(map(repr, parameter.shapes))
        raise CheckpointError(
            f"{path}: {names} are stored in another format than the model's weights; accepted: the format of the "
            "checkpoint that the model was loaded from, or a model that was loaded with quantized='widened'"
        )
    return weight


def _missing(path: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: tensor {name!r} is missing; accepted: all tensors of the model, because its weights were dropped"
    )
