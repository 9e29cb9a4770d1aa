"""The histogram shows both tallies, whatever they hold."""

from pathlib import Path

import matplotlib.image
import pytest

from detjax.demo import CHECKPOINT
from detjax.demo.experiment import Result, Tally
from detjax.demo.histogram import draw_histogram
from detjax.models import Tokenizer
from detjax.runtime import fingerprints


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.load(CHECKPOINT)
    assert tokenizer is not None
    return tokenizer


def drawn(path: Path, stock: Tally, tokenizer: Tokenizer | None) -> bytes:
    detjax = Tally(((stock.counts[0][0], stock.asks),), 1)
    draw_histogram(Result(9, stock, 1.0, detjax, 1.0, fingerprints.fingerprint()), tokenizer, path)
    return path.read_bytes()


@pytest.mark.parametrize("counts", [(10,), (6, 4), (5, 3, 1, 1), tuple(range(90, 0, -1))])
def test_a_picture_has_bars_of_both_colors(tmp_path: Path, tokenizer: Tokenizer, counts: tuple[int, ...]) -> None:
    tally = Tally(tuple(((40, 41, 42, token), count) for token, count in enumerate(counts)), len(counts))
    drawn(tmp_path / "picture.png", tally, tokenizer)
    pixels = matplotlib.image.imread(tmp_path / "picture.png")
    assert pixels.shape == (960, 1760, 4)
    left, right = pixels[:, :880, :3], pixels[:, 880:, :3]
    orange, teal = (0xD1 / 255, 0x60 / 255, 0x3D / 255), (0x2A / 255, 0x7F / 255, 0x8E / 255)
    for half, color, other in ((left, orange, teal), (right, teal, orange)):
        assert (abs(half - color) < 0.01).all(axis=-1).sum() > 5000
        assert not (abs(half - other) < 0.01).all(axis=-1).any()


@pytest.mark.parametrize("text", ["It cost $5, or $6\nor more", "日本語のテキスト", "", "x" * 500])
def test_any_text_can_be_drawn(tmp_path: Path, tokenizer: Tokenizer, text: str) -> None:
    tally = Tally(((tuple(tokenizer.encode(text)), 3), ((1,), 1)), 2)
    assert drawn(tmp_path / "picture.png", tally, tokenizer).startswith(b"\x89PNG")


def test_tokens_are_drawn_where_there_is_no_tokenizer(tmp_path: Path) -> None:
    tally = Tally(((tuple(range(500, 540)), 3), ((1,), 1)), 2)
    assert drawn(tmp_path / "picture.png", tally, None).startswith(b"\x89PNG")


def test_one_result_gives_one_picture(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tally = Tally((((5, 6), 3), ((5, 7), 1)), 2)
    assert drawn(tmp_path / "1.png", tally, tokenizer) == drawn(tmp_path / "2.png", tally, tokenizer)
