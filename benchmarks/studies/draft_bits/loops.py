"""The step loops of a model, without guesses and with each kind of them, as engines have them."""

import dataclasses
import functools
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import jax

from benchmarks.studies.draft_bits.models import MOST, NAMES, model, speculative
from detjax.engine import BatchShapes, SamplingVariant, StepLoop, StepLoopConfig
from detjax.engine.batch import BatchShape
from detjax.engine.drafts.loading import Guesser
from detjax.engine.program_compiler import ProgramCompiler
from detjax.engine.scheduler import StepLimits
from detjax.models import Draft

PAGES: Final = 3
"""Pages of a sequence."""
PLAIN: Final = ""
"""The kind of no guesses."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a round of requests, and of the steps that answer it.

    Attributes:
        requests: requests of a round.
        tokens: maximum number of tokens of an answer.
        arrivals: maximum number of requests that arrive before a step.
        slots: sequences that are computed at the same time.
        step_tokens: maximum number of tokens of a step.
        rows: maximum number of rows of a step's prefills, which sequences with guesses may be among.
        prefill_chunk: maximum number of tokens of a prefill chunk.
        fewest_pages: the least pages that sequences share. The most are as many as all slots can have.
    """

    requests: int
    tokens: int
    arrivals: int
    slots: int
    step_tokens: int
    rows: int
    prefill_chunk: int
    fewest_pages: int


NARROW: Final = Sizes(
    requests=36,
    tokens=100,
    arrivals=3,
    slots=12,
    step_tokens=90,
    rows=96,
    prefill_chunk=40,
    fewest_pages=PAGES + 1,
)
"""Sizes for CPUs, where a step takes longer the more tokens it has."""
WIDE: Final = Sizes(
    requests=400,
    tokens=100,
    arrivals=12,
    slots=64,
    step_tokens=560,
    rows=640,
    prefill_chunk=40,
    fewest_pages=48,
)
"""Sizes for accelerators, where a step of small models takes the host's time for it, however many tokens it has.

The cache has pages for half of the sequences or more, since steps of few sequences would take most of the time.
"""


@functools.cache
def loops(name: str, sizes: Sizes, programs: Path | None) -> Mapping[str, StepLoop]:
    """Returns the loops of a model, by the kind of their guesses, `PLAIN` first.

    Args:
        name: the model.
        sizes: the sizes of their steps.
        programs: a directory of compiled programs, where all programs of the loops are looked up or added at once.
            None: programs are compiled when steps need them.
    """
    one = model(name)
    guessers: dict[str, Guesser] = {PLAIN: None, **one.guessers}
    made = {kind: _loop(name, kind, guesser, sizes) for kind, guesser in guessers.items()}
    if programs is not None:
        compiler = ProgramCompiler(programs, processes=_compilers() if jax.default_backend() == "gpu" else None)
        depths = {kind: _depths(guesser) for kind, guesser in guessers.items() if kind}
        warm_up(made, depths, compiler)
    return made


def _loop(name: str, kind: str, guesser: Guesser, sizes: Sizes) -> StepLoop:
    """Returns a loop with the sampling of all requests."""
    decoder, slots, drafts = model(name).decoder, sizes.slots, MOST if kind else 0
    sampled, decodes_guesses = slots * (1 + drafts), not decoder.has_slots  # as an engine has it
    limits = StepLimits(
        slots=slots,
        tokens=sizes.step_tokens,
        prefills=slots,
        rows=sizes.rows,
        prefill_chunk=sizes.prefill_chunk,
        mixes=True,
        drafts=slots * drafts,
        decodes_guesses=decodes_guesses,
    )
    # Each shape has its own programs, which on a GPU take tens of seconds to compile.
    decodes = sampled if decodes_guesses else slots
    shapes = [BatchShape(slots, 0, 0, slots), BatchShape(decodes, sizes.rows, slots, sampled)]
    if drafts and decodes_guesses:
        shapes.append(BatchShape(sampled, 0, 0, sampled, queries=1 + drafts))
    config = StepLoopConfig(
        shapes=BatchShapes(shapes, limits),
        num_pages=slots * PAGES,
        pages_per_sequence=PAGES,
        variants=(SamplingVariant(True, 2, adjusted=True, constrained=True, distribution=True),),
        prefix_cache=True,
        speculative=speculative(kind, guesser) if kind else None,
        layers_at_once=1 if kind else None,  # an engine with guesses has such blocks of larger models
    )
    return StepLoop.for_model(decoder, config, guesser=guesser)


def _depths(guesser: Guesser) -> Any:
    """Returns what the model's programs compute for a guesser; see `ModelRunner`."""
    return guesser.head.depths or () if isinstance(guesser, Draft) else None


def warm_up(loops: Mapping[str, StepLoop], depths: Mapping[str, Any], compiler: ProgramCompiler) -> None:
    """Compiles all programs of a model's loops, many at a time, and runs each of them once.

    Args:
        loops: the loops, the plain one first.
        depths: what the other ones compute in addition, by their kinds; those with equal depths share programs.
        compiler: compiles programs. What one loop has compiled, the others load from its cache.
    """
    plain, *drafting = loops.values()
    drafters = [loop.drafting.drafter for loop in drafting if loop.drafting is not None]
    firsts = {depth: loops[kind] for kind, depth in depths.items()}.values()
    with ThreadPoolExecutor(len(drafters) + 1) as pool:
        _wait([pool.submit(plain.warm_up, compiler), *(pool.submit(one.compile, compiler) for one in drafters)])
        _wait(pool.submit(loop.warm_up, compiler) for loop in firsts)
        _wait(pool.submit(loop.warm_up, compiler) for loop in drafting if loop not in firsts)


def _wait(futures: Iterable[Future[None]]) -> None:
    for future in list(futures):
        future.result()


def _compilers() -> int:
    """Returns how many processes compile the programs of a loop or drafter on a GPU.

    As many models are compiled at a time as there are, and four or five loops and drafters of each.
    """
    return max(2, (os.cpu_count() or 1) // (4 * len(NAMES)))
