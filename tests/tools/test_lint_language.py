"""The lint of the project's language reports fragments and function words, and nothing else."""

import pytest

from tools.lint_language import violations


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ('"""Of the rows, the first."""', 1),
        ('def rows():\n    """Those that remain."""', 2),
        ('rows = 1\n"""As above."""', 2),
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
def test_fragments_and_function_words_are_reported_with_their_line(source: str, line: int) -> None:
    assert [reported for reported, _ in violations(source)] == [line]


@pytest.mark.parametrize(
    "source",
    [
        '"""Offsets of the rows."""',
        '"""Assigns pages to requests."""',
        "jnp.where(mask, x, y)",
        "x = found",
        "offset = officer = 1",
        'text = "Of the rows"',
    ],
)
def test_everything_else_passes(source: str) -> None:
    assert not list(violations(source))
