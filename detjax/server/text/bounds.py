"""An upper bound on the bytes of text per token, so that texts that are too long are rejected before tokenization."""

from collections.abc import Mapping
from typing import Any, Final

from detjax.models.text.tokenizer import byte_alphabet

_SHRINKAGE: Final = {"NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "Lowercase": 4, "Prepend": 1, "ByteLevel": 1}
"""Normalizers that shrink a text at most by a constant factor, with a bound on the factor.

Unicode's canonical forms and lower case shrink by up to 3 (the 3-byte Kelvin sign becomes 1 byte; three Hangul jamo of
3 bytes each become one syllable of 3), its compatibility forms by up to 4 (mathematical letters).
"""
_PRE_TOKENIZERS: Final = ("ByteLevel", "Split", "Digits", "Metaspace", "Punctuation")
"""Pre-tokenizers that keep the whole text, unless configured to remove something."""


def bytes_per_token(tokenizer: Mapping[str, Any]) -> int | None:
    """Returns an upper bound on the bytes of text per token, or None if the tokenizer has no bound.

    A tokenizer has no bound if parts of the text may vanish without a token: normalizers that strip or replace,
    pre-tokenizers that remove spaces, added tokens that swallow surrounding spaces, and vocabularies that map a run of
    unknown characters to one token or to nothing. The bound is loose, because a text that fits must never be rejected.

    Args:
        tokenizer: the object in `tokenizer.json`.
    """
    model = tokenizer.get("model") or {}
    added = tokenizer.get("added_tokens") or []
    steps = _steps(tokenizer.get("pre_tokenizer"), "pretokenizers")
    shrinkage = _shrinkage(tokenizer.get("normalizer"))
    if (
        shrinkage is None
        or any(token.get("lstrip") or token.get("rstrip") for token in added)
        or any(step.get("type") not in _PRE_TOKENIZERS or step.get("behavior") == "Removed" for step in steps)
        or not _has_a_token_for_every_byte(model, tokenizer)
    ):
        return None
    longest = max(len(text.encode()) for text in (*model["vocab"], *(token["content"] for token in added)))
    return longest * shrinkage


def _steps(step: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """Returns the steps of a normalizer or pre-tokenizer, flattening sequences."""
    if step is None:
        return []
    if step.get("type") == "Sequence":
        return [inner for part in step[key] for inner in _steps(part, key)]
    return [step]


def _shrinkage(normalizer: Mapping[str, Any] | None) -> int | None:
    shrinkage = 1
    for step in _steps(normalizer, "normalizers"):
        if step.get("type") == "Replace":
            pattern = step.get("pattern", {}).get("String")
            if not pattern or len(step["content"].encode()) < len(pattern.encode()):
                return None
        elif step.get("type") not in _SHRINKAGE:
            return None
        else:
            shrinkage *= _SHRINKAGE[step["type"]]
    return shrinkage


def _has_a_token_for_every_byte(model: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> bool:
    if model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), Mapping):
        return False
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    vocab = model["vocab"]
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    steps = _steps(tokenizer.get("pre_tokenizer"), "pretokenizers") + _steps(tokenizer.get("normalizer"), "normalizers")
    return any(step.get("type") == "ByteLevel" for step in steps) and all(c in vocab for c in byte_alphabet())
