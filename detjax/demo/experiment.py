"""The experiment that made this field: one question at temperature 0, asked again and again while the load changes."""

import dataclasses
import functools
import itertools
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from detjax import backends, fingerprints
from detjax.demo import DEFAULT_PROMPT
from detjax.engine import SamplingParams, generate
from detjax.models import Decoder, Tokenizer

LARGEST_BATCH: Final = 32
"""Requests of a batch: 1 to this."""

MOST_CHUNKS: Final = 32
"""A prompt comes in one piece, or in as many chunks as it has tokens, up to about this many."""

# What the others ask about, meanwhile: pieces of this.
_NEIGHBOURS: Final = """\
JULIET:
O Romeo, Romeo! wherefore art thou Romeo?
Deny thy father and refuse thy name;
Or, if thou wilt not, be but sworn my love,
And I'll no longer be a Capulet.

GLOUCESTER:
Now is the winter of our discontent
Made glorious summer by this sun of York;

First Citizen:
Before we proceed any further, hear me speak.

PROSPERO:
Our revels now are ended. These our actors,
As I foretold you, were all spirits and
Are melted into air, into thin air:
"""


@dataclasses.dataclass(frozen=True)
class Request:
    """Token ids, and how many tokens are to follow them at most."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclasses.dataclass(frozen=True)
class Load:
    """One batch: what the engine is busy with when the question comes.

    Attributes:
        requests: the question and its neighbours, by slot.
        asked: the slots that hold the question, ascending.
        prefill_chunk: tokens of the prompts that are processed at a time.
    """

    requests: tuple[Request, ...]
    asked: tuple[int, ...]
    prefill_chunk: int


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came back: the tokens, the bits of their logprobs, and which slot of which load it was."""

    tokens: tuple[int, ...]
    logprobs: bytes
    load: int
    slot: int


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Two completions that have their first `position` tokens in common, and differ behind them."""

    position: int
    one: tuple[int, ...]
    other: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Tally:
    """How often each completion came, and how many patterns of logprob bits there were.

    Attributes:
        counts: every unique completion with its count, the commonest first.
        bit_patterns: unique completions, if two are the same only when all their logprobs are, in every bit.
    """

    counts: tuple[tuple[tuple[int, ...], int], ...]
    bit_patterns: int

    @classmethod
    def of(cls, answers: Iterable[Answer]) -> "Tally":
        """The tally of one answer or more."""
        answers = list(answers)
        counts = Counter(answer.tokens for answer in answers)
        return cls(tuple(counts.most_common()), len({(answer.tokens, answer.logprobs) for answer in answers}))

    @property
    def asks(self) -> int:
        """All answers."""
        return sum(count for _, count in self.counts)

    @property
    def commonest(self) -> int:
        """How often the commonest completion came."""
        return self.counts[0][1]

    @property
    def reproduced(self) -> bool:
        """Whether all answers were the same, tokens and bits of logprobs."""
        return self.bit_patterns == 1

    @property
    def divergence(self) -> Divergence | None:
        """Where two completions first differ, and the commonest of each side; None if there is one completion."""
        (commonest, _), *others = self.counts
        if not others:
            return None
        # Before the first difference all are alike, so the commonest is on one side of it.
        common = [common_prefix(commonest, other) for other, _ in others]
        return Divergence(min(common), commonest, others[common.index(min(common))][0])


@dataclasses.dataclass(frozen=True)
class Result:
    """Both tallies of the same loads, with the seconds they took, programs being compiled included."""

    loads: int
    stock: Tally
    stock_seconds: float
    detjax: Tally
    detjax_seconds: float
    fingerprint: fingerprints.Fingerprint


def contender(backend: str | None) -> str:
    """The backend that stock XLA is compared with: `backend`; default: the one that serves.

    Raises:
        ValueError: it is no backend, or stock XLA itself.
    """
    with backends.use_backend(backend):
        name = backends.backend()
    if name == backends.STOCK:
        raise ValueError(
            f"demo: the backend is {name!r}, which is what detjax is compared with; accepted: "
            f"{', '.join(backends.BACKENDS)}. Change --backend or {backends.BACKEND_VARIABLE}, or leave them out."
        )
    return name


def pose(model: Decoder, tokenizer: Tokenizer | None, prompt: str | None, max_tokens: int, seed: int) -> Request:
    """The question: `prompt`, by default `DEFAULT_PROMPT`, in tokens; where there is no tokenizer, tokens by chance.

    Raises:
        ValueError: there is a prompt and no tokenizer, the prompt is empty, or the model has no room for it and for
            `max_tokens` behind it.
    """
    if tokenizer is not None:
        tokens = tuple(tokenizer.encode(DEFAULT_PROMPT if prompt is None else prompt))
    elif prompt is None:
        tokens = _by_chance(model, 24, seed)
    else:
        raise ValueError(
            f"demo: the prompt is {prompt!r} and the checkpoint has no tokenizer.json; accepted: no prompt, tokens are "
            "then drawn by chance. Leave it out, or add the tokenizer's files to the checkpoint."
        )
    if not tokens:
        raise ValueError("demo: the prompt is empty; accepted: at least one token")
    room = model.config.max_positions - len(tokens)
    if not 1 <= max_tokens <= room:
        raise ValueError(
            f"demo: max_tokens is {max_tokens}; accepted: 1 to {room}, as the prompt has {len(tokens)} tokens and the "
            f"model {model.config.max_positions} positions"
        )
    return Request(tokens, max_tokens)


def draw_loads(
    model: Decoder, tokenizer: Tokenizer | None, question: Request, asks: int, seed: int
) -> tuple[Load, ...]:
    """Loads that ask the question `asks` times in all, the same for the same seed.

    Batches have 1 to `LARGEST_BATCH` requests, every size as often as any other. In each, half of the slots or more, by
    chance, hold the question; the rest are neighbours of other prompts and lengths. No request is longer than the
    question with its answer, so that nothing but the number of requests and the chunks changes the arrays' shapes.

    Raises:
        ValueError: fewer than one ask.
    """
    if asks < 1:
        raise ValueError(f"demo: asks is {asks}; accepted: at least 1")
    draw = random.Random(seed)
    stream = _by_chance(model, 256, seed + 1) if tokenizer is None else tuple(tokenizer.encode(_NEIGHBOURS))
    capacity = len(question.prompt) + question.max_tokens
    longest = min(len(question.prompt) * 4 // 3, capacity - 1)
    chunks = (len(question.prompt), -(-len(question.prompt) // MOST_CHUNKS))

    def neighbour() -> Request:
        start, length = draw.randrange(len(stream)), draw.randint(1, longest)
        prompt = tuple(itertools.islice(itertools.cycle(stream), start, start + length))
        return Request(prompt, draw.randint(1, min(question.max_tokens, capacity - length)))

    loads: list[Load] = []
    sizes: list[int] = []
    while asks:
        sizes = sizes or draw.sample(range(1, LARGEST_BATCH + 1), LARGEST_BATCH)
        size = sizes.pop()
        asked = sorted(draw.sample(range(size), min(draw.randint(-(-size // 2), size), asks)))
        requests = tuple(question if slot in asked else neighbour() for slot in range(size))
        loads.append(Load(requests, tuple(asked), draw.choice(chunks)))
        asks -= len(asked)
    return tuple(loads)


def ask(
    model: Decoder, loads: Sequence[Load], backend: str, advance: Callable[[int], object] = lambda answers: None
) -> list[Answer]:
    """The answers to all asks under the backend given, by load and slot; `advance` is told how many more there are.

    Loads of about one size run one behind another, as they share their programs; `at_once` such groups at a time.
    """
    stop = threading.Event()
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for index, load in enumerate(loads):
        groups[(len(load.requests) - 1).bit_length()].append(index)

    def meet(indices: list[int]) -> list[Answer]:
        answers = []
        try:
            for index in indices:
                if stop.is_set():
                    break
                met = _meet(model, loads[index], index, backend)
                answers += met
                advance(len(met))
        except BaseException:
            stop.set()
            raise
        return answers

    with ThreadPoolExecutor(at_once(backend)) as threads:
        try:
            found = threads.map(meet, sorted(groups.values(), key=len, reverse=True))
            return sorted(itertools.chain.from_iterable(found), key=lambda answer: (answer.load, answer.slot))
        finally:
            stop.set()  # without effect at the end; interrupted, the threads are not to finish their work


def at_once(backend: str) -> int:
    """How many threads compile and run programs of a backend: two, since a program is compiled by one core.

    Stock XLA on a GPU: one. With two it failed in each of seven processes on an H200 (jax 0.11.2), by a segmentation
    fault or by "cuda_graph_end_capture failed with capturing stream has unjoined work"; with one in none. That is about
    cuDNN's kernels, which only its programs have.
    """
    return 1 if (backend, backends.target()) == (backends.STOCK, "gpu") else 2


def compare(
    model: Decoder,
    loads: Sequence[Load],
    backend: str,
    advance: Callable[[str, int], object] = lambda numerics, answers: None,
) -> Result:
    """The result of the same loads with stock XLA and with `backend`; `advance` is told "stock" or "detjax", and how
    many more answers there are, 0 at the start.
    """
    tallies, seconds = [], []
    for numerics, chosen in (("stock", backends.STOCK), ("detjax", backend)):
        advance(numerics, 0)
        start = time.perf_counter()
        tallies.append(Tally.of(ask(model, loads, chosen, functools.partial(advance, numerics))))
        seconds.append(time.perf_counter() - start)
    with backends.use_backend(backend):
        return Result(len(loads), tallies[0], seconds[0], tallies[1], seconds[1], fingerprints.fingerprint())


def _meet(model: Decoder, load: Load, index: int, backend: str) -> list[Answer]:
    prompts = [request.prompt for request in load.requests]
    sampling = [SamplingParams(max_tokens=request.max_tokens) for request in load.requests]
    with backends.use_backend(backend):
        generations = generate(model, prompts, sampling, prefill_chunk=load.prefill_chunk)
    completions = [(slot, generations[slot].completions[0]) for slot in load.asked]
    return [
        Answer(found.tokens, np.asarray(found.logprobs, np.float32).tobytes(), index, slot)
        for slot, found in completions
    ]


def _by_chance(model: Decoder, count: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(model.config.vocab_size) for _ in range(count))


def common_prefix(one: Sequence[object], other: Sequence[object]) -> int:
    """How many elements both begin with."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
