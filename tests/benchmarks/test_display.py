"""The form in which results are printed."""

import pytest

from benchmarks.display import display


def test_records_are_tables_and_other_fields_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    cells = [{"m": 1, "seconds": {"ours": 0.0123456, "theirs": 2.0}, "rounds": [1, 2]}, {"m": 17, "name": "wide"}]
    display({"small": True, "cells": cells, "summary": {"mean": 1.0, "by model": {"tiny": {"largest": 3}}}})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["result:", "small", "True"],
        ["cells"],
        ["m", "seconds", "ours", "seconds", "theirs", "name"],
        ["1", "0.01235", "2"],
        ["17", "wide"],
        ["summary:", "mean", "1"],
        ["summary,", "by", "model,", "tiny:", "largest", "3"],
    ]
