"""The small policy that comes with detjax, and the recipe that it was trained by."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from detjax import models
from detjax.rl.runs import recipe
from detjax.rl.runs.policy import CHECKPOINT, DIFFICULTIES
from detjax.rl.trainer.microbatches import Packed, Rows
from detjax.rl.trainer.step import Plan

ROOT = Path(__file__).parents[2]


def test_the_policy_that_ships_is_one_of_the_recipes_and_is_small() -> None:
    assert recipe.digest(CHECKPOINT) in recipe.DIGESTS.values()
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) < 3_000_000


@pytest.mark.sampled(0)
def test_the_policy_that_ships_solves_some_examples_of_every_task_and_fails_at_others() -> None:
    model, tokenizer = models.load(CHECKPOINT, progress=False)
    assert tokenizer is not None
    shares = recipe.solved_shares(model, tokenizer, prompts=40, samples=2)
    assert shares.keys() == DIFFICULTIES.keys()
    # It is 30 to 70% of all examples; 80 answers have a standard deviation of 6%.
    assert all(0.12 < share < 0.88 for share in shares.values()), shares


def test_the_recipe_has_every_task_at_its_difficulty() -> None:
    assert set(recipe.RECIPE.tasks) == set(DIFFICULTIES.items())


@pytest.mark.sampled(0)
def test_a_shortened_recipe_that_is_cut_up_differently_gives_the_same_file(tmp_path: Path) -> None:
    plans = {"one": Plan(Rows(4, 32)), "two": Plan(Packed(96), rematerialized=True)}
    digests = {
        recipe.save(*recipe.train(plan, steps=3, layers=1, width=32), tmp_path / name) for name, plan in plans.items()
    }
    assert len(digests) == 1
    other = recipe.save(*recipe.train(plans["one"], steps=2, layers=1, width=32), tmp_path / "shorter")
    assert other not in digests


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_trained", [False, True])
def test_the_weights_are_those_of_the_list_where_the_fingerprint_is_in_it(is_trained: bool, tmp_path: Path) -> None:
    # The list is of processes without flags, whatever these tests run with.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT)}
    script = ["tools/train_policy.py", "--microbatch-tokens", "512", "--out", str(tmp_path / "policy")]
    command = [sys.executable, *(script if is_trained else ["tools/train_policy.py", "--help"])]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    if is_trained:
        fingerprint, digest = run.stdout.split()[-1], recipe.digest(tmp_path / "policy")
        assert recipe.DIGESTS.get(fingerprint, digest) == digest
