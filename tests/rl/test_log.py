"""A run's log has every step once, whenever the run was killed and resumed, and the console shows the newest ones."""

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from detjax.rl.runs.log import RunLog


def file_console() -> Console:
    return Console(file=io.StringIO(), width=30)


def terminal() -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=True, legacy_windows=False)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_steps(path: Path, *steps: int, resumed_step: int | None = None, run: str = "first") -> None:
    with RunLog(path, (), file_console(), resumed_step) as log:
        for step in steps:
            log.write(step, {"run": run})


def test_a_step_is_a_line_of_json_that_is_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with RunLog(path, ("reward",), file_console()) as log:
        log.write(0, {"reward": 0.1, "note": "é"})
        assert path.read_bytes() == b'{"step": 0, "reward": 0.1, "note": "\\u00e9"}\n'
        log.write(5, {"reward": 0.2})
        assert lines(path)[1] == {"step": 5, "reward": 0.2}


def test_numbers_of_numpy_and_those_that_json_lacks_are_written(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    float32 = np.float32(0.1)
    metrics = {"a": float32, "b": np.int64(3), "c": np.array([1.5, math.nan]), "d": {"e": [math.inf, -math.inf]}}
    with RunLog(path, (), file_console()) as log:
        log.write(1, metrics | {"f": None, "g": True, "h": np.float64(2.5), "i": np.bool_(False)})
    (line,) = lines(path)
    assert line == {
        "step": 1,
        "a": float(float32),
        "b": 3,
        "c": [1.5, "nan"],
        "d": {"e": ["inf", "-inf"]},
        "f": None,
        "g": True,
        "h": 2.5,
        "i": False,
    }
    assert float(line["d"]["e"][1]) == -math.inf


def test_a_resumed_run_replaces_the_steps_that_it_computes_again(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write_steps(path, 0, 1, 2, 3, 4)
    write_steps(path, 3, 4, 5, resumed_step=3, run="second")
    assert [(line["step"], line["run"]) for line in lines(path)] == [
        (0, "first"),
        (1, "first"),
        (2, "first"),
        (3, "second"),
        (4, "second"),
        (5, "second"),
    ]


def test_the_steps_are_gone_when_the_log_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write_steps(path, 0, 1, 2)
    write_steps(path, resumed_step=1)
    assert [line["step"] for line in lines(path)] == [0]
    write_steps(path, resumed_step=0)
    assert path.read_bytes() == b""


@pytest.mark.parametrize("cut", range(1, len('{"step": 2, "run": "first"}\n') + 1))
def test_a_run_that_was_killed_while_it_wrote_a_line_is_resumed(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "run.jsonl"
    write_steps(path, 0, 1, 2)
    path.write_bytes(path.read_bytes()[:-cut])
    write_steps(path, 3, resumed_step=3, run="second")
    # The line that lacks its newline alone is whole.
    kept = [0, 1, 2] if cut == 1 else [0, 1]
    assert [line["step"] for line in lines(path)] == [*kept, 3]
    assert path.read_bytes().endswith(b"}\n")


def test_a_resumed_log_without_a_file_begins_one(tmp_path: Path) -> None:
    write_steps(tmp_path / "run.jsonl", 7, resumed_step=7)
    assert lines(tmp_path / "run.jsonl") == [{"step": 7, "run": "first"}]


def test_a_new_run_does_not_touch_the_lines_of_another(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write_steps(path, 0, 1)
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"run.jsonl has lines; accepted: another path, or the step to resume"):
        write_steps(path, 0)
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", [b"x", b"[]", b'{"stop": 1}', b'{"step": "1"}', b"", b"\xff\xfe"])
def test_a_damaged_line_before_the_last_is_refused_and_left_alone(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "run.jsonl"
    write_steps(path, 0, 1, 2)
    first, _, third, _ = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([first, damage, third, b""]))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"RunLog: line 2 of .*run.jsonl is .*; accepted: a JSON object with a step"):
        write_steps(path, resumed_step=3)
    assert path.read_bytes() == before


def test_steps_must_rise_and_metrics_must_not_be_named_step(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write_steps(path, 0, 4)
    with RunLog(path, (), file_console(), resumed_step=5) as log:
        for step in (3, 4):
            with pytest.raises(ValueError, match=f"RunLog: step is {step} after 4; accepted: above 4"):
                log.write(step, {})
        with pytest.raises(ValueError, match="a metric is named 'step'"):
            log.write(5, {"step": 5})
    assert [line["step"] for line in lines(path)] == [0, 4]


def test_a_console_that_is_no_terminal_has_one_line_a_step(tmp_path: Path) -> None:
    console = file_console()
    with RunLog(tmp_path / "run.jsonl", ("reward", "k3", "[b]missing"), console) as log:
        log.write(0, {"reward": 0.123456, "k3": 0.0, "unseen": 1})
        log.write(1, {"reward": math.nan, "k3": np.float32(1e-7)})
    assert shown(console).splitlines() == [
        "step 0  reward 0.1235  k3 0  [b]missing ",
        "step 1  reward nan  k3 1e-07  [b]missing ",
    ]


def test_a_terminal_has_a_table_of_the_newest_steps(tmp_path: Path) -> None:
    console = terminal()
    with RunLog(tmp_path / "run.jsonl", ("reward",), console) as log:
        for step in range(100, 120):
            log.write(step, {"reward": step / 1000})
        frames = shown(console)
    assert frames.count("reward") >= 20
    last = frames[frames.rindex("reward") :]
    assert [step for step in range(100, 120) if str(step) in last] == list(range(108, 120))
    assert "0.119" in last and "\x1b[" in frames


def test_a_run_that_fails_closes_its_log_and_gives_the_terminal_back(tmp_path: Path) -> None:
    console = terminal()
    with pytest.raises(KeyError), RunLog(tmp_path / "run.jsonl", ("reward",), console) as log:
        log.write(0, {"reward": 1.0})
        raise KeyError
    assert shown(console).endswith("\x1b[?25h")  # the cursor is shown again
    with pytest.raises(ValueError, match="closed file"):
        log.write(1, {})
