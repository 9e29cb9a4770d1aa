"""The command `detjax train`: a run from its options, with states, log and model in one directory."""

import contextlib
import dataclasses
import math
from pathlib import Path
from typing import Final

from detjax import models
from detjax.engine import Engine, EngineConfig, SpeculativeConfig
from detjax.models import AdapterConfig, Decoder, Tokenizer
from detjax.operands.adapted_weight import padded_rank
from detjax.operands.options import Distribution, KVQuantization
from detjax.rl.policy_gradients.policy_gradient import Correction, Estimator, PolicyGradient
from detjax.rl.runs.log import RunLog
from detjax.rl.runs.policy import small_policy
from detjax.rl.runs.run import Kind, Run, RunConfig, trainer_for
from detjax.rl.runs.run_state import RunState
from detjax.rl.tasks import task_named
from detjax.rl.tasks.pairs import NAME as SFT
from detjax.rl.tasks.pairs import Pairs
from detjax.rl.trainer.microbatches import Packed
from detjax.rl.trainer.step import Plan

_COLUMNS: Final = {
    "supervised": ("loss", "gradient_norm", "tokens", "seconds"),
    "reinforcement": ("reward", "unequal_tokens", "k3", "entropy", "gradient_norm", "seconds"),
}
_ENGINE_SAMPLES: Final = 64
"""Rollouts that the engine computes concurrently; no bit depends on it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The options of `detjax train`.

    Attributes:
        directory: directory of the run: its states, its log and, at the end, its model.
        tasks: a task with its difficulty, such as addition:2; or sft, with --data.
        kind: supervised: train on correct answers; reinforcement: train on the policy's own rollouts.
        model: start from this checkpoint. Default: random weights.
        layers: layers of a model with random weights.
        width: width of a model with random weights, a multiple of 32.
        dtype: compute in float32, bfloat16 or float16.
        steps: number of training steps.
        prompts: prompts per step.
        samples: rollouts per prompt.
        max_tokens: maximum number of tokens to generate.
        temperature: temperature of rollouts.
        learning_rate: step size of AdamW.
        estimator: estimator of advantages from rewards.
        correction: the importance weights.
        kv_cache_dtype: quantize the KV cache of rollouts only. Default: the model's dtype.
        speculative_config: JSON object with the settings of speculative decoding for rollouts, as for `detjax serve`;
            no bit depends on it. Default: no tokens are guessed.
        seed: random seed, 0 to 2^64 - 1.
        microbatch_tokens: tokens per packed microbatch, a multiple of 16; no bit depends on it.
        devices: number of devices that share a batch.
        save_every: steps between two saved states.
        data: for the task sft, a file with an object of prompt and completion in each line. The end token follows each
            completion. Default: no file.
        lora_rank: train an adapter of this rank, and leave the model as it is; the run's directory gets the adapter in
            peft's files as `adapter`. 0: train the model.
        lora_alpha: the adapter's factor times its rank. Default: twice the rank.
        lora_targets: modules that get an adapter, such as q_proj.
        lora_rslora: divide by the root of the rank in place of the rank.
    """

    directory: Path
    tasks: tuple[str, ...]
    kind: Kind = "supervised"
    model: Path | None = None
    layers: int = 2
    width: int = 128
    dtype: str = "bfloat16"
    steps: int = 100
    prompts: int = 64
    samples: int = 8
    max_tokens: int = 32
    temperature: float = 1.0
    learning_rate: float = 1e-3
    estimator: Estimator = "grpo"
    correction: Correction = "none"
    kv_cache_dtype: KVQuantization | None = None
    speculative_config: str | None = None
    seed: int = 0
    microbatch_tokens: int = 1024
    devices: int = 1
    save_every: int = 50
    data: Path | None = None
    lora_rank: int = 0
    lora_alpha: float | None = None
    lora_targets: tuple[str, ...] = ()
    lora_rslora: bool = False

    def adapter(self) -> AdapterConfig | None:
        """Returns the options of the adapter to train; None: the model is trained.

        Raises:
            ValueError: an option is out of range, or it belongs to adapters and none is given.
        """
        given = self.lora_alpha is not None or bool(self.lora_targets) or self.lora_rslora
        if self.lora_rank < 0 or (given and not self.lora_rank):
            raise ValueError(
                f"--lora-rank is {self.lora_rank}; accepted: at least 1, or 0 without other --lora options"
            )
        if not self.lora_rank:
            return None
        alpha = 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha
        if not 0 < alpha < math.inf:
            raise ValueError(f"--lora-alpha is {alpha}; accepted: a number > 0")
        return AdapterConfig(
            rank=self.lora_rank,
            alpha=alpha,
            is_rank_stabilized=self.lora_rslora,
            targets=self.lora_targets or "all-linear",
            base=None if self.model is None else str(self.model),
        )

    def pairs(self) -> Pairs | None:
        """Returns the prompts and completions of the task sft; None for other tasks.

        Raises:
            ValueError: the file is missing or not accepted, or the task is not alone, or not supervised.
        """
        if self.data is None and SFT not in self.tasks:
            return None
        if self.data is None or self.tasks != (SFT,) or self.kind != "supervised":
            raise ValueError(
                f"--data is {self.data}, --tasks are {self.tasks} and --kind is {self.kind!r}; accepted: --data with "
                f"the task {SFT} alone, supervised"
            )
        return Pairs.read(self.data)

    def speculative(self) -> SpeculativeConfig | None:
        """Returns the settings of speculative decoding for rollouts.

        Raises:
            ValueError: they are not accepted, or there are no rollouts.
        """
        if self.speculative_config is None:
            return None
        if self.kind != "reinforcement":
            raise ValueError(
                f"--speculative-config is given and --kind is {self.kind!r}; accepted: 'reinforcement', which has "
                "rollouts"
            )
        return SpeculativeConfig.from_json(self.speculative_config, self.model)

    def config(self) -> RunConfig:
        """Returns the run's configuration.

        Raises:
            ValueError: an option is out of range.
        """
        for option in ("steps", "prompts", "samples", "max_tokens", "save_every"):
            if getattr(self, option) < 1:
                raise ValueError(f"--{option.replace('_', '-')} is {getattr(self, option)}; accepted: at least 1")
        return RunConfig(
            kind=self.kind,
            tasks=() if self.data is not None else tuple(map(_task, self.tasks)),
            steps=self.steps,
            seed=self.seed,
            prompts=self.prompts,
            samples=self.samples,
            max_tokens=self.max_tokens,
            distribution=Distribution(self.temperature),
            kv_cache_dtype=self.kv_cache_dtype,
            policy_gradient=PolicyGradient(estimator=self.estimator, correction=self.correction),
            learning_rate=self.learning_rate,
        )


def _task(text: str) -> tuple[str, int]:
    name, _, difficulty = text.partition(":")
    task_named(name)
    if not difficulty.isdecimal() or int(difficulty) < 1:
        raise ValueError(f"--task is {text!r}; accepted: a name and a difficulty of at least 1, such as {name}:2")
    return name, int(difficulty)


def train(options: TrainingOptions) -> str:
    """Trains a model and writes it to the subdirectory `model` of the run's directory, or an adapter to `adapter`.

    Returns:
        The digest of the model's weights, configuration and tokenizer, see `detjax.models.digest`; or of the adapter.

    Raises:
        FileExistsError: the run has already finished.
        ValueError: an option is not accepted, or the directory has the states of another run.
    """
    data = options.pairs()
    config, speculative, adapter = options.config(), options.speculative(), options.adapter()
    if data is not None:
        config = dataclasses.replace(config, data=data.digest)
    plan = Plan(Packed(options.microbatch_tokens), devices=options.devices)
    target = options.directory / ("model" if adapter is None else "adapter")
    if target.exists():
        raise FileExistsError(f"{target} exists: the run has already finished. Choose another directory.")
    options.directory.mkdir(parents=True, exist_ok=True)
    decoder, tokenizer = _model(options)
    origin = config.as_json() | {"model": models.digest(decoder, tokenizer), "dtype": options.dtype}
    policy = decoder
    if adapter is not None:
        policy = models.with_adapter(decoder, models.new_adapter(decoder, adapter, seed=options.seed))
        origin |= {"adapter": adapter.to_json()}
    trainer = trainer_for(config, policy, plan)
    with contextlib.ExitStack() as stack:
        state = stack.enter_context(RunState(options.directory / "states", origin))
        engine = None
        if config.kind == "reinforcement":
            sizes = EngineConfig(
                max_samples=_ENGINE_SAMPLES,
                token_budget=4 * _ENGINE_SAMPLES,
                max_length=min(options.microbatch_tokens, decoder.config.max_positions),
                kv_cache_dtype=config.kv_cache_dtype,
                speculative=speculative,
                max_loras=0 if adapter is None else 1,
                max_lora_rank=padded_rank(options.lora_rank or 1),
            )
            engine = stack.enter_context(Engine(decoder, tokenizer, sizes))
        run = Run(config, trainer, tokenizer, _end_token(decoder), engine, data)
        log = None
        for step, metrics in run.steps(state, save_every=options.save_every):
            if log is None:
                path = options.directory / "log.jsonl"
                resumed = step if step or path.exists() else None
                log = stack.enter_context(RunLog(path, _COLUMNS[config.kind], resumed_step=resumed))
            log.write(step, metrics)
    if adapter is not None:
        trained = models.adapter_of(trainer.model, adapter)
        models.save_adapter(trained, target)
        return trained.digest.hex()
    models.save(trainer.model, target, tokenizer=tokenizer)
    return models.digest(trainer.model, tokenizer)


def _end_token(decoder: Decoder) -> int:
    defaults = decoder.generation_defaults
    if defaults is None or not defaults.eos_token_ids:
        raise ValueError("the model has no end-of-sequence token; accepted: a model with one, to end its answers")
    return min(defaults.eos_token_ids)


def _model(options: TrainingOptions) -> tuple[Decoder, Tokenizer]:
    if options.model is None:
        return small_policy(options.layers, options.width, seed=options.seed, dtype=options.dtype)
    # Weights in codes would not be trained.
    decoder, tokenizer = models.load(options.model, dtype=options.dtype, quantized="widened")
    if tokenizer is None:
        raise ValueError(f"{options.model} has no tokenizer; accepted: a checkpoint with one, since tasks are text")
    return decoder, tokenizer
