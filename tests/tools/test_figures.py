"""Every figure of README.md and docs/ is what a result file says, and no measured number is typed."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tools import figures

DOCUMENT: dict[str, Any] = {
    "runs": [
        {"name": "a", "kind": "x y", "seconds": 0.00435, "loss": [4.0, 2.0, 1.0]},
        {"name": "b", "kind": "x y", "seconds": 2.0, "loss": [8.0, 6.0, 2.0]},
    ],
    "a/b": 131072,
    "share": 0.9959,
    "differing": [],
    "wrong": "text",
}


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: str(page.relative_to(figures.ROOT)))
def test_figures_are_those_of_the_result_files_and_none_is_typed(page: Path) -> None:
    """`python tools/figures.py --write` rounds labels again; tools/typed_numbers.toml lists numbers of other kinds."""
    assert not [str(fault) for fault in figures.faults_of(page)]


def test_every_exception_is_needed() -> None:
    for page, numbers in figures.allowed().items():
        typed = {number for _, number in figures.typed((figures.ROOT / page).read_text())}
        assert numbers == ["*"] or not set(numbers) - typed, page


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("/runs/0/seconds", 0.00435),
        ("/runs/name=b/seconds", 2),
        ("/runs/kind=x%20y&name=b/seconds", 2),
        ("/a~1b", 131072),
        ("/runs/1/loss/0:/runs/0/loss/0", 2),
        ("median(/runs/*/loss/*)", 3),
        ("mean(/runs/kind=x%20y/loss/1..2)", 2.75),
        ("geomean(/runs/*/loss/0:/runs/*/loss/1)", (8 / 3) ** 0.5),
        ("max(/runs/*/loss/*):min(/runs/*/loss/*)", 8),
        ("sum(/runs/*/loss/0)", 12),
        ("count(/differing/*)", 0),
        ("distinct(/runs/*/kind)", 1),
        ("distinct(/runs/*/name)", 2),
    ],
)
def test_an_expression_selects_and_reduces(expression: str, value: float) -> None:
    assert float(figures.evaluate(DOCUMENT, expression)) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    "expression",
    [
        "/runs/2/seconds",
        "/runs/name=c/seconds",
        "/runs/kind=x%20y/seconds",  # two items
        "/runs/*/seconds",
        "/runs/0/loss/1..3",
        "mode(/runs/*/seconds)",
        "median(/differing/*)",
        "geomean(/runs/*/loss/*:/runs/*/seconds)",
        "/wrong",
        "runs",
        "/share:/share:/share",
    ],
)
def test_an_expression_that_gives_no_number_is_refused(expression: str) -> None:
    with pytest.raises(LookupError):
        figures.evaluate(DOCUMENT, expression)


@pytest.mark.parametrize(
    ("value", "label", "shown"),
    [
        ("0.00435", "4.3 ms", "4.4 ms"),
        ("0.00435", "0.00 s", "0.00 s"),
        ("0.9959", "99.6%", "99.6%"),
        ("13080.7", "13,100 tokens/s", "13,100 tokens/s"),
        ("13080.7", "13,000 tokens/s", "13,100 tokens/s"),
        ("13080.7", "13,081", "13,081"),
        ("1700", "1,800", "1,700"),
        ("131072", "131072", "131,072"),
        ("0.000734", "7.4e-4", "7.3e-4"),
        ("1.2499", "1.25 ×", "1.25 ×"),
        ("-0.031", "+3%", "-3%"),
        ("13.8", "+14", "+14"),
    ],
)
def test_a_label_is_the_value_in_its_unit_and_precision(value: str, label: str, shown: str) -> None:
    assert figures.label_of(Decimal(value), label) == shown


def test_a_label_with_an_unknown_unit_is_refused() -> None:
    with pytest.raises(ValueError, match="furlongs"):
        figures.label_of(Decimal(1), "1 furlongs")


def test_a_wrong_label_is_reported_with_its_place_and_rewritten(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps(DOCUMENT))
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n\nIt takes [4.36 ms](result.json#/runs/0/seconds), and `[1 s](result.json#/no)` is code.\n"
    )
    shown, faults = figures.checked(page, page.read_text())
    assert [fault.line for fault in faults] == [3]
    assert all(word in faults[0].message for word in ("4.36 ms", "0.00435", "4.35 ms"))
    assert shown == page.read_text().replace("4.36", "4.35")
    assert not figures.checked(page, shown)[1]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("It takes 7.66 s and 3 ms.", ["7.66 s", "3 ms"]),
        ("It is 1.5× as fast, 80% of a copy, 1.01 times.", ["1.5×", "80%", "1.01"]),
        ("At 13,100 tokens/s and 4.2 TB/s.", ["13,100 tokens/s", "4.2 TB/s"]),
        ("Tiles of 28 × 28 pixels, version 3.1.6 at 127.0.0.1, Qwen2.5, on 2026-11-23, twice.", []),
        ("0.75 of its speed, 1.4e-6 or 2e-4 apart.", ["0.75", "1.4e-6", "2e-4"]),
        ("Of 65,536 tokens, 4,326 differ (16 KiB, 0.5 GB).", ["65,536", "4,326", "16 KiB", "0.5 GB"]),
        ("With $x + 8.5$ and\n\n$$y =\n0.5 x$$\n", []),
        ("`7 s` and\n\n```\n7 s\n```\n", []),
        ("[7.66 s](result.json#/seconds)", []),
        ("[7.66 s](other.md)", ["7.66 s"]),
        ("| rows | share |\n|---|---|\n| 64 | 92 |", ["92"]),
        ("| rows | share |\n|---|---|\n| 64 | [92](r.json#/a) |", []),
    ],
)
def test_measured_numbers_in_prose_are_reported(text: str, numbers: list[str]) -> None:
    assert [number for _, number in figures.typed(text)] == numbers
