"""The comparison of drafts with plain decoding: it finds a fault, and continues an earlier result."""

import dataclasses
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies.draft_bits import loops
from benchmarks.studies.draft_bits import study as draft_bits
from benchmarks.studies.draft_bits.models import NAMES, Model, model
from benchmarks.studies.draft_bits.requests import everything, requests
from benchmarks.study import Run
from detjax.cli.options import UsageError
from detjax.engine import SamplingParams, Sequence, StepLoop
from detjax.engine.step_states import SampleRows
from detjax.models import Decoder
from tests.support.compiled_programs import compiled_programs


def test_a_guess_that_is_taken_unverified_is_found_and_a_later_call_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_bits, "kinds", lambda name: ("mixed",))
    run = Run("python -m benchmarks draft_bits", small=True, out=tmp_path / "result.json")
    first = draft_bits.study(run)
    assert not first.problem and first.content["tokens_compared"] > 0
    with monkeypatch.context() as patch:
        # All rows of a draft count, also those after wrong guesses.
        patch.setattr(SampleRows, "rows", lambda self, tokens: range(self.row, self.row + 1 + len(self.chunk.drafts)))
        second = draft_bits.study(run)
    assert second.content["rounds"] == 2 and second.content["tokens_compared"] > first.content["tokens_compared"]
    wrong = second.content["drafts"]["demo, mixed"]
    assert wrong["answers_with_other_bits"] == len(wrong["differences"]) > 0
    assert second.problem == f"{len(wrong['differences'])} answers have other bits with drafts"
    assert run.out is not None
    written = json.loads(run.out.read_text())
    written["fingerprint"]["device_kind"] = "another"
    run.out.write_text(json.dumps(written))
    with pytest.raises(UsageError, match=r"was made with device_kind 'another', and this is .*; accepted: a result of"):
        draft_bits.study(run)


def counted(name: str, seed: str, *options: Any) -> draft_bits.Counts:
    """The counts of a round without answers, and the process that would have given them."""
    return {"rounds": 1, "tokens_compared": 3, "drafts": {name: {"answers_with_other_bits": 0, seed: [os.getpid()]}}}


def test_processes_answer_different_rounds_and_all_of_them_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_bits, "_round", counted)
    run = Run("python -m benchmarks draft_bits", small=True, out=tmp_path / "result.json")
    for rounds in (2, 4):
        content = draft_bits.study(run, processes=2).content
        assert (content["rounds"], content["begun"], content["tokens_compared"]) == (rounds, rounds, 3 * rounds)
        processes = [content["drafts"]["demo"][f"demo {number}"] for number in range(rounds)]
        assert len({process for (process,) in processes}) == rounds and [os.getpid()] not in processes
    with pytest.raises(UsageError, match=r"--devices: 1000 devices are more than this machine has; accepted: 1 to \d"):
        draft_bits.study(run, devices=1000)


def test_one_process_compiles_the_programs_of_each_model_before_others_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(draft_bits, "_compile", lambda name, *_: compiled.append(name))
    first, workers = 4, [ThreadPoolExecutor(1) for _ in range(7)]
    sizes = dict.fromkeys(NAMES, loops.WIDE)
    assert [*draft_bits._with_programs(workers, sizes, first, None)] == [*range(7)] and not compiled
    beginning = set[int]()
    for share in draft_bits._with_programs(workers, sizes, first, tmp_path):
        assert NAMES[(first + share) % len(NAMES)] in compiled
        beginning.add(share)
    assert beginning == {*range(7)} and sorted(compiled) == sorted(NAMES)
    for worker in workers:
        worker.shutdown()


def test_a_wide_round_runs_many_sequences_at_a_time_and_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = model("windows").guessers["draft_model"]
    assert isinstance(small, Decoder)
    one = Model(small, None, {"ngram": None})
    for module in (draft_bits, loops):
        monkeypatch.setattr(module, "model", lambda name: one)
    monkeypatch.setattr(draft_bits, "kinds", lambda name: ("mixed",))
    sizes = dataclasses.replace(loops.WIDE, requests=30, tokens=6)
    step, running = StepLoop.step, list[int]()

    def counted_step(loop: StepLoop) -> Any:
        tokens = step(loop)
        running.append(len(loop.scheduler.running))
        return tokens

    monkeypatch.setattr(StepLoop, "step", counted_step)
    loops.loops("small", sizes, tmp_path)
    with compiled_programs() as compiled:
        counts = draft_bits._round("small", "small 0", sizes, tmp_path)
    assert not compiled
    assert max(running) > loops.NARROW.slots
    (mixed,) = counts["drafts"].values()
    assert not mixed["answers_with_other_bits"]
    assert mixed["tokens"] > 60 and mixed["guesses"] > mixed["right_guesses"] > 0


def test_any_round_has_requests_that_are_accepted() -> None:
    one, sizes = model("demo"), loops.NARROW
    drawn = [
        request.sampling
        for number in range(60)
        for request in requests(
            f"demo {number}", sizes.requests, sizes.tokens, one.decoder.config.vocab_size, one.tokenizer
        )
    ]
    constrained = [params for params in drawn if params.constraint is not None]
    assert any(params.prompt_logprobs for params in constrained)
    assert any(params.sampling_logprobs for params in constrained)


def test_all_bits_of_an_answer_are_compared() -> None:
    def answer(logprob: float, top: float, text_ends: str | None = None) -> tuple[object, ...]:
        sample = Sequence((1, 2), SamplingParams(max_tokens=1))
        sample.generated.append(7)
        sample.output.logprobs, sample.output.top_logprobs = [logprob], [((7, top),)]
        sample.finish_reason = text_ends
        return everything(sample)

    same, *others = (
        answer(-0.5, 0.0),
        answer(-0.5, -0.0),
        answer(-0.5000000596046448, 0.0),
        answer(-0.5, 0.0, "stop"),
    )
    assert same == answer(-0.5, 0.0)
    assert all(same != other for other in others)
    assert answer(float("nan"), 0.0) == answer(float("nan"), 0.0)
