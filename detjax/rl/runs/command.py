"""What `detjax train` does: a run from its options, with its states, its log and its model in one directory."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any, Final, get_args

from detjax import models
from detjax.engine import Engine, EngineConfig
from detjax.models import Decoder, Tokenizer
from detjax.operands.options import Distribution, KVQuantization
from detjax.rl.policy_gradients.policy_gradient import Correction, Estimator, PolicyGradient
from detjax.rl.runs.log import RunLog
from detjax.rl.runs.policy import small_policy
from detjax.rl.runs.run import Kind, Run, RunConfig, trainer_for
from detjax.rl.runs.run_state import RunState
from detjax.rl.tasks import task_named
from detjax.rl.trainer.microbatches import Packed
from detjax.rl.trainer.step import Plan

_COLUMNS: Final = {
    "supervised": ("loss", "gradient_norm", "tokens", "seconds"),
    "reinforcement": ("reward", "unequal_tokens", "k3", "entropy", "gradient_norm", "seconds"),
}
_ENGINE_SAMPLES: Final = 64
"""Rollouts that are computed at the same time; no bit depends on it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The options of `detjax train`, as they are given on the command line; see there."""

    directory: Path
    tasks: tuple[str, ...]
    kind: str
    model: Path | None
    layers: int
    width: int
    dtype: str
    steps: int
    prompts: int
    samples: int
    max_tokens: int
    temperature: float
    learning_rate: float
    estimator: str
    correction: str
    kv_cache_dtype: str | None
    seed: int
    microbatch_tokens: int
    devices: int
    save_every: int

    def config(self) -> RunConfig:
        """Returns the run's configuration.

        Raises:
            ValueError: an option is out of range, or a name is unknown.
        """
        names: list[tuple[str, str, Any]] = [
            ("kind", self.kind, get_args(Kind)),
            ("estimator", self.estimator, get_args(Estimator)),
            ("correction", self.correction, get_args(Correction)),
        ]
        if self.kv_cache_dtype is not None:
            names.append(("kv-cache-dtype", self.kv_cache_dtype, get_args(KVQuantization)))
        for option, value, accepted in names:
            if value not in accepted:
                raise ValueError(f"--{option} is {value!r}; accepted: {', '.join(accepted)}")
        for option in ("steps", "prompts", "samples", "max_tokens", "save_every"):
            if getattr(self, option) < 1:
                raise ValueError(f"--{option.replace('_', '-')} is {getattr(self, option)}; accepted: at least 1")
        chosen: Any = {"estimator": self.estimator, "correction": self.correction}
        kind: Any = self.kind
        kv_cache_dtype: Any = self.kv_cache_dtype
        return RunConfig(
            kind=kind,
            tasks=tuple(map(_task, self.tasks)),
            steps=self.steps,
            seed=self.seed,
            prompts=self.prompts,
            samples=self.samples,
            max_tokens=self.max_tokens,
            distribution=Distribution(self.temperature),
            kv_cache_dtype=kv_cache_dtype,
            policy_gradient=PolicyGradient(**chosen),
            learning_rate=self.learning_rate,
        )


def _task(text: str) -> tuple[str, int]:
    name, _, difficulty = text.partition(":")
    task_named(name)
    if not difficulty.isdecimal() or int(difficulty) < 1:
        raise ValueError(f"--task is {text!r}; accepted: a name and a difficulty from 1 on, such as {name}:2")
    return name, int(difficulty)


def train(options: TrainingOptions) -> str:
    """Trains a model, and writes it to the directory `model` of the run's.

    Returns:
        The digest of the model's weights, configuration and tokenizer; see `detjax.models.digest`.

    Raises:
        FileExistsError: the run has ended already.
        ValueError: an option is not accepted, or the directory has the states of another run.
    """
    config = options.config()
    plan = Plan(Packed(options.microbatch_tokens), devices=options.devices)
    target = options.directory / "model"
    if target.exists():
        raise FileExistsError(f"{target} exists: the run has ended. Give another directory.")
    options.directory.mkdir(parents=True, exist_ok=True)
    decoder, tokenizer = _model(options)
    trainer = trainer_for(config, decoder, plan)
    origin = config.as_json() | {"model": models.digest(decoder, tokenizer), "dtype": options.dtype}
    with contextlib.ExitStack() as stack:
        state = stack.enter_context(RunState(options.directory / "states", origin))
        engine = None
        if config.kind == "reinforcement":
            sizes = EngineConfig(
                max_samples=_ENGINE_SAMPLES,
                token_budget=4 * _ENGINE_SAMPLES,
                max_length=min(options.microbatch_tokens, decoder.config.max_positions),
                kv_cache_dtype=config.kv_cache_dtype,
            )
            engine = stack.enter_context(Engine(decoder, tokenizer, sizes))
        run = Run(config, trainer, tokenizer, _end_token(decoder), engine)
        log = None
        for step, metrics in run.steps(state, save_every=options.save_every):
            if log is None:
                path = options.directory / "log.jsonl"
                resumed = step if step or path.exists() else None
                log = stack.enter_context(RunLog(path, _COLUMNS[config.kind], resumed_step=resumed))
            log.write(step, metrics)
    models.save(trainer.model, target, tokenizer=tokenizer)
    return models.digest(trainer.model, tokenizer)


def _end_token(decoder: Decoder) -> int:
    """The token that ends answers: the first of those that end a text."""
    defaults = decoder.generation_defaults
    if defaults is None or not defaults.eos_token_ids:
        raise ValueError("the model has no end-of-sequence token; accepted: a model with one, which ends its answers")
    return min(defaults.eos_token_ids)


def _model(options: TrainingOptions) -> tuple[Decoder, Tokenizer]:
    if options.model is None:
        return small_policy(options.layers, options.width, seed=options.seed, dtype=options.dtype)
    decoder, tokenizer = models.load(options.model, dtype=options.dtype)
    if tokenizer is None:
        raise ValueError(f"{options.model} has no tokenizer; accepted: a checkpoint with one, since tasks are texts")
    return decoder, tokenizer
