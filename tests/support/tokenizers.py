"""Tokenizers of the kinds that no fixture has."""

from pathlib import Path

import tokenizers

from detjax.models import Tokenizer


def with_byte_fallback(path: Path) -> Tokenizer:
    """A tokenizer such as Llama 2's and Mistral's: spaces are U+2581, and bytes have tokens of their own."""
    vocabulary = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a", "\ufffd"]
    model = tokenizers.models.BPE(
        {token: index for index, token in enumerate(vocabulary)},
        [("\u2581", "a")],
        unk_token="<unk>",
        byte_fallback=True,
    )
    made = tokenizers.Tokenizer(model)
    made.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    made.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    made.add_special_tokens(["<s>"])
    first = ("<s>", len(vocabulary))
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[first])
    made.save(str(path / "tokenizer.json"))
    loaded = Tokenizer.load(path)
    assert loaded is not None
    return loaded
