"""The files of Sentence Transformers next to a model: how it pools or scores pairs, and prompts."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.json_object import CheckpointError, JsonObject, parse_json_object, read_file
from detjax.models.configuration.pooling_config import ACTIVATIONS, ANSWER_IDS, ANSWERS, read_dimensions
from detjax.models.parts.pooling import Method, PoolingOptions, Score
from detjax.models.text.tokenizer import Tokenizer

MODULES: Final = "modules.json"
_PROMPTS: Final = "config_sentence_transformers.json"
_LENGTH: Final = "sentence_bert_config.json"
_TRANSFORMER, _POOLING, _NORMALIZE, _LOGITS = "Transformer", "Pooling", "Normalize", "LogitScore"
_EMBEDDERS: Final = [_TRANSFORMER, _POOLING], [_TRANSFORMER, _POOLING, _NORMALIZE]
_CLASSES: Final = {kind: f"sentence_transformers.models.{kind}" for kind in (_TRANSFORMER, _POOLING, _NORMALIZE)} | {
    _LOGITS: "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
}
"""The classes of modules, by their last names."""
_METHODS: Final[Mapping[str, Method]] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_OLD_METHODS: Final[Mapping[str, str]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
}


def with_sentence_files(directory: Path, config: DecoderConfig, file: JsonObject) -> DecoderConfig:
    """Returns a configuration with the options in the files of Sentence Transformers, if the directory has them.

    They make a model of embeddings, or a reranker, of one that generates. The configuration was read from `file`.

    Raises:
        CheckpointError: a file is damaged, or a module or an option is not supported.
    """
    # With keys of vLLM's in config.json there is nothing left to say.
    if not (directory / MODULES).exists(follow_symlinks=False) or (config.pooling and config.pooling.answers):
        return config
    length, settings = _object(directory / _LENGTH), _object(directory / _PROMPTS)
    if length.boolean("do_lower_case", False):
        raise length.error("do_lower_case", "false")
    longest = length.optional_integer("max_seq_length", minimum=2) or config.max_positions
    modules, given = _read_modules(directory), config.pooling
    if [*modules] == [_TRANSFORMER] and given is not None and given.labels:
        pooling = dataclasses.replace(given, score=_read_score(settings, given.score))
    elif [*modules] == [_TRANSFORMER, _LOGITS] and given is None:
        pooling = _reranker(config, modules[_LOGITS], settings)
    elif [*modules] in _EMBEDDERS and (given is None or given.gives_embeddings):
        pooling = _embeddings(config, modules, settings, file)
    else:
        raise CheckpointError(
            f"{directory / MODULES}: the modules are {', '.join(modules)}, and the architecture is "
            f"{given.architecture if given else config.architecture}; accepted: {_TRANSFORMER}, {_POOLING} and, "
            f"optionally, {_NORMALIZE}, or {_TRANSFORMER} and {_LOGITS}, of a model without a head for classes, or "
            f"{_TRANSFORMER} of one with such a head"
        )
    return dataclasses.replace(config, pooling=pooling, max_positions=min(longest, config.max_positions))


def _embeddings(
    config: DecoderConfig, modules: Mapping[str, JsonObject], settings: JsonObject, file: JsonObject
) -> PoolingOptions:
    """Reads a model of embeddings."""
    settings.choice("similarity_fn_name", "cosine", ("cosine",))
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(prompts, Mapping) or not all(isinstance(text, str) for text in prompts.values()):
        raise settings.error("prompts", "an object of texts by name")
    if default is not None and default not in prompts:
        raise settings.error("default_prompt_name", ", ".join(["null", *prompts]))
    return PoolingOptions(
        architecture=config.architecture if config.pooling is None else config.pooling.architecture,
        method=_read_method(modules[_POOLING], config.hidden_size),
        normalized=_NORMALIZE in modules,
        dimensions=read_dimensions(file),
        prompts=tuple(sorted(prompts.items())),
        default_prompt=default,
    )


def _reranker(config: DecoderConfig, module: JsonObject, settings: JsonObject) -> PoolingOptions:
    """Reads a reranker whose score is the logit of a token, or the difference of two."""
    true, false = (
        module.optional_integer(key, minimum=0, maximum=config.vocab_size - 1)
        for key in ("true_token_id", "false_token_id")
    )
    if true is None:
        raise module.error("true_token_id", f"an integer from 0 to {config.vocab_size - 1}")
    return PoolingOptions(
        architecture=config.architecture,
        normalized=False,
        labels=("LABEL_0",),
        score=_read_score(settings, "sigmoid"),
        answer_ids=(true,) if false is None else (false, true),
        has_contrast=false is not None,
    )


def _read_score(settings: JsonObject, default: Score) -> Score:
    """Reads the function of logits of a reranker, which gets no text before its texts."""
    if settings.get("default_prompt_name") is not None:
        raise settings.error("default_prompt_name", "null, for models that score pairs")
    given = settings.get("activation_fn")
    return default if given is None else ACTIVATIONS[settings.choice("activation_fn", "", tuple(ACTIVATIONS))]


def with_answer_ids(config: DecoderConfig, tokenizer: Tokenizer | None, file: JsonObject) -> DecoderConfig:
    """Returns a configuration with the ids of the tokens that a classifier consists of, if it does.

    Raises:
        CheckpointError: a text is not one token, or the checkpoint has no tokenizer.
    """
    pooling = config.pooling
    if pooling is None or not pooling.answers:
        return config
    ids = pooling.answer_ids
    if tokenizer is not None:
        ids = tuple(tokenizer.id_of(answer) for answer in pooling.answers)
    if not ids or None in ids or pooling.answer_ids not in ((), ids):
        known = "the checkpoint has no tokenizer" if tokenizer is None else f"the tokenizer's ids are {ids}"
        raise file.error(ANSWERS, f"tokens of the tokenizer, and their ids in {ANSWER_IDS}; {known}")
    return dataclasses.replace(config, pooling=dataclasses.replace(pooling, answer_ids=ids))


def _object(path: Path) -> JsonObject:
    """Reads a JSON object, which is empty if the file does not exist."""
    raw = parse_json_object(read_file(path), str(path)) if path.exists(follow_symlinks=False) else {}
    return JsonObject(raw, str(path))


def _read_modules(directory: Path) -> dict[str, JsonObject]:
    """Reads the list of modules: the last names of their classes, each with the configuration in its folder."""
    path = directory / MODULES
    # The file holds a list.
    listed = parse_json_object(b'{"modules": ' + read_file(path) + b"}", str(path))["modules"]
    try:
        return {one["type"].rpartition(".")[2]: _object(directory / one["path"] / "config.json") for one in listed}
    except (TypeError, KeyError, AttributeError):
        raise CheckpointError(
            f"{path}: the modules are {listed!r}; accepted: a list of objects with a type and a path"
        ) from None


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
    """Returns the contents of the files of Sentence Transformers for a model, by name."""
    kinds = [_TRANSFORMER, _POOLING, *([_NORMALIZE] if options.normalized else [])]
    settings = {
        "prompts": dict(options.prompts),
        "default_prompt_name": options.default_prompt,
        "similarity_fn_name": "cosine",
    }
    modes = {key: _METHODS[mode] == options.method for key, mode in _OLD_METHODS.items()}
    described: dict[str, Any] = {"word_embedding_dimension": width, "include_prompt": True, **modes}
    if options.has_answers:
        kinds, names = [_TRANSFORMER, _LOGITS], {score: name for name, score in ACTIVATIONS.items()}
        false, true = options.answer_ids if options.has_contrast else (None, *options.answer_ids)
        described = {"true_token_id": true, "false_token_id": false}
        settings = {"model_type": "CrossEncoder", "activation_fn": names[options.score], "prompts": {}}
    modules = [
        {"idx": index, "name": str(index), "path": f"{index}_{kind}" if index else "", "type": _CLASSES[kind]}
        for index, kind in enumerate(kinds)
    ]
    return {
        MODULES: modules,
        f"1_{kinds[1]}/config.json": described,
        _LENGTH: {"max_seq_length": max_length, "do_lower_case": False},
        _PROMPTS: settings,
    }
