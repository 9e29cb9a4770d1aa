"""Texts in, vectors and scores out, for engines whose model pools."""

import math
import re
from collections.abc import Sequence
from typing import Final

import numpy as np
from jaxtyping import Float32

from detjax.engine.engine import Engine
from detjax.engine.field_error import FieldError
from detjax.engine.pooling import Pooling, Vectors
from detjax.engine.request import Request
from detjax.models import Tokenizer
from detjax.models.parts.pooling import PoolingOptions

QUERY: Final = "query"
DOCUMENT: Final = "document"


def embed(
    engine: Engine,
    prompts: Sequence[str | Sequence[int]],
    *,
    dimensions: int | None = None,
    prompt_name: str | None = None,
) -> Float32[np.ndarray, "n D"]:
    """Returns the embedding of each prompt. Its bits depend on nothing but the prompt.

    Args:
        engine: an engine whose model gives embeddings.
        prompts: texts, or lists of token ids.
        dimensions: the length to cut embeddings to before they are normalized, if the model's may be cut. Default: all.
        prompt_name: the name of the checkpoint's text to put before each text. Default: the checkpoint's default.

    Raises:
        ValueError: the model gives no embeddings, or a prompt, the length or the name is not accepted.
    """
    options = options_of("embed", engine)
    before = prompt_named("embed", options, prompt_name)
    texts = [before + prompt if isinstance(prompt, str) else prompt for prompt in prompts]
    return _pooled(engine, texts, Pooling("embed", dimensions=dimensions))


def classify(
    engine: Engine, prompts: Sequence[str | Sequence[int]], *, is_scored: bool = True
) -> Float32[np.ndarray, "n L"]:
    """Returns the scores of the classes for each prompt, in the order of the checkpoint's labels.

    Args:
        engine: an engine whose model gives scores of classes.
        prompts: texts, or lists of token ids.
        is_scored: False to return logits, such as the rewards of a reward model.

    Raises:
        ValueError: the model gives embeddings, or a prompt is not accepted.
    """
    options_of("classify", engine)
    return _pooled(engine, prompts, Pooling("classify", is_scored))


def score(
    engine: Engine, queries: str | Sequence[str], documents: Sequence[str], *, is_scored: bool = True
) -> Float32[np.ndarray, "n"]:
    """Returns how well each document answers its query: a reranker's score, or the cosine of two embeddings.

    Args:
        engine: an engine whose model gives embeddings, or the score of one class.
        queries: a query for all documents, or one for each.
        documents: the documents.
        is_scored: False to return a reranker's logit instead.

    Raises:
        ValueError: the numbers of texts differ, or the model gives scores of several classes.
    """
    options, pairs = options_of("score", engine), pairs_of("score", queries, documents)
    if options.gives_embeddings:
        distinct = list(dict.fromkeys(text for pair in pairs for text in pair))
        vectors = dict(zip(distinct, _pooled(engine, distinct, Pooling("embed")), strict=True))
        return np.array([cosine(vectors[query], vectors[document]) for query, document in pairs], np.float32)
    check_single_score("score", options)
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ValueError("score: the engine has no tokenizer; accepted: an engine with the checkpoint's tokenizer")
    prompts = [pair_text(tokenizer, *pair) for pair in pairs]
    return _pooled(engine, prompts, Pooling("classify", is_scored))[:, 0]


def _pooled(engine: Engine, prompts: Sequence[str | Sequence[int]], pooling: Pooling) -> Vectors:
    answers = engine.generate([Request(prompt, pooling=pooling) for prompt in prompts])
    vectors = [one.pooled for one in answers if one.pooled is not None]
    return np.stack(vectors) if vectors else np.zeros((0, 0), np.float32)


def options_of(name: str, engine: Engine) -> PoolingOptions:
    """Returns the pooling options of an engine's model; `name` is the caller's name in errors.

    Raises:
        ValueError: the model generates.
    """
    options = engine.pooling
    if options is None:
        raise ValueError(f"{name}: the model generates; accepted: a model that pools")
    return options


def prompt_named(name: str, options: PoolingOptions, prompt_name: str | None) -> str:
    """Returns the text that a model's checkpoint puts before texts under a name; None: under its default name.

    Raises:
        ValueError: the checkpoint has no such name.
    """
    prompts, chosen = dict(options.prompts), options.default_prompt if prompt_name is None else prompt_name
    if chosen is not None and chosen not in prompts:
        accepted = ", ".join(map(repr, prompts)) or "null, as the checkpoint has no prompts"
        raise FieldError(f"{name}: prompt_name is {chosen!r}; accepted: {accepted}", "prompt_name")
    return "" if chosen is None else prompts[chosen]


def pairs_of(name: str, queries: str | Sequence[str], documents: Sequence[str]) -> list[tuple[str, str]]:
    """Returns each document with its query.

    Raises:
        ValueError: there are several queries, and not one for each document.
    """
    given = [queries] if isinstance(queries, str) else list(queries)
    if len(given) not in (1, len(documents)):
        raise FieldError(
            f"{name}: {len(given)} queries and {len(documents)} documents; accepted: one query, or one for each "
            "document",
            "queries",
        )
    return list(zip(given * len(documents) if len(given) == 1 else given, documents, strict=True))


def check_single_score(name: str, options: PoolingOptions) -> None:
    """Raises a ValueError if a model gives scores of several classes."""
    if len(options.labels) > 1:
        raise FieldError(f"{name}: the model has {len(options.labels)} classes; accepted: models with one", "model")


def has_pair_template(tokenizer: Tokenizer) -> bool:
    """Returns whether the chat template is for pairs of a query and a document.

    Rerankers often have the chat template of the language model that they were trained from, which is not for pairs.
    """
    template = tokenizer.tool_template or ""
    return all(re.search(rf"""['"]{role}['"]""", template) for role in (QUERY, DOCUMENT))


def pair_text(tokenizer: Tokenizer, query: str, document: str) -> str:
    """Returns the text of a query and a document: the chat template's for such pairs, else both texts side by side."""
    if not has_pair_template(tokenizer):
        return query + document
    messages = [{"role": QUERY, "content": query}, {"role": DOCUMENT, "content": document}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=False)


def cosine(x: Float32[np.ndarray, "D"], y: Float32[np.ndarray, "D"]) -> float:
    """Returns the cosine of two embeddings, from sums of products that are rounded only once, to float64."""
    wide = x.astype(np.float64), y.astype(np.float64)  # so products are exact
    product, *squares = (math.fsum(one * other) for one, other in ((wide[0], wide[1]), *zip(wide, wide, strict=True)))
    return product / math.sqrt(squares[0] * squares[1]) if all(squares) else 0.0
