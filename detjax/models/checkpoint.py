"""Hugging Face checkpoints: `load` reads a directory into a `Decoder`, `save` writes one that transformers reads."""

import contextlib
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress
import safetensors
import safetensors.numpy
from flax import nnx
from jaxtyping import DTypeLike

from detjax.contract import INPUT_DTYPES
from detjax.models.config import DecoderConfig, GenerationDefaults
from detjax.models.decoder import Decoder
from detjax.models.json_object import CheckpointError, parse_json_object, read_file
from detjax.models.tokenizer import Tokenizer

_CONFIG: Final = "config.json"
_GENERATION: Final = "generation_config.json"
_WEIGHTS: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"

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

_DTYPES: Final = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_COMPUTED: Final = ".rotary_emb.inv_freq"
"""End of the names of tensors that old checkpoints hold though they follow from config.json."""


def load(
    path: str | os.PathLike[str], *, dtype: DTypeLike | None = None, progress: bool | None = None
) -> tuple[Decoder, Tokenizer | None]:
    """The model in the Hugging Face directory `path` and its tokenizer, None where it has none.

    All files are checked before the first tensor is read. Where `config.json` ties the embeddings but the directory holds
    another `lm_head.weight`, that one serves, with a warning, as in transformers.

    Args:
        path: a directory with `config.json` and `model.safetensors`, or shards of it with their index; optionally
            `generation_config.json`, `tokenizer.json`, `tokenizer_config.json` and a chat template.
        dtype: of the weights: float32, bfloat16 or float16, rounded to nearest even. Default: the one that `config.json`
            names, else the one that the embedding is stored in.
        progress: whether a progress bar is drawn on stderr. Default: if stderr is a terminal.

    Raises:
        CheckpointError: `path` is no directory; a file is missing or damaged; the architecture or an option is not
            supported; a tensor is missing, surplus, misshapen, of another dtype, or beyond the range of `dtype`.
        ValueError: `dtype` is none of these.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(
            f"load: {os.fspath(path)!r} is not a directory; accepted: a directory that holds a Hugging Face checkpoint. "
            "Nothing is downloaded from here: fetch the checkpoint first, and pass where it lies"
        )
    if dtype is not None and jnp.dtype(dtype).name not in INPUT_DTYPES:
        raise ValueError(f"load: dtype is {jnp.dtype(dtype).name}; accepted: {', '.join(INPUT_DTYPES)}")
    raw = _json(directory / _CONFIG)
    config = DecoderConfig.from_hugging_face(raw, str(directory / _CONFIG))
    generation = directory / _GENERATION
    defaults = GenerationDefaults.from_hugging_face(
        _json(generation) if generation.exists() else None, str(generation), raw
    )
    tokenizer = Tokenizer.load(directory)

    with contextlib.ExitStack() as files:
        listing, stored = _stored_tensors(directory, files)
        config = _with_stored_tie(config, stored)
        if "dtype" not in raw and "torch_dtype" not in raw and _EMBEDDING in stored:
            config = dataclasses.replace(config, dtype=stored[_EMBEDDING].dtype)
        weights_dtype = jnp.dtype(config.dtype if dtype is None else dtype)
        graph, state = nnx.split(
            nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=weights_dtype)),
        )
        variables = dict(nnx.to_flat_state(state))
        parameters = [_Parameter.of(path, variable.shape, config) for path, variable in variables.items()]
        _check(parameters, stored, listing)

        total = sum(stored[name].size for parameter in parameters for name in parameter.tensors)
        with _progress_bar(f"Loading {directory.name}", total, progress) as advance:
            for parameter in parameters:
                parts = [stored[name].read(weights_dtype) for name in parameter.tensors]
                variables[parameter.path] = variables[parameter.path].replace(jnp.asarray(parameter.joined(parts)))
                advance(sum(stored[name].size for name in parameter.tensors))
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
        max_shard_bytes: weights of more bytes are cut into several files with an index. One tensor is never cut.

    Raises:
        FileExistsError: there is something at `path`.
        ValueError: the model has parameters or a configuration that transformers' class of it does not have.
    """
    target = Path(path).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"save: {target} exists; accepted: a path where there is nothing, or an empty directory")
    config = dataclasses.replace(model.config, dtype=model.dtype.name)
    defaults = model.generation_defaults
    ids = (defaults or GenerationDefaults()).token_ids_to_hugging_face()
    files = {_CONFIG: _json_bytes(config.to_hugging_face() | ids)}
    if defaults is not None:
        files[_GENERATION] = _json_bytes(defaults.to_hugging_face())
    if tokenizer is not None:
        files |= tokenizer.files

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as temporary:
        # One level down, so that it has the permissions of any new directory and not those of a temporary one.
        directory = Path(temporary) / target.name
        directory.mkdir()
        for name, contents in files.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(contents)
        _write_weights(model, directory, max_shard_bytes)
        if target.exists():
            target.rmdir()
        directory.rename(target)


@dataclasses.dataclass(frozen=True)
class _Parameter:
    """A parameter of the decoder and the shapes of the checkpoint's tensors that it is made of, in their order."""

    path: tuple[Any, ...]
    tensors: Mapping[str, tuple[int, ...]]
    stacked: bool

    @classmethod
    def of(cls, path: tuple[Any, ...], shape: tuple[int, ...], config: DecoderConfig) -> "_Parameter":
        match path:
            case ("layers", index, name) if name in _LAYER_TENSORS:
                names = [f"model.layers.{index}.{tensor}" for tensor in _LAYER_TENSORS[name]]
            case (name,) if name in _TENSORS:
                names = list(_TENSORS[name])
            case _:
                raise ValueError(
                    f"parameter {'.'.join(map(str, path))} has no counterpart in a Hugging Face checkpoint; accepted: "
                    f"{', '.join(_TENSORS)}, and in layers {', '.join(_LAYER_TENSORS)}"
                )
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
