"""Checkpoints of heads that draft: `load_draft` reads an EAGLE-3 head, or the MTP layer of a model's own checkpoint."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import DTypeLike, Int64

from detjax.contract import INPUT_DTYPES
from detjax.models.checkpoint.loading import (
    CONFIG,
    EMBEDDING,
    LM_HEAD,
    are_equal,
    check_tensors,
    parameters_of_checkpoint,
)
from detjax.models.checkpoint.stored_formats import stored_formats
from detjax.models.checkpoint.weight_files import INDEX, SINGLE_FILE, StoredTensor, open_weights
from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import Family, description
from detjax.models.configuration.json_object import CheckpointError, parse_json_object, read_file
from detjax.models.decoder import Decoder
from detjax.models.drafts.draft import Draft
from detjax.models.drafts.eagle3 import Eagle3Head
from detjax.models.drafts.eagle3_config import read_eagle3
from detjax.models.drafts.head import DraftHead
from detjax.models.drafts.next_token import NextTokenHead, QwenNextTokenHead, layer_config
from detjax.models.mesh import everywhere
from detjax.models.network import abstract, split

_IDS, _IS_DRAFTED = "d2t", "t2d"
_PROJECTION: Final = "fc.weight"
_COMPUTED: Final = r".*rotary_emb\.inv_freq"
"""The names of tensors in old checkpoints that follow from config.json."""
_COUNTS: Final = "num_nextn_predict_layers", "mtp_num_hidden_layers"
"""Keys for the number of layers that predict further tokens."""
_QWEN: Final = "mtp."
"""The prefix of such layers' tensors in Qwen3-Next and Qwen3.5."""
_BY_DEEPSEEK: Final = "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "KimiK25ForConditionalGeneration"
_COPIES: Final = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": LM_HEAD}
"""Tensors in DeepSeek's form that repeat tensors of the model."""
_UNCOMPARED: Final = "dtype", "tied_embeddings", "pooling"
"""Fields of a configuration in which a model may differ from its checkpoint's `config.json`."""


def load_draft(path: str | os.PathLike[str], model: Decoder, *, dtype: DTypeLike | None = None) -> Draft:
    """Returns the head in the directory `path` that drafts tokens for `model`.

    A directory with `fc.weight` has an EAGLE-3 head, with the names of EAGLE (`midlayer.`) or of vLLM's speculators
    (`layers.0.`). The directory that `model` was loaded from has its MTP layer: DeepSeek-V3's and GLM-4.5's follow the
    model's layers, Qwen3-Next's and Qwen3.5's have names that begin with `mtp.`. Parts without tensors are the model's:
    the embedding and the table of logits. Quantized weights are widened.

    Args:
        path: a directory with `config.json` and `model.safetensors`, or shards of it with their index.
        model: the target.
        dtype: the dtype of the head's weights, to which the model's hidden states are rounded: float32, bfloat16 or
            float16. Default: the model's.

    Raises:
        CheckpointError: the directory has no head, or only a pickle; a file is missing or damaged; an option is
            not supported; `config.json`, the tensors and the model disagree.
        ValueError: the dtype is not supported.

    Example:
        >>> import detjax, detjax.demo
        >>> model, _ = detjax.models.load(detjax.demo.CHECKPOINT, progress=False)
        >>> draft = detjax.models.load_draft(detjax.demo.EAGLE3, model)
        >>> draft.logits([[1, 2, 3, 4]]).shape
        (1, 3, 448)
    """
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(
            f"load_draft: {os.fspath(path)!r} is not a directory; accepted: a directory with config.json and "
            "safetensors of a head, or the model's own. Nothing is downloaded here: fetch it first, then pass its "
            "directory"
        )
    head_dtype = model.dtype if dtype is None else _accepted_dtype(dtype)
    _refuse_pickles(directory)
    raw = parse_json_object(read_file(directory / CONFIG), str(directory / CONFIG))
    with contextlib.ExitStack() as files:
        listing, stored = open_weights(directory, files)
        read = _eagle3 if _PROJECTION in stored else _next_token
        return read(_Files(raw, str(directory / CONFIG), listing, stored), model, head_dtype)


@dataclasses.dataclass(frozen=True)
class _Files:
    """The files of a directory: the contents and name of `config.json`, and the stored tensors and what lists them."""

    raw: dict[str, Any]
    source: str
    listing: Path
    stored: Mapping[str, StoredTensor]


def _accepted_dtype(dtype: DTypeLike) -> np.dtype:
    with contextlib.suppress(TypeError):
        if jnp.dtype(dtype).name in INPUT_DTYPES:
            return jnp.dtype(dtype)
    raise ValueError(f"load_draft: dtype is {dtype!r}; accepted: {', '.join(INPUT_DTYPES)}")


def _refuse_pickles(directory: Path) -> None:
    """Refuses a directory whose weights are a pickle, which can run any code when it is read."""
    if any((directory / name).exists(follow_symlinks=False) for name in (SINGLE_FILE, INDEX)):
        return
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in directory.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"load_draft: {directory} holds {', '.join(pickles)}, a pickle, which can run any code when it is read; "
            f"accepted: {SINGLE_FILE}. Convert a file that you trust: safetensors.torch.save_file(torch.load("
            f'"{pickles[0]}", map_location="cpu", weights_only=True), "{SINGLE_FILE}")'
        )


# --- EAGLE-3 ----------------------------------------------------------------------------------------------------------


def _eagle3(files: _Files, model: Decoder, dtype: np.dtype) -> Draft:
    """Returns an EAGLE-3 head."""
    by_name, listing = _by_eagle_name(files.stored), files.listing
    for name in ("midlayer.hidden_norm.weight", "norm.weight"):
        if name not in by_name:
            raise CheckpointError(
                f"{listing}: tensor {name!r} is missing; accepted: the tensors of an EAGLE-3 head. Heads of EAGLE 1 "
                "and 2 are not supported"
            )
    options = read_eagle3(files.raw, files.source, by_name, model)
    empty = abstract(lambda: Eagle3Head(options, rngs=nnx.Rngs(0), dtype=dtype))
    tables = (by_name.pop(_IDS, None), by_name.pop(_IS_DRAFTED, None))
    target_ids = _target_ids(*tables, options.draft_vocab_size, options.config.vocab_size, listing)
    return Draft(model, _with_weights(empty, by_name, listing, model), target_ids)


def _by_eagle_name(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors of a head by EAGLE's names.

    Raises:
        CheckpointError: a tensor occurs under both names.
    """
    by_name: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        other = by_name.setdefault(re.sub(r"^layers\.0\.", "midlayer.", name), tensor)
        if other is not tensor:
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.name!r} is the same parameter as {other.name!r}; accepted: one of them"
            )
    return by_name


def _target_ids(
    offsets: StoredTensor | None, drafted: StoredTensor | None, count: int, vocabulary: int, listing: Path
) -> Int64[np.ndarray, "v"] | None:
    """Returns the target's token of each of a head's `count` tokens, which is stored as an offset from its index.

    Raises:
        CheckpointError: the tensors do not have the form of such tables, or disagree.
    """
    if offsets is None:
        if count != vocabulary:
            raise CheckpointError(
                f"{listing}: tensor {_IDS!r} is missing; accepted: one of shape {(count,)}, as the head guesses "
                f"{count} of {vocabulary} tokens"
            )
        ids = np.arange(count)
    else:
        ids = np.arange(count) + _table(offsets, count, {"I64": np.int64, "I32": np.int32}).astype(np.int64)
        is_valid = ids.min() >= 0 and ids.max() < vocabulary and len(set(ids.tolist())) == count
        if not is_valid:
            raise CheckpointError(
                f"{offsets.file}: tensor {_IDS!r} gives the tokens {ids.min()} to {ids.max()} when each entry's index "
                f"is added to it; accepted: {count} different tokens from 0 to {vocabulary - 1}"
            )
    if drafted is not None:
        is_drafted = _table(drafted, vocabulary, {"BOOL": np.bool_, "U8": np.bool_})
        if not np.array_equal(np.flatnonzero(is_drafted), np.sort(ids)):
            raise CheckpointError(
                f"{drafted.file}: tensor {_IS_DRAFTED!r} marks {is_drafted.sum()} tokens; accepted: the {count} tokens "
                f"that the head guesses by {_IDS!r}"
            )
    return None if offsets is None else ids


def _table(tensor: StoredTensor, count: int, formats: Mapping[str, Any]) -> np.ndarray:
    """Returns a tensor of integers or booleans."""
    if tensor.shape != (count,) or tensor.format not in formats:
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r} is stored as {tensor.format} of shape {tensor.shape}; accepted: "
            f"{' or '.join(formats)} of shape {(count,)}"
        )
    return tensor.read_bytes(0, tensor.size).view(formats[tensor.format])


# --- MTP --------------------------------------------------------------------------------------------------------------


def _next_token(files: _Files, model: Decoder, dtype: np.dtype) -> Draft:
    """Returns the layer that predicts a further token in a model's own checkpoint."""
    listing, stored = files.listing, files.stored
    described = description(files.raw, files.source)
    config = DecoderConfig.from_description(described)
    _check_shape(config, model.config, files.source)
    prefix, count = _place(stored, described.family, config.layers)
    for key in _COUNTS:
        stated = described.file.optional_integer(key, minimum=0)
        if stated is not None and stated != count:
            raise described.file.error(key, f"{count}, the layers of this kind in {listing.name}")
    if count != 1:
        raise CheckpointError(
            f"{listing}: there are {count} layers that predict further tokens, and no EAGLE-3 head, which has "
            f"{_PROJECTION!r}; accepted: one such layer, model.layers.{config.layers} of {', '.join(_BY_DEEPSEEK)}, or "
            f"{_QWEN}layers.0 of Qwen3-Next and Qwen3.5"
        )
    if described.file.boolean("mtp_use_dedicated_embeddings", False):
        raise described.file.error("mtp_use_dedicated_embeddings", "false")
    if described.file.boolean("mtp_hidden_states_first", False):
        raise described.file.error("mtp_hidden_states_first", "false; no published model of this family has it")
    formats = stored_formats(described.file)
    if formats is not None:
        stored = formats.read(stored)
    by_name = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
    kind = QwenNextTokenHead if prefix == _QWEN else NextTokenHead
    if kind is NextTokenHead:
        _drop_copies(by_name, {described.family.decoder_name(name): tensor for name, tensor in stored.items()})
    layer = kind.CHECKPOINT_NAMES["layer"]
    router = f"{layer}.mlp.gate.weight" if layer else "mlp.gate.weight"
    shape = layer_config(model.config, is_sparse=router in by_name)
    empty = abstract(lambda: kind(shape, rngs=nnx.Rngs(0), dtype=dtype))
    return Draft(model, _with_weights(empty, by_name, listing, model, prefix))


def _check_shape(stored: DecoderConfig, served: DecoderConfig, source: str) -> None:
    """Refuses a checkpoint of another shape than the model's."""
    for field in dataclasses.fields(stored):
        values = getattr(stored, field.name), getattr(served, field.name)
        if field.name not in _UNCOMPARED and values[0] != values[1]:
            raise CheckpointError(
                f"{source}: {field.name} is {values[0]!r}, and {values[1]!r} in the model; accepted: an EAGLE-3 head, "
                "or the checkpoint of the model itself"
            )


def _place(stored: Mapping[str, StoredTensor], family: Family, layers: int) -> tuple[str, int]:
    """Returns the prefix of the tensors of layers that predict further tokens, and the number of such layers."""
    if any(name.startswith(_QWEN) for name in stored):
        return _QWEN, len({match[1] for name in stored if (match := re.match(r"mtp\.layers\.(\d+)\.", name))})
    prefixes = {match[1]: match[0] for name in stored if (match := _layer_of(family, name)) and int(match[1]) >= layers}
    return next(iter(prefixes.values()), _QWEN), len(prefixes)


def _layer_of(family: Family, name: str) -> re.Match[str] | None:
    """Matches a tensor of a layer: its number and, as a whole, the prefix of its tensors in the checkpoint."""
    if family.architecture not in _BY_DEEPSEEK:
        return None
    return re.match(r"(?:language_model\.)?model\.layers\.(\d+)\.", name)


def _drop_copies(layer: dict[str, StoredTensor], stored: Mapping[str, StoredTensor]) -> None:
    """Removes copies of the model's embedding and head.

    Raises:
        CheckpointError: one differs from the model's.
    """
    for name, original in _COPIES.items():
        copy = layer.pop(name, None)
        if copy is None:
            continue
        model_tensor = stored.get(original, stored.get(EMBEDDING))
        if model_tensor is None or not are_equal(copy, model_tensor):
            raise CheckpointError(
                f"{copy.file}: tensor {copy.name!r} differs from {original!r}; accepted: a copy of it, as the model's "
                "own serves the layer that predicts further tokens"
            )


# --- weights ----------------------------------------------------------------------------------------------------------


def _with_weights[H: DraftHead](
    empty: H, stored: Mapping[str, StoredTensor], listing: Path, model: Decoder, prefix: str = ""
) -> H:
    """Returns a head with its stored weights, on every device of the model; errors call tensors by their stored names.

    Raises:
        CheckpointError: a tensor is missing, surplus, misshapen, or of an unsupported dtype.
    """
    parameters = parameters_of_checkpoint(empty, stored)
    accepted = f"the tensors of the {empty.METHOD} head that config.json describes"
    check_tensors(parameters, stored, listing, (_COMPUTED,), accepted=accepted, prefix=prefix)
    place: Callable[[Any], Any] = jnp.asarray
    if (sharding := everywhere(model.mesh)) is not None:
        place = lambda value: jax.device_put(np.asarray(value), sharding)  # noqa: E731
    return split(empty)[0].with_weights(tuple(place(parameter.unread(stored)) for parameter in parameters))
