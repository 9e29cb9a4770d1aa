"""Reads Hugging Face checkpoints: a directory becomes a `Decoder`."""

import contextlib
import dataclasses
import functools
import os
import re
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args

import jax.numpy as jnp
import numpy as np
import rich.console
import rich.markup
import rich.progress
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import DTypeLike

from detjax.contract import INPUT_DTYPES
from detjax.models.checkpoint.directory_files import refuse_adapter, refuse_without_model, unread_files
from detjax.models.checkpoint.lazy_parameter import LazyParameter
from detjax.models.checkpoint.quantization_schemes import Quantized
from detjax.models.checkpoint.quantized_parameter import QuantizedParameter, quantized_parameter
from detjax.models.checkpoint.sentence_files import with_answer_ids, with_sentence_files
from detjax.models.checkpoint.stored_formats import stored_formats
from detjax.models.checkpoint.weight_files import StoredTensor, open_weights
from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import Description, Family, description, family_named
from detjax.models.configuration.generation_defaults import GenerationDefaults
from detjax.models.configuration.json_object import CheckpointError, JsonObject, parse_json_object, read_file
from detjax.models.decoder import Decoder
from detjax.models.mesh import checked, placement, with_mesh
from detjax.models.network import Weights, abstract, split
from detjax.models.network import parameters as parameters_of
from detjax.models.parts.parameters import Tensors
from detjax.models.text.tokenizer import Tokenizer
from detjax.models.vision.clips import image_options_class
from detjax.models.vision.images import ImageOptions
from detjax.operands.quantized_weight import QuantizedWeight, is_quantized

CONFIG: Final = "config.json"
GENERATION: Final = "generation_config.json"
IMAGES: Final = "preprocessor_config.json"
VIDEOS: Final = "video_preprocessor_config.json"

EMBEDDING: Final = f"{Decoder.CHECKPOINT_NAMES['embedding']}.weight"
LM_HEAD: Final = f"{Decoder.CHECKPOINT_NAMES['lm_head']}.weight"
_LAYERS: Final = "model."
"""The prefix of the names of all tensors but the head."""
_COMPUTED: Final = r".*\.rotary_emb\.inv_freq"
"""The names of tensors in old checkpoints that follow from config.json."""
_ACCEPTED: Final = (
    "the tensors of the model that config.json describes. Is it the one that the weights were saved with?"
)
_COMPARED_AT_ONCE: Final = 1 << 24
"""The bytes of a tensor that are compared at a time."""


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None,
    progress: bool | None,
    mesh: Mesh | None,
    overrides: Mapping[str, Any] | None,
    quantized: Quantized,
) -> tuple[Decoder, Tokenizer | None]:
    """Returns the model and the tokenizer; arguments and errors as in `detjax.models.load`."""
    if quantized not in get_args(Quantized):
        raise ValueError(f"load: quantized is {quantized!r}; accepted: {', '.join(get_args(Quantized))}")
    directory, mesh = Path(path), None if mesh is None else checked("load", mesh)
    if not directory.is_dir():
        raise CheckpointError(
            f"load: {os.fspath(path)!r} is not a directory; accepted: a directory with a Hugging Face checkpoint. "
            "Nothing is downloaded here: fetch the checkpoint first, then pass its directory"
        )
    requested_dtype = None if dtype is None else _accepted_dtype(dtype)
    refuse_without_model(directory)
    refuse_adapter(directory)
    tokenizer = Tokenizer.load(directory)
    described, config, defaults = _read_configuration(directory, overrides or {}, tokenizer)
    formats = stored_formats(described.file)
    image_options, video_options = _read_image_options(directory, config)

    with contextlib.ExitStack() as files:
        family = described.family
        listing, stored = open_weights(directory, files)
        stored = by_decoder_name(stored, family, config)
        if formats is not None:
            stored = formats.read(stored)
        config = _dtype_as_stored(_tied_as_stored(config, stored), described.file.raw, stored)
        weights_dtype = requested_dtype or np.dtype(config.dtype)
        empty = without_weights(config, weights_dtype)
        parameters = parameters_of_checkpoint(empty, stored)
        check_tensors(parameters, stored, listing, skipped_names(family, config), accepted=_ACCEPTED)
        sizes = [sum(stored[name].size for name in parameter.shapes) for parameter in parameters]
        with _progress_bar(f"Loading {directory.resolve().name}", sum(sizes), progress) as advance:
            weights = _read_weights(parameters, sizes, stored, advance, placement(empty, mesh), quantized)
    read = {listing.name, *(tensor.file.name for tensor in stored.values())}
    has_template = tokenizer is not None and tokenizer.has_chat_template
    if unread := unread_files(directory, read, has_tokenizer=tokenizer is not None, has_template=has_template):
        warnings.warn(f"load: {directory} also holds {unread}, which is not read", stacklevel=3)
    model = split(empty)[0].with_weights(weights) if mesh is None else with_mesh(empty, weights, mesh)
    model.generation_defaults, model.image_options, model.video_options = defaults, image_options, video_options
    if any(map(is_quantized, weights)):
        model.quantized_from = os.fspath(directory.resolve())
    return model, tokenizer


def _read_configuration(
    directory: Path, overrides: Mapping[str, Any], tokenizer: Tokenizer | None
) -> tuple[Description, DecoderConfig, GenerationDefaults]:
    """Returns the description of the decoder in `config.json`, and the options in it and `generation_config.json`."""
    config_file, generation_file = directory / CONFIG, directory / GENERATION
    raw = parse_json_object(read_file(config_file), str(config_file)) | dict(overrides)
    described = description(raw, str(config_file))
    if raw.get("model_type") is None:  # transformers cannot determine such a file's class
        raise JsonObject(raw, str(config_file)).error("model_type", repr(described.family.model_type))
    config = DecoderConfig.from_description(described)
    config = with_sentence_files(directory, config, described.file)
    config = with_answer_ids(config, tokenizer, described.file)
    raw_defaults = {}
    if generation_file.exists(follow_symlinks=False):
        raw_defaults = parse_json_object(read_file(generation_file), str(generation_file))
    return described, config, GenerationDefaults.from_hugging_face(raw_defaults, str(generation_file), described)


def by_decoder_name(
    stored: Mapping[str, StoredTensor], family: Family, config: DecoderConfig
) -> dict[str, StoredTensor]:
    """Returns the tensors by their names in the decoder.

    Models that pool may be stored without a head, and then without the prefix of their layers.

    Raises:
        CheckpointError: a tensor occurs under both names.
    """
    by_name: dict[str, StoredTensor] = {}
    is_bare = config.pooling is not None and EMBEDDING.removeprefix(_LAYERS) in stored
    for tensor in stored.values():
        name = f"{_LAYERS}{tensor.name}" if is_bare and tensor.name != LM_HEAD else tensor.name
        other = by_name.setdefault(family.decoder_name(name), tensor)
        if other is not tensor:
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.name!r} is the same parameter as {other.name!r}; accepted: one of them"
            )
    return by_name


def skipped_names(family: Family, config: DecoderConfig) -> tuple[str, ...]:
    """Returns regular expressions for the names of tensors that checkpoints of a model may have and nobody needs."""
    # A head without a use: the embedding's copy, or what the model was trained from.
    unused = () if config.pooling is None or config.pooling.has_answers else (re.escape(LM_HEAD),)
    skips = (pattern.replace("{layers}", str(config.layers)) for pattern in family.skips)
    return (_COMPUTED, *unused, *skips, *family.unread_tensors(config))


def _read_image_options(directory: Path, config: DecoderConfig) -> tuple[ImageOptions | None, ImageOptions | None]:
    """Returns the options for images and videos, if the model takes them; None for videos without a file."""
    if config.vision is None:
        return None, None
    files = directory / IMAGES, directory / VIDEOS
    images, videos = (
        parse_json_object(read_file(file), str(file)) if file.exists(follow_symlinks=False) else None for file in files
    )
    read = functools.partial(image_options_class(config.vision).from_hugging_face, vision=config.vision)
    for_videos = None if videos is None else read(videos, str(files[1]), is_for_videos=True)
    return read(images or {}, str(files[0])), for_videos


def _read_weights(
    parameters: Sequence["Parameter"],
    sizes: Sequence[int],
    stored: Mapping[str, StoredTensor],
    advance: Callable[[int], None],
    placements: Sequence[Callable[[LazyParameter | QuantizedWeight], Any]],
    quantized: Quantized,
) -> Weights:
    """Returns the arrays that `placements` makes of parameters; `advance` gets the number of bytes that were read."""
    # A mixture of schemes that is not supported is refused before anything is read.
    in_codes = [parameter.in_codes(stored, quantized) for parameter in parameters]
    weights = []
    for parameter, size, put, codes in zip(parameters, sizes, placements, in_codes, strict=True):
        weight = None if codes is None else codes.read()
        weights.append(put(parameter.unread(stored) if weight is None else weight))
        advance(size)
    return tuple(weights)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of a decoder.

    Attributes:
        tensors: its tensors.
        shapes: their shapes by name in the checkpoint.
        shape: its shape.
        dtype: its dtype.
        is_product: whether it is only multiplied by, in a product that takes codes.
        is_always_widened: whether its contract reads it as plain numbers.
    """

    tensors: Tensors
    shapes: Mapping[str, tuple[int, ...]]
    shape: tuple[int, ...]
    dtype: np.dtype
    is_product: bool = False
    is_always_widened: bool = False

    def unread(self, stored: Mapping[str, StoredTensor]) -> LazyParameter:
        """Returns the placeholder of its array, given the stored tensors."""
        return LazyParameter(self.tensors, [stored[name] for name in self.shapes], self.shape, self.dtype)

    def in_codes(self, stored: Mapping[str, StoredTensor], quantized: Quantized) -> QuantizedParameter | None:
        """Returns the parameter that keeps its codes; None: it is read as plain numbers.

        Raises:
            CheckpointError: its tensors have different schemes, or quantized activations of another product.
        """
        uses: dict[str, bool] = {"is_product": self.is_product, "is_always_widened": self.is_always_widened}
        tensors = [stored[name] for name in self.shapes]
        return quantized_parameter(self.tensors, tensors, self.shape, self.dtype, quantized=quantized, **uses)


def parameters_of_checkpoint(
    model: nnx.Module, stored: Mapping[str, StoredTensor] = types.MappingProxyType({})
) -> list[Parameter]:
    """Returns the parameters in the order of `network.split`'s weights, each in the form of the stored tensors."""
    parameters = []
    for path, value in parameters_of(model).items():
        *levels, name = path
        part: Any = model
        prefix = ""
        for level in levels:
            if isinstance(level, int):
                part, prefix = part[level], f"{prefix}{level}."
            else:
                named = part.CHECKPOINT_NAMES[level]  # empty if the tensors are next to the surrounding part's
                part, prefix = getattr(part, level), f"{prefix}{named}." if named else prefix
        forms = []
        tensors: Tensors | None = part.tensors[name]
        while tensors is not None:
            names = [prefix + tensor for tensor in tensors.names]
            shapes = dict(zip(names, tensors.shapes(value.shape), strict=True))
            uses = name in getattr(part, "PRODUCTS", ()), name in getattr(part, "WIDENED", ())
            forms.append(Parameter(tensors, shapes, value.shape, np.dtype(value.dtype), *uses))
            tensors = tensors.other_form
        parameters.append(_stored_form(forms, stored))
    return parameters


def _stored_form(forms: Sequence[Parameter], stored: Mapping[str, StoredTensor]) -> Parameter:
    """Returns the first form of a parameter that has stored tensors, if possible one whose shapes are theirs."""
    named = [form for form in forms if any(name in stored for name in form.shapes)]
    for form in named:
        if all(stored[name].shape == shape for name, shape in form.shapes.items() if name in stored):
            return form
    return (named or forms)[0]


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes, by name, of the tensors that `save` writes for a model of this configuration."""
    family = family_named("tensor_shapes", config.architecture)
    parameters = parameters_of_checkpoint(without_weights(config, np.dtype(config.dtype)))
    return {family.written_name(name): shape for one in parameters for name, shape in one.shapes.items()}


def without_weights(config: DecoderConfig, dtype: np.dtype) -> Decoder:
    """Returns a decoder with shapes in place of weights."""
    return abstract(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype))


def _accepted_dtype(dtype: DTypeLike) -> np.dtype:
    with contextlib.suppress(TypeError):
        if jnp.dtype(dtype).name in INPUT_DTYPES:
            return jnp.dtype(dtype)
    raise ValueError(f"load: dtype is {dtype!r}; accepted: {', '.join(INPUT_DTYPES)}")


def _dtype_as_stored(
    config: DecoderConfig, raw: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> DecoderConfig:
    """Sets the configuration's dtype to the embedding's if `config.json`, whose contents are `raw`, has none."""
    if raw.get("dtype") is not None or raw.get("torch_dtype") is not None or EMBEDDING not in stored:
        return config
    return dataclasses.replace(config, dtype=stored[EMBEDDING].dtype.name)


def _tied_as_stored(config: DecoderConfig, stored: dict[str, StoredTensor]) -> DecoderConfig:
    """Unties the configuration if the files hold a different head; removes a head that repeats the embedding."""
    has_unused_head = config.pooling is not None and not config.pooling.has_answers
    if not config.tied_embeddings or LM_HEAD not in stored or has_unused_head:
        return config
    head = stored[LM_HEAD]
    embedding = stored.setdefault(EMBEDDING, head)
    if are_equal(head, embedding):
        del stored[LM_HEAD]
        return config
    warnings.warn(
        f"{head.file}: tensor {LM_HEAD!r} serves as it differs from {EMBEDDING!r}, though config.json ties the two; "
        "set tie_word_embeddings to false there",
        stacklevel=3,
    )
    return dataclasses.replace(config, tied_embeddings=False)


def are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Returns whether two tensors are equal, comparing a small part at a time."""
    if one is other or (one.shape, one.dtype) != (other.shape, other.dtype):
        return one is other
    begins = range(0, one.size, _COMPARED_AT_ONCE)
    parts = ((begin, min(_COMPARED_AT_ONCE, one.size - begin)) for begin in begins)
    return all(np.array_equal(one.read_bytes(*part), other.read_bytes(*part)) for part in parts)


def check_tensors(
    parameters: Sequence[Parameter],
    stored: Mapping[str, StoredTensor],
    listing: Path,
    skips: Sequence[str],
    *,
    accepted: str,
    prefix: str = "",
) -> None:
    """Checks the stored tensors against the parameters.

    Args:
        parameters: the parameters of the model or the head.
        stored: the stored tensors by name.
        listing: the file that lists them.
        skips: regular expressions. Additional tensors are accepted if their whole names match one of them.
        accepted: a description of accepted tensors, for surplus ones.
        prefix: what precedes the names in the checkpoint.

    Raises:
        CheckpointError: a tensor is missing, surplus, misshapen, or of an unsupported dtype.
    """
    expected = {name: shape for parameter in parameters for name, shape in parameter.shapes.items()}
    for name, shape in expected.items():
        if name not in stored:
            raise CheckpointError(f"{listing}: tensor {prefix + name!r} is missing; accepted: one of shape {shape}")
        if stored[name].shape != shape:
            raise CheckpointError(
                f"{stored[name].file}: tensor {stored[name].name!r} has shape {stored[name].shape}; accepted: {shape}, "
                "which follows from config.json"
            )
        _ = stored[name].dtype  # raises if it is not supported
    for name, tensor in stored.items():
        if name not in expected and not any(re.fullmatch(pattern, name) for pattern in skips):
            raise CheckpointError(f"{tensor.file}: tensor {tensor.name!r} is surplus; accepted: {accepted}")


@contextlib.contextmanager
def _progress_bar(title: str, size: int, shown: bool | None) -> Iterator[Callable[[int], None]]:
    """Yields a function that advances a progress bar by a number of bytes."""
    console = rich.console.Console(stderr=True)
    columns = ("{task.description}", rich.progress.BarColumn(), rich.progress.DownloadColumn())
    disable = not (console.is_terminal if shown is None else shown)
    with rich.progress.Progress(*columns, console=console, disable=disable) as bar:
        task = bar.add_task(rich.markup.escape(title), total=size)
        yield lambda bytes_read: bar.advance(task, bytes_read)
