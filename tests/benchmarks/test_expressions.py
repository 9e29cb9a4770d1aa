"""Expressions that name numbers of result files."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.expressions import evaluate, number, sources

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
    assert float(evaluate(DOCUMENT, expression)) == pytest.approx(value, rel=1e-12)


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
        evaluate(DOCUMENT, expression)


def test_expressions_of_several_files_are_ratios(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(DOCUMENT))
    (tmp_path / "b.json").write_text(json.dumps({"seconds": [4, 12], "by": 2}))
    ratio = "b.json#mean(/seconds/*):/by / a.json#/runs/name=b/seconds"
    assert (number("b.json#/by", tmp_path), number(ratio, tmp_path)) == (2, 2)
    assert sources(ratio) == ["b.json", "a.json"]
    with pytest.raises(OSError):
        number("c.json#/by", tmp_path)
