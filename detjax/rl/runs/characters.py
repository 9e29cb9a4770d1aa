"""The characters of the tasks, and tokenizers with one token per character."""

import json
from typing import Final

import tokenizers

from detjax.models import Tokenizer

CHARACTERS: Final = "0123456789+-*/()[]{}?,:="
"""All characters of the prompts and answers of `detjax.rl.tasks`. A character's index is its token id."""

END_TOKEN: Final = "<end>"
"""The text of the token that ends an answer."""


def character_tokenizer(characters: str = CHARACTERS) -> Tokenizer:
    """Returns a tokenizer with a token per character, followed by `END_TOKEN`, which ends an answer.

    The vocabulary has no padding or unknown token, so for other characters `encode` raises the library's exception. The
    end token has the role "eos_token": `encode` recognizes its text, and `decode` skips it. `models.save` writes the
    tokenizer next to a model, and `Tokenizer.load` reads it.

    Args:
        characters: the characters in the order of their token ids.

    Raises:
        ValueError: characters are missing or repeated.
    """
    if not characters or len(set(characters)) < len(characters):
        raise ValueError(
            f"character_tokenizer: characters is {characters!r}; accepted: different characters, at least one"
        )
    vocabulary = {character: token for token, character in enumerate(characters)}
    # `unk_token` is not in the vocabulary, so the library refuses unknown characters.
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens([END_TOKEN])
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": END_TOKEN}).encode(),
    }
    return Tokenizer(files, "the characters' tokenizer")
