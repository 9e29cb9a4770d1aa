"""Tokens and logprob bits of speculative decoding, compared with plain decoding on small models.

    python -m benchmarks draft_bits --seconds 900 --out benchmarks/results/draft-bits-cpu.json

Random requests with everything that a token may depend on are answered without guesses, and then with each kind of
draft: prompt lookup, smaller models, heads, the right answers, wrong tokens, and numbers beyond the vocabulary. Drafts
have random lengths from 0 to 7, requests arrive at random steps and are preempted at others. The models are the demo's
checkpoint, and random ones with windows, and with linear attention. Tokens, all logprobs, texts, the pieces of streamed
texts, and the reasons for ends have to be equal.

The result counts tokens that were compared. A later call with the same `--out` continues where the last one ended. The
exit code is 1 if any bit differs.

Small models leave most of a machine idle, so `--processes` answers several rounds of requests at a time. On a CPU, a
process for each processor is sensible; on GPUs fewer, such as twelve for each of `--devices` with 16 processors,
because a process has several threads. If there are a multiple of three in all, each process needs the programs of only
one of the three models. Start CUDA's multi-process service first, by `nvidia-cuda-mps-control -d`: without it, twelve
processes had a GPU in turns, and a round took an H200 475 s rather than 65.

A step of small models takes an accelerator less time than the host, so there rounds have hundreds of requests and steps
hundreds of tokens. The first process of each model compiles its programs before the first round, many at a time, and
the others load them. They are kept in JAX's compilation cache if it has a directory. The result is written after each
round, and a line on standard error says how far the study is.

`--small` compares a few tokens in seconds: a round in each process.
"""

import os

# The processes of `--processes` share the devices' memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import contextlib
import dataclasses
import functools
import itertools
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, as_completed, wait
from pathlib import Path
from typing import Annotated, Any, Final

import jax

from benchmarks.devices import environment
from benchmarks.studies.draft_bits.loops import NARROW, PAGES, PLAIN, WIDE, Sizes, loops
from benchmarks.studies.draft_bits.models import ADVERSARIES, MOST, NAMES, Adversary, kinds, model
from benchmarks.studies.draft_bits.requests import LONGEST, covered, everything, requests
from benchmarks.study import Result, Run
from detjax.cli.options import Option, UsageError
from detjax.engine import EngineConfig, Request, Sequence, StepLoop
from detjax.engine.drafts.drafting import Drafting
from detjax.engine.page_pool import PagePool
from detjax.engine.request_reader import RequestReader

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
    processes: Annotated[int, Option("Answer this many rounds at a time on each device.", minimum=1)] = 1,
    devices: Annotated[int, Option("Answer rounds on this many GPUs.", minimum=1)] = 1,
) -> Result:
    if devices > (there := jax.local_device_count()):
        raise UsageError(f"--devices: {devices} devices are more than this machine has; accepted: 1 to {there}")
    content: Counts = {"rounds": 0, "begun": 0, "tokens_compared": 0, "tokens_with": {}, "preemptions": 0, "drafts": {}}
    if run.out is not None and run.out.exists():
        content = _earlier(run)
    started, sizes = time.monotonic(), _sizes(run.small)
    content["sizes"] = {name: dataclasses.asdict(size) for name, size in sizes.items()}
    shares = [share % devices for share in range(processes * devices)]
    last = content["begun"] + len(shares) if run.small else sys.maxsize

    def is_over() -> bool:
        is_late = time.monotonic() - started >= seconds
        return is_late or content["tokens_compared"] >= tokens or content["begun"] >= last

    with _programs() as programs:
        for counts in _rounds(content, sizes, programs, shares, is_over):
            _add(content, counts)
            run.save(content)
            progress = f"{content['rounds']} rounds, {content['tokens_compared']} tokens"
            print(f"{progress} after {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    different = sum(one["answers_with_other_bits"] for one in content["drafts"].values())
    return Result(content, f"{different} answers have other bits with drafts" if different else "")


def _rounds(
    content: Counts,
    sizes: Mapping[str, Sizes],
    programs: Path | None,
    shares: list[int],
    is_over: Callable[[], bool],
) -> Iterator[Counts]:
    """Yields what each round compared, until `is_over`; the content has the number of rounds that were begun.

    Rounds are answered in one process for each of `shares`, which is the number of its device.
    """
    names = list(sizes)

    def begun(share: int) -> tuple[str, str, Sizes, Path | None]:
        """Returns the arguments of the next round of a process."""
        number = next(numbers[share])
        content["begun"] = max(content["begun"], number + 1)
        name = names[number % len(names)]
        return name, f"{name} {number}", sizes[name], programs

    first = content["begun"]
    numbers = [itertools.count(first + share, len(shares)) for share in range(len(shares))]
    if len(shares) == 1:
        while not is_over():
            yield _round(*begun(0))
        return
    with contextlib.ExitStack() as stack:
        context = multiprocessing.get_context("spawn")
        workers = [stack.enter_context(ProcessPoolExecutor(1, context, _take_device, (device,))) for device in shares]
        running: dict[Future[Counts], int] = {}
        for share in _with_programs(workers, sizes, first, programs):
            running[workers[share].submit(_round, *begun(share))] = share
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                share = running.pop(future)
                if not is_over():
                    running[workers[share].submit(_round, *begun(share))] = share
                yield future.result()


def _take_device(number: int) -> None:
    """Lets this process, and those that it starts to compile programs, see one GPU only."""
    os.environ.update(environment(number))


def _with_programs(
    workers: Seq[Executor], sizes: Mapping[str, Sizes], first: int, programs: Path | None
) -> Iterator[int]:
    """Yields the numbers of processes as soon as the programs of their first models are compiled.

    One process compiles the programs of a model, and the others of that model load them.
    """
    names = list(sizes)
    if programs is None:
        yield from range(len(workers))
        return
    started = time.monotonic()
    compiling = {
        workers[share].submit(_compile, name := names[(first + share) % len(names)], sizes[name], programs): share
        for share in range(min(len(names), len(workers)))
    }
    for future in as_completed(compiling):
        future.result()
        share = compiling[future]
        seconds = time.monotonic() - started
        name = names[(first + share) % len(names)]
        print(f"programs of {name} compiled after {seconds:.0f} s", file=sys.stderr, flush=True)
        yield from range(share, len(workers), len(names))


def _compile(name: str, sizes: Sizes, programs: Path) -> None:
    """Compiles the programs of a model."""
    loops(name, sizes, programs)


@contextlib.contextmanager
def _programs() -> Iterator[Path | None]:
    """A context with a directory where processes share compiled programs; None on a CPU, which compiles what it needs.

    On an accelerator, a program takes so long that processes should not compile one after another.
    """
    if jax.default_backend() == "cpu":
        yield None
    elif jax.config.jax_compilation_cache_dir:
        yield Path(jax.config.jax_compilation_cache_dir) / "programs"
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)


def _sizes(is_small: bool) -> dict[str, Sizes]:
    """Returns the models and the sizes of their rounds."""
    sizes = NARROW if jax.default_backend() == "cpu" else WIDE
    if is_small:
        return {NAMES[0]: dataclasses.replace(sizes, requests=5, tokens=9)}
    # Steps with linear layers verify guesses among the rows of prefills, which takes an accelerator longest.
    fewer = dataclasses.replace(sizes, requests=sizes.requests // 4) if sizes is WIDE else sizes
    return {name: fewer if name == "linear" else sizes for name in NAMES}


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


def _round(name: str, seed: str, sizes: Sizes, programs: Path | None) -> Counts:
    """Answers requests without drafts and with each kind, and returns what was compared."""
    one, loop_of = model(name), loops(name, sizes, programs)
    some = requests(seed, sizes.requests, sizes.tokens, one.decoder.config.vocab_size, one.tokenizer)
    plain, pieces = _answers(loop_of[PLAIN], name, some, f"{seed} plain", sizes)
    compared = sum(len(sample.generated) for sample in plain)
    drafts: dict[str, Counts] = {}
    preemptions = 0
    for kind in kinds(name):
        loop = loop_of[kind if kind in one.guessers else "ngram"]
        drafting = _drafting(loop, name, f"{seed} {kind}")
        if kind in ADVERSARIES:
            drafting.drafter = Adversary(plain, ADVERSARIES[kind], seed)
        before = loop.scheduler.preemptions
        samples, own_pieces = _answers(loop, name, some, f"{seed} {kind}", sizes)
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
    loop: StepLoop, name: str, some: list[Request], seed: str, sizes: Sizes
) -> tuple[list[Sequence], list[list[str | None]]]:
    """Returns the samples of requests, and the pieces of their texts."""
    one, numbers = model(name), random.Random(seed)
    reader = RequestReader(one.decoder, one.tokenizer, EngineConfig(max_length=LONGEST))
    samples = [sample for request in some for sample in reader.samples_of("r", request, is_streamed=True)]
    order = numbers.sample(samples, len(samples))
    # Few enough pages that samples are preempted for others, and enough for the longest one.
    # Pages do not hold the state of linear layers, so prefixes of such models are not kept.
    keeps_prefixes = numbers.random() < 0.5 and not one.decoder.has_slots
    loop.scheduler.pool = PagePool(
        numbers.randint(sizes.fewest_pages, sizes.slots * PAGES), keeps_prefixes=keeps_prefixes
    )
    pieces: dict[Sequence, list[str | None]] = {sample: [] for sample in samples}
    for sample, text in _played(loop, order, numbers, sizes.arrivals):
        pieces[sample].append(text)
    return samples, list(pieces.values())


def _played(
    loop: StepLoop, waiting: list[Sequence], numbers: random.Random, arrivals: int
) -> Iterator[tuple[Sequence, str | None]]:
    """Yields the pieces of texts while samples arrive and are preempted."""
    while waiting or not loop.is_idle:
        for _ in range(numbers.randint(0, arrivals) if waiting else 0):
            if waiting:
                loop.submit(waiting.pop())
        if loop.is_idle:
            continue
        tokens = loop.step()
        if numbers.random() < _PREEMPTED:
            tokens += loop.drain()
            loop.scheduler.preempt_all()
        yield from ((sample, token.text) for sample, token in tokens)
