"""The prose linter reports translated phrases, docstring openings and function words as names, with their lines."""

import json
from pathlib import Path

import pytest

from tools import lint_prose


@pytest.fixture(scope="module", autouse=True)
def _checks() -> None:
    lint_prose.register_checks()


def lines(path: Path, text: str) -> list[int]:
    path.write_text(text)
    return [line for line, _ in lint_prose.violations(path)]


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ('"""What reads the rows."""', 1),
        ('def rows():\n    """Those that remain."""', 2),
        ('rows = 1\n"""Whether rows remain."""', 2),
        ("rows = 1\n\n# The rows are behind the others, and\n# likewise their pages.", 3),
        ('"""Rows\n\nThe pages and those\n    of the others.\n"""', 3),
        ('raise ValueError("the dtype is no float")', 1),
        ('raise ValueError(f"{x}: the dtype is no {y} float")', 1),
        ('"""An irregardless page."""', 1),
        ("found = 1", 1),
        ("def pages(of): ...", 1),
        ("def pages(of_request): ...", 1),
        ("class Pages:\n    own: int", 2),
        ("import numpy as mine", 1),
        ("pages.where = 1", 1),
        ("try:\n    pass\nexcept ValueError as told: ...", 3),
        ("for each in pages: ...", 1),
        ("def _told(): ...", 1),
    ],
)
def test_a_violation_is_reported_in_its_line(tmp_path: Path, source: str, line: int) -> None:
    assert lines(tmp_path / "module.py", source)[:1] == [line]


@pytest.mark.parametrize(
    "source",
    [
        '"""Offsets of the rows."""',
        '"""Assigns pages to requests: `those of` is code.\n\n    >>> anew = 1\n"""',
        '"""There is no page, and the server is behind a proxy."""',
        "jnp.where(mask, x, y)",
        "x = found",
        "offset = officer = 1",
        'text = "likewise"',
    ],
)
def test_everything_else_passes(tmp_path: Path, source: str) -> None:
    assert not lines(tmp_path / "module.py", source)


def test_pages_are_read_without_code_and_targets_of_links(tmp_path: Path) -> None:
    page = "# Pages\n\n```\nlikewise\n```\n\n[rows](likewise.md) and `likewise`\n\nThe rows likewise.\n"
    assert lines(tmp_path / "page.md", page) == [9]
    cells = [{"cell_type": "code", "source": ["# anew"]}, {"cell_type": "markdown", "source": ["Rows\n", "anew."]}]
    assert lines(tmp_path / "notebook.ipynb", json.dumps({"cells": cells})) == [2]


def test_each_phrase_of_the_list_matches_what_it_names() -> None:
    """A mistyped expression would match nothing and refuse nothing."""
    samples = (
        "there is none|anew|stands apart|as far as it goes|as it comes|at a time when|rows behind it|beside it|by turns"
        "|goes on|is no page|is to be had|likewise|of which|of whose|see there|so many|that of|spares|is told"
        "|whose turn|no more than is needed|were it"
    ).split("|")
    for check in lint_prose.phrase_checks():
        assert any(list(check.check(f"\n{sample} x\n")) for sample in samples), check.check_type


def test_a_file_is_remembered_only_as_it_was_when_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lint_prose, "register_checks", lambda: None)
    page = Path("page.md")
    for text, code in [("A page.", 0), ("A page.", 0), ("Likewise.", 1), ("Likewise.", 1), ("A page.", 0)]:
        page.write_text(text)
        assert lint_prose.main(["page.md"]) == code


def test_a_clean_file_is_not_read_again_until_the_rules_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lint_prose, "register_checks", lambda: None)
    Path("page.md").write_text("A page.")
    assert lint_prose.main(["page.md"]) == 0
    monkeypatch.setattr(lint_prose, "violations", lambda file: [(1, "read again")])
    assert lint_prose.main(["page.md"]) == 0
    rules = tmp_path / "prose.toml"
    rules.write_text("# other rules")
    monkeypatch.setattr(lint_prose, "_RULES_FILE", rules)
    assert lint_prose.main(["page.md"]) == 1
