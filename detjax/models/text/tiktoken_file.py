"""`tiktoken.model`, the vocabulary of Kimi's checkpoints, as a `tokenizer.json`.

The file lists byte strings and their ranks, which are their ids. Which text is one piece is not in it but in the code
that comes with the checkpoint, `tokenization_kimi.py`; its pattern is stated here.
"""

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from detjax.models.configuration.json_object import CheckpointError

VOCABULARY: Final = "tiktoken.model"
_CODE: Final = "tokenization_kimi.TikTokenTokenizer"
_RESERVED: Final = 256
"""The number of ids after the byte strings. `tokenizer_config.json` names some of them."""

_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_PATTERN: Final = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""The pieces of text that are encoded one by one."""


def tokenizer_json(vocabulary: bytes, config: Mapping[str, Any], alphabet: Mapping[int, str], source: str) -> bytes:
    """Returns the `tokenizer.json` of a checkpoint with a `tiktoken.model`.

    Args:
        vocabulary: the contents of `tiktoken.model`.
        config: the object in `tokenizer_config.json`.
        alphabet: the characters that stand for bytes in a `tokenizer.json`.
        source: the checkpoint's directory, for errors.

    Raises:
        CheckpointError: the file is damaged, or the checkpoint's code is not the one whose pattern is known.
    """
    code = (config.get("auto_map") or {}).get("AutoTokenizer")
    if _CODE not in (code if isinstance(code, list) else [code]):
        raise CheckpointError(
            f"{source} has {VOCABULARY} and no tokenizer.json, and tokenizer_config.json has the AutoTokenizer "
            f"{code!r}; accepted: {_CODE}, or a tokenizer.json. Save one with transformers."
        )
    ranks = _ranks(vocabulary, source)
    vocab = {"".join(map(alphabet.__getitem__, token)): rank for token, rank in ranks.items()}
    # A piece that is a token is not merged, as in tiktoken.
    tokenizer = Tokenizer(models.BPE(vocab, _merges(ranks, vocab, alphabet), ignore_merges=True))
    split = pre_tokenizers.Split(Regex(_PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    named = _named_tokens(config, source)
    reserved = range(len(ranks), len(ranks) + _RESERVED)
    if outside := sorted(named.keys() - set(reserved)):
        raise CheckpointError(
            f"{source}/tokenizer_config.json: added_tokens_decoder has id {outside[0]}; accepted: {reserved[0]} to "
            f"{reserved[-1]}, the {_RESERVED} ids after the tokens of {VOCABULARY}"
        )
    for rank in reserved:
        token = named.get(rank, AddedToken(f"<|reserved_token_{rank}|>", normalized=False))
        tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != rank:
            raise CheckpointError(
                f"{source}/tokenizer_config.json: added_tokens_decoder has {token.content!r} at id {rank}, which is "
                "another token's text; accepted: a text of its own for each token"
            )
    return tokenizer.to_str().encode()


def _ranks(vocabulary: bytes, source: str) -> dict[bytes, int]:
    ranks = {}
    for number, line in enumerate(vocabulary.splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise CheckpointError(
                f"{source}/{VOCABULARY}: line {number} is {line[:80]!r}; accepted: a token in base64 and its rank"
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))) or not {bytes([byte]) for byte in range(256)} <= ranks.keys():
        raise CheckpointError(
            f"{source}/{VOCABULARY} has {len(ranks)} tokens; accepted: every byte as a token, and the ranks 0, 1, 2, … "
            "once each"
        )
    return ranks


def _merges(ranks: Mapping[bytes, int], vocab: Mapping[str, int], alphabet: Mapping[int, str]) -> list[tuple[str, str]]:
    """Returns every way to make a token of two others, in the order of the tokens' ranks, which is tiktoken's order."""
    merges = []
    for token in sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__):
        text = "".join(map(alphabet.__getitem__, token))
        ways = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        ways = [way for way in ways if way[0] in vocab and way[1] in vocab]
        merges += sorted(ways, key=lambda way: (vocab[way[0]], vocab[way[1]]))
    return merges


def _named_tokens(config: Mapping[str, Any], source: str) -> dict[int, AddedToken]:
    named = {}
    for key, token in (config.get("added_tokens_decoder") or {}).items():
        if not (key.isdigit() and isinstance(token, Mapping) and isinstance(token.get("content"), str)):
            raise CheckpointError(
                f"{source}/tokenizer_config.json: added_tokens_decoder has {key!r}: {token!r}; accepted: an id, and an "
                "object with content"
            )
        options = {name: bool(token.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "special")}
        named[int(key)] = AddedToken(token["content"], normalized=False, **options)
    return named
