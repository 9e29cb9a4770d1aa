"""Logprobs of sampled tokens from the engine and from the trainer: the number of unequal bits.

    python -m benchmarks on_policy --out benchmarks/results/on-policy-h200.json

The engine samples 65,536 tokens for mixed requests: temperatures 0, 0.6, 1 and 1.5, with and without filters, prompts
of many lengths that share prefixes, two samples each, prefilled in chunks while others decode. The trainer computes the
same tokens' logprobs under the model and under the sampling distributions, on packed rows.

`--small` runs on a CPU in seconds. The exit code is 1 if bits differ, as they must under `DETJAX_BACKEND=stock`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Annotated, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from benchmarks import study as options
from benchmarks.study import Result, Run
from detjax.audit.comparison.divergence import divergence
from detjax.bench import presets
from detjax.cli.options import Option
from detjax.engine import Engine, EngineConfig, Generation, Request, SamplingParams
from detjax.models.network import split
from detjax.operands.options import MODEL_DISTRIBUTION, Distribution
from detjax.rl.trainer.gradients import last_hidden_states
from detjax.rl.trainer.microbatches import Microbatch, Packed, Rows, Sample, by_sequence
from detjax.runtime import backends, compilation

TEMPERATURES: Final = 0.0, 0.6, 1.0, 1.5
FILTERS: Final = {"top_k": 50, "top_p": 0.9, "min_p": 0.02}
DISTRIBUTIONS: Final = tuple(
    Distribution(temperature, **filters) for temperature, filters in itertools.product(TEMPERATURES, ({}, FILTERS))
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a run.

    Attributes:
        preset: the model's shape.
        layers: its number of layers; None: the preset's own.
        samples: samples per distribution.
        tokens: tokens per sample.
        longest_prompt: maximum number of tokens of a prompt.
        slots: concurrent samples.
        budget: tokens per step.
        row: tokens per row of the trainer's microbatches.
        is_packed: whether sequences are packed into rows.
    """

    preset: str = "Qwen3-0.6B"
    layers: int | None = None
    samples: int = 32
    tokens: int = 256
    longest_prompt: int = 200
    slots: int = 128
    budget: int = 512
    row: int = 8192
    is_packed: bool = True


SMALL: Final = Sizes("tiny", 2, 4, 12, 20, 6, 32, 64)


def requests(sizes: Sizes, vocabulary: int) -> list[Request]:
    """Returns mixed requests of all distributions, for two samples each. Prompts vary in length and share prefixes."""
    random = np.random.default_rng(0)
    shared = random.integers(0, vocabulary, sizes.longest_prompt)
    made = []
    for number in range(sizes.samples // 2):
        for distribution in DISTRIBUTIONS:
            prompt = shared[: random.integers(1, sizes.longest_prompt)].tolist()
            if number % 2:
                prompt += random.integers(0, vocabulary, random.integers(1, 20)).tolist()
            options: dict[str, Any] = dataclasses.asdict(distribution) | {"n": 2, "sampling_logprobs": True}
            params = SamplingParams(sizes.tokens, seed=len(made), ignore_eos=True, **options)
            made.append(Request(prompt, params))
    return made


def compared(sizes: Sizes) -> dict[str, Any]:
    """Returns the divergence between sampler and trainer in logprobs of the model and of each sampling distribution."""
    config, decoder = presets.config(sizes.preset, sizes.layers), presets.decoder(sizes.preset, sizes.layers)
    given = requests(sizes, config.vocab_size)
    longest = sizes.longest_prompt + 20 + sizes.tokens
    options = {"max_samples": sizes.slots, "token_budget": sizes.budget, "max_length": longest, "prefix_cache": True}
    with Engine(decoder, None, EngineConfig(**options, top_logprobs=0)) as engine:
        if backends.backend() != "portable":
            engine.warm_up(in_background=True)  # compiles in parallel; an interpreter's few steps do not need it
        answers = engine.generate(given)
    network, weights = split(decoder)
    hidden_states = compilation.jit(lambda weights, batch: last_hidden_states(network.with_weights(weights), batch))
    layout = Packed(sizes.row) if sizes.is_packed else Rows(sizes.row // longest, -(-longest // 16) * 16)
    results = {}
    raw: list[tuple[Any, Any]] = []
    for distribution in DISTRIBUTIONS:
        chosen = [i for i, request in enumerate(given) if _distribution_of(request.sampling) == distribution]
        generations = [answers[index] for index in chosen]
        samples = [sample for generation in generations for sample in _samples(generation)]
        completions = [one for generation in generations for one in generation.completions]
        placed = list(layout.microbatches(samples))
        hidden = [hidden_states(weights, jax.tree.map(jnp.asarray, one.arrays)) for one in placed]

        def logprobs(drawn: Distribution, placed: Any = placed, hidden: Any = hidden) -> list[np.ndarray]:
            program = _logprobs_program(network, drawn)
            pairs = zip(placed, hidden, strict=True)
            return by_sequence(placed, [program(weights, states, one.arrays) for one, states in pairs])

        raw += zip([one.logprobs for one in completions], logprobs(MODEL_DISTRIBUTION), strict=True)
        sampler = [np.asarray(one.sampling_logprobs, np.float32) for one in completions]
        results[str(distribution)] = divergence(sampler, logprobs(distribution)).as_dict()
    sampler, trainer = zip(*raw, strict=True)
    results["model"] = divergence([np.asarray(x, np.float32) for x in sampler], trainer).as_dict()
    return results


def _distribution_of(params: SamplingParams) -> Distribution:
    return Distribution(params.temperature, params.top_k, params.top_p, params.min_p)


def _samples(generation: Generation) -> list[Sample]:
    prompt = generation.prompt_tokens

    def sample(tokens: Sequence[int]) -> Sample:
        nothing = np.zeros(len(tokens), np.float32)
        return Sample(np.asarray([*prompt, *tokens], np.int32), nothing, nothing)

    return [sample(one.tokens) for one in generation.completions]


@functools.cache
def _logprobs_program(network: Any, distribution: Distribution) -> Any:
    @compilation.jit
    def program(weights: Any, hidden: Array, microbatch: Microbatch) -> Array:
        return network.with_weights(weights).logprobs(hidden, jnp.asarray(microbatch.targets), distribution)

    return program


def study(
    run: Run,
    *,
    preset: options.Preset = Sizes.preset,
    layers: options.Layers = None,
    packed: Annotated[bool, Option("The trainer's layout of sequences.", name="--packed/--rows")] = True,
) -> Result:
    sizes = dataclasses.replace(SMALL if run.small else Sizes(preset, layers), is_packed=packed)
    results = compared(sizes)
    unequal = {name: result["unequal_tokens"] for name, result in results.items() if result["unequal_tokens"]}
    return Result(
        {"sizes": dataclasses.asdict(sizes), "results": results},
        f"sampler and trainer have unequal bits: {unequal}" if unequal else "",
    )
