"""The options of models that pool in `config.json`, with the meaning that vLLM gives them."""

import re
from collections.abc import Mapping
from typing import Any, Final

from detjax.models.configuration.json_object import JsonObject
from detjax.models.parts.pooling import PoolingOptions, Score

_CLASSIFIES: Final = "ForSequenceClassification"
_REWARDS: Final[Mapping[str, int]] = {"Qwen2ForRewardModel": 1, "Qwen2ForProcessRewardModel": 2}
"""Architectures with two layers in their head, and the number of their classes."""
_GENERATES: Final = "ForCausalLM"
POOLING_ARCHITECTURES: Final = (
    f"in place of {_GENERATES} also {_CLASSIFIES} or Model, and {', '.join(_REWARDS)}, for models that pool"
)
"""A description of the architectures that pool, for errors."""
_BARE: Final = "Model"
ANSWERS: Final = "classifier_from_token"
ANSWER_IDS: Final = "classifier_token_ids"
_CONTRAST, _PLAIN = "from_2_way_softmax", "no_post_processing"
_PROBLEMS: Final = ("regression", "single_label_classification", "multi_label_classification")
ACTIVATIONS: Final[Mapping[str, Score]] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}


def generative_architectures(name: str) -> tuple[str, ...]:
    """Returns the architectures that a pooling architecture may share its layers with; empty: it is not one."""
    suffixes = (r"For\w*RewardModel",) if name in _REWARDS else (_CLASSIFIES, _BARE)
    base = next((name[: match.start()] for suffix in suffixes if (match := re.search(f"{suffix}$", name))), None)
    # Some families have a multimodal model whose name lacks "Text".
    return () if base is None else (f"{base}{_GENERATES}", f"{base.removesuffix('Text')}{_GENERATES}")


def read_pooling(file: JsonObject, generates: str) -> PoolingOptions | None:
    """Returns the pooling options in a `config.json`, or None if it describes a model that generates.

    Args:
        file: the file.
        generates: the architecture of the family, which generates.

    Raises:
        CheckpointError: an option is not supported.
    """
    names = file.get("architectures")
    name = names[0] if isinstance(names, list) and names else generates
    if file.get(ANSWERS) is not None:
        return _read_answers(file, generates)
    if file.boolean("is_original_qwen3_reranker", False):
        raise file.error(ANSWERS, 'the tokens ["no", "yes"], as is_original_qwen3_reranker is true')
    if generates not in generative_architectures(name):
        return None
    if name in _REWARDS:
        labels = tuple(f"LABEL_{index}" for index in range(_REWARDS[name]))
        score = _read_score(file, len(labels))
        return PoolingOptions(architecture=name, normalized=False, labels=labels, score=score, has_inner_layer=True)
    if name.endswith(_CLASSIFIES):
        labels = _read_labels(file)
        return PoolingOptions(architecture=name, normalized=False, labels=labels, score=_read_score(file, len(labels)))
    return PoolingOptions(architecture=name, dimensions=read_dimensions(file))


def _read_answers(file: JsonObject, generates: str) -> PoolingOptions:
    """Reads a classifier that consists of rows of a language model's head, in vLLM's keys."""
    answers, ids = file.get(ANSWERS), file.get(ANSWER_IDS) or []
    if not isinstance(answers, list) or not answers or not all(isinstance(one, str) for one in answers):
        raise file.error(ANSWERS, 'a list of tokens, such as ["no", "yes"]')
    if not isinstance(ids, list) or len(ids) not in (0, len(answers)) or not all(map(_is_id, ids)):
        raise file.error(ANSWER_IDS, f"the ids of the {len(answers)} tokens of {ANSWERS}")
    is_original = file.boolean("is_original_qwen3_reranker", False)
    if file.get("method") is None and not is_original:
        raise file.error("method", f"{_CONTRAST}, {_PLAIN}, as {ANSWERS} is given")
    method = file.choice("method", _CONTRAST, (_CONTRAST, _PLAIN))
    if method == _CONTRAST and len(answers) != 2:
        raise file.error(ANSWERS, f"two tokens, as the method is {_CONTRAST}")
    labels = tuple(answers[1:] if method == _CONTRAST else answers)
    return PoolingOptions(
        architecture=generates,
        normalized=False,
        labels=labels,
        score=_read_score(file, len(labels)),
        answers=tuple(answers),
        answer_ids=tuple(ids),
        has_contrast=method == _CONTRAST,
    )


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _read_labels(file: JsonObject) -> tuple[str, ...]:
    """Reads the names of the classes; transformers has two by default."""
    given, count = file.get("id2label"), file.optional_integer("num_labels", minimum=1)
    if given is None or given == {}:
        return tuple(f"LABEL_{index}" for index in range(count or 2))
    accepted = "an object of names by the numbers 0, 1, ... as strings"
    if not isinstance(given, Mapping) or sorted(given) != sorted(map(str, range(len(given)))):
        raise file.error("id2label", accepted)
    labels = tuple(given[str(index)] for index in range(len(given)))
    if not all(isinstance(label, str) for label in labels):
        raise file.error("id2label", accepted)
    if count not in (None, len(labels)):
        raise file.error("num_labels", f"{len(labels)}, as id2label has")
    return labels


def _read_score(file: JsonObject, classes: int) -> Score:
    """Reads the function of logits: by default the sigmoid of one logit, and the softmax of several."""
    cross_encoder = file.object("sentence_transformers")
    named, key = (file, "sbert_ce_default_activation_function")
    if cross_encoder is not None and cross_encoder.get("activation_fn") is not None:
        named, key = cross_encoder, "activation_fn"
    if named.get(key) is not None:
        return ACTIVATIONS[named.choice(key, "", tuple(ACTIVATIONS))]
    problem = file.choice("problem_type", "", _PROBLEMS)
    if problem == "regression":
        return "identity"
    return "sigmoid" if classes == 1 or problem == "multi_label_classification" else "softmax"


def read_dimensions(file: JsonObject) -> tuple[int, ...] | None:
    """Reads the lengths that embeddings may be cut to; None: none, empty: any."""
    given, width = file.get("matryoshka_dimensions"), file.integer("hidden_size")
    if given is not None:
        if not isinstance(given, list) or not given or not all(_is_id(one) and 1 <= one <= width for one in given):
            raise file.error("matryoshka_dimensions", f"a list of integers from 1 to {width}")
        return tuple(given)
    return () if file.boolean("is_matryoshka", False) else None


def write_pooling(options: PoolingOptions) -> dict[str, Any]:
    """Returns the keys of `config.json` that say these options, except for the keys of Sentence Transformers."""
    raw: dict[str, Any] = {"architectures": [options.architecture]}
    if options.gives_embeddings:
        if options.dimensions is not None:
            any_length = {"is_matryoshka": True}
            raw |= {"matryoshka_dimensions": list(options.dimensions)} if options.dimensions else any_length
        return raw
    if options.is_in_sentence_files:
        return raw
    names = {name: key for key, name in ACTIVATIONS.items()}
    default = "sigmoid" if len(options.labels) == 1 else "softmax"
    if options.score != default:
        raw["problem_type"] = "regression" if options.score == "identity" else "multi_label_classification"
        raw["sentence_transformers"] = {"activation_fn": names[options.score]}
    if options.answers:
        raw |= {ANSWERS: list(options.answers), "method": _CONTRAST if options.has_contrast else _PLAIN}
        return raw | ({ANSWER_IDS: list(options.answer_ids)} if options.answer_ids else {})
    if not options.has_inner_layer:
        raw["id2label"] = {str(index): label for index, label in enumerate(options.labels)}
        raw["label2id"] = {label: index for index, label in enumerate(options.labels)}
    return raw
