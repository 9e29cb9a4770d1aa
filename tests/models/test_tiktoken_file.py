"""`tiktoken.model` of Kimi's checkpoints: the ids of tiktoken's algorithm, named tokens, and damaged files.

With tiktoken 0.13's own implementation, 20,000 random texts had the same ids.
"""

import base64
import itertools
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from detjax.models import CheckpointError, Tokenizer
from detjax.models.text.tokenizer import byte_alphabet

LETTERS = "abc A\nAbc中文1。٣ß'sé"
CONFIG: dict[str, Any] = {
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    "added_tokens_decoder": {
        "400": {"content": "[BOS]", "special": True},
        "410": {"content": "<|open|>", "special": False},
    },
    "bos_token": "[BOS]",
}


def ranks() -> dict[bytes, int]:
    """Every byte, random pairs of tokens of a few bytes, and a token that no pair makes."""
    draw, made = random.Random(0), {bytes([byte]): byte for byte in range(256)}
    parts = [bytes([byte]) for byte in LETTERS.encode()]
    while len(made) < 399:
        pair = draw.choice(parts) + draw.choice(parts)
        if len(pair) < 9 and pair not in made:
            made[pair] = len(made)
            parts.append(pair)
    return made | {b"xyz": 399}


def written(directory: Path, table: Mapping[bytes, int], config: Mapping[str, Any] = CONFIG) -> Path:
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in table.items()]
    (directory / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def loaded(directory: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(directory)
    assert tokenizer is not None
    return tokenizer


def merged(piece: bytes, table: Mapping[bytes, int]) -> list[int]:
    """tiktoken's algorithm: the pair whose union has the lowest rank is merged first, the leftmost of equal ones."""
    if piece in table:
        return [table[piece]]
    parts = [bytes([byte]) for byte in piece]
    while pairs := [(table[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in table]:
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [table[part] for part in parts]


def test_ids_are_those_of_tiktokens_algorithm(tmp_path: Path) -> None:
    table = ranks()
    tokenizer = loaded(written(tmp_path, table))
    split = tokenizers.Tokenizer.from_buffer(tokenizer.files["tokenizer.json"]).pre_tokenizer
    draw, alphabet = random.Random(1), byte_alphabet()
    merges = 0
    for _ in range(300):
        text = "".join(draw.choice(LETTERS) for _ in range(draw.randint(1, 30)))
        pieces = [bytes(alphabet[one] for one in piece) for piece, _ in split.pre_tokenize_str(text)]
        expected = [rank for piece in pieces for rank in merged(piece, table)]
        assert tokenizer.encode(text) == expected and tokenizer.decode(expected) == text
        merges += len(text.encode()) - len(expected)
    assert merges > 300
    # A piece that is a token is one, even if no pair of tokens makes it.
    assert tokenizer.encode("xyz") == [399]
    assert tokenizer.encode("xyzz") == merged(b"xyzz", table) == list(b"xyzz")


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("ab AB", ["ab", "ĠAB"]),
        ("aBc\u4e2dx", ["a", "Bc", "\xe4\xb8\u0143", "x"]),
        ("I'LL go", ["I'LL", "Ġgo"]),
        ("12345", ["123", "45"]),
        ("a\n\n b  c", ["a", "ĊĊ", "Ġb", "Ġ", "Ġc"]),
        (" ,.\n!", ["Ġ,.Ċ", "!"]),
    ],
)
def test_text_is_cut_into_pieces_as_by_the_published_code(tmp_path: Path, text: str, pieces: list[str]) -> None:
    tokenizer = loaded(written(tmp_path, ranks()))
    split = tokenizers.Tokenizer.from_buffer(tokenizer.files["tokenizer.json"]).pre_tokenizer
    assert [piece for piece, _ in split.pre_tokenize_str(text)] == pieces


def test_named_and_reserved_tokens_follow_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = loaded(written(tmp_path, ranks()))
    assert len(tokenizer) == 400 + 256 and tokenizer.token_id("bos_token") == 400
    ids = tokenizer.encode("a[BOS]<|open|><|reserved_token_655|>")
    assert ids[1:] == [400, 410, 655]
    assert tokenizer.decode(ids) == "a<|open|><|reserved_token_655|>"
    assert loaded(written(tmp_path, ranks())).files == tokenizer.files


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"auto_map": {"AutoTokenizer": "other.Tokenizer"}}, "'other.Tokenizer'; accepted: tokenization_kimi"),
        ({"auto_map": None}, "AutoTokenizer None; accepted: tokenization_kimi"),
        ({"added_tokens_decoder": {"656": {"content": "x"}}}, "has id 656; accepted: 400 to 655"),
        ({"added_tokens_decoder": {"400": {"content": "a"}}}, "'a' at id 400, which is another token's text"),
        ({"added_tokens_decoder": {"400": "a"}}, "accepted: an id, and an object with content"),
    ],
)
def test_settings_of_another_tokenizer_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    written(tmp_path, ranks(), CONFIG | change)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"YQ== 0\nYg== x\n", "line 2 is b'Yg== x'; accepted: a token in base64"),
        (b"Y 0\n", "line 1 is b'Y 0'; accepted"),
        (b"YQ== 0\n", "has 1 tokens; accepted: every byte"),
        (b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % (byte + 1) for byte in range(256)), "has 256 tokens"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    written(tmp_path, {})
    (tmp_path / "tiktoken.model").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(tmp_path)
