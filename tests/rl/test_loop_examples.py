"""The examples of loops: training over HTTP has the bits of training in one process, and tools' tokens no weight."""

import dataclasses
import inspect
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

from detjax.engine import Engine
from detjax.rl.trainer.microbatches import Packed
from tests.rl import policies
from tests.rl.test_functional import training
from tests.server.controlled import KEY, SIZES, controlled, saved
from tests.support.bits import assert_same_bits, same_bits

EXAMPLES = Path(__file__).parents[2] / "examples"
HTTP = runpy.run_path(str(EXAMPLES / "train_over_http.py"))
GAME = runpy.run_path(str(EXAMPLES / "multi_turn.py"))


@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_training_over_http_has_the_bits_of_training_in_one_process(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The server is a process, which keeps its programs for the next run of this test."""

    class Kept(subprocess.Popen[str]):
        def __init__(self, command: list[str], **options: Any) -> None:
            if command[1:3] == ["-m", "detjax"]:
                command = [*command[:2], "tests.support.kept_programs", *command[2:]]
            super().__init__(command, **options)

    monkeypatch.setattr(subprocess, "Popen", Kept)
    monkeypatch.setattr(sys, "argv", ["train_over_http.py", "--compare", "--steps", str(steps)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    HTTP["main"]()
    *lines, compared = capfd.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"step {number}" for number in range(steps)]
    assert len({line.partition("weights ")[2] for line in lines}) == steps
    assert compared == f"{steps} steps have the same bits in this process"


def test_the_loop_over_http_notices_answers_of_other_weights(tmp_path: Path) -> None:
    versions, prompts, seeds = saved(tmp_path, ["one", "two"]), [[5, 6, 7], [8, 9]], [3, 2**64 - 1]
    with controlled(tmp_path) as trainer, Engine(*versions["two"], **SIZES) as engine:
        server = HTTP["Server"](trainer.running.url, KEY, versions["one"][1])
        server.update(versions["two"][0])
        given, expected = server.rollouts(prompts, seeds), HTTP["InProcess"](engine).rollouts(prompts, seeds)
        for one, other in zip(given, expected, strict=True):
            assert_same_bits((one.completion, one.sampling_logprobs), (other.completion, other.sampling_logprobs))
        trainer.update(Path("one"))  # by somebody else
        with pytest.raises(AssertionError):
            server.rollouts(prompts, seeds)
        server.update(versions["two"][0])
        assert_same_bits([one.completion for one in server.rollouts(prompts, seeds)], [one.completion for one in given])


@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_conversations_with_a_tool_are_trained(
    steps: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example itself compares bits in each step."""
    monkeypatch.setitem(GAME["main"].__globals__, "STEPS", steps)
    GAME["main"]()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"step {number}" for number in range(steps)]
    assert not any(" 0 read" in line or "norm 0.000" in line for line in lines)


def conversation() -> Any:
    """An episode of two turns in which the tool writes 3 tokens between them, and 2 at the end."""
    is_sampled = [True] * 4 + [False] * 3 + [True] * 4 + [False] * 2
    tokens = [*policies.tokenizer().encode("1+2="), *range(len(is_sampled))]
    return GAME["Episode"](None, tokens, is_sampled, [-1.0 * flag for flag in is_sampled])


def test_gradients_do_not_depend_on_the_tools_tokens_as_targets() -> None:
    functions, params = training(), nnx.state(policies.policy())

    def gradients(sample: Any, layout: Any) -> Any:
        return functions.loss_and_gradients(params, [sample], microbatch=layout).gradients

    layout, sample = Packed(tokens=32), conversation().sample(0.25)
    others = [GAME["OtherTargets"](layout, token) for token in (1, 17)]
    expected = gradients(sample, layout)
    assert sample.weights.tolist() == [0.25] * 4 + [0.0] * 3 + [0.25] * 4 + [0.0] * 2
    assert_same_bits([gradients(sample, other) for other in others], [expected, expected])
    # Nothing reads the tokens at the end, but the ones in the middle are read by the turn after them.
    ended, asked = sample.tokens.copy(), sample.tokens.copy()
    ended[-2:], asked[8:11] = 17, 17
    assert_same_bits(gradients(dataclasses.replace(sample, tokens=ended), layout), expected)
    assert not same_bits(gradients(dataclasses.replace(sample, tokens=asked), layout), expected)
    # With a weight they would be trained.
    weighted = dataclasses.replace(sample, weights=np.full(13, 0.25, np.float32))
    changed = dataclasses.replace(weighted, tokens=ended)
    assert not same_bits(gradients(weighted, layout), expected)
    assert not same_bits(gradients(changed, layout), gradients(weighted, layout))


def test_the_guide_shows_the_example() -> None:
    page = (EXAMPLES.parent / "docs" / "guide" / "multi_turn.md").read_text()
    for code in (GAME["play"], GAME["Episode"].sample):
        assert textwrap.dedent(inspect.getsource(code)) in page
