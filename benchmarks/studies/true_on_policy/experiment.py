"""One run of reinforcement learning five times, with samplers that increasingly differ from the trainer.

All arms start from detjax's small policy, with the same prompts, order and seeds. They differ in the numerics of both
sides, in the sampler's KV cache, and in the correction.

Processes may share the runs. The bits of a run with detjax do not depend on it.
"""

import contextlib
import dataclasses
import gc
import itertools
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from benchmarks import plots
from detjax import models
from detjax.contract import GRADIENT_SHARDS, WEIGHT_GRADIENT_TOKENS
from detjax.engine import Engine, EngineConfig, SamplingParams
from detjax.engine.batch import BatchShapes
from detjax.engine.sampling_variant import SamplingVariant
from detjax.engine.step_loop import StepLoopConfig
from detjax.models import Decoder, Tokenizer
from detjax.operands.numerics import ceil_div, round_up
from detjax.operands.options import KVQuantization
from detjax.rl.policy_gradients.policy_gradient import Correction, PolicyGradient
from detjax.rl.rollouts import prompt_seeds, rollouts
from detjax.rl.runs.policy import CHECKPOINT, DIFFICULTIES
from detjax.rl.runs.run import Run, RunConfig, trainer_for
from detjax.rl.tasks import Example, Task, task_named
from detjax.rl.trainer.microbatches import Layout, Packed, Rows
from detjax.rl.trainer.step import Plan
from detjax.runtime import backends


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way to sample and train.

    Attributes:
        name: its name in results.
        is_stock: whether both sides use stock numerics.
        kv_cache_dtype: the sampler's KV cache quantization.
        correction: the policy gradient's correction for the difference.
    """

    name: str
    is_stock: bool = False
    kv_cache_dtype: KVQuantization | None = None
    correction: Correction = "none"


ARMS: Final = (
    Arm("stock", is_stock=True),
    Arm("stock, truncated weights", is_stock=True, correction="token_truncated"),
    Arm("detjax"),
    Arm("detjax, q4_0 sampler", kv_cache_dtype="q4_0"),
    Arm("detjax, q4_0 sampler, truncated weights", kv_cache_dtype="q4_0", correction="token_truncated"),
)
STOCK, ON_POLICY = ARMS[0].name, ARMS[2].name

_COLORS: Final = (plots.THEIRS, "#e8a68b", plots.OURS, "#6b4c9a", "#b39ddb")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the experiment.

    Attributes:
        seeds: runs per arm, with seeds from 0.
        steps: steps per run.
        samples: rollouts per step.
        group: rollouts per prompt.
        pool: number of prompts, which steps cycle through.
        score_every: steps between two greedy scores.
        learning_rate: the step size of AdamW.
        max_tokens: maximum number of tokens of a rollout.
    """

    seeds: int = 1
    steps: int = 150
    samples: int = 64
    group: int = 8
    pool: int = 64
    score_every: int = 10
    learning_rate: float = 1e-4
    max_tokens: int = 24

    def __post_init__(self) -> None:
        """Checks the samples.

        Raises:
            ValueError: the groups do not fill a step.
        """
        if self.samples < self.group or self.samples % self.group:
            raise ValueError(f"samples is {self.samples}; accepted: multiples of {self.group}, the samples of a prompt")


SMALL: Final = Sizes(steps=3, samples=8, group=4, pool=4, score_every=2)

_MAX_LENGTH: Final = 64
_CANDIDATES: Final = 8
"""Candidates per prompt of the pool."""
_TRIES: Final = 10
"""Answers that estimate a candidate's share of correct answers."""
_PERFECTIBLE: Final = (0.2, 0.8)
"""The range of the initial policy's share of correct answers to a prompt of the pool, which can improve or degrade."""
_DIGITS: Final = 7
"""Decimal digits of numbers in results, as precise as float32."""

_REPORT_EVERY: Final = 25
"""Steps between two reports of a run."""

_VARIANT: Final = SamplingVariant(filtered=False, top_logprobs=0, distribution=True)
"""The features of the sampling program that all answers share."""

type _Job = tuple[Arm, int]
"""A run: its arm and its seed."""


class _Watch(NamedTuple):
    """The deadline of the runs, in seconds since the epoch, and the function that reports progress."""

    deadline: float
    report: Callable[[str], Any]


class _PooledRun(Run):
    """A run with the prompts of a pool, in an order that depends on its seed."""

    def __init__(self, pool: Sequence[tuple[Task, Example]], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._pool, self._order = pool, np.random.default_rng(self.config.seed).permutation(len(pool))

    def examples(self, step: int) -> list[tuple[Task, Example]]:
        numbers = range(step * self.config.prompts, (step + 1) * self.config.prompts)
        return [self._pool[self._order[number % len(self._pool)]] for number in numbers]


def measured(
    sizes: Sizes,
    *,
    processes: int = 1,
    seconds: float = math.inf,
    report: Callable[[str], Any] = print,
) -> dict[str, Any]:
    """Returns the metrics of every step of all arms and seeds.

    Args:
        sizes: the sizes of the experiment.
        processes: number of processes that share the runs, concurrently on one device.
        seconds: time limit after which runs end early.
        report: called by a run's process with lines of text, from time to time and at the end.
    """
    start = time.perf_counter()
    # All processes share this clock.
    watch = _Watch(time.time() + seconds, report)
    # The runs of an arm share programs, so they run in the same process where possible.
    jobs = [(arm, seed) for arm in ARMS for seed in range(sizes.seeds)]
    runs = _runs(sizes, watch, jobs) if processes == 1 else _shared_runs(sizes, watch, jobs, processes)
    return {
        "sizes": dataclasses.asdict(sizes),
        "arms": [dataclasses.asdict(arm) for arm in ARMS],
        "tasks": dict(DIFFICULTIES),
        "processes": processes,
        "runs": runs,
        "seconds": time.perf_counter() - start,
    }


def _shared_runs(sizes: Sizes, watch: _Watch, jobs: Sequence[_Job], processes: int) -> list[dict[str, Any]]:
    """Runs jobs in several processes, and returns the runs in order. If one fails, the others are terminated."""
    parts = list(itertools.batched(jobs, ceil_div(len(jobs), processes)))
    context, others = multiprocessing.get_context("spawn"), multiprocessing.active_children()
    with ProcessPoolExecutor(len(parts), context, initializer=_share_the_device) as pool:
        futures = [pool.submit(_runs, sizes, watch, part) for part in parts]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            for process in multiprocessing.active_children():
                if process not in others:
                    process.terminate()
            raise
    return [run for future in futures for run in future.result()]


def _share_the_device() -> None:
    """Configures a process that shares a GPU with others, before its first use."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    # Autotuning stock programs would take longer than running them.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()


def _runs(sizes: Sizes, watch: _Watch, jobs: Iterable[_Job]) -> list[dict[str, Any]]:
    """Runs jobs in this process."""
    model, tokenizer = models.load(CHECKPOINT, progress=False)
    assert tokenizer is not None
    runs = []
    with _engine(model, tokenizer, sizes) as exact:
        pool = perfectible_prompts(exact, sizes)
        for arm, group in itertools.groupby(jobs, key=lambda job: job[0]):
            with contextlib.ExitStack() as stack:
                stack.enter_context(backends.use_backend(backends.STOCK if arm.is_stock else None))
                engine = exact
                if arm.is_stock or arm.kv_cache_dtype is not None:
                    engine = stack.enter_context(_engine(model, tokenizer, sizes, arm.kv_cache_dtype))
                for _, seed in group:
                    runs.append(_run(arm, seed, sizes, (model, tokenizer), pool, engine, exact, watch))
                    watch.report(summary_line(runs[-1]))
    return runs


@dataclasses.dataclass(frozen=True, kw_only=True)
class _FewPrograms(EngineConfig):
    """Engine settings with two step shapes, both for all samples, and a single sampling program.

    A GPU computes a few hundred samples of a small model as fast as one, and three programs compile in a few seconds.
    """

    def step_loop(self, **options: Any) -> StepLoopConfig:
        """Returns the sizes of the engine's step loop."""
        shapes = BatchShapes.for_chunks(self.max_samples, WEIGHT_GRADIENT_TOKENS)
        return dataclasses.replace(super().step_loop(**options), shapes=shapes, variants=(_VARIANT,))


def _engine(model: Decoder, tokenizer: Tokenizer, sizes: Sizes, kv_cache_dtype: KVQuantization | None = None) -> Engine:
    """Returns an engine under the current backend. A GPU computes all samples of a step at once."""
    settings: dict[str, Any] = {"max_length": _MAX_LENGTH, "kv_cache_dtype": kv_cache_dtype}
    if _is_gpu():
        return Engine(model, tokenizer, _FewPrograms(max_samples=sizes.samples, **settings))
    return Engine(model, tokenizer, EngineConfig(max_samples=64, token_budget=256, **settings))


def _layout(sizes: Sizes, longest_prompt: int) -> Layout:
    """Returns the layout of sequences, which affects no bit of detjax."""
    if not _is_gpu():
        return Packed(256)
    # A shard is one microbatch: on a GPU many launches take longer than half-empty rows.
    length = round_up(longest_prompt + sizes.max_tokens, WEIGHT_GRADIENT_TOKENS)
    return Rows(ceil_div(sizes.samples, GRADIENT_SHARDS), length)


def _is_gpu() -> bool:
    return backends.target() == "gpu"


def _sampling(sizes: Sizes, temperature: float, samples: int = 1) -> SamplingParams:
    """Returns the sampling parameters of all answers. All report sampling logprobs, so that they share programs."""
    return SamplingParams(sizes.max_tokens, temperature, n=samples, sampling_logprobs=True)


def perfectible_prompts(engine: Engine, sizes: Sizes) -> list[tuple[Task, Example]]:
    """Returns prompts of all tasks that the engine's policy solves sometimes.

    Raises:
        ValueError: the policy solves too few prompts sometimes.
    """
    names = list(DIFFICULTIES)
    candidates = [names[number % len(names)] for number in range(_CANDIDATES * sizes.pool)]
    pairs = [
        (task_named(name), task_named(name).example(2, number, DIFFICULTIES[name]))
        for number, name in enumerate(candidates)
    ]
    sampling = _sampling(sizes, 1.0, _TRIES)
    # The batches have a step's size, so that no other programs are needed.
    at_once = max(1, sizes.samples // _TRIES)
    groups = [
        group
        for some in itertools.batched(zip(pairs, prompt_seeds(2, len(pairs)), strict=True), at_once)
        for group in rollouts(engine, [pair[1].prompt for pair, _ in some], sampling, [seed for _, seed in some])
    ]
    chosen = []
    for (task, example), group in zip(pairs, groups, strict=True):
        share = statistics.fmean(task.reward(example, one.text) for one in group)
        if _PERFECTIBLE[0] <= share <= _PERFECTIBLE[1]:
            chosen.append((task, example))
    if len(chosen) < sizes.pool:
        raise ValueError(f"{len(chosen)} prompts are solved sometimes; accepted: a policy with at least {sizes.pool}")
    return chosen[: sizes.pool]


def _run(
    arm: Arm,
    seed: int,
    sizes: Sizes,
    policy: tuple[Decoder, Tokenizer],
    pool: Sequence[tuple[Task, Example]],
    engine: Engine,
    exact: Engine,
    watch: _Watch,
) -> dict[str, Any]:
    """Runs an arm, and returns lists of its steps' metrics, and greedy scores with the number of preceding steps."""
    began = time.perf_counter()
    model, tokenizer = policy
    config = RunConfig(
        kind="reinforcement",
        tasks=tuple(DIFFICULTIES.items()),
        steps=sizes.steps,
        seed=seed,
        prompts=sizes.samples // sizes.group,
        samples=sizes.group,
        max_tokens=sizes.max_tokens,
        kv_cache_dtype=arm.kv_cache_dtype,
        policy_gradient=PolicyGradient(correction=arm.correction),
        learning_rate=sizes.learning_rate,
    )
    longest = max(len(tokenizer.encode(example.prompt)) for _, example in pool)
    trainer = trainer_for(config, model, Plan(_layout(sizes, longest)))
    run = _PooledRun(pool, config, trainer, tokenizer, len(tokenizer) - 1, engine)
    scores = [[0, _greedy_score(exact, trainer.params, pool, sizes)]]
    steps: dict[str, list[float]] = {}
    for step, metrics in run.steps():
        for name, value in metrics.items():
            # The place of the first difference has no curve.
            if isinstance(value, int | float):
                steps.setdefault(name, []).append(_shortened(value))
        done = step + 1
        if done == 1:
            # Keeps the garbage collector from scanning the objects left by compilation.
            gc.collect()
            gc.freeze()
        if done == 1 or done % _REPORT_EVERY == 0:
            watch.report(f"{arm.name}, seed {seed}: step {done}, {time.perf_counter() - began:.0f} s")
        is_last = done == sizes.steps or time.time() > watch.deadline
        if done % sizes.score_every == 0 or is_last:
            scores.append([done, _greedy_score(exact, trainer.params, pool, sizes)])
        if is_last:
            break
    seconds = time.perf_counter() - began
    return {"arm": arm.name, "seed": seed, "seconds": seconds, "steps": steps, "greedy_scores": scores}


def _shortened(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")


def _greedy_score(engine: Engine, params: Any, pool: Sequence[tuple[Task, Example]], sizes: Sizes) -> float:
    """Returns the share of the pool that the policy solves greedily under exact numerics."""
    engine.update_weights(params)
    groups = rollouts(engine, [example.prompt for _, example in pool], _sampling(sizes, 0.0), [0] * len(pool))
    return statistics.fmean(
        task.reward(example, one.text) for (task, example), (one,) in zip(pool, groups, strict=True)
    )


def summary_line(run: Mapping[str, Any]) -> str:
    """Returns a one-line summary of a run."""
    steps, scores = run["steps"], [score for _, score in run["greedy_scores"]]
    rewards = steps["reward"]
    last = rewards[-max(1, len(rewards) // 5) :]
    return (
        f"{run['arm']}, seed {run['seed']}: reward {rewards[0]:.2f} to {statistics.fmean(last):.2f}, greedy "
        f"{scores[0]:.2f} to {scores[-1]:.2f} (best {max(scores):.2f}), k3 {statistics.fmean(steps['k3']):.1e}, "
        f"unequal tokens {statistics.fmean(steps['unequal_share']):.1%}, {run['seconds']:.0f} s, "
        f"{statistics.median(steps['seconds']):.2f} s a step"
    )


def problems(result: Mapping[str, Any]) -> list[str]:
    """Returns contradictions of the claim: unequal bits with detjax on both sides, or equal bits with stock."""
    wrong = []
    for run in result["runs"]:
        name, steps = f"{run['arm']}, seed {run['seed']}", run["steps"]
        if run["arm"] == ON_POLICY:
            rows = zip(*(steps[k] for k in ("unequal_tokens", "k1", "k2", "k3")), strict=True)
            unequal = [step for step, row in enumerate(rows) if any(row)]
            wrong += [f"{name}: sampler and trainer differ at steps {unequal}"] if unequal else []
        elif run["arm"] == STOCK and not all(steps["unequal_tokens"]):
            wrong.append(f"{name}: sampler and trainer are equal at a step")
    return wrong


_PANELS: Final = (
    ("reward", "reward, mean of 10 steps"),
    ("greedy_score", "greedy score, computed exactly"),
    ("k3", "k3 between sampler and trainer"),
    ("gradient_norm", "norm of the gradients, mean of 10 steps"),
    ("entropy", "entropy, nats, mean of 10 steps"),
)


def draw(result: Mapping[str, Any], file: Path) -> None:
    """Plots all arms over steps: thin lines for seeds, and their mean."""
    sizes = result["sizes"]
    setting = (
        f"{sizes['samples']} samples a step, {sizes['pool']} prompts that the first policy solves 20 to 80% of the time"
    )
    figure = plots.titled_figure(9, "The same run with samplers that differ from the trainer", setting)
    panels = figure.subplots(3, 2).reshape(-1)
    figure.subplots_adjust(left=0.07, right=0.98, top=0.9, bottom=0.05, hspace=0.35, wspace=0.2)
    for axes, (metric, title) in zip(panels, _PANELS, strict=False):
        _draw_panel(axes, result, metric, title)
    handles, labels = panels[0].get_legend_handles_labels()
    panels[-1].axis("off")
    panels[-1].legend(handles, labels, loc="center left", frameon=False, fontsize=9)
    file.parent.mkdir(parents=True, exist_ok=True)
    plots.write_png(figure, file)


def _draw_panel(axes: Axes, result: Mapping[str, Any], metric: str, title: str) -> None:
    plots.clear_frame(axes)
    axes.grid(color=plots.GRID)
    axes.set_title(title, fontsize=9.5, color=plots.INK, loc="left")
    if metric == "k3":
        # This scale can show zero.
        axes.set_yscale("symlog", linthresh=1e-7)
        axes.set_ylim(-3e-8, 1)
    for arm, color in zip(ARMS, _COLORS, strict=True):
        runs = [run for run in result["runs"] if run["arm"] == arm.name]
        if metric == "greedy_score":
            lines = [[score for _, score in run["greedy_scores"]] for run in runs]
            steps = [step for step, _ in min((run["greedy_scores"] for run in runs), key=len)]
        else:
            lines = [run["steps"][metric] for run in runs]
            steps = range(min(map(len, lines)))
            lines = lines if metric == "k3" else list(map(_smoothed, lines))
        # Runs that hit the time limit have fewer steps.
        lines = [line[: len(steps)] for line in lines]
        for line in lines:
            axes.plot(steps, line, color=color, linewidth=0.6, alpha=0.5)
        axes.plot(steps, np.mean(lines, axis=0), color=color, linewidth=1.6, label=arm.name)


def _smoothed(values: Sequence[float], window: int = 10) -> list[float]:
    return [statistics.fmean(values[max(0, place - window + 1) : place + 1]) for place in range(len(values))]
