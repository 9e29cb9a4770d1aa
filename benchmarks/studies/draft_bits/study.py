"""Tokens and logprob bits of speculative decoding, compared with plain decoding on small models.

    python -m benchmarks draft_bits --seconds 900 --out benchmarks/results/draft-bits-cpu.json

Random requests with everything that a token may depend on are answered without guesses, and then with each kind of
draft: prompt lookup, smaller models, heads, the right answers, wrong tokens, and numbers beyond the vocabulary. Drafts
have random lengths from 0 to 7, requests arrive at random steps and are preempted at others. The models are the demo's
checkpoint, and random ones with windows, and with linear attention. Tokens, all logprobs, texts, the pieces of streamed
texts, and the reasons for ends have to be equal.

The result counts tokens that were compared. A later call with the same `--out` continues where the last one ended. The
exit code is 1 if any bit differs. Small models leave most of a machine idle, so `--processes` answers several rounds of
requests at a time, in processes that take the devices in turn. Each process compiles the programs of its models: one of
the three models if the number of processes is a multiple of three.

`--small` compares a few tokens in seconds: a round in each process.
"""

import os

# The processes of `--processes` share the devices' memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import contextlib
import functools
import itertools
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Annotated, Any, Final

import jax

from benchmarks.studies.draft_bits.models import ADVERSARIES, MOST, NAMES, Adversary, kinds, model, speculative
from benchmarks.studies.draft_bits.requests import LONGEST, covered, everything, requests
from benchmarks.study import Result, Run
from detjax.cli.options import Option, UsageError
from detjax.engine import (
    BatchShapes,
    EngineConfig,
    Request,
    SamplingVariant,
    Sequence,
    SpeculativeConfig,
    StepLoop,
    StepLoopConfig,
)
from detjax.engine.batch import BatchShape
from detjax.engine.drafts.drafting import Drafting
from detjax.engine.drafts.loading import Guesser
from detjax.engine.page_pool import PagePool
from detjax.engine.request_reader import RequestReader
from detjax.engine.scheduler import StepLimits

SLOTS: Final = 12
REQUESTS: Final = 36
"""Requests of a round."""
TOKENS: Final = 100
"""Maximum number of tokens of an answer."""
_PAGES: Final = 3
"""Pages of a sequence."""
_PREEMPTED: Final = 0.02
"""Probability of a step after which all samples are preempted."""
_SAME: Final = "contract_version", "backend", "device_kind", "jax", "jaxlib", "compiler_options"
"""Parts of the fingerprint that have to be equal to continue a result."""

type Counts = dict[str, Any]


def study(
    run: Run,
    *,
    tokens: Annotated[int, Option("Compare this many tokens in all.", minimum=1)] = 1_000_000,
    seconds: Annotated[float, Option("Begin no round of requests after this time.", minimum=0)] = 1e9,
    processes: Annotated[int, Option("Answer this many rounds at a time, each in a process.", minimum=1)] = 1,
) -> Result:
    content: Counts = {"rounds": 0, "begun": 0, "tokens_compared": 0, "tokens_with": {}, "preemptions": 0, "drafts": {}}
    if run.out is not None and run.out.exists():
        content = _earlier(run)
    started, (sizes, names) = time.monotonic(), _sizes(run.small)
    last = content["begun"] + processes if run.small else sys.maxsize

    def is_over() -> bool:
        is_late = time.monotonic() - started >= seconds
        return is_late or content["tokens_compared"] >= tokens or content["begun"] >= last

    for counts in _rounds(content, names, sizes, processes, is_over):
        _add(content, counts)
        run.save(content)
    different = sum(one["answers_with_other_bits"] for one in content["drafts"].values())
    return Result(content, f"{different} answers have other bits with drafts" if different else "")


def _rounds(
    content: Counts, names: tuple[str, ...], sizes: tuple[int, int], processes: int, is_over: Callable[[], bool]
) -> Iterator[Counts]:
    """Yields what each round compared, until `is_over`; the content has the number of rounds that were begun."""

    def begun(share: int) -> tuple[str, str, int, int]:
        """Returns the arguments of the next of every `processes` rounds."""
        number = next(numbers[share])
        content["begun"] = max(content["begun"], number + 1)
        name = names[number % len(names)]
        return name, f"{name} {number}", *sizes

    numbers = [itertools.count(content["begun"] + share, processes) for share in range(processes)]
    if processes == 1:
        while not is_over():
            yield _round(*begun(0))
        return
    with contextlib.ExitStack() as stack:
        context = multiprocessing.get_context("spawn")
        workers = [
            stack.enter_context(ProcessPoolExecutor(1, context, _take_device, (share % jax.local_device_count(),)))
            for share in range(processes)
        ]
        running: dict[Future[Counts], int] = {}
        for share, worker in enumerate(workers):
            running[worker.submit(_round, *begun(share))] = share
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                share = running.pop(future)
                if not is_over():
                    running[workers[share].submit(_round, *begun(share))] = share
                yield future.result()


def _take_device(index: int) -> None:
    """Lets this process see one GPU only."""
    jax.config.update("jax_cuda_visible_devices", str(index))


def _sizes(is_small: bool) -> tuple[tuple[int, int], tuple[str, ...]]:
    """Returns the number of requests and of tokens of an answer, and the models."""
    return ((5, 9), NAMES[:1]) if is_small else ((REQUESTS, TOKENS), NAMES)


def _earlier(run: Run) -> Counts:
    """Returns the content of the result that the run continues.

    Raises:
        UsageError: another device or version has made it.
    """
    assert run.out is not None
    earlier = json.loads(run.out.read_text())
    for key in _SAME:
        before, now = earlier["fingerprint"][key], run.heading["fingerprint"][key]
        if before != now:
            raise UsageError(
                f"--out: {run.out} was made with {key} {before!r}, and this is {now!r}; accepted: a result of this "
                "device and version to continue, or a new file"
            )
    return {"begun": earlier["rounds"]} | {key: value for key, value in earlier.items() if key not in run.heading}


def _round(name: str, seed: str, count: int, tokens: int) -> Counts:
    """Answers requests without drafts and with each kind, and returns what was compared."""
    one = model(name)
    some = requests(seed, count, tokens, one.decoder.config.vocab_size, one.tokenizer)
    plain, pieces = _answers(_loop(name, ""), name, some, f"{seed} plain")
    compared = sum(len(sample.generated) for sample in plain)
    drafts: dict[str, Counts] = {}
    preemptions = 0
    for kind in kinds(name):
        loop = _loop(name, kind if kind in one.guessers else "ngram")
        drafting = _drafting(loop, name, f"{seed} {kind}")
        if kind in ADVERSARIES:
            drafting.drafter = Adversary(plain, ADVERSARIES[kind], seed)
        before = loop.scheduler.preemptions
        samples, own_pieces = _answers(loop, name, some, f"{seed} {kind}")
        wrong = [
            index
            for index, (sample, expected) in enumerate(zip(samples, plain, strict=True))
            if everything(sample) != everything(expected) or own_pieces[index] != pieces[index]
        ]
        preemptions += loop.scheduler.preemptions - before
        drafts[f"{name}, {kind}"] = {
            "tokens": compared,
            "guesses": drafting.proposed,
            "right_guesses": sum(drafting.accepted_at),
            "answers_with_other_bits": len(wrong),
            "differences": [f"{seed}, request {index}" for index in wrong],
        }
    return {
        "rounds": 1,
        "tokens_compared": compared * len(drafts),
        "tokens_with": {part: number * len(drafts) for part, number in covered(plain).items()},
        "preemptions": preemptions,
        "drafts": drafts,
    }


def _add(content: Counts, counts: Counts) -> None:
    """Adds the counts of a round to the content."""
    for key, value in counts.items():
        if isinstance(value, dict):
            _add(content.setdefault(key, {}), value)
        else:
            content[key] = content[key] + value if key in content else value


@functools.cache
def _loop(name: str, kind: str) -> StepLoop:
    """Returns the loop of a model and of a kind of guesses; empty: of none."""
    one, guesser, settings = model(name), None, None
    if kind:
        guesser = one.guessers[kind]
        settings = speculative(kind, guesser)
    return _new_loop(name, settings, guesser)


def _new_loop(name: str, settings: SpeculativeConfig | None, guesser: Guesser) -> StepLoop:
    drafts = 0 if settings is None else MOST
    limits = StepLimits(
        slots=SLOTS, tokens=90, prefills=SLOTS, rows=96, prefill_chunk=40, mixes=True, drafts=SLOTS * drafts
    )
    shapes = BatchShape(SLOTS, 0, 0, SLOTS), BatchShape(SLOTS, 96, SLOTS, SLOTS * (1 + drafts))
    config = StepLoopConfig(
        shapes=BatchShapes(shapes, limits),
        num_pages=SLOTS * _PAGES,
        pages_per_sequence=_PAGES,
        variants=(SamplingVariant(True, 2, adjusted=True, constrained=True, distribution=True),),
        prefix_cache=True,
        speculative=settings,
    )
    return StepLoop.for_model(model(name).decoder, config, guesser=guesser)


def _drafting(loop: StepLoop, name: str, seed: str) -> Drafting:
    """Gives a loop drafting whose lengths are random, and returns it."""
    assert loop.drafting is not None
    numbers, config = random.Random(seed), model(name).decoder.config
    drafter = _drafters.setdefault(loop, loop.drafting.drafter)
    lengths = functools.partial(_random_length, numbers)
    loop.drafting = Drafting(drafter, MOST, config.vocab_size, lengths)
    return loop.drafting


_drafters: Final[dict[StepLoop, Any]] = {}
"""The drafter that each loop was made with."""


def _random_length(numbers: random.Random, *_: Any) -> int:
    return numbers.randint(0, MOST)


def _answers(
    loop: StepLoop, name: str, some: list[Request], seed: str
) -> tuple[list[Sequence], list[list[str | None]]]:
    """Returns the samples of requests, and the pieces of their texts."""
    one, numbers = model(name), random.Random(seed)
    reader = RequestReader(one.decoder, one.tokenizer, EngineConfig(max_length=LONGEST))
    samples = [sample for request in some for sample in reader.samples_of("r", request, is_streamed=True)]
    order = numbers.sample(samples, len(samples))
    # Few enough pages that samples are preempted for others, and enough for the longest one.
    # Pages do not hold the state of linear layers, so prefixes of such models are not kept.
    keeps_prefixes = numbers.random() < 0.5 and not one.decoder.has_slots
    loop.scheduler.pool = PagePool(numbers.randint(_PAGES + 1, SLOTS * _PAGES), keeps_prefixes=keeps_prefixes)
    pieces: dict[Sequence, list[str | None]] = {sample: [] for sample in samples}
    for sample, text in _played(loop, order, numbers):
        pieces[sample].append(text)
    return samples, list(pieces.values())


def _played(loop: StepLoop, waiting: list[Sequence], numbers: random.Random) -> Iterator[tuple[Sequence, str | None]]:
    """Yields the pieces of texts while samples arrive and are preempted."""
    while waiting or not loop.is_idle:
        for _ in range(numbers.randint(0, 3) if waiting else 0):
            if waiting:
                loop.submit(waiting.pop())
        if loop.is_idle:
            continue
        tokens = loop.step()
        if numbers.random() < _PREEMPTED:
            tokens += loop.drain()
            loop.scheduler.preempt_all()
        yield from ((sample, token.text) for sample, token in tokens)
