"""The experiment: one question at temperature 0, asked repeatedly while the load changes."""

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
"""Maximum number of requests in a batch."""

MAX_CHUNKS: Final = 32
"""Approximate maximum number of prefill chunks; prompts are prefilled in one chunk or in this many."""

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
"""Text from which the prompts of the other requests are cut."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt as token ids, and the maximum number of tokens to generate."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclasses.dataclass(frozen=True)
class Load:
    """One batch: the question, and the requests computed together with it.

    Attributes:
        requests: the question and its neighbours, by slot.
        asked: the slots that hold the question, in ascending order.
        prefill_chunk: tokens of a prompt computed in one step.
    """

    requests: tuple[Request, ...]
    asked: tuple[int, ...]
    prefill_chunk: int


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer to the question: its tokens, the bytes of their float32 logprobs, and its slot in a load."""

    tokens: tuple[int, ...]
    logprobs: bytes
    load: int
    slot: int


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Two completions that differ after their first `position` tokens."""

    position: int
    one: tuple[int, ...]
    other: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Tally:
    """Counts of unique completions.

    Attributes:
        counts: every unique completion with its count, most frequent first.
        bit_patterns: number of unique pairs of completion and logprob bits.
    """

    counts: tuple[tuple[tuple[int, ...], int], ...]
    bit_patterns: int

    @classmethod
    def from_answers(cls, answers: Iterable[Answer]) -> "Tally":
        """Counts one or more answers."""
        answers = list(answers)
        counts = Counter(answer.tokens for answer in answers)
        return cls(tuple(counts.most_common()), len({(answer.tokens, answer.logprobs) for answer in answers}))

    @property
    def asks(self) -> int:
        """The number of answers."""
        return sum(count for _, count in self.counts)

    @property
    def commonest(self) -> int:
        """The count of the most frequent completion."""
        return self.counts[0][1]

    @property
    def reproduced(self) -> bool:
        """True if all answers have the same tokens and the same logprob bits."""
        return self.bit_patterns == 1

    @property
    def divergence(self) -> Divergence | None:
        """The first divergence, with the most frequent completion on each side. None if all completions are equal."""
        (commonest, _), *others = self.counts
        if not others:
            return None
        # All completions agree before the first difference, so the most frequent one is on one side of it.
        common = [common_prefix(commonest, other) for other, _ in others]
        return Divergence(min(common), commonest, others[common.index(min(common))][0])


@dataclasses.dataclass(frozen=True)
class Result:
    """The tallies of both numerics for the same loads, and the seconds that each took, including compilation."""

    loads: int
    stock: Tally
    stock_seconds: float
    detjax: Tally
    detjax_seconds: float
    fingerprint: fingerprints.Fingerprint


def contender(backend: str | None) -> str:
    """Returns the backend to compare with stock XLA: `backend`, or by default the best one for this device.

    Raises:
        ValueError: the backend does not exist, or is stock XLA itself.
    """
    with backends.use_backend(backend):
        name = backends.backend()
    if name == backends.STOCK:
        raise ValueError(
            f"demo: the backend is {name!r}, the baseline of the demo; accepted: {', '.join(backends.BACKENDS)}. "
            f"Change --backend or {backends.BACKEND_VARIABLE}, or leave them out."
        )
    return name


def pose(model: Decoder, tokenizer: Tokenizer | None, prompt: str | None, max_tokens: int, seed: int) -> Request:
    """Returns the question: `prompt`, by default `DEFAULT_PROMPT`; without a tokenizer, random tokens.

    Raises:
        ValueError: a prompt is given without a tokenizer, the prompt is empty, or prompt and `max_tokens` together
            exceed the model's positions.
    """
    if tokenizer is not None:
        tokens = tuple(tokenizer.encode(DEFAULT_PROMPT if prompt is None else prompt))
    elif prompt is None:
        tokens = _random_tokens(model, 24, seed)
    else:
        raise ValueError(
            f"demo: the prompt is {prompt!r} and the checkpoint has no tokenizer.json; accepted: no prompt, so that "
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
    """Returns loads in which the question occurs `asks` times in total. The same seed draws the same loads.

    Batch sizes are uniform over 1 to `LARGEST_BATCH`. In each batch at least half of the slots, chosen at random, hold
    the question; the others hold neighbours with different prompts and lengths. No request is longer than the question
    with its answer, so array shapes depend only on the batch size and the prefill chunk.
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
    """Returns all answers under a backend, sorted by load and slot. Calls `advance` with the number of new answers.

    Loads of similar size share their programs, so they run in sequence; `concurrent_groups` such groups run
    concurrently.
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
            stop.set()  # after an interruption the threads must not finish their work


def concurrent_groups(backend: str) -> int:
    """Returns the number of threads that compile and run a backend's programs: two, because compiling uses one core.

    Stock XLA on a GPU gets one. With two threads, each of seven processes on an H200 (jax 0.11.2) failed, with a
    segmentation fault or with "cuda_graph_end_capture failed with capturing stream has unjoined work"; with one thread,
    none did. The cause is in cuDNN's kernels, which only stock's programs use.
    """
    return 1 if (backend, backends.target()) == (backends.STOCK, "gpu") else 2


def compare(
    model: Decoder,
    loads: Sequence[Load],
    backend: str,
    advance: Callable[[str, int], object] = lambda numerics, answers: None,
) -> Result:
    """Runs the same loads with stock XLA and with `backend`, and returns both tallies.

    Calls `advance` with "stock" or "detjax" and the number of new answers, first with 0.
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
    """Runs one load, and returns the answers to the question."""
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
    """Returns the length of the longest common prefix."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
