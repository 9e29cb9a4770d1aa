"""Hugging Face checkpoints: `load` reads a directory into a `Decoder`, `save` writes one that transformers reads."""

import contextlib
import dataclasses
import functools
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
import rich.console
import rich.markup
import rich.progress
from flax import nnx
from jaxtyping import DTypeLike

from detjax.contract import INPUT_DTYPES
from detjax.models.config import DecoderConfig, GenerationDefaults
from detjax.models.decoder import Decoder
from detjax.models.json_object import CheckpointError, parse_json_object, read_file
from detjax.models.tokenizer import Tokenizer
from detjax.models.weight_files import StoredTensor, open_weights, write_weights

_CONFIG: Final = "config.json"
_GENERATION: Final = "generation_config.json"

_EMBEDDING: Final = "model.embed_tokens.weight"
_LM_HEAD: Final = "lm_head.weight"
_TENSORS: Final[Mapping[str, tuple[str, ...]]] = {
    "embedding": (_EMBEDDING,),
    "final_norm": ("model.norm.weight",),
    "lm_head": (_LM_HEAD,),
}
_LAYER_TENSORS: Final[Mapping[str, tuple[str, ...]]] = {
    "attention_norm": ("input_layernorm.weight",),
    "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "output": ("self_attn.o_proj.weight",),
    "output_bias": ("self_attn.o_proj.bias",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "gate_up_bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "down": ("mlp.down_proj.weight",),
    "down_bias": ("mlp.down_proj.bias",),
}
"""Parameters of the decoder, each with the checkpoint's tensors that it is made of: the only place that says so."""

_STACKED: Final = ("gate_up", "gate_up_bias")
"""Parameters whose tensors lie along a new first axis; elsewhere, one behind the other along the first."""

_COMPUTED: Final = ".rotary_emb.inv_freq"
"""End of the names of tensors that old checkpoints hold though they follow from config.json."""


def load(
    path: str | os.PathLike[str], *, dtype: DTypeLike | None = None, progress: bool | None = None
) -> tuple[Decoder, Tokenizer | None]:
    """The model in the Hugging Face directory `path` and its tokenizer, None where it has none.

    All files are checked before the first parameter is read. Where `config.json` ties the embeddings but the files
    hold another `lm_head.weight`, that one serves, with a warning, as in transformers.

    Args:
        path: a directory with `config.json` and `model.safetensors`, or shards of it with their index; optionally
            `generation_config.json`, `tokenizer.json`, `tokenizer_config.json` and a chat template.
        dtype: of the weights: float32, bfloat16 or float16, rounded to nearest even. Default: the one that
            `config.json` names, else the one that the embedding is stored in.
        progress: whether a progress bar is drawn on stderr. Default: if stderr is a terminal.

    Raises:
        CheckpointError: `path` is no directory; a file is missing or damaged; the architecture or an option is not
            supported; a tensor is missing, surplus, misshapen, of another dtype, or beyond the range of `dtype`.
        ValueError: `dtype` is none of these.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(
            f"load: {os.fspath(path)!r} is not a directory; accepted: a directory with a Hugging Face checkpoint. "
            "Nothing is downloaded here: fetch the checkpoint first, then pass its directory"
        )
    wanted = None if dtype is None else _accepted_dtype(dtype)
    config_file, generation_file = directory / _CONFIG, directory / _GENERATION
    raw = parse_json_object(read_file(config_file), str(config_file))
    config = DecoderConfig.from_hugging_face(raw, str(config_file))
    raw_defaults = {}
    if generation_file.exists():
        raw_defaults = parse_json_object(read_file(generation_file), str(generation_file))
    defaults = GenerationDefaults.from_hugging_face(raw_defaults, str(generation_file), raw, str(config_file))
    tokenizer = Tokenizer.load(directory)

    with contextlib.ExitStack() as files:
        listing, stored = open_weights(directory, files)
        config = _tied_as_stored(config, stored)
        if raw.get("dtype") is None and raw.get("torch_dtype") is None and _EMBEDDING in stored:
            config = dataclasses.replace(config, dtype=stored[_EMBEDDING].dtype.name)
        weights_dtype = wanted or np.dtype(config.dtype)
        graph, variables = _abstract(config, weights_dtype)
        parameters = [_Parameter.of(path, variable.shape, config) for path, variable in variables.items()]
        sizes = _checked_sizes(parameters, stored, listing)
        with _progress_bar(f"Loading {directory.resolve().name}", sum(sizes), progress) as advance:
            for parameter, size in zip(parameters, sizes, strict=True):
                value = parameter.joined([stored[name].read(weights_dtype) for name in parameter.tensors])
                variables[parameter.path] = variables[parameter.path].replace(jnp.asarray(value))
                advance(size)
    model = nnx.merge(graph, nnx.from_flat_state(variables.items()))
    model.generation_defaults = defaults
    return model, tokenizer


def save(
    model: Decoder,
    path: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a directory that `load` and transformers read, in the dtype that the weights have.

    It is written under another name beside `path` and renamed at the end: `path` never holds half a checkpoint.

    Args:
        model: the decoder.
        path: where the directory is to be; nothing or an empty directory may be there.
        tokenizer: written too, if given, as it was read.
        max_shard_bytes: weights of more bytes are cut into several files with an index. No parameter is cut.

    Raises:
        FileExistsError: there is something at `path`.
        ValueError: transformers' class of this model cannot be configured like this, the parameters are not those of
            the model's config, or `max_shard_bytes` is less than 1.
    """
    target = Path(path).resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"save: {target} exists; accepted: a path where there is nothing, or an empty directory")
    if max_shard_bytes < 1:
        raise ValueError(f"save: max_shard_bytes is {max_shard_bytes}; accepted: integers >= 1")
    variables = dict(nnx.to_flat_state(nnx.state(model)))
    found = {path: variable.shape for path, variable in variables.items()}
    expected = {path: variable.shape for path, variable in _abstract(model.config, model.dtype)[1].items()}
    for name in [*expected, *found]:
        if found.get(name) != expected.get(name):
            raise ValueError(
                f"save: parameter {'.'.join(map(str, name))} has shape {found.get(name)}; accepted: "
                f"{expected.get(name)}, as the model's config has it"
            )
    parameters = [_Parameter.of(path, shape, model.config) for path, shape in found.items()]
    defaults = model.generation_defaults
    ids = (defaults or GenerationDefaults()).token_ids_to_hugging_face()
    files = {_CONFIG: dataclasses.replace(model.config, dtype=model.dtype.name).to_hugging_face() | ids}
    if defaults is not None:
        files[_GENERATION] = defaults.to_hugging_face()
    contents = {name: f"{json.dumps(raw, indent=2, sort_keys=True)}\n".encode() for name, raw in files.items()}
    if tokenizer is not None:
        contents |= tokenizer.files

    def tensors(parameter: _Parameter) -> dict[str, np.ndarray]:
        return parameter.cut(np.asarray(variables[parameter.path][...]))

    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        target.rmdir()  # here and not by the renaming, so that what cannot be replaced (a mount point) fails early
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as temporary:
        # One level down, so that it has the permissions of any new directory and not those of a temporary one.
        directory = Path(temporary) / target.name
        directory.mkdir()
        for name, content in contents.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(content)
        write_weights(
            directory,
            [(variables[p.path][...].nbytes, functools.partial(tensors, p)) for p in parameters],
            max_shard_bytes,
        )
        directory.rename(target)


@dataclasses.dataclass(frozen=True)
class _Parameter:
    """A parameter of the decoder and the shapes of the checkpoint's tensors that it is made of, in their order."""

    path: tuple[Any, ...]
    tensors: Mapping[str, tuple[int, ...]]
    stacked: bool

    @classmethod
    def of(cls, path: tuple[Any, ...], shape: tuple[int, ...], config: DecoderConfig) -> "_Parameter":
        name = path[-1]
        if len(path) == 1:
            names = list(_TENSORS[name])
        else:
            names = [f"model.layers.{path[1]}.{tensor}" for tensor in _LAYER_TENSORS[name]]
        if name in _STACKED:
            shapes = [shape[1:]] * len(names)
        elif len(names) > 1:
            rows = (config.heads, config.kv_heads, config.kv_heads)
            shapes = [(heads * config.head_dim, *shape[1:]) for heads in rows]
        else:
            shapes = [shape]
        return cls(path, dict(zip(names, shapes, strict=True)), name in _STACKED)

    def joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        if len(parts) == 1:
            return parts[0]
        return np.stack(parts) if self.stacked else np.concatenate(parts)

    def cut(self, value: np.ndarray) -> dict[str, np.ndarray]:
        if self.stacked:
            return dict(zip(self.tensors, value, strict=True))
        ends = np.cumsum([shape[0] for shape in self.tensors.values()])
        return dict(zip(self.tensors, np.split(value, ends[:-1]), strict=True))


def _abstract(config: DecoderConfig, dtype: np.dtype) -> tuple[nnx.GraphDef[Decoder], dict[Any, nnx.Variable[Any]]]:
    """The decoder's structure, and its parameters without values."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype)))
    return graph, dict(nnx.to_flat_state(state))


def _accepted_dtype(dtype: DTypeLike) -> np.dtype:
    with contextlib.suppress(TypeError):
        if jnp.dtype(dtype).name in INPUT_DTYPES:
            return jnp.dtype(dtype)
    raise ValueError(f"load: dtype is {dtype!r}; accepted: {', '.join(INPUT_DTYPES)}")


def _tied_as_stored(config: DecoderConfig, stored: dict[str, StoredTensor]) -> DecoderConfig:
    """The configuration, untied if the file holds a head of its own; takes a repeated embedding out of `stored`."""
    if not config.tied_embeddings or _LM_HEAD not in stored:
        return config
    head = stored[_LM_HEAD]
    embedding = stored.setdefault(_EMBEDDING, head)
    if (head.shape, head.dtype) == (embedding.shape, embedding.dtype):
        if head is embedding or np.array_equal(head.read().view(np.uint8), embedding.read().view(np.uint8)):
            del stored[_LM_HEAD]
            return config
    warnings.warn(
        f"{head.file}: tensor {_LM_HEAD!r} serves as it differs from {_EMBEDDING!r}, though config.json ties the two; "
        "set tie_word_embeddings to false there",
        stacklevel=3,
    )
    return dataclasses.replace(config, tied_embeddings=False)


def _checked_sizes(parameters: Sequence[_Parameter], stored: Mapping[str, StoredTensor], listing: Path) -> list[int]:
    """Bytes of each parameter's tensors.

    Raises:
        CheckpointError: a tensor is missing, surplus, misshapen, or of a dtype that is not supported.
    """
    wanted = {name: shape for parameter in parameters for name, shape in parameter.tensors.items()}
    for name, shape in wanted.items():
        if name not in stored:
            raise CheckpointError(f"{listing}: tensor {name!r} is missing; accepted: one of shape {shape}")
        if stored[name].shape != shape:
            raise CheckpointError(
                f"{stored[name].file}: tensor {name!r} has shape {stored[name].shape}; accepted: {shape}, "
                "which follows from config.json"
            )
    for name, tensor in stored.items():
        if name not in wanted and not name.endswith(_COMPUTED):
            raise CheckpointError(
                f"{tensor.file}: tensor {name!r} is surplus; accepted: the tensors of the model that config.json "
                "describes. Is it the one that the weights were saved with?"
            )
    return [sum(stored[name].size for name in parameter.tensors) for parameter in parameters]


@contextlib.contextmanager
def _progress_bar(title: str, size: int, shown: bool | None) -> Iterator[Callable[[int], None]]:
    console = rich.console.Console(stderr=True)
    columns = ("{task.description}", rich.progress.BarColumn(), rich.progress.DownloadColumn())
    disable = not (console.is_terminal if shown is None else shown)
    with rich.progress.Progress(*columns, console=console, disable=disable) as bar:
        task = bar.add_task(rich.markup.escape(title), total=size)
        yield lambda bytes_read: bar.advance(task, bytes_read)
