"""One run of reinforcement learning five times, with samplers that differ more and more from the trainer.

All arms begin with the policy that comes with detjax, learn from the same prompts in the same order, and draw with the
same seeds. They differ in the numerics of both sides, in the KV cache of the sampler, and in the correction.
"""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes

from detjax import backends, models
from detjax.bench import plots, provenance
from detjax.engine import Engine, EngineConfig, SamplingParams
from detjax.models import Decoder, Tokenizer
from detjax.options import KVQuantization
from detjax.rl.microbatches import Packed
from detjax.rl.policy import CHECKPOINT, DIFFICULTIES
from detjax.rl.policy_gradient import Correction, PolicyGradient
from detjax.rl.rollouts import prompt_seeds, rollouts
from detjax.rl.run import Run, RunConfig, trainer_for
from detjax.rl.tasks import Example, Task, task_named
from detjax.rl.training import Plan


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way to sample and to train.

    Attributes:
        name: its name in results.
        is_stock: whether both sides compute with stock numerics.
        kv_cache_dtype: how the sampler alone quantizes keys and values.
        correction: how the policy gradient corrects for what differs.
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
    """What is measured.

    Attributes:
        seeds: runs of each arm; the seeds are 0 and those after it.
        steps: steps of a run.
        samples: rollouts of a step.
        group: rollouts of each prompt.
        pool: prompts, which steps take in turn.
        score_every: steps between two greedy scores.
        learning_rate: the step size of AdamW.
        max_tokens: the most tokens of a rollout.
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
"""Candidates for each prompt of the pool."""
_TRIES: Final = 10
"""Answers that say how much of a candidate the policy solves."""
_PERFECTIBLE: Final = (0.2, 0.8)
"""The share of right answers of a prompt of the pool, by the first policy: what it can become better and worse at."""


class _PooledRun(Run):
    """A run whose prompts are those of a pool, in an order of its seed."""

    def __init__(self, pool: Sequence[tuple[Task, Example]], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._pool, self._order = pool, np.random.default_rng(self.config.seed).permutation(len(pool))

    def examples(self, step: int) -> list[tuple[Task, Example]]:
        numbers = range(step * self.config.prompts, (step + 1) * self.config.prompts)
        return [self._pool[self._order[number % len(self._pool)]] for number in numbers]


def perfectible_prompts(model: Decoder, tokenizer: Tokenizer, sizes: Sizes) -> list[tuple[Task, Example]]:
    """Returns prompts of all tasks that the policy solves sometimes.

    Raises:
        ValueError: there are too few of them.
    """
    names = list(DIFFICULTIES)
    candidates = [names[number % len(names)] for number in range(_CANDIDATES * sizes.pool)]
    pairs = [
        (task_named(name), task_named(name).example(2, number, DIFFICULTIES[name]))
        for number, name in enumerate(candidates)
    ]
    sampling = SamplingParams(sizes.max_tokens, 1.0, n=_TRIES)
    chosen = []
    with _engine(model, tokenizer) as engine:
        groups = rollouts(engine, [example.prompt for _, example in pairs], sampling, prompt_seeds(2, len(pairs)))
    for (task, example), group in zip(pairs, groups, strict=True):
        share = statistics.fmean(task.reward(example, one.text) for one in group)
        if _PERFECTIBLE[0] <= share <= _PERFECTIBLE[1]:
            chosen.append((task, example))
    if len(chosen) < sizes.pool:
        raise ValueError(f"{len(chosen)} prompts are solved sometimes; accepted: a policy with at least {sizes.pool}")
    return chosen[: sizes.pool]


def _engine(model: Decoder, tokenizer: Tokenizer, kv_cache_dtype: KVQuantization | None = None) -> Engine:
    sizes = EngineConfig(max_samples=64, token_budget=256, max_length=_MAX_LENGTH, kv_cache_dtype=kv_cache_dtype)
    return Engine(model, tokenizer, sizes)


def measured(sizes: Sizes, command: str, report: Callable[[str], Any] = print) -> dict[str, Any]:
    """Returns the metrics of every step of all arms and seeds, with where they come from.

    Args:
        sizes: what is measured.
        command: the command that measures it.
        report: called with a line of text when a run has ended.
    """
    start = time.perf_counter()
    model, tokenizer = models.load(CHECKPOINT, progress=False)
    assert tokenizer is not None
    pool = perfectible_prompts(model, tokenizer, sizes)
    runs: list[dict[str, Any]] = []
    with _engine(model, tokenizer) as exact:
        for seed in range(sizes.seeds):
            for arm in ARMS:
                began = time.perf_counter()
                steps = list(_steps(arm, seed, sizes, model, tokenizer, pool, exact))
                runs.append({"arm": arm.name, "seed": seed, "seconds": time.perf_counter() - began, "steps": steps})
                report(summary_line(runs[-1]))
    return provenance.heading(command) | {
        "sizes": dataclasses.asdict(sizes),
        "arms": [dataclasses.asdict(arm) for arm in ARMS],
        "tasks": dict(DIFFICULTIES),
        "runs": runs,
        "seconds": time.perf_counter() - start,
    }


def _steps(
    arm: Arm,
    seed: int,
    sizes: Sizes,
    model: Decoder,
    tokenizer: Tokenizer,
    pool: Sequence[tuple[Task, Example]],
    exact: Engine,
) -> Iterator[dict[str, Any]]:
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
    with contextlib.ExitStack() as stack:
        stack.enter_context(backends.use_backend(backends.STOCK if arm.is_stock else None))
        trainer = trainer_for(config, model, Plan(Packed(256)))
        engine = stack.enter_context(_engine(model, tokenizer, arm.kv_cache_dtype))
        run = _PooledRun(pool, config, trainer, tokenizer, len(tokenizer) - 1, engine)
        score = _greedy_score(exact, trainer.params, pool, sizes)
        for step, metrics in run.steps():
            yield {"step": step} | dict(metrics) | ({} if score is None else {"greedy_score": score})
            done = step + 1
            is_scored = done % sizes.score_every == 0 or done == sizes.steps
            score = _greedy_score(exact, trainer.params, pool, sizes) if is_scored else None
        assert score is not None
        # What the last step has made of the policy belongs to no step.
        yield {"step": sizes.steps, "greedy_score": score}


def _greedy_score(engine: Engine, params: Any, pool: Sequence[tuple[Task, Example]], sizes: Sizes) -> float:
    """Returns the share of the pool that the policy solves by its likeliest tokens, computed exactly."""
    engine.update_weights(params)
    texts = [example.prompt for _, example in pool]
    groups = rollouts(engine, texts, SamplingParams(sizes.max_tokens, 0.0), [0] * len(pool))
    return statistics.fmean(
        task.reward(example, one.text) for (task, example), (one,) in zip(pool, groups, strict=True)
    )


def trained_steps(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the metrics of the steps that trained, without the score at the end."""
    return [step for step in run["steps"] if "reward" in step]


def summary_line(run: Mapping[str, Any]) -> str:
    """Returns a run in a line of text."""
    steps = trained_steps(run)
    scores = [step["greedy_score"] for step in run["steps"] if "greedy_score" in step]
    last = steps[-max(1, len(steps) // 5) :]
    return (
        f"{run['arm']}, seed {run['seed']}: reward {steps[0]['reward']:.2f} to "
        f"{statistics.fmean(step['reward'] for step in last):.2f}, greedy {scores[0]:.2f} to {scores[-1]:.2f} "
        f"(best {max(scores):.2f}), k3 {statistics.fmean(step['k3'] for step in steps):.1e}, unequal tokens "
        f"{statistics.fmean(step['unequal_share'] for step in steps):.1%}, {run['seconds']:.0f} s"
    )


def problems(result: Mapping[str, Any]) -> list[str]:
    """Returns what contradicts the claim: unequal bits with detjax on both sides, or none with stock numerics."""
    wrong = []
    for run in result["runs"]:
        name, steps = f"{run['arm']}, seed {run['seed']}", trained_steps(run)
        if run["arm"] == ON_POLICY:
            unequal = [step["step"] for step in steps if any(step[k] for k in ("unequal_tokens", "k1", "k2", "k3"))]
            wrong += [f"{name}: sampler and trainer differ at steps {unequal}"] if unequal else []
        elif run["arm"] == STOCK and not all(step["unequal_tokens"] for step in steps):
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
    """Writes a picture of all arms over steps: thin lines of seeds, and their mean."""
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
        # Zero has a place on this scale.
        axes.set_yscale("symlog", linthresh=1e-7)
        axes.set_ylim(-3e-8, 1)
    for arm, color in zip(ARMS, _COLORS, strict=True):
        runs = [run for run in result["runs"] if run["arm"] == arm.name]
        points = [[(step["step"], step[metric]) for step in run["steps"] if metric in step] for run in runs]
        lines = [[value for _, value in line] for line in points]
        if metric not in ("greedy_score", "k3"):
            lines = list(map(_smoothed, lines))
        steps = [step for step, _ in points[0]]
        for line in lines:
            axes.plot(steps, line, color=color, linewidth=0.6, alpha=0.5)
        axes.plot(steps, np.mean(lines, axis=0), color=color, linewidth=1.6, label=arm.name)


def _smoothed(values: Sequence[float], window: int = 10) -> list[float]:
    return [statistics.fmean(values[max(0, place - window + 1) : place + 1]) for place in range(len(values))]
