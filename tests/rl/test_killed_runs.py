"""A run that is killed at random moments, and resumed with other microbatches and devices, ends with the same bytes."""

from pathlib import Path

import pytest

from tools import kill_training


@pytest.mark.sampled(0)
@pytest.mark.parametrize("kills", [3, 20])
def test_a_run_that_is_killed_in_rollouts_steps_and_saves_ends_with_the_same_bytes(kills: int, tmp_path: Path) -> None:
    reported: list[kill_training.Kill] = []
    assert kill_training.attack(tmp_path, kills, report=reported.append) == []
    assert {one.phase for one in reported} == set(kill_training.PHASES)
    assert len({one.microbatch_tokens for one in reported}) == len({one.devices for one in reported}) - (kills > 3) == 3


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
