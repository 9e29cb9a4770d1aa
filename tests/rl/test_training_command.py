"""The command `detjax train`."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from detjax import cli, models
from detjax.engine import EngineConfig, SpeculativeConfig
from detjax.models import GenerationDefaults
from detjax.operands.options import Distribution
from detjax.rl.policy_gradients.policy_gradient import PolicyGradient
from detjax.rl.runs import command
from detjax.rl.runs.run import RunConfig
from detjax.rl.trainer.microbatches import Packed
from detjax.rl.trainer.step import Plan
from tests.rl import policies
from tests.support import commands
from tests.support.commands import Result

SMALL = ("--task", "addition:1", "--task", "brackets:1", "--layers", "1", "--width", "32", "--prompts", "8")


def run(*arguments: object) -> Result:
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


class Stop(BaseException):
    """Ends a command."""


def test_each_option_reaches_what_it_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def recorded(name: str, returned: Any = None) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            seen[name] = (given, named)
            return contextlib.nullcontext() if returned is None else returned

        return call

    def run_of(*given: Any) -> Any:
        def steps(*given: Any, **named: Any) -> Any:
            seen["steps"] = named
            raise Stop

        seen["Run"] = given
        return SimpleNamespace(steps=steps)

    policy = policies.policy(), policies.tokenizer()
    for name, returned in (("small_policy", policy), ("trainer_for", "trainer"), ("RunState", None), ("Engine", None)):
        monkeypatch.setattr(command, name, recorded(name, returned))
    monkeypatch.setattr(command, "Run", run_of)
    monkeypatch.setattr(command, "_ENGINE_SAMPLES", 4)
    sizes = "--layers", 3, "--width", 96, "--dtype", "float16", "--microbatch-tokens", 112, "--devices", 2
    counts = "--steps", 7, "--prompts", 5, "--samples", 3, "--max-tokens", 9, "--save-every", 4, "--seed", 12
    learning = "--temperature", 0.5, "--learning-rate", 0.25, "--kind", "reinforcement", "--kv-cache-dtype", "int8"
    gradient = "--estimator", "rloo", "--correction", "sequence_masked", "--task", "sorting:3", "--task", "addition:2"
    with pytest.raises(Stop):
        run(tmp_path / "new", *sizes, *counts, *learning, *gradient, "--speculative-config", '{"method": "ngram"}')
    config = RunConfig(
        kind="reinforcement",
        tasks=(("sorting", 3), ("addition", 2)),
        steps=7,
        seed=12,
        prompts=5,
        samples=3,
        max_tokens=9,
        distribution=Distribution(0.5),
        kv_cache_dtype="int8",
        policy_gradient=PolicyGradient(estimator="rloo", correction="sequence_masked"),
        learning_rate=0.25,
    )
    assert seen["small_policy"] == ((3, 96), {"seed": 12, "dtype": "float16"})
    assert seen["trainer_for"] == ((config, policy[0], Plan(Packed(112), devices=2)), {})
    origin = config.as_json() | {"model": models.digest(*policy), "dtype": "float16"}
    assert seen["RunState"] == ((tmp_path / "new" / "states", origin), {})
    lookup = SpeculativeConfig(method="ngram")
    engine = EngineConfig(max_samples=4, token_budget=16, max_length=112, kv_cache_dtype="int8", speculative=lookup)
    assert seen["Engine"] == ((*policy, engine), {})
    assert seen["Run"] == (config, "trainer", policy[1], policies.end_token(), None, None)
    assert seen["steps"] == {"save_every": 4}
    # A supervised run samples nothing, and rollouts are no longer than the model's positions.
    del seen["Engine"]
    with pytest.raises(Stop):
        run(tmp_path / "supervised", "--task", "addition:1")
    assert "Engine" not in seen and seen["trainer_for"][0][0] == RunConfig(
        kind="supervised", tasks=(("addition", 1),), steps=100
    )
    assert seen["trainer_for"][0][2] == Plan(Packed(1024)) and seen["small_policy"][0] == (2, 128)
    with pytest.raises(Stop):
        run(tmp_path / "long", "--task", "addition:1", "--kind", "reinforcement")
    assert seen["Engine"][0][2].max_length == policy[0].config.max_positions == 128


def test_models_without_tokenizer_or_end_token_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = "--model", tmp_path / "model", "--task", "addition:1"
    models.save(policies.policy(), tmp_path / "model")
    result = run(tmp_path / "run", *start)
    assert result.exit_code == 2 and "has no tokenizer; accepted: a checkpoint with one" in " ".join(
        result.output.split()
    )
    for defaults in (None, GenerationDefaults(), GenerationDefaults(eos_token_ids=(7, 3))):
        decoder = policies.policy()
        decoder.generation_defaults = defaults
        if defaults is not None and defaults.eos_token_ids:
            assert command._end_token(decoder) == 3
        else:
            with pytest.raises(ValueError, match="the model has no end-of-sequence token; accepted: a model with one"):
                command._end_token(decoder)


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
        (("--task", "addition:1", "--speculative-config", '{"method": "ngram"}'), "accepted: 'reinforcement', which"),
        (("--task", "addition:1", "--kind", "both"), "--kind is 'both'; accepted: supervised, reinforcement"),
        (("--task", "addition:1", "--estimator", "ppo"), "--estimator is 'ppo'; accepted: grpo, rloo, reinforce"),
        (("--task", "addition:1", "--correction", "all"), "--correction is 'all'; accepted: none"),
        (
            ("--task", "addition:1", "--kv-cache-dtype", "int4"),
            "--kv-cache-dtype is 'int4'; accepted: int8",
        ),
        (("--task", "addition:1", "--steps", "0"), "--steps is 0; accepted: at least 1"),
        (("--task", "addition:1", "--prompts", "0"), "--prompts is 0; accepted: at least 1"),
        (("--task", "addition:1", "--samples", "0"), "--samples is 0; accepted: at least 1"),
        (("--task", "addition:1", "--max-tokens", "0"), "--max-tokens is 0; accepted: at least 1"),
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
