"""Tunix' learners, and the number of differing bits between the logprobs of rollouts and of the trainer's step.

    make .tunix/.ready
    .tunix/bin/python -m benchmarks tunix_learners --out benchmarks/results/tunix-cpu.json

GRPO, PPO and agentic GRPO train detjax's small policy, with detjax as model and rollout. As a control, GRPO trains
Tunix' own Qwen3 with the same weights and Tunix' own sampler. Each case runs in a separate process. The trainer's
logprobs are read inside the program that computes the gradient.

The exit code is 1 if a bit differs with detjax, or if none does in the control.
"""

import concurrent.futures
import dataclasses
import importlib.metadata
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

from benchmarks import study as options
from benchmarks.study import Result, Run
from detjax import models
from detjax.bench import command_line
from detjax.cli.options import Option
from detjax.rl.runs.policy import CHECKPOINT, DIFFICULTIES
from detjax.rl.tasks import TASKS

PROMPTS, SAMPLES, PROMPT_LENGTH, MAX_TOKENS = 2, 4, 16, 16
LEARNING_RATE: Final = 1e-4


@dataclasses.dataclass(frozen=True)
class Case:
    """A run of a learner.

    Attributes:
        learner: "grpo", "ppo" or "agentic".
        numerics: "detjax", or "tunix" for Tunix' own model and sampler.
        dtype: the dtype of weights.
    """

    learner: str
    numerics: str
    dtype: str

    @property
    def name(self) -> str:
        """The case's name on the command line."""
        return f"{self.learner}-{self.numerics}-{self.dtype}"


_CASES: Final = (
    Case("grpo", "detjax", "bfloat16"),
    Case("grpo", "detjax", "float32"),
    Case("grpo", "tunix", "bfloat16"),
    Case("grpo", "tunix", "float32"),
    Case("ppo", "detjax", "bfloat16"),
    Case("agentic", "detjax", "bfloat16"),
)
CASES: Final = {case.name: case for case in _CASES}


class Comparison:
    """A comparison of the logprobs of rollouts and of the trainer's step, token by token."""

    def __init__(self, pad_id: int) -> None:
        """Starts an empty comparison."""
        self.pad_id, self.tokens, self.unequal = pad_id, 0, 0
        self.rows_unknown, self.rows_empty = 0, 0
        self.differences: list[np.ndarray] = []
        self._waiting: defaultdict[tuple[bytes, bytes], list[np.ndarray]] = defaultdict(list)

    @property
    def rows_untrained(self) -> int:
        """The number of rollouts without logprobs from the trainer."""
        return sum(map(len, self._waiting.values()))

    @property
    def rows_left_out(self) -> int:
        """The number of rollouts that Tunix' trainer did not drop, but that were not compared."""
        return self.rows_unknown + abs(self.rows_untrained - self.rows_empty)

    def sampled(self, prompts: Any, completions: Any, logprobs: Any) -> None:
        """Records the logprobs of rollouts: prompts are left-padded, completions and logprobs unpadded."""
        for prompt, completion, row in zip(np.asarray(prompts), completions, logprobs, strict=True):
            padded = np.full(MAX_TOKENS, self.pad_id, np.int32)
            padded[: len(completion)] = completion
            self._waiting[prompt.astype(np.int32).tobytes(), padded.tobytes()].append(np.asarray(row, np.float32))

    def trained(self, prompts: Any, completions: Any, logprobs: Any) -> None:
        """Compares the trainer's logprobs `[B, C]` with the rollouts'."""
        for prompt, completion, row in zip(*map(np.asarray, (prompts, completions, logprobs)), strict=True):
            rollouts = self._waiting[prompt.astype(np.int32).tobytes(), completion.astype(np.int32).tobytes()]
            is_token = completion != self.pad_id
            if not is_token.any():
                # The agentic learner empties truncated completions.
                self.rows_empty += 1
                continue
            if not rollouts:
                self.rows_unknown += 1
                continue
            sampled = rollouts.pop(0)
            before, after = sampled[is_token[: len(sampled)]], row[is_token].astype(np.float32)
            self.tokens += len(after)
            self.unequal += int((before.view("u4") != after.view("u4")).sum())
            self.differences.append(np.abs(before.astype(np.float64) - after))


def batches(steps: int) -> Iterator[dict[str, Any]]:
    """Yields the prompts of each step with the arguments of the reward."""
    for step in range(steps):
        names = [list(DIFFICULTIES)[(PROMPTS * step + index) % len(DIFFICULTIES)] for index in range(PROMPTS)]
        prompts = [TASKS[name].example(0, step, DIFFICULTIES[name]).prompt for name in names]
        yield {"prompts": np.array(prompts), "task": np.array(names), "number": np.full(PROMPTS, step)}


def reward(prompts: Any, completions: Any, task: Any, number: Any, **_: Any) -> list[float]:
    """Returns 1 for correct answers, and 0 for wrong ones."""
    del prompts
    answers = zip(completions, np.ravel(task), np.ravel(number), strict=True)
    return [
        TASKS[name].reward(TASKS[name].example(0, int(step), DIFFICULTIES[name]), text) for text, name, step in answers
    ]


def tunix_qwen3(config: models.DecoderConfig, mesh: Mesh, dtype: str) -> Any:
    """Returns Tunix' Qwen3 with the weights of `CHECKPOINT`."""
    from tunix.models.qwen3 import model, params  # pyright: ignore[reportMissingImports]

    shape = model.ModelConfig(
        num_layers=config.layers,
        vocab_size=config.vocab_size,
        embed_dim=config.hidden_size,
        hidden_dim=config.intermediate_size,
        num_heads=config.heads,
        head_dim=config.head_dim,
        num_kv_heads=config.kv_heads,
        rope_theta=10_000,
        norm_eps=config.norm_eps,
        use_tied_embedding=config.tied_embeddings,
        dtype=jnp.dtype(dtype),
        param_dtype=jnp.dtype(dtype),
    )
    with mesh:
        return params.create_model_from_safe_tensors(str(CHECKPOINT), shape, mesh, dtype=jnp.dtype(dtype))


def _listening(compare: Comparison, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps Tunix' function of logprobs to record the logprobs under a gradient."""

    def listening(
        graph: Any, state: Any, prompt_tokens: Any, completion_tokens: Any, *rest: Any, **options: Any
    ) -> Any:
        output = compute(graph, state, prompt_tokens, completion_tokens, *rest, **options)
        if not options.get("stop_gradient", True):
            logprobs = output[0] if isinstance(output, tuple) else output
            jax.debug.callback(compare.trained, prompt_tokens, completion_tokens, jax.lax.stop_gradient(logprobs))
        return output

    return listening


def run_case(case: Case, steps: int) -> dict[str, Any]:
    """Runs a case and returns its result."""
    from tunix.rl import common, rl_cluster  # pyright: ignore[reportMissingImports]
    from tunix.rl.rollout.base_rollout import RolloutConfig  # pyright: ignore[reportMissingImports]

    from detjax.rl.tunix import TunixCritic, TunixModel, TunixRollout, TunixTokenizer

    start = time.perf_counter()
    decoder, text_tokenizer = models.load(CHECKPOINT, dtype=case.dtype, progress=False)
    assert text_tokenizer is not None
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    tokenizer, uses_detjax = TunixTokenizer(text_tokenizer, decoder), case.numerics == "detjax"
    if not uses_detjax:
        # Tunix' model has no row for an id beyond the vocabulary, and its rows need no first token.
        tokenizer.pad_id, tokenizer.bos_id = tokenizer.eos_id, lambda: None  # pyright: ignore
    cluster = rl_cluster.RLCluster(
        actor=TunixModel(decoder) if uses_detjax else tunix_qwen3(decoder.config, mesh, case.dtype),
        critic=TunixCritic(decoder) if case.learner == "ppo" else None,
        tokenizer=tokenizer,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(rl_cluster.Role, mesh),
            rollout_engine=TunixRollout if uses_detjax else "vanilla",
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adamw(LEARNING_RATE),
                critic_optimizer=optax.adamw(LEARNING_RATE),
                max_steps=steps,
                eval_every_n_steps=10**9,
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=MAX_TOKENS,
                max_prompt_length=PROMPT_LENGTH,
                temperature=1.0,
                return_logprobs=True,
            ),
        ),
    )
    comparison = Comparison(tokenizer.pad_id())
    generate = cluster.rollout.generate

    def noting_generate(*arguments: Any, **options: Any) -> Any:
        output = generate(*arguments, **options)
        comparison.sampled(output.left_padded_prompt_tokens, output.tokens, output.logprobs)
        return output

    logged: list[float] = []
    buffer_metrics = cluster.buffer_metrics_async

    def noting_metrics(metrics: dict[str, Any], *arguments: Any, **options: Any) -> None:
        logged.extend(float(metrics[name][0]) for name in metrics if name == "sampler_trainer/logp_diff_max")
        buffer_metrics(metrics, *arguments, **options)

    cluster.rollout.generate, cluster.buffer_metrics_async = noting_generate, noting_metrics
    common.compute_per_token_logps = _listening(comparison, common.compute_per_token_logps)
    before = [np.asarray(x) for x in jax.tree.leaves(_weights(cluster))]
    _learner(case.learner, cluster).train(batches(steps))
    jax.effects_barrier()
    after = [np.asarray(x) for x in jax.tree.leaves(_weights(cluster))]
    differences = np.concatenate([*comparison.differences, np.zeros(1)])
    return {
        **dataclasses.asdict(case),
        "steps": cluster.global_steps,
        "weights": len(before),
        "weights_moved": sum(not np.array_equal(x, y) for x, y in zip(before, after, strict=True)),
        "tokens": comparison.tokens,
        "unequal_tokens": comparison.unequal,
        "mean_difference": float(differences[:-1].mean()) if comparison.tokens else None,
        "largest_difference": float(differences.max()),
        "largest_difference_that_tunix_logs": max(logged, default=None),
        "rollouts_that_tunix_drops": comparison.rows_empty,
        "rollouts_not_compared": comparison.rows_left_out,
        "seconds": round(time.perf_counter() - start, 1),
    }


def _weights(cluster: Any) -> Any:
    from flax import nnx

    return nnx.state(cluster.actor_trainer.model)


def _learner(name: str, cluster: Any) -> Any:
    """Returns a learner of a cluster's actor."""
    if name == "grpo":
        from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner  # pyright: ignore[reportMissingImports]

        return GRPOLearner(cluster, GRPOConfig(num_generations=SAMPLES, beta=0.0), [reward])
    if name == "ppo":
        from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner  # pyright: ignore[reportMissingImports]

        return PPOLearner(cluster, PPOConfig(beta=0.0), [reward])
    from tunix.rl.agentic import agentic_grpo_learner  # pyright: ignore[reportMissingImports]
    from tunix.rl.agentic.parser.chat_template_parser import parser  # pyright: ignore[reportMissingImports]

    class PlainText(parser.BaseChatTemplateParser):
        """Plain conversations without a template."""

        def _init_tokens(self) -> Any:
            return parser.TokenConfig()

        def _init_generation_prompt(self) -> str:
            return ""

        def parse(self, messages: Any, add_generation_prompt: bool = False, is_first_msg: bool = False) -> str:
            # A prompt is an array with one text.
            return "".join(str(text) for message in messages for text in np.ravel(message["content"]))

    config = agentic_grpo_learner.GRPOConfig(
        num_generations=SAMPLES, beta=0.0, max_response_length=MAX_TOKENS, max_concurrency=PROMPTS * SAMPLES
    )
    return agentic_grpo_learner.GRPOLearner(cluster, config, [reward], chat_parser=PlainText(cluster.tokenizer))


def study(
    run: Run,
    *,
    case: Annotated[list[str], options.names(CASES, "Run this case")],
    steps: Annotated[int, Option("Steps of a case.", minimum=1)] = 100,
) -> Result:
    chosen = [CASES[name] for name in case]
    results = []
    # The adapter patches Tunix in the whole process, so each case gets its own.
    spawning = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, spawning, max_tasks_per_child=1) as pool:
        for result in pool.map(run_case, chosen, [steps] * len(chosen)):
            results.append(result)
            command_line.print_line(str(result))
    versions = {name: importlib.metadata.version(name) for name in ("google-tunix", "flax", "optax")}
    wrong = [result for result in results if is_wrong(result)]
    return Result({"libraries": versions, "results": results}, f"not as promised: {wrong}" if wrong else "")


def is_wrong(result: dict[str, Any]) -> bool:
    """Returns whether a result breaks the promise: equal bits with detjax, unequal without, all rollouts compared."""
    is_equal = not result["unequal_tokens"]
    is_whole = result["tokens"] > 0 and not result["rollouts_not_compared"] and result["weights_moved"] > 0
    return not is_whole or is_equal != (result["numerics"] == "detjax")
