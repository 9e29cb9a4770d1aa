"""The other files in a checkpoint's directory: each file that concerns the model is read or named in a warning."""

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from detjax.models.configuration.json_object import CheckpointError, parse_json_object, read_file

ADAPTER: Final = "adapter_config.json"
_FORMATS: Final[Mapping[str, str]] = {
    "adapter_model*": "an adapter's weights",
    "*.safetensors": "other safetensors",
    "*.safetensors.index*.json": "another index of safetensors",
    "*.gguf": "GGUF",
    "*.ggml": "GGML",
    "*.bin": "PyTorch's format",
    "*.pt": "PyTorch's format",
    "*.pth": "PyTorch's format",
    "*.ckpt": "PyTorch's format",
    "*.h5": "TensorFlow's format",
    "*.msgpack": "Flax's format",
    "*.onnx": "ONNX",
    "*.nemo": "NeMo's format",
    "*.dvc": "a pointer of DVC",
    "params.json": "the original format of Llama and Mistral",
    "model_index.json": "a pipeline of Diffusers",
    "hf_quant_config.json": "a quantization that config.json does not describe",
    "quant_config.json": "a quantization that config.json does not describe",
    "quantize_config.json": "a quantization that config.json does not describe",
}
"""Patterns of model-related file names, with descriptions. The first match counts."""
_TOKENIZERS: Final = (
    *("tokenizer.model", "tekken.json", "vocab.json", "merges.txt", "vocab.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "*.tiktoken"),
)
"""Names of tokenizer files, except for tokenizer.json, which is read."""
_MAX_NAMED: Final = 4
_CONVERT: Final = (
    "Fetch the checkpoint as safetensors, or convert it with save_pretrained of transformers, then pass its directory"
)


def refuse_without_model(directory: Path) -> None:
    """Refuses a directory without `config.json`, and names what it has.

    Raises:
        CheckpointError: the file is missing.
    """
    config = directory / "config.json"
    if config.exists(follow_symlinks=False):
        return
    if (directory / ADAPTER).exists(follow_symlinks=False):
        raise _adapter_error(directory, "and no model (config.json is missing)")
    unread = _described((name, kind) for name, kind in _foreign_files(directory) if not _is_weights(name))
    if unread:
        raise CheckpointError(
            f"{config} is missing, and {directory} holds {unread}, which is not read; accepted: a directory with "
            f"config.json and safetensors. {_CONVERT}"
        )
    below = sorted(
        path.parent.relative_to(directory) for depth in (1, 2) for path in directory.glob("*/" * depth + config.name)
    )
    if below:
        more = f" and {len(below) - 1} more" if len(below) > 1 else ""
        raise CheckpointError(f"{config} is missing; there is one in {below[0]}{more} below it. Pass that directory")


def refuse_adapter(directory: Path) -> None:
    """Refuses a model with an adapter in its directory, which transformers would apply.

    Raises:
        CheckpointError: the directory has an adapter.
    """
    if (directory / ADAPTER).exists(follow_symlinks=False):
        raise _adapter_error(directory, "next to a model, which transformers would apply to it")


def _adapter_error(directory: Path, state: str) -> CheckpointError:
    raw = parse_json_object(read_file(directory / ADAPTER), str(directory / ADAPTER))
    kind, base = raw.get("peft_type"), raw.get("base_model_name_or_path")
    base_name = f" of {base}" if isinstance(base, str) and base else ""
    described = f"{ADAPTER}, {kind}{base_name}" if isinstance(kind, str) else f"{ADAPTER}{base_name}"
    return CheckpointError(
        f"{directory} holds an adapter ({described}) {state}; accepted: a directory with a whole model. Pass the "
        "base model, and this directory as an adapter (load(adapters=...), --lora-modules); or merge the two with "
        "detjax merge"
    )


def unread_weights(directory: Path) -> str:
    """Returns an error's sentence about weights in unsupported formats in a directory; "" for none."""
    unread = _described(_foreign_files(directory))
    return f" There is {unread}, which is not read." if unread else ""


def unread_files(directory: Path, read: Collection[str], *, has_tokenizer: bool, has_template: bool) -> str:
    """Returns a warning's description of the files of a checkpoint that concern the model and are not in `read`."""
    unread = {name: kind for name, kind in _foreign_files(directory) if name not in read}
    names = sorted(path.name for path in directory.iterdir())
    if not has_tokenizer:
        others = (name for name in names if any(fnmatch(name, pattern) for pattern in _TOKENIZERS))
        unread |= dict.fromkeys(others, "a tokenizer without tokenizer.json")
    if has_tokenizer and not has_template and "chat_template.json" in names:
        unread["chat_template.json"] = "a processor's chat template"
    return _described(unread.items())


def _is_weights(name: str) -> bool:
    """Returns whether a file only lacks a `config.json` next to it to be read."""
    return fnmatch(name, "model*.safetensors") or fnmatch(name, "model*.safetensors.index.json")


def _foreign_files(directory: Path) -> Iterator[tuple[str, str]]:
    """Yields the files that match `_FORMATS` in a directory and one level below, with descriptions."""
    for path in sorted([*directory.iterdir(), *directory.glob("[!.]*/*")]):
        name = path.relative_to(directory).as_posix()
        kind = next((kind for pattern, kind in _FORMATS.items() if fnmatch(path.name, pattern)), None)
        if kind is not None and not path.is_dir() and (path.parent == directory or not name.endswith(".json")):
            yield name, kind


def _described(files: "Collection[tuple[str, str]] | Iterator[tuple[str, str]]") -> str:
    """Groups files by kind, as in "GGUF (a.gguf, b.gguf) and ONNX (c.onnx)"."""
    by_kind: dict[str, list[str]] = {}
    for name, kind in files:
        by_kind.setdefault(kind, []).append(name)
    groups = [
        f"{kind} ({', '.join(names[:_MAX_NAMED])}{', ...' if len(names) > _MAX_NAMED else ''})"
        for kind, names in by_kind.items()
    ]
    return " and ".join([", ".join(groups[:-1]), groups[-1]]) if len(groups) > 1 else "".join(groups)
