"""A step loop with the smallest checkpoint and few programs."""

import functools
from pathlib import Path
from typing import Final

from detjax.engine import BatchShapes, Completion, SamplingParams, SamplingVariant, Sequence, StepLoop, StepLoopConfig
from detjax.models import Decoder, load

FIXTURE: Final = Path(__file__).parents[1] / "fixtures" / "qwen3"
VARIANTS = (
    SamplingVariant(filtered=False, top_logprobs=0),
    SamplingVariant(filtered=True, top_logprobs=0),
    SamplingVariant(filtered=True, top_logprobs=2, adjusted=True),
)


@functools.cache
def small_model() -> Decoder:
    return load(FIXTURE, dtype="bfloat16", progress=False)[0]


def small_loop(variants: tuple[SamplingVariant, ...] = VARIANTS, runs_of: int = 0) -> StepLoop:
    """Returns a loop of one slot whose programs are 3 of layers, 1 of each variant, 2 others, and with runs 2 more."""
    shapes = BatchShapes.for_serving(1, 8)
    config = StepLoopConfig(shapes=shapes, num_pages=2, pages_per_sequence=1, variants=variants, runs_of=runs_of)
    return StepLoop.for_model(small_model(), config)


def answers(loop: StepLoop) -> list[Completion]:
    """Returns what a loop makes of requests for every kind of program."""
    params = (
        SamplingParams(max_tokens=4),
        SamplingParams(max_tokens=3, temperature=0.8, top_k=20, seed=3),
        SamplingParams(max_tokens=3, repetition_penalty=1.3, top_logprobs=2),
        SamplingParams(max_tokens=2, prompt_logprobs=True),
        SamplingParams(max_tokens=6, temperature=0.7),
    )
    sequences = [Sequence(tuple(range(2 + index, 12 + index)), one) for index, one in enumerate(params)]
    for sequence in sequences:
        loop.submit(sequence)
    while not loop.is_idle:
        loop.step()
    return [sequence.completion() for sequence in sequences]
