"""The files of Sentence Transformers next to a model: the pooling of its embeddings, and prompts."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.json_object import CheckpointError, JsonObject, parse_json_object, read_file
from detjax.models.configuration.pooling_config import ANSWER_IDS, ANSWERS, read_dimensions
from detjax.models.parts.pooling import Method, PoolingOptions
from detjax.models.text.tokenizer import Tokenizer

MODULES: Final = "modules.json"
_PROMPTS: Final = "config_sentence_transformers.json"
_LENGTH: Final = "sentence_bert_config.json"
_POOLING: Final = "1_Pooling"
_METHODS: Final[Mapping[str, Method]] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_OLD_METHODS: Final[Mapping[str, str]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
}


def with_sentence_files(directory: Path, config: DecoderConfig, file: JsonObject) -> DecoderConfig:
    """Returns a configuration with the options in the files of Sentence Transformers, if the directory has them.

    They make a model of embeddings of one that generates. The configuration was read from `file`.

    Raises:
        CheckpointError: a file is damaged, or a module or an option is not supported.
    """
    has_modules = (directory / MODULES).exists(follow_symlinks=False)
    if not has_modules or (config.pooling is not None and not config.pooling.gives_embeddings):
        return config
    length = _object(directory / _LENGTH)
    if length.boolean("do_lower_case", False):
        raise length.error("do_lower_case", "false")
    longest = length.optional_integer("max_seq_length", minimum=2) or config.max_positions
    method, normalized = _read_modules(directory, config.hidden_size)
    settings = _object(directory / _PROMPTS)
    settings.choice("similarity_fn_name", "cosine", ("cosine",))
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(prompts, Mapping) or not all(isinstance(text, str) for text in prompts.values()):
        raise settings.error("prompts", "an object of texts by name")
    if default is not None and default not in prompts:
        raise settings.error("default_prompt_name", ", ".join(["null", *prompts]))
    pooling = PoolingOptions(
        architecture=config.architecture if config.pooling is None else config.pooling.architecture,
        method=method,
        normalized=normalized,
        dimensions=read_dimensions(file),
        prompts=tuple(sorted(prompts.items())),
        default_prompt=default,
    )
    return dataclasses.replace(config, pooling=pooling, max_positions=min(longest, config.max_positions))


def with_answer_ids(config: DecoderConfig, tokenizer: Tokenizer | None, file: JsonObject) -> DecoderConfig:
    """Returns a configuration with the ids of the tokens that a classifier consists of, if it does.

    Raises:
        CheckpointError: a text is not one token, or there is no tokenizer.
    """
    pooling = config.pooling
    if pooling is None or not pooling.answers:
        return config
    ids = pooling.answer_ids
    if tokenizer is not None:
        ids = tuple(tokenizer.id_of(answer) for answer in pooling.answers)
    if not ids or None in ids or pooling.answer_ids not in ((), ids):
        known = "there is no tokenizer" if tokenizer is None else f"the tokenizer's ids are {ids}"
        raise file.error(ANSWERS, f"tokens of the tokenizer, and their ids in {ANSWER_IDS}; {known}")
    return dataclasses.replace(config, pooling=dataclasses.replace(pooling, answer_ids=ids))


def _object(path: Path) -> JsonObject:
    """Reads a JSON object, which is empty if the file does not exist."""
    raw = parse_json_object(read_file(path), str(path)) if path.exists(follow_symlinks=False) else {}
    return JsonObject(raw, str(path))


def _read_modules(directory: Path, width: int) -> tuple[Method, bool]:
    """Reads the list of modules: the model, the pooling, and possibly the normalization."""
    path = directory / MODULES
    accepted = "the modules Transformer, Pooling and, optionally, Normalize"
    # The file holds a list.
    listed = parse_json_object(b'{"modules": ' + read_file(path) + b"}", str(path))["modules"]
    try:
        kinds, places = [one["type"].rpartition(".")[2] for one in listed], [one["path"] for one in listed]
    except (TypeError, KeyError, AttributeError):
        raise CheckpointError(f"{path}: the modules are {listed!r}; accepted: {accepted}") from None
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or places[0] != "":
        raise CheckpointError(f"{path}: the modules are {', '.join(map(str, kinds))}; accepted: {accepted}")
    return _read_method(_object(directory / places[1] / "config.json"), width), len(kinds) == 3


def _read_method(pooling: JsonObject, width: int) -> Method:
    """Reads which hidden state stands for a text."""
    for key in ("word_embedding_dimension", "embedding_dimension"):
        if pooling.get(key) not in (None, width):
            raise pooling.error(key, f"{width}, the hidden_size of config.json")
    if not pooling.boolean("include_prompt", True):
        raise pooling.error("include_prompt", "true")
    if pooling.get("pooling_mode") is not None:
        return _METHODS[pooling.choice("pooling_mode", "", tuple(_METHODS))]
    chosen = [key for key, value in pooling.raw.items() if key.startswith("pooling_mode_") and value]
    if len(chosen) != 1 or chosen[0] not in _OLD_METHODS:
        raise CheckpointError(
            f"{pooling.source}: true is {', '.join(chosen) or 'no pooling mode'}; accepted: one of "
            f"{', '.join(_OLD_METHODS)}"
        )
    return _METHODS[_OLD_METHODS[chosen[0]]]


def sentence_files(options: PoolingOptions, width: int, max_length: int) -> dict[str, Any]:
    """Returns the contents of the files of Sentence Transformers for a model of embeddings, by name."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if options.normalized else [])]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    modes = {key: _METHODS[mode] == options.method for key, mode in _OLD_METHODS.items()}
    return {
        MODULES: modules,
        f"{_POOLING}/config.json": {"word_embedding_dimension": width, "include_prompt": True, **modes},
        _LENGTH: {"max_seq_length": max_length, "do_lower_case": False},
        _PROMPTS: {
            "prompts": dict(options.prompts),
            "default_prompt_name": options.default_prompt,
            "similarity_fn_name": "cosine",
        },
    }
