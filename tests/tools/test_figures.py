"""Every figure of README.md and docs/ is what a result file says, and no measured number is typed."""

import json
from decimal import Decimal
from pathlib import Path

import pytest

from tools import figures


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: str(page.relative_to(figures.ROOT)))
def test_figures_are_those_of_the_result_files_and_none_is_typed(page: Path) -> None:
    """`python -m tools.figures --write` rounds labels again; tools/typed_numbers.toml lists numbers of other kinds."""
    assert not [str(fault) for fault in figures.faults_of(page)]


def test_every_exception_is_needed() -> None:
    for page, numbers in figures.allowed().items():
        typed = {number for _, number in figures.typed((figures.ROOT / page).read_text())}
        assert numbers == ["*"] or not set(numbers) - typed, page


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
    (tmp_path / "result.json").write_text(json.dumps({"runs": [{"seconds": 0.00435}]}))
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
        ("0.75 of its speed, 1.4e-6 or 2e-4 away.", ["0.75", "1.4e-6", "2e-4"]),
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
