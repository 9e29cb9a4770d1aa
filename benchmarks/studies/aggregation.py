"""Aggregation of experts: the distance in logprobs of other orders of addition from the contract.

    python -m benchmarks aggregation --out benchmarks/results/aggregation-tiny-cpu.json
    python -m benchmarks aggregation --preset Qwen3-30B-A3B --layers 8 --out benchmarks/results/aggregation-h200.json

k3 is the mean of exp(d) - 1 - d over tokens, d being the difference of logprobs. Without a preset, the tiny checkpoint
of the tests is measured. See `detjax.ops.combine_experts` for the aggregations.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import study as options
from benchmarks.study import Result, Run
from detjax import ops
from detjax.audit.comparison.divergence import divergence
from detjax.bench import presets
from detjax.cli.options import Option, usage_errors
from detjax.models import Decoder, DecoderConfig, load
from detjax.models.network import Weights, abstract, split
from detjax.operands.options import Aggregation
from detjax.runtime import compilation

CONTRACT: Aggregation = get_args(Aggregation)[0]


def tiny() -> Decoder:
    """Returns the tests' tiny Qwen3-MoE checkpoint, in bfloat16."""
    folder = Path(__file__).parents[2] / "tests" / "fixtures" / "qwen3-moe"
    return load(folder, dtype="bfloat16", progress=False)[0]


def random_decoder(name: str, layers: int | None) -> Decoder:
    """Returns a decoder of a preset's shape with random weights.

    Raises:
        ValueError: the preset has no experts.
    """
    if presets.config(name, layers).experts is None:
        accepted = [other for other in presets.MODELS if presets.config(other, None).experts is not None]
        raise ValueError(f"preset {name!r} has no experts; accepted: {', '.join(accepted)}")
    return presets.decoder(name, layers)


def measure(model: Decoder, sequences: int, length: int) -> Iterator[dict[str, Any]]:
    """Yields the divergence of each aggregation's logprobs of random tokens from the contract's."""
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (sequences, length)).astype(np.int32)
    weights = split(model)[1]
    reference, best = _logprobs(model.config, CONTRACT, weights, tokens)
    for aggregation in get_args(Aggregation):
        values, likeliest = _logprobs(model.config, aggregation, weights, tokens)
        between = divergence(list(reference), list(values)).as_dict()
        agreement = float((best == likeliest).mean())
        yield {"aggregation": aggregation, "top_1_agreement": agreement, **between}


def _logprobs(
    config: DecoderConfig, aggregation: Aggregation, weights: Weights, tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The logprob of each next token, and the likeliest token at each position."""
    assert config.experts is not None
    experts = dataclasses.replace(config.experts, aggregation=aggregation)
    other = dataclasses.replace(config, experts=experts)
    network = split(abstract(lambda: Decoder(other, rngs=nnx.Rngs(0), dtype=weights[0].dtype)))[0]

    @compilation.jit
    def program(weights: Weights, tokens: Any) -> tuple[Any, Any]:
        logits = network.with_weights(weights)(tokens)
        logprobs = ops.log_softmax(logits[:, :-1])
        return jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0], jnp.argmax(logits, axis=-1)

    values, likeliest = program(weights, tokens)
    return np.asarray(values), np.asarray(likeliest)


def study(
    run: Run,
    *,
    preset: Annotated[str | None, Option("A shape to fill with random weights.")] = None,
    layers: options.Layers = None,
    sequences: Annotated[int, Option("Sequences of random tokens.", minimum=1)] = 16,
    length: Annotated[int, Option("Tokens per sequence.", minimum=2)] = 128,
) -> Result:
    with usage_errors():
        model = tiny() if preset is None else random_decoder(preset, layers)
    results = list(measure(model, *((2, 16) if run.small else (sequences, length))))
    sizes = {"preset": preset, "layers": layers, "sequences": sequences, "length": length}
    return Result({"sizes": sizes, "results": results})
