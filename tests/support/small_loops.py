"""A step loop and engines with the smallest checkpoint and few programs."""

import functools
from pathlib import Path
from typing import Any, Final

from detjax.engine import (
    BatchShapes,
    Completion,
    Engine,
    PromptLogprobs,
    SamplingParams,
    SamplingVariant,
    Sequence,
    StepLoop,
    StepLoopConfig,
)
from detjax.engine.page_pool import PagePool
from detjax.models import Decoder, Tokenizer, load

FIXTURE: Final = Path(__file__).parents[1] / "fixtures" / "qwen3"
VARIANTS = (
    SamplingVariant(filtered=False, top_logprobs=0),
    SamplingVariant(filtered=True, top_logprobs=0),
    SamplingVariant(filtered=True, top_logprobs=2, adjusted=True),
)


@functools.cache
def small_model() -> Decoder:
    return load(FIXTURE, dtype="bfloat16", progress=False)[0]


def small_loop(variants: tuple[SamplingVariant, ...] = VARIANTS, runs_of: int = 0, *, num_pages: int = 2) -> StepLoop:
    """Returns a loop of one slot whose programs are 3 of layers, 1 of each variant, 2 others, and with runs 2 more.

    Loops of the same number of pages share their programs.
    """
    shapes = BatchShapes.for_serving(1, 8)
    config = StepLoopConfig(
        shapes=shapes, num_pages=num_pages, pages_per_sequence=1, variants=variants, runs_of=runs_of
    )
    return StepLoop.for_model(small_model(), config)


def answers(loop: StepLoop) -> list[tuple[Completion, PromptLogprobs | None]]:
    """Returns what a loop makes of requests for every kind of its programs."""
    params = (
        SamplingParams(max_tokens=4),
        SamplingParams(max_tokens=3, temperature=0.8, top_k=20, seed=3),
        SamplingParams(max_tokens=3, repetition_penalty=1.3, top_logprobs=2),
        SamplingParams(max_tokens=2, prompt_logprobs=True),
        SamplingParams(max_tokens=6, temperature=0.7),
        SamplingParams(
            max_tokens=2,
            temperature=0.7,
            top_p=0.9,
            repetition_penalty=1.3,
            top_logprobs=2,
            prompt_logprobs=True,
            sampling_logprobs=True,
        ),
    )
    variants = loop._runner._variants
    served = [one for one in params if any(variant.serves(SamplingVariant(*one.needs)) for variant in variants)]
    sequences = [Sequence(tuple(range(2 + index, 12 + index)), one) for index, one in enumerate(served)]
    for sequence in sequences:
        loop.submit(sequence)
    while not loop.is_idle:
        loop.step()
    return [(sequence.completion(), sequence.scored_prompt()) for sequence in sequences]


@functools.cache
def small_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.load(FIXTURE)
    assert tokenizer is not None
    return tokenizer


def small_engine(*, pages: int | None = None, **options: Any) -> Engine:
    """Returns an engine of three samples with steps of 40 tokens. All of them share their programs.

    Args:
        pages: pages that the scheduler may use; the device has nine, so that the same programs serve any number.
        options: other settings than these.
    """
    settings = {"max_samples": 3, "token_budget": 40, "max_length": 300, "num_pages": 9, "top_logprobs": 3}
    engine = Engine(small_model(), small_tokenizer(), **settings | options)
    return engine if pages is None else with_pages(engine, pages)


def with_pages(engine: Engine, pages: int) -> Engine:
    """Lets the scheduler of an engine without requests use this many pages, and returns the engine."""
    scheduler = engine._loop.scheduler
    old = scheduler.pool
    assert pages <= old.num_pages
    scheduler.pool = PagePool(pages, keeps_prefixes=old.keeps_prefixes, snapshots=old.snapshots)
    return engine
