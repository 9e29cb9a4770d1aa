"""The characters of the tasks, and tokenizers with one token for every character."""

import json
from typing import Final

import tokenizers

from detjax.models import Tokenizer

CHARACTERS: Final = "0123456789+-*/()[]{}?,:="
"""All characters of the prompts and answers of `detjax.rl.tasks`. Their positions are their token ids."""

END_TOKEN: Final = "<end>"
"""The text of the token that ends a sample."""


def character_tokenizer(characters: str = CHARACTERS) -> Tokenizer:
    """Returns a tokenizer with a token for every character, and a last one, `END_TOKEN`, that ends a sample.

    The vocabulary has no token for padding or for unknown characters, so `encode` refuses a text with other characters
    by an exception of the library. The end token has the role "eos_token", `encode` recognizes its text, and `decode`
    leaves it out. `models.save` writes the tokenizer beside a model, and `Tokenizer.load` reads it.

    Args:
        characters: the characters in the order of their token ids, from 0.

    Raises:
        ValueError: there is no character, or one is there twice.
    """
    if not characters or len(set(characters)) < len(characters):
        raise ValueError(
            f"character_tokenizer: characters is {characters!r}; accepted: different characters, at least one"
        )
    vocabulary = {character: token for token, character in enumerate(characters)}
    # No token has the text of `unk_token`, so the library refuses what is not in the vocabulary.
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unknown>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    made.add_special_tokens([END_TOKEN])
    files = {
        "tokenizer.json": made.to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": END_TOKEN}).encode(),
    }
    return Tokenizer(files, "the characters' tokenizer")
