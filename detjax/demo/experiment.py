"""The experiment: one question at temperature 0, asked again and again while the load changes."""

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

from detjax.demo import DEFAULT_PROMPT
from detjax.engine import SamplingParams, generate
from detjax.models import Decoder, Tokenizer
from detjax.runtime import backends, fingerprints

LARGEST_BATCH: Final = 32
"""The most requests of a batch."""

MAX_CHUNKS: Final = 32
"""Prompts are prefilled in one chunk, or in as many as they have tokens, up to about this many."""

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
"""The text that the other requests' prompts are cut from."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt as token ids, and how many tokens to generate at most."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclasses.dataclass(frozen=True)
class Load:
    """One batch: the requests that are computed together with the question.

    Attributes:
        requests: the question and its neighbours, by slot.
        asked: the slots that hold the question, in ascending order.
        prefill_chunk: tokens of a prompt that one step computes.
    """

    requests: tuple[Request, ...]
    asked: tuple[int, ...]
    prefill_chunk: int


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to one ask.

    Attributes:
        tokens: the generated tokens.
        logprobs: the bytes of their float32 logprobs.
        load: the index of the load.
        slot: the slot in that load.
    """

    tokens: tuple[int, ...]
    logprobs: bytes
    load: int
    slot: int


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Two completions that share their first `position` tokens and differ after them."""

    position: int
    one: tuple[int, ...]
    other: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Tally:
    """How often each completion came, and how many patterns of logprob bits there were.

    Attributes:
        counts: every unique completion with its count, the commonest first.
        bit_patterns: the number of unique completions when logprobs count too, bit by bit.
    """

    counts: tuple[tuple[tuple[int, ...], int], ...]
    bit_patterns: int

    @classmethod
    def from_answers(cls, answers: Iterable[Answer]) -> "Tally":
        """The tally of one answer or more."""
        answers = list(answers)
        counts = Counter(answer.tokens for answer in answers)
        return cls(tuple(counts.most_common()), len({(answer.tokens, answer.logprobs) for answer in answers}))

    @property
    def asks(self) -> int:
        """The number of answers."""
        return sum(count for _, count in self.counts)

    @property
    def commonest(self) -> int:
        """How often the commonest completion came."""
        return self.counts[0][1]

    @property
    def reproduced(self) -> bool:
        """Whether all answers have the same tokens and the same bits of logprobs."""
        return self.bit_patterns == 1

    @property
    def divergence(self) -> Divergence | None:
        """Where completions first differ, and the commonest on each side. None if there is one completion."""
        (commonest, _), *others = self.counts
        if not others:
            return None
        # All completions agree before the first difference, so the commonest one is on one side of it.
        common = [common_prefix(commonest, other) for other, _ in others]
        return Divergence(min(common), commonest, others[common.index(min(common))][0])


@dataclasses.dataclass(frozen=True)
class Result:
    """Both tallies of the same loads, and the seconds that they took, compilation included."""

    loads: int
    stock: Tally
    stock_seconds: float
    detjax: Tally
    detjax_seconds: float
    fingerprint: fingerprints.Fingerprint


def contender(backend: str | None) -> str:
    """The backend that stock XLA is compared with: `backend`, or by default the best for this device.

    Raises:
        ValueError: there is no such backend, or it is stock XLA itself.
    """
    with backends.use_backend(backend):
        name = backends.backend()
    if name == backends.STOCK:
        raise ValueError(
            f"demo: the backend is {name!r}, which detjax is compared with; accepted: {', '.join(backends.BACKENDS)}. "
            f"Change --backend or {backends.BACKEND_VARIABLE}, or leave them out."
        )
    return name


def pose(model: Decoder, tokenizer: Tokenizer | None, prompt: str | None, max_tokens: int, seed: int) -> Request:
    """The question: the tokens of `prompt`, by default of `DEFAULT_PROMPT`; without a tokenizer, random tokens.

    Raises:
        ValueError: there is a prompt and no tokenizer, the prompt is empty, or the model has no room for it and for
            `max_tokens` after it.
    """
    if tokenizer is not None:
        tokens = tuple(tokenizer.encode(DEFAULT_PROMPT if prompt is None else prompt))
    elif prompt is None:
        tokens = _random_tokens(model, 24, seed)
    else:
        raise ValueError(
            f"demo: the prompt is {prompt!r} and the checkpoint has no tokenizer.json; accepted: no prompt, for which "
            "tokens are drawn at random. Leave it out, or add the tokenizer's files to the checkpoint."
        )
    if not tokens:
        raise ValueError("demo: the prompt is empty; accepted: at least one token")
    room = model.config.max_positions - len(tokens)
    if not 1 <= max_tokens <= room:
        raise ValueError(
            f"demo: max_tokens is {max_tokens}; accepted: 1 to {room}, because the prompt has {len(tokens)} tokens "
            f"and the model {model.config.max_positions} positions"
        )
    return Request(tokens, max_tokens)


def draw_loads(
    model: Decoder, tokenizer: Tokenizer | None, question: Request, asks: int, seed: int
) -> tuple[Load, ...]:
    """Returns loads that ask the question `asks` times in all. The same seed draws the same loads.

    Batches have 1 to `LARGEST_BATCH` requests, and every size is as frequent as any other. In each batch at least half
    of the slots, chosen at random, hold the question; the rest hold neighbours with different prompts and lengths. No
    request is longer than the question with its answer. So the shapes of arrays change with the number of requests and
    with the chunks, and with nothing else.

    Raises:
        ValueError: fewer than one ask.
    """
    if asks < 1:
        raise ValueError(f"demo: asks is {asks}; accepted: at least 1")
    draw = random.Random(seed)
    stream = _random_tokens(model, 256, seed + 1) if tokenizer is None else tuple(tokenizer.encode(_NEIGHBOURS))
    capacity = len(question.prompt) + question.max_tokens
    longest = min(len(question.prompt) * 4 // 3, capacity - 1)
    chunks = (len(question.prompt), -(-len(question.prompt) // MAX_CHUNKS))

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
    """Returns the answers to all asks under a backend, sorted by load and slot.

    Loads of about one size share their programs, so they run one after another. `concurrent_groups` such groups run at
    a time.

    Args:
        model: the decoder.
        loads: the batches.
        backend: computes them.
        advance: called with the number of further answers, whenever there are some.
    """
    stop = threading.Event()
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for index, load in enumerate(loads):
        groups[(len(load.requests) - 1).bit_length()].append(index)

    def run_group(indices: list[int]) -> list[Answer]:
        answers = []
        try:
            for index in indices:
                if stop.is_set():
                    break
                new = _run_load(model, loads[index], index, backend)
                answers += new
                advance(len(new))
        except BaseException:
            stop.set()
            raise
        return answers

    with ThreadPoolExecutor(concurrent_groups(backend)) as threads:
        try:
            answers = threads.map(run_group, sorted(groups.values(), key=len, reverse=True))
            return sorted(itertools.chain.from_iterable(answers), key=lambda answer: (answer.load, answer.slot))
        finally:
            stop.set()  # after an interruption the threads must not finish their work; otherwise they have


def concurrent_groups(backend: str) -> int:
    """The number of threads that compile and run a backend's programs: two, because one core compiles a program.

    For stock XLA on a GPU it is one. With two threads, each of seven processes on an H200 (jax 0.11.2) failed, by a
    segmentation fault or by "cuda_graph_end_capture failed with capturing stream has unjoined work"; with one thread,
    none did. The cause is in cuDNN's kernels, which only stock's programs have.
    """
    return 1 if (backend, backends.target()) == (backends.STOCK, "gpu") else 2


def compare(
    model: Decoder,
    loads: Sequence[Load],
    backend: str,
    advance: Callable[[str, int], object] = lambda numerics, answers: None,
) -> Result:
    """Returns the result of the same loads with stock XLA and with `backend`.

    Args:
        model: the decoder.
        loads: the batches.
        backend: detjax's.
        advance: called with "stock" or "detjax" and the number of further answers; first with 0.
    """
    tallies, seconds = [], []
    for numerics, used in (("stock", backends.STOCK), ("detjax", backend)):
        advance(numerics, 0)
        start = time.perf_counter()
        tallies.append(Tally.from_answers(ask(model, loads, used, functools.partial(advance, numerics))))
        seconds.append(time.perf_counter() - start)
    with backends.use_backend(backend):
        return Result(len(loads), tallies[0], seconds[0], tallies[1], seconds[1], fingerprints.fingerprint())


def _run_load(model: Decoder, load: Load, index: int, backend: str) -> list[Answer]:
    """Computes one load, and returns the answers to the question."""
    prompts = [request.prompt for request in load.requests]
    sampling = [SamplingParams(max_tokens=request.max_tokens) for request in load.requests]
    with backends.use_backend(backend):
        generations = generate(model, prompts, sampling, prefill_chunk=load.prefill_chunk)
    completions = [(slot, generations[slot].completions[0]) for slot in load.asked]
    return [
        Answer(completion.tokens, np.asarray(completion.logprobs, np.float32).tobytes(), index, slot)
        for slot, completion in completions
    ]


def _random_tokens(model: Decoder, count: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(model.config.vocab_size) for _ in range(count))


def common_prefix(one: Sequence[object], other: Sequence[object]) -> int:
    """The number of elements that both sequences begin with."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
