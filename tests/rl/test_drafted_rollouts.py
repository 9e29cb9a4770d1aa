"""Rollouts with guessed tokens: a run trains the same policy, to the bit."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from detjax.engine.drafts.drafting import Drafting
from detjax.rl.runs.command import TrainingOptions, train
from detjax.rl.tasks.task import Task


@pytest.mark.parametrize("lora_rank", [0, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_run_with_drafts_gives_the_policy_of_a_run_without(
    lora_rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, note = list[tuple[int, int]](), Drafting.note

    def noted(self: Drafting, sequence: Any, proposed: int, accepted: int) -> None:
        counted.append((proposed, accepted))
        note(self, sequence, proposed, accepted)

    monkeypatch.setattr(Drafting, "note", noted)
    # A reward that the answers of a random policy do not have in common.
    monkeypatch.setattr(Task, "reward", lambda self, example, text: float(sum(map(ord, text)) % 2))
    plain = TrainingOptions(
        directory=tmp_path / "plain",
        kind="reinforcement",
        tasks=("addition:1",),
        steps=2,
        prompts=4,
        samples=2,
        max_tokens=12,
        width=32,
        layers=1,
        microbatch_tokens=64,
        learning_rate=0.03,
        lora_rank=lora_rank,
    )
    expected = train(plain)
    assert not counted
    lookup = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1})
    drafted = dataclasses.replace(plain, directory=tmp_path / "drafted", speculative_config=lookup)
    assert train(drafted) == expected
    assert sum(proposed for proposed, _ in counted) > sum(accepted for _, accepted in counted) > 0
    texts = [(tmp_path / name / "log.jsonl").read_text() for name in ("plain", "drafted")]
    logs = [[json.loads(line) for line in text.splitlines()] for text in texts]
    without_times = [[{k: v for k, v in line.items() if k != "seconds"} for line in log] for log in logs]
    assert without_times[0] == without_times[1]
    assert all(line["unequal_tokens"] == 0 and line["gradient_norm"] > 0 for line in without_times[1])
