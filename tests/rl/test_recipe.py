"""The small policy that comes with detjax, and the recipe that it was trained by."""

import dataclasses
import hashlib
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import models
from detjax.engine import SamplingParams
from detjax.models import Decoder, Tokenizer
from detjax.rl.rollouts import prompt_seeds
from detjax.rl.runs import policy, recipe
from detjax.rl.runs.policy import CHECKPOINT, DIFFICULTIES
from detjax.rl.tasks import TASKS
from detjax.rl.trainer.microbatches import Packed
from detjax.rl.trainer.step import Plan
from tests.rl import policies
from tests.support.unchecked import unchecked

ROOT = Path(__file__).parents[2]


def test_the_policy_that_ships_is_one_of_the_recipes_and_is_small() -> None:
    assert recipe.digest(CHECKPOINT) in recipe.DIGESTS.values()
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) < 3_000_000


def likeliest_solved(model: Decoder, tokenizer: Tokenizer) -> dict[str, float]:
    """The share of examples of each task whose known answer the model gives at temperature 0."""
    pairs = []
    for name, difficulty in DIFFICULTIES.items():
        examples = [TASKS[name].example(recipe.HELD_OUT_SEED, number, difficulty) for number in range(40)]
        pairs += [(tokenizer.encode(one.prompt), tokenizer.encode(TASKS[name].solution(one))) for one in examples]
    end = len(tokenizer) - 1
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    rows = np.array([[*prompt, *answer, *[end] * (longest - len(prompt) - len(answer))] for prompt, answer in pairs])
    given = np.asarray(detjax.jit(model.__call__)(jnp.asarray(rows, jnp.int32))).argmax(axis=-1)
    places = [slice(len(prompt) - 1, len(prompt) + len(answer)) for prompt, answer in pairs]
    solved = [
        bool((row[place] == [*answer, end]).all()) for row, place, (_, answer) in zip(given, places, pairs, strict=True)
    ]
    return {name: float(np.mean(solved[40 * index : 40 * index + 40])) for index, name in enumerate(DIFFICULTIES)}


@pytest.mark.parametrize("sampled", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_the_policy_that_ships_solves_some_examples_of_every_task_and_fails_at_others(sampled: bool) -> None:
    model, tokenizer = models.load(CHECKPOINT, progress=False)
    assert tokenizer is not None
    if sampled:
        shares = recipe.solved_shares(model, tokenizer, prompts=40, samples=2)
        least = dict.fromkeys(shares, 0.12)
    else:
        # Other answers than the known one may be right in countdown and brackets.
        shares, least = likeliest_solved(model, tokenizer), dict.fromkeys(DIFFICULTIES, 0.12) | {"brackets": -1.0}
    assert shares.keys() == DIFFICULTIES.keys()
    # It is 30 to 70% of all examples; 80 answers have a standard deviation of 6%.
    assert all(least[name] < share < 0.88 for name, share in shares.items()), shares


def test_shares_are_those_of_answers_that_are_right_to_examples_that_no_training_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def rollouts(engine: Any, prompts: list[str], sampling: SamplingParams, seeds: list[int]) -> list[list[Any]]:
        asked.append((engine, prompts, sampling, seeds))
        right = [str(sum(map(int, prompt[:-1].split("+")))) for prompt in prompts]
        return [[SimpleNamespace(text=text), SimpleNamespace(text="x")] for text in [*right[:1], "y", *right[2:]]]

    monkeypatch.setattr(recipe, "rollouts", rollouts)
    sampling = SamplingParams(32, 0.5, n=2)
    assert unchecked(recipe.solved_share)("engine", "addition", 3, 4, sampling) == 3 / 8
    assert recipe.HELD_OUT_SEED != recipe.RECIPE.seed
    prompts = [TASKS["addition"].example(1, number, 3).prompt for number in range(4)]
    assert asked == [("engine", prompts, sampling, prompt_seeds(1, 4))]


def test_the_recipe_has_every_task_at_its_difficulty() -> None:
    assert set(recipe.RECIPE.tasks) == set(DIFFICULTIES.items())


def test_the_recipe_is_a_run_from_the_small_policy_that_is_reported_every_25_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    plan, small, lines = Plan(Packed(96)), (policies.policy(), policies.tokenizer()), []
    trainer = SimpleNamespace(model="trained")

    def run(*given: Any) -> Any:
        made.append(given)
        steps = range(given[0].steps)
        return SimpleNamespace(steps=lambda: ((step, {"loss": 2.0 + step, "seconds": 0.5}) for step in steps))

    monkeypatch.setattr(recipe, "small_policy", lambda *given, **named: made.append((given, named)) or small)
    monkeypatch.setattr(recipe, "trainer_for", lambda *given: made.append(given) or trainer)
    monkeypatch.setattr(recipe, "Run", run)
    train = unchecked(recipe.train)
    assert train(plan, steps=51, report=lines.append) == ("trained", small[1])
    config = dataclasses.replace(recipe.RECIPE, steps=51)
    assert made == [((2, 128), {}), (config, small[0], plan), (config, trainer, small[1], policies.end_token())]
    assert lines == [f"step {step} of 51: loss {step + 1}.000, 0.50 s a step" for step in (25, 50)]
    train(plan, layers=1, width=32, report=lines.append)
    assert made[3] == ((1, 32), {}) and made[4][0] is recipe.RECIPE and len(lines) == 2 + 350 // 25


def test_a_policy_is_saved_with_its_tokenizer_and_named_by_its_weights(tmp_path: Path) -> None:
    digest = recipe.save(policies.policy(), policies.tokenizer(), tmp_path)
    assert digest == hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    assert Tokenizer.load(tmp_path) is not None


@pytest.mark.parametrize(("layers", "width"), [(0, 64), (1, 0), (1, 48), (1, 33)])
def test_a_policy_of_another_shape_is_refused(layers: int, width: int) -> None:
    with pytest.raises(ValueError, match=f"small_policy: {layers} layers of width {width}; accepted: at least one"):
        policy.small_policy(layers, width)


def test_a_small_policy_has_a_token_for_each_character_and_an_end() -> None:
    for width, heads, kv_heads in ((32, 1, 1), (64, 2, 1), (96, 3, 3)):
        decoder, tokenizer = policy.small_policy(2, width, seed=1, dtype="float32", max_positions=77)
        config = decoder.config
        assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (2, heads, kv_heads, 32)
        assert (config.hidden_size, config.max_positions, config.dtype) == (width, 77, "float32")
        assert config.vocab_size == len(tokenizer) and config.tied_embeddings and config.qk_norm
        assert decoder.generation_defaults is not None
        assert decoder.generation_defaults.eos_token_ids == (tokenizer.token_id("eos_token"),)
    other, _ = policy.small_policy(2, 96, seed=2, dtype="float32", max_positions=77)
    assert models.digest(other, tokenizer) != models.digest(decoder, tokenizer)


def train_policy(*arguments: str) -> int:
    """The exit code of the script that trains the policy, in this process."""
    script = runpy.run_path(str(ROOT / "tools" / "train_policy.py"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train_policy.py", *arguments])
        return script["main"]()


@pytest.mark.parametrize(("known", "code"), [(None, 0), ("right", 0), ("wrong", 1)])
def test_the_script_fails_if_the_weights_are_not_those_known_for_the_fingerprint(
    known: str | None, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plans: list[Plan] = []
    small = policies.policy(), policies.tokenizer()
    monkeypatch.setattr(recipe, "train", lambda plan, report: plans.append(plan) or small)
    monkeypatch.setattr(recipe, "solved_shares", lambda *_, **named: {"addition": 0.5 - named["temperature"] / 4})
    digest = recipe.save(*small, tmp_path / "expected")
    listed = {} if known is None else {detjax.fingerprint().digest: digest if known == "right" else "0" * 64}
    monkeypatch.setattr(recipe, "DIGESTS", listed)
    out = str(tmp_path / "policy")
    assert train_policy("--out", out, "--microbatch-tokens", "112", "--devices", "2") == code
    assert plans == [Plan(Packed(112), devices=2)] and recipe.digest(Path(out)) == digest
    output = capsys.readouterr().out
    assert "temperature 1: addition:2 25%" in output and "temperature 0: addition:2 50%" in output
    assert f"{digest}  model.safetensors, fingerprint {detjax.fingerprint().digest}" in output
    assert ("accepted: 0000" in output) == bool(code)


@pytest.mark.parametrize("is_trained", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_the_weights_are_those_of_the_list_where_the_fingerprint_is_in_it(is_trained: bool, tmp_path: Path) -> None:
    if not is_trained:
        assert all(len(name) == 16 and len(digest) == 64 for name, digest in recipe.DIGESTS.items())
        return
    # The list is of processes without flags, whatever these tests run with.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT)}
    script = ["tools/train_policy.py", "--microbatch-tokens", "512", "--out", str(tmp_path / "policy")]
    run = subprocess.run(
        [sys.executable, *script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    fingerprint, digest = run.stdout.split()[-1], recipe.digest(tmp_path / "policy")
    assert recipe.DIGESTS.get(fingerprint, digest) == digest
