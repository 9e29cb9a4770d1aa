"""Loads what guesses tokens, and checks that it fits the model."""

from collections.abc import Iterable
from typing import Final

from detjax.engine.drafts.draft_model import check_draft_model
from detjax.engine.drafts.speculative_config import SpeculativeConfig
from detjax.models import Decoder, Draft, Tokenizer, load, load_draft

type Guesser = Decoder | Draft | None
"""A smaller model, a head, or None for prompt lookup."""

_NAMES: Final = {"eagle3": "EAGLE-3 head", "mtp": "MTP layer"}


def load_guesser(config: SpeculativeConfig, model: Decoder, tokenizer: Tokenizer | None) -> Guesser:
    """Returns the smaller model or the head that the settings name.

    Raises:
        ValueError: the checkpoint cannot be read, or does not fit the model.
    """
    if config.model is None:
        return None
    if config.method == "draft_model":
        draft, draft_tokenizer = load(config.model, mesh=model.mesh, progress=False)
        check_draft_model(model, draft, config.model)
        check_vocabularies(tokenizer, draft_tokenizer, config.model)
        return draft
    head = load_draft(config.model, model)
    if head.head.METHOD != config.method:
        raise ValueError(
            f"speculative: method is {config.method!r} and {config.model!r} has a head of the kind "
            f"{head.head.METHOD!r}; accepted: the directory of an {_NAMES[config.method]}, or method "
            f"{head.head.METHOD!r}"
        )
    return head


def check_vocabularies(tokenizer: Tokenizer | None, draft: Tokenizer | None, name: str) -> None:
    """Checks that each token has the same bytes in both vocabularies.

    The sizes of models' vocabularies do not tell: they are often padded.

    Raises:
        ValueError: a tokenizer is missing, or a token differs.
    """
    if tokenizer is None or draft is None:
        owner = "the engine" if tokenizer is None else f"the draft model {name!r}"
        raise ValueError(f"speculative: {owner} has no tokenizer; accepted: two tokenizers, to compare their tokens")
    count = max(len(tokenizer), len(draft), 1 + max([*tokenizer.added_tokens, *draft.added_tokens], default=0))
    different = _different(tokenizer, draft, range(count))
    if different is not None:
        expected, other = tokenizer.token_bytes(different), draft.token_bytes(different)
        raise ValueError(
            f"speculative: token {different} is {expected!r} in the model's vocabulary and {other!r} in the draft "
            f"model {name!r}; accepted: the same vocabulary in both"
        )


def _different(tokenizer: Tokenizer, draft: Tokenizer, tokens: Iterable[int]) -> int | None:
    return next((token for token in tokens if tokenizer.token_bytes(token) != draft.token_bytes(token)), None)
