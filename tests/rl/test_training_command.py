"""The command `detjax train`."""

import json
from pathlib import Path

import pytest

from detjax import cli, models
from tests.support import commands
from tests.support.commands import Result

SMALL = ("--task", "addition:1", "--task", "brackets:1", "--layers", "1", "--width", "32", "--prompts", "8")


def run(*arguments: str) -> Result:
    return commands.run(cli.main, "train", *arguments)


def digest_of(result: Result) -> str:
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.output.splitlines() if line.startswith("model ")]
    return line.split()[1].removesuffix(",")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run, with a model that others may start from."""
    directory = tmp_path_factory.mktemp("runs") / "ended"
    assert run(str(directory), *SMALL, "--steps", "1").exit_code == 0
    return directory


def test_two_runs_that_are_cut_up_differently_give_one_model(tmp_path: Path) -> None:
    runs = [
        run(str(tmp_path / "one"), *SMALL, "--steps", "3"),
        run(str(tmp_path / "two"), *SMALL, "--steps", "3", "--microbatch-tokens", "32", "--save-every", "1"),
    ]
    assert len({digest_of(result) for result in runs}) == 1
    lines = [json.loads(line) for line in (tmp_path / "one" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    model, tokenizer = models.load(tmp_path / "one" / "model", progress=False)
    assert models.digest(model, tokenizer) == digest_of(runs[0])
    assert b"".join(
        path.read_bytes() for path in sorted((tmp_path / "one" / "model").glob("*.safetensors"))
    ) == b"".join(path.read_bytes() for path in sorted((tmp_path / "two" / "model").glob("*.safetensors")))


def test_a_policy_learns_from_its_rollouts(ended: Path, tmp_path: Path) -> None:
    start = "--model", str(ended / "model")
    tasks = "--task", "addition:1", "--prompts", "4", "--samples", "2", "--max-tokens", "6"
    result = run(str(tmp_path / "learned"), "--kind", "reinforcement", *start, *tasks, "--steps", "2")
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (tmp_path / "learned" / "log.jsonl").read_text().splitlines()]
    assert [line["unequal_tokens"] for line in lines] == [0, 0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("numerics", [("--kv-cache-dtype", "q4_0"), ("--backend", "stock")], ids=["q4_0", "stock"])
def test_samplers_of_other_numerics_are_seen_by_the_trainer(
    ended: Path, tmp_path: Path, numerics: tuple[str, ...]
) -> None:
    tasks = "--task", "addition:1", "--prompts", "4", "--samples", "2", "--max-tokens", "6", "--steps", "1"
    learn = "--kind", "reinforcement", "--model", str(ended / "model"), *tasks
    assert run(str(tmp_path), *learn, *numerics).exit_code == 0
    (line,) = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert line["unequal_tokens"] > 0 and line["k3"] > 0


def test_a_run_that_has_ended_is_not_written_over(ended: Path) -> None:
    result = run(str(ended), *SMALL, "--steps", "2")
    assert result.exit_code == 2
    assert "the run has already finished. Choose another directory." in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--task", "plus:1"), "name is 'plus'; accepted: 'addition'"),
        (("--task", "addition"), "--task is 'addition'; accepted: a name and a difficulty of at least 1"),
        (("--task", "addition:0"), "--task is 'addition:0'; accepted"),
        (("--task", "addition:1", "--kind", "both"), "--kind is 'both'; accepted: supervised, reinforcement"),
        (("--task", "addition:1", "--estimator", "ppo"), "--estimator is 'ppo'; accepted: grpo, rloo, reinforce"),
        (("--task", "addition:1", "--correction", "all"), "--correction is 'all'; accepted: none"),
        (
            ("--task", "addition:1", "--kv-cache-dtype", "int4"),
            "--kv-cache-dtype is 'int4'; accepted: int8",
        ),
        (("--task", "addition:1", "--steps", "0"), "--steps is 0; accepted: at least 1"),
        (("--task", "addition:1", "--save-every", "0"), "--save-every is 0; accepted: at least 1"),
        (("--task", "addition:1", "--microbatch-tokens", "20"), "tokens is 20; accepted: positive multiples of 16"),
        (("--task", "addition:1", "--width", "33"), "and a width that is a multiple of 32"),
        (("--task", "addition:1", "--devices", "3"), "devices is 3; accepted: powers of two up to shards"),
        (("--task", "addition:1", "--model", "/nowhere"), "/nowhere"),
    ],
)
def test_a_bad_option_is_refused_before_anything_is_written(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = run(str(tmp_path / "run"), *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "run" / "states").exists()
