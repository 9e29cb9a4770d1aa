"""The table, the JSON and the picture of the demonstration's result, word for word."""

import dataclasses
import io
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
from rich.console import Console

from detjax.demo import CHECKPOINT, DEFAULT_MAX_TOKENS, DEFAULT_PROMPT, experiment, histogram
from detjax.demo.experiment import Divergence, Request, Result, Tally, common_prefix
from detjax.demo.histogram import _verse, draw_histogram
from detjax.demo.report import as_json, as_text, counted, report
from detjax.models import Tokenizer
from detjax.runtime import fingerprints

STOCK: Final = Tally((((5, 6, 7), 7), ((5, 6, 8), 2), ((5, 9), 1)), bit_patterns=4)
SAME: Final = Tally((((5, 6, 7), 10),), bit_patterns=1)
QUESTION: Final = Request((40, 41), 3)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.load(CHECKPOINT)
    assert tokenizer is not None
    return tokenizer


def result() -> Result:
    return Result(4, STOCK, 1.25, SAME, 2.0625, fingerprints.fingerprint())


@pytest.mark.parametrize("has_words", [True, False])
def test_the_json_has_every_field(tokenizer: Tokenizer, has_words: bool) -> None:
    words = tokenizer if has_words else None

    def text(*tokens: int) -> str | None:
        return tokenizer.decode(tokens) if has_words else None

    one = result()
    assert as_json(one, QUESTION, words, model="m", seed=3) == {
        "model": "m",
        "seed": 3,
        "prompt": text(40, 41),
        "prompt_tokens": (40, 41),
        "max_tokens": 3,
        "asks": 10,
        "batches": 4,
        "stock": {
            "unique_completions": 3,
            "unique_logprob_bits": 4,
            "first_divergence": 1,
            "seconds": 1.25,
            "completions": [
                {"count": 7, "text": text(5, 6, 7), "tokens": (5, 6, 7)},
                {"count": 2, "text": text(5, 6, 8), "tokens": (5, 6, 8)},
                {"count": 1, "text": text(5, 9), "tokens": (5, 9)},
            ],
        },
        "detjax": {
            "unique_completions": 1,
            "unique_logprob_bits": 1,
            "first_divergence": None,
            "seconds": 2.062,
            "completions": [{"count": 10, "text": text(5, 6, 7), "tokens": (5, 6, 7)}],
        },
        "fingerprint": dataclasses.asdict(one.fingerprint) | {"digest": one.fingerprint.digest},
    }


def test_the_table_has_a_row_for_each_numerics(tokenizer: Tokenizer) -> None:
    console = Console(width=110, file=io.StringIO())
    console.print(report(result(), QUESTION, tokenizer))
    printed: Any = console.file
    rows = [line.split() for line in printed.getvalue().splitlines()]
    assert ["stock", "XLA", "3", "7", "of", "10", "4", "after", "1", "token", "1.2"] in rows
    (ours,) = [row for row in rows if row[:1] == ["detjax"] and "none" in row]
    assert ours[-6:] == ["10", "of", "10", "1", "none", "2.1"]


def test_tallies_say_what_was_counted() -> None:
    assert (STOCK.asks, STOCK.commonest, STOCK.reproduced) == (10, 7, False)
    assert (SAME.asks, SAME.commonest, SAME.reproduced, SAME.divergence) == (10, 10, True, None)
    assert STOCK.divergence == Divergence(1, (5, 6, 7), (5, 9))
    assert [common_prefix(*pair) for pair in (("", "a"), ("ab", "ab"), ("ab", "a"), ("ab", "cb"), ("abc", "abd"))] == [
        *(0, 2, 1, 0, 2)
    ]
    assert [counted(0, "bar"), counted(1, "bar"), counted(2, "bar"), counted(2, "batch", "batches")] == [
        *("0 bars", "1 bar", "2 bars", "2 batches")
    ]
    assert as_text((5, 16), None) == "5 16"


def test_completions_under_bars_have_a_few_short_lines() -> None:
    assert _verse("one two\nthree", 7) == "one two\nthree"
    assert _verse("one two three", 7) == "one two\nthree"
    seven = "\n".join("abcdefg")
    assert _verse(seven, 9) == seven
    assert _verse(f"{seven}\nh", 9) == "a\nb\nc\nd\ne\nf\n…"


@pytest.mark.parametrize(("completions", "are_shown"), [(1, True), (4, True), (5, False)])
def test_a_picture_says_how_many_answers_there_were(
    tmp_path: Path, tokenizer: Tokenizer, completions: int, are_shown: bool
) -> None:
    counts = tuple(((40, 41, token), 9 - token) for token in range(completions))
    one = dataclasses.replace(result(), stock=Tally(counts, bit_patterns=6))
    figures: list[Any] = []
    made = histogram.Figure

    def figure(**options: Any) -> Any:
        figures.append(made(**options))
        return figures[-1]

    with mock.patch.object(histogram, "Figure", figure):
        draw_histogram(one, tokenizer, tmp_path / "picture.png")
    (drawn,) = figures
    asks = counted(sum(count for _, count in counts), "time")
    assert [text.get_text() for text in drawn.texts] == [
        f"To one question stock XLA gave {counted(completions, 'answer')}, detjax 1",
        f"asked {asks} at temperature 0, within the same 4 batches of 1 to 32 requests\n{one.fingerprint.device_kind}",
    ]
    stock, detjax = drawn.axes
    assert stock.get_title(loc="left") == f"stock XLA: {counted(completions, 'completion')}, 6 sets of logprobs"
    assert detjax.get_title(loc="left") == "detjax: 1 completion, 1 set of logprobs"
    assert [bar.get_height() for bar in stock.patches] == [count for _, count in counts]
    assert stock.get_ylim() == (0, pytest.approx(1.12 * 10))
    labels = [label.get_text() for label in stock.texts]
    assert labels == [f"{count} ×" if are_shown or not place else "" for place, (_, count) in enumerate(counts)]
    shown = [tick.get_text() for tick in stock.get_xticklabels()]
    assert shown == (
        [_verse(tokenizer.decode(tokens), 66 // max(completions, 2)) for tokens, _ in counts] if are_shown else []
    )
    assert stock.get_xlabel() == ("" if are_shown else "5 unique completions, most frequent first")


def test_the_constants_are_those_of_the_documentation() -> None:
    assert (DEFAULT_MAX_TOKENS, experiment.LARGEST_BATCH, experiment.MAX_CHUNKS) == (40, 32, 32)
    assert DEFAULT_PROMPT.startswith("KING RICHARD III:\n")
