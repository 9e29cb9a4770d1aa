"""Writes checkpoints: directories as transformers reads them."""

import contextlib
import dataclasses
import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import Array

from detjax.models.checkpoint.loading import (
    CONFIG,
    GENERATION,
    IMAGES,
    VIDEOS,
    Parameter,
    by_decoder_name,
    parameters_of_checkpoint,
    without_weights,
)
from detjax.models.checkpoint.matrix_arrays import StoredMatrix
from detjax.models.checkpoint.quantization_schemes import Quantized
from detjax.models.checkpoint.quantized_saving import StoredCodes, opened_codes
from detjax.models.checkpoint.sentence_files import sentence_files
from detjax.models.checkpoint.weight_files import write_weights
from detjax.models.configuration.family import Family, family_named
from detjax.models.configuration.generation_defaults import GenerationDefaults
from detjax.models.decoder import Decoder
from detjax.models.mesh import spans_processes, whole_shapes, whole_weights
from detjax.models.network import parameters as parameters_of
from detjax.models.text.tokenizer import Tokenizer
from detjax.models.vision.clips import image_options_class
from detjax.operands.quantized_weight import is_quantized


def save(
    model: Decoder,
    path: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a directory that `load` and transformers read, in the dtype of the weights.

    The directory is written under another name next to `path` and renamed at the end, so that `path` never holds an
    incomplete checkpoint. If the devices of several processes share the model, each process must call this: the first
    one writes, and the others wait for it.

    Args:
        model: the decoder.
        path: the new directory; nothing or an empty directory may exist there.
        tokenizer: written too, if given, with the files that it was read from.
        max_shard_bytes: weights of more bytes are split into several files with an index. No parameter is split.

    Raises:
        FileExistsError: `path` exists.
        ValueError: transformers' class of this model does not support the configuration, the parameters do not match
            the model's config, or `max_shard_bytes` is less than 1.
    """
    target = Path(path).resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"save: {target} exists; accepted: a path that does not exist, or an empty directory")
    if max_shard_bytes < 1:
        raise ValueError(f"save: max_shard_bytes is {max_shard_bytes}; accepted: integers >= 1")
    _check_parameters(model)
    contents = _configuration_files(model, tokenizer)
    family = family_named("save", model.config.architecture)
    empty, weights = without_weights(model.config, model.dtype), whole_weights(model)
    pairs = zip(parameters_of_checkpoint(empty), weights, strict=True)
    with contextlib.ExitStack() as files, _one_writer(model.mesh) as writes:
        if writes:
            if model.quantized_from is None:
                groups = [_sized_tensors(family, *pair) for pair in pairs]
            else:
                rename = functools.partial(by_decoder_name, family=family, config=model.config)
                codes = files.enter_context(opened_codes(Path(model.quantized_from), rename))
                groups, plain = _sized_codes(family, empty, list(pairs), codes)
                described = json.loads(contents[CONFIG]) | codes.configuration(plain)
                contents[CONFIG] = f"{json.dumps(described, indent=2, sort_keys=True)}\n".encode()
            with new_directory(target) as directory:
                for name, content in contents.items():
                    (directory / name).parent.mkdir(exist_ok=True)
                    (directory / name).write_bytes(content)
                write_weights(directory, groups, max_shard_bytes)


def _sized_codes(
    family: Family, empty: Decoder, pairs: Sequence[tuple[Parameter, Any]], codes: StoredCodes
) -> tuple[list[tuple[int, Callable[[], dict[str, np.ndarray]]]], list[str]]:
    """Returns `_sized_tensors` of parameters that may have the codes of a checkpoint, and modules with others."""
    groups, plain = [], list[str]()
    for parameter, (default, weight) in zip(parameters_of_checkpoint(empty, codes.stored), pairs, strict=True):
        names = list(parameter.shapes)
        reading: Quantized = "computed" if is_quantized(weight) and weight.is_computed else "weights"

        def read(parameter: Parameter = parameter, weight: Any = weight, reading: Quantized = reading) -> Any:
            held = parameter.in_codes(codes.stored, reading) if is_quantized(weight) else None
            return np.asarray(parameter.unread(codes.stored)) if held is None else held.read()

        if codes.are_in(weight, read, names):
            groups.append((codes.size(names), functools.partial(codes.tensors, names)))
        else:
            groups.append(_sized_tensors(family, default, weight))
            changed = [codes.stored[name] for name in names]
            plain += [one.name.removesuffix(".weight") for one in changed if isinstance(one, StoredMatrix)]
    return groups, plain


@contextlib.contextmanager
def _one_writer(mesh: Mesh | None) -> Iterator[bool]:
    """Yields whether this process writes for all that share a model. The others wait at the end, even on failure."""
    if not spans_processes(mesh):
        yield True
        return
    assert mesh is not None
    try:
        yield jax.process_index() == mesh.devices.flat[0].process_index
    finally:
        multihost_utils.sync_global_devices("detjax.models.save")


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yields a directory that becomes `target` at the end, or is deleted after an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        target.rmdir()  # removed here and not replaced by renaming, so that a mount point fails early
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as temporary:
        # The directory is one level down, so that it gets the permissions of any new directory, and not a
        # temporary directory's.
        directory = Path(temporary) / target.name
        directory.mkdir()
        yield directory
        directory.rename(target)


def _check_parameters(model: Decoder) -> None:
    """Raises unless the parameters have the names and shapes of the model's config."""
    shapes, expected = (
        {
            ".".join(map(str, path)): shape
            for path, shape in zip(parameters_of(decoder), whole_shapes(decoder), strict=True)
        }
        for decoder in (model, without_weights(model.config, model.dtype))
    )
    for name in [*expected, *shapes]:
        if shapes.get(name) != expected.get(name):
            raise ValueError(
                f"save: parameter {name} has shape {shapes.get(name)}; accepted: {expected.get(name)}, as the model's "
                "config has it"
            )


def _configuration_files(model: Decoder, tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """Returns the contents of all files except for the weights, by name."""
    defaults = model.generation_defaults
    ids = (defaults or GenerationDefaults()).token_ids_to_hugging_face()
    files = {CONFIG: dataclasses.replace(model.config, dtype=model.dtype.name).to_hugging_face() | ids}
    pooling = model.config.pooling
    if pooling is not None and pooling.is_in_sentence_files:
        files |= sentence_files(pooling, model.config.hidden_size, model.config.max_positions)
    if defaults is not None:
        files[GENERATION] = defaults.to_hugging_face()
    if model.config.vision is not None:
        image_options = model.image_options or image_options_class(model.config.vision)()
        files[IMAGES] = image_options.to_hugging_face(model.config.vision)
        if model.video_options is not None:
            files[VIDEOS] = model.video_options.to_hugging_face(model.config.vision)
    contents = {name: f"{json.dumps(raw, indent=2, sort_keys=True)}\n".encode() for name, raw in files.items()}
    return contents if tokenizer is None else contents | tokenizer.files


def _sized_tensors(
    family: Family, parameter: Parameter, value: Array
) -> tuple[int, Callable[[], dict[str, np.ndarray]]]:
    """Returns the bytes of a parameter, and a function that returns its tensors by name."""

    def tensors() -> dict[str, np.ndarray]:
        names = map(family.written_name, parameter.shapes)
        return dict(zip(names, parameter.tensors.split(np.asarray(value)), strict=True))

    return value.nbytes, tensors
