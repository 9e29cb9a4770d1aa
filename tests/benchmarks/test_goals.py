"""The results that the repository has meet the performance goals, and one that misses a goal is noticed."""

import json
from pathlib import Path

import pytest

from benchmarks import goals
from benchmarks.__main__ import main
from tests.support import commands


def run(*arguments: str) -> tuple[int, str]:
    result = commands.run(main, "goals", *arguments, env={"COLUMNS": "300"})
    return result.exit_code, result.output


def test_every_goal_is_met() -> None:
    code, output = run()
    assert code == 0, output
    count = len(goals.read())
    assert count >= 45 and f"{count} of {count} goals are met" in output
    # An aim that is reached becomes the bar.
    assert all(goal.misses_aim for goal in goals.read() if goal.aim is not None)
    code, output = run("--json")
    listed = json.loads(output)
    assert code == 0 and {goal["name"] for goal in listed} == {goal.name for goal in goals.read()}
    by_name = {goal["name"]: goal for goal in listed}
    assert {"two_gpus.one_request_8b", "two_gpus.throughput_8b", "two_gpus.ready_8b"} <= by_name.keys()
    step = by_name["serving.one_request_8b"]
    assert (step["bound"], step["unit"], step["is_met"]) == ("at_most", "ms", True)
    assert step["value"] == pytest.approx(4.346, abs=1e-3)


@pytest.mark.parametrize(
    ("bound", "value", "is_met"),
    [
        ("at_most = 5", "a.json#/x", True),
        ("at_most = 4.9", "a.json#/x", False),
        ("at_least = 5", "a.json#/x", True),
        ("at_least = 5.1", "a.json#/x", False),
        ('at_most = 5000\nunit = "ms"', "a.json#/x", True),
        ('at_most = 4999\nunit = "ms"', "a.json#/x", False),
        ("at_most = 5", "a.json#/y", False),
        ("at_most = 5", "b.json#/x", False),
        ("at_most = 5", "broken.json#/x", False),
        ("at_most = 5", "a.json#/x / a.json#/zero", False),
    ],
)
def test_a_goal_that_is_missed_or_cannot_be_read_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, value: str, is_met: bool
) -> None:
    (tmp_path / "a.json").write_text('{"x": 5, "zero": 0}')
    (tmp_path / "broken.json").write_text("{")
    file = tmp_path / "goals.toml"
    file.write_text(f'[topic.goal]\nmeaning = "what it is"\nvalue = "{value}"\n{bound}\n')
    (goal,) = goals.read(file, tmp_path)
    assert goal.is_met == is_met and bool(goal.problem) == (goal.value is None)
    monkeypatch.setattr(goals, "read", lambda: [goal])
    code, output = run()
    assert code == (not is_met)
    assert ("MISSED" in output) != is_met and ("cannot be read" in output) == bool(goal.problem)


@pytest.mark.parametrize(("aim", "misses"), [(6, True), (5, False)])
def test_an_aim_that_is_missed_is_named_and_does_not_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aim: int, misses: bool
) -> None:
    (tmp_path / "a.json").write_text('{"x": 5}')
    (tmp_path / "goals.toml").write_text(
        f"[topic.goal]\nmeaning = 'x'\nvalue = 'a.json#/x'\nat_least = 4\naim = {aim}\n"
    )
    read = goals.read(tmp_path / "goals.toml", tmp_path)
    monkeypatch.setattr(goals, "read", lambda: read)
    code, output = run()
    assert code == 0 and f"at least 4 (aim: {aim})" in output
    assert ("1 of 1 goals are met; aims that are missed: topic.goal" in output) == misses


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("", "accepted: meaning, value, at_most or at_least, unit and aim"),
        ("at_most = 1\nat_least = 0", "accepted: meaning"),
        ("at_most = 1\nunits = 's'", "accepted: meaning"),
        ("at_most = 1\nunit = 'furlongs'", "'furlongs'; accepted: h, minutes"),
    ],
)
def test_a_goal_without_one_bound_or_with_an_unknown_field_is_refused(
    tmp_path: Path, fields: str, message: str
) -> None:
    (tmp_path / "goals.toml").write_text(f"[topic.goal]\nmeaning = 'x'\nvalue = 'a.json#/x'\n{fields}\n")
    with pytest.raises(ValueError, match=message):
        goals.read(tmp_path / "goals.toml", tmp_path)
