"""A run that is killed at random moments, and resumed with other microbatches and devices, ends with the same bytes."""

import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tools import kill_training

COUNTING = """
import json, signal, sys
from pathlib import Path

def write(file, text):
    file.with_suffix(".part").write_text(text)
    file.with_suffix(".part").replace(file)

folder, fault, is_killed = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
options = dict(zip(sys.argv[4::2], sys.argv[5::2]))
kept, log, model = folder / "state.json", folder / "log.jsonl", folder / "model"
is_other = options.get("--devices") == "4"
begin, value = 0, 1
if "--model" in options:
    value = json.loads((Path(options["--model"]) / "model.safetensors").read_text())
if kept.exists():
    begin, value = json.loads(kept.read_text())
folder.mkdir(exist_ok=True)
lines = log.read_text().splitlines()[:begin] if log.exists() else []
for step in range(begin, int(options["--steps"])):
    for phase in ("rollouts", "step", "save"):
        print("phase", phase, flush=True)
    if fault != "idle":
        value = 2 * value + step + (is_other and fault == "layout")
    lines.append(json.dumps({"step": step, "loss": value + (is_other and fault == "log"), "seconds": len(lines)}))
    write(log, "".join(line + chr(10) for line in lines))
    write(kept, json.dumps([step + 1, value]))
    if is_killed and step == begin + 1:
        signal.pause()
if fault == "crash" and "--model" in options:
    raise SystemExit("the disk is full")
model.mkdir()
(model / "model.safetensors").write_text(json.dumps(value))
"""
"""A process that counts in place of one that trains."""


def counting(monkeypatch: pytest.MonkeyPatch, kills: int, fault: str = "none") -> list[dict[str, str]]:
    """Replaces the processes that train; returns the options of each."""
    seen: list[dict[str, str]] = []

    def process(folder: Path, arguments: Sequence[str]) -> subprocess.Popen[str]:
        seen.append(dict(itertools.batched(arguments[1:], 2)))  # pyright: ignore[reportArgumentType, reportCallIssue]
        # The first two processes and the last one end by themselves.
        is_killed = 2 < len(seen) < 3 + kills
        command = [sys.executable, "-S", "-c", COUNTING, arguments[0], fault, str(is_killed), *arguments[1:]]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, start_new_session=True, **pipes)

    monkeypatch.setattr(kill_training, "_process", process)
    monkeypatch.setattr(kill_training, "LONGEST_DELAY", 0.01)
    return seen


def test_kills_come_in_every_phase_and_each_process_has_another_layout_and_other_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, reported = counting(monkeypatch, 4), []
    assert kill_training.attack(tmp_path, 4, report=reported.append) == []
    assert [one.phase for one in reported] == ["rollouts", "step", "save", "rollouts"]
    assert all(one.steps in (0, 1, 2) for one in reported)
    _, whole, *killed = seen
    assert whole.items() <= killed[0].items() and whole["--steps"] == "16"
    layouts = [(one["--microbatch-tokens"], one["--devices"]) for one in killed]
    assert layouts == [("64", "1"), ("128", "2"), ("256", "4"), ("64", "8"), ("128", "1")]
    assert [(str(one.microbatch_tokens), str(one.devices)) for one in reported] == layouts[:4]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("layout", ["model.safetensors differs", "the logs differ"]),
        ("log", ["the logs differ"]),
        ("idle", ["nothing was learned"]),
    ],
)
def test_what_differs_from_an_undisturbed_run_is_named(
    fault: str, says: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting(monkeypatch, 2, fault)
    assert kill_training.attack(tmp_path, 2, report=lambda kill: None) == says


def test_a_process_that_fails_by_itself_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting(monkeypatch, 1, "crash")
    with pytest.raises(RuntimeError, match=r"training ended with exit code 1:\n(.*\n)*the disk is full"):
        kill_training.attack(tmp_path, 1)


@pytest.mark.parametrize(
    "kills", [0, pytest.param(3, marks=pytest.mark.nightly), pytest.param(20, marks=pytest.mark.nightly)]
)
def test_a_run_that_is_killed_in_rollouts_steps_and_saves_ends_with_the_same_bytes(
    kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without kills, the processes count, and two runs are compared."""
    if not kills:
        counting(monkeypatch, 0)
    reported: list[kill_training.Kill] = []
    assert kill_training.attack(tmp_path, kills, report=reported.append) == []
    assert {one.phase for one in reported} == (set(kill_training.PHASES) if kills else set())
    assert len({one.microbatch_tokens for one in reported}) == (3 if kills else 0)
    assert len({one.devices for one in reported}) == min(kills, 4)


def test_what_differs_is_named(tmp_path: Path) -> None:
    for name in ("start", "whole/model", "killed/model"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
    (tmp_path / "whole" / "log.jsonl").write_text('{"step": 0, "loss": 1.0, "seconds": 3.0}\n')
    (tmp_path / "killed" / "log.jsonl").write_text('{"step": 0, "loss": 1.5, "seconds": 4.0}\n')

    def problems() -> list[str]:
        return [*kill_training._differences(tmp_path / "whole", tmp_path / "killed", tmp_path / "start")]

    assert problems() == ["model.safetensors differs", "the logs differ"]
    for name in ("start", "killed/model"):
        (tmp_path / name / "model.safetensors").write_bytes(b"whole/model")
    (tmp_path / "killed" / "log.jsonl").write_text('{"step": 0, "loss": 1.0, "seconds": 4.0}\n')
    assert problems() == ["nothing was learned"]
