"""Time per token with guesses over plain decoding, of an engine whose drafter is right with a given probability.

    python -m benchmarks draft_speed --out benchmarks/results/draft-speed-h200.json

An engine without guesses answers random requests with random weights. Another engine then answers the same requests
with a drafter that knows these answers: it proposes each next token with probability 0.7, otherwise another one, and a
seed decides which. The engine chooses the number of guesses. Tokens and logprobs of both engines have to be equal. The
time per token is measured while all requests decode. Since a few hundred guesses can be luckier than others, one
request at a time is measured with eight requests, one after another. 1000 requests run as in
`python -m detjax.bench serve`, as many at a time as the engine has slots.

Random weights do not repeat a text, so the request for prompt lookup has a bias that makes the model repeat a token.
All guesses count: its time is a step's time over the most tokens that a step can have. The share of guesses of prompt
lookup that count in real texts is in `python -m benchmarks drafts`.

The time of a guess of an EAGLE-3 head, whose weights are random, is the difference between the times of seven guesses
and of one over six, with the host's work for them, for 1, 8 and 64 requests; the model has three layers then.

With `--part lengths` drafts of 1 to 64 requests have one, three or seven guesses, to see what the engine's rule
(`detjax.engine.drafts.draft_lengths`) should choose. The rule knows the times of these steps.

All programs are compiled before they are measured, in parallel. The exit code is 1 if the bits of an answer differ.

`--small` runs on a CPU in seconds.
"""

import os

# Engines and models have the memory in turns.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import contextlib
import dataclasses
import functools
import gc
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Annotated, Any, Final

import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import study as options
from benchmarks.study import Result, Run
from detjax.bench import command_line, presets, serve
from detjax.bench.serve import Workload, digest
from detjax.cli.options import Option
from detjax.contract import KV_BLOCK
from detjax.engine import (
    BatchShapes,
    Engine,
    EngineConfig,
    Generation,
    Request,
    SamplingParams,
    SamplingVariant,
    SpeculativeConfig,
    StepLoop,
    StepLoopConfig,
)
from detjax.engine import Sequence as Sample
from detjax.engine.batch import BatchShape
from detjax.engine.drafts.drafter import Drafter
from detjax.engine.drafts.drafting import Drafting
from detjax.engine.drafts.speculative_config import MOST_DRAFTED
from detjax.engine.program_compiler import ProgramCompiler
from detjax.models import Decoder, DecoderConfig, Draft
from detjax.models.drafts.eagle3 import Eagle3Head, Eagle3Options
from detjax.operands.numerics import ceil_div
from detjax.runtime import backends

PARTS: Final = "tokens", "serve", "lookup", "head", "lengths"
"""The parts: requests that decode together, a thousand requests, prompt lookup, the head, and fixed numbers of guesses.
The last one is measured on demand."""
PLAIN: Final = "plain"
DRAFTS: Final = "drafts"
SPECULATIVE: Final = SpeculativeConfig(method="ngram", num_speculative_tokens=MOST_DRAFTED)
HEAD_DEPTHS: Final = 0, 1, 2
"""The layers whose incoming residual streams the head sees; the model has as many layers."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a run.

    Attributes:
        requests: numbers of requests that decode together.
        prompt: tokens of their prompts. All but the last one fill pages, which later rounds find in the cache.
        tokens: tokens of their answers.
        served: the requests of the server's loop.
        token_budget: see `EngineConfig`.
        acceptance: the probability with which a guess is right.
        rounds: timed rounds of each measurement.
        heads: numbers of requests that the head guesses for.
        head_tokens: the tokens that the head can guess.
        calls: timed calls of the head.
        lengths: numbers of requests, and of guesses for each of them, of the part `lengths`.
        least: fewest requests of a measurement. If fewer decode together, others follow.
    """

    requests: tuple[int, ...] = (1, 8, 64, 256)
    prompt: int = 4 * KV_BLOCK + 1
    tokens: int = 200
    served: Workload = dataclasses.field(default_factory=lambda: Workload(1000, seed=1))
    token_budget: int = 2048
    acceptance: float = 0.7
    rounds: int = 2
    heads: tuple[int, ...] = (1, 8, 64)
    head_tokens: int = 32000
    calls: int = 30
    lengths: tuple[tuple[int, ...], tuple[int, ...]] = (1, 8, 16, 32, 64), (1, 3, 7)
    least: int = 8

    @property
    def length(self) -> int:
        """The most tokens of a request and its answer."""
        return max(self.prompt + self.tokens, self.served.prompt[1] + self.served.output[1])

    def engine(self, speculative: SpeculativeConfig | None) -> EngineConfig:
        """Returns the settings of an engine."""
        pages = ceil_div(self.length, KV_BLOCK)
        return EngineConfig(
            max_samples=max(self.requests),
            token_budget=self.token_budget,
            max_length=pages * KV_BLOCK,
            num_pages=(max(self.requests) + 8) * pages,
            top_logprobs=0,
            speculative=speculative,
        )


SMALL: Final = Sizes(
    requests=(1, 2),
    prompt=5,
    tokens=12,
    served=Workload(4, (2, 9), (4, 6), seed=1),
    token_budget=32,
    rounds=1,
    heads=(1, 2),
    head_tokens=100,
    calls=3,
    lengths=((2,), (3,)),
    least=2,
)


def study(
    run: Run,
    *,
    preset: options.Preset = "Qwen3-8B",
    layers: options.Layers = None,
    part: Annotated[list[str], options.names(PARTS)],
    rounds: Annotated[int | None, Option("Timed rounds.", minimum=1, default="2")] = None,
) -> Result:
    sizes, parts = Sizes(), part or PARTS[:-1]
    if run.small:
        sizes, preset, layers = SMALL, "tiny", 1
    if rounds is not None:
        sizes = dataclasses.replace(sizes, rounds=rounds)
    content: dict[str, Any] = {
        "preset": preset,
        "layers": presets.config(preset, layers).layers,
        "sizes": dataclasses.asdict(sizes),
        "ready_after_seconds": {},
        "results": [],
    }

    def add(name: str, value: Mapping[str, Any]) -> None:
        """Adds a row or a part, prints it and saves the result so far."""
        if name in ("results", "head"):
            content.setdefault(name, []).append(value)
        else:
            content[name] = value
        command_line.print_line(f"{name}: {value}")
        run.save(content)

    # The head's model is small and compiles fast, so a run that is cut short has its times.
    if "head" in parts:
        for row in head_times(preset, sizes):
            add("head", row)
        gc.collect()
    if set(parts) != {"head"}:
        decoder = presets.decoder(preset, layers)
        measurements = [one for one in _measurements(sizes, decoder.config.vocab_size) if one.part in parts]
        plain: list[Measured] = []
        with _ready_engine(decoder, sizes.engine(None), content, PLAIN) as engine:
            for one in measurements:
                alike = (known for other, known in zip(measurements, plain, strict=False) if one.is_like(other))
                plain.append(next(alike, None) or one.run(engine, sizes.rounds))
                command_line.print_line(f"{one.part}, {one.count} requests: {plain[-1].seconds} s without guesses")
        del engine
        gc.collect()  # the cache's memory is the next engine's
        with _ready_engine(decoder, sizes.engine(SPECULATIVE), content, DRAFTS) as engine:
            for one, expected in zip(measurements, plain, strict=True):
                add("results", one.compared(engine, expected, sizes))
    different = [f"{row['part']} of {row['requests']}" for row in content["results"] if not row["same_bits"]]
    return Result(content, f"bits differ with guesses: {', '.join(different)}" if different else "")


class Oracle(Drafter):
    """Guesses the tokens of known answers, each with a given probability, otherwise another token."""

    def __init__(self, answers: Mapping[int, Sequence[int]], acceptance: float, vocabulary: int) -> None:
        """A drafter that knows the tokens of answers, by the seeds of their requests.

        The seed and the token's place decide whether a guess is right, so steps do not.
        """
        self._guesses: dict[int, list[int]] = {}
        for seed, answer in answers.items():
            tokens = np.array(answer)
            is_right = np.random.default_rng(seed).random(len(tokens)) < acceptance
            self._guesses[seed] = np.where(is_right, tokens, (tokens + 1) % vocabulary).tolist()

    def propose(self, wanted: Mapping[Sample, int]) -> dict[Sample, list[int]]:
        """Returns guesses of the tokens after the ones that samples have."""
        guesses = {}
        for sample, most in wanted.items():
            first = len(sample.generated)
            guesses[sample] = self._guesses[sample.params.seed][first : first + most]
        return guesses


@dataclasses.dataclass(frozen=True)
class Measured:
    """Seconds, for a token of each request or for all tokens, and the answers."""

    seconds: float
    answers: list[Generation]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Requests that engines answer with guesses and without.

    Attributes:
        part: one of `PARTS`.
        count: how many requests decode together.
        requests: the requests, a multiple of `count`.
        vocabulary: the model's tokens.
        workload: the requests as a workload of the server's loop; None: all of them begin together.
        length: the number of guesses for each request; None: the engine chooses.
    """

    part: str
    count: int
    requests: Sequence[Request]
    vocabulary: int
    workload: Workload | None = None
    length: int | None = None

    def is_like(self, other: "Measurement") -> bool:
        """Returns whether both are the same measurement of an engine without guesses."""
        return self.workload is other.workload is None and self.requests == other.requests and self.count == other.count

    def run(self, engine: Engine, rounds: int) -> Measured:
        """Returns the median of rounds. The first round fills the prefix cache, and does not count.

        Raises:
            RuntimeError: rounds have different answers.
        """
        if self.workload is None:
            timed = [self._round(engine) for _ in range(rounds + 1)]
            answers, seconds = timed[0][1], [one for one, _ in timed[1:]]
            digests = {digest(one) for _, one in timed}
        else:
            answers = engine.generate(self.requests)
            served = [serve.measure(engine, self.workload, self.vocabulary)[0] for _ in range(rounds)]
            digests, seconds = {one["digest"] for one in served}, [one["seconds"] for one in served]
        if digests != {digest(answers)}:
            raise RuntimeError(f"draft_speed: answers of {len(self.requests)} requests differ between rounds")
        return Measured(statistics.median(seconds), answers)

    def _round(self, engine: Engine) -> tuple[float, list[Generation]]:
        """Returns the mean seconds of a token, and the answers, of requests that decode `count` at a time."""
        timed = [token_seconds(engine, some) for some in itertools.batched(self.requests, self.count)]
        return statistics.mean(seconds for seconds, _ in timed), [one for _, answers in timed for one in answers]

    def compared(self, engine: Engine, plain: Measured, sizes: Sizes) -> dict[str, Any]:
        """Returns a row of the result, given what the engine without guesses measured.

        `step_over_plain` is the time of a step with a fixed number of guesses over the time of a step without any.
        """
        loop = engine._loop
        assert loop.drafting is not None
        usual, drafter, lengths = loop.drafting, loop.drafting.drafter, None
        if self.part != "lookup":
            pairs = zip(self.requests, plain.answers, strict=True)
            answers = {request.sampling.seed: answer.completions[0].tokens for request, answer in pairs}
            drafter = Oracle(answers, sizes.acceptance, self.vocabulary)
        if self.length is not None:
            lengths = functools.partial(_fixed_length, self.length)
        loop.drafting = Drafting(drafter, MOST_DRAFTED, self.vocabulary, lengths)
        measured = self.run(engine, sizes.rounds)
        counted, loop.drafting = engine.stats(), usual
        step_over_plain = None
        if self.length is not None and counted.drafts_proposed:
            tokens_of_step = 1 + self.length * counted.drafts_accepted / counted.drafts_proposed
            step_over_plain = tokens_of_step * measured.seconds / plain.seconds
        return {
            "part": self.part,
            "requests": self.count,
            "length": self.length,
            "seconds": {PLAIN: plain.seconds, DRAFTS: measured.seconds},
            "plain_over_drafts": plain.seconds / measured.seconds,
            "step_over_plain": step_over_plain,
            "guesses": counted.drafts_proposed,
            "right_guesses": counted.drafts_accepted,
            "tokens": (1 + sizes.rounds) * sum(len(one.completions[0].tokens) for one in measured.answers),
            "same_bits": digest(measured.answers) == digest(plain.answers),
        }


def _measurements(sizes: Sizes, vocabulary: int) -> Iterator[Measurement]:
    """Yields all measurements."""
    workload = Workload(
        max(sizes.requests), (sizes.prompt, sizes.prompt), (sizes.tokens, sizes.tokens), temperature=0.8
    )
    requests = workload.draw(vocabulary)

    def some(part: str, count: int, **options: Any) -> Measurement:
        return Measurement(part, count, requests[: count * ceil_div(sizes.least, count)], vocabulary, **options)

    for count in sizes.requests:
        yield some("tokens", count)
    for count, length in itertools.product(*sizes.lengths):
        yield some("lengths", count, length=length)
    biased = SamplingParams(sizes.tokens, logit_bias=((vocabulary // 3, 100.0),), ignore_eos=True)
    yield Measurement("lookup", 1, [Request(requests[0].prompt, biased)], vocabulary)
    served = sizes.served.draw(vocabulary)
    yield Measurement("serve", len(served), served, vocabulary, sizes.served)


def _fixed_length(length: int, *_: Any) -> int:
    return length


@contextlib.contextmanager
def _ready_engine(decoder: Decoder, config: EngineConfig, content: dict[str, Any], name: str) -> Iterator[Engine]:
    """Yields an engine whose programs are compiled, and notes how long that took."""
    begin = time.perf_counter()
    with Engine(decoder, config=config) as engine:
        if backends.backend() != "portable":
            engine.warm_up()
        content["ready_after_seconds"][name] = time.perf_counter() - begin
        yield engine


def token_seconds(engine: Engine, requests: Sequence[Request]) -> tuple[float, list[Generation]]:
    """Returns the seconds of a token of each request while all of them decode, and their answers.

    Measured from the last request's first token to the first request's last one.

    Raises:
        RuntimeError: a request ended before another one began.
    """
    times: list[list[float]] = [[] for _ in requests]

    def noted(index: int) -> Any:
        return lambda _: times[index].append(time.perf_counter())

    futures: list[Future[Generation]] = [engine.submit(request, noted(index)) for index, request in enumerate(requests)]
    answers = [future.result() for future in futures]
    begin, end = max(one[0] for one in times), min(one[-1] for one in times)
    tokens = sum(begin < at <= end for one in times for at in one)
    if not tokens:
        raise RuntimeError("draft_speed: no time in which all requests decode was seen; accepted: longer answers")
    return len(requests) * (end - begin) / tokens, answers


def head_times(preset: str, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Yields a row for each number of requests: seconds of a guess of a random EAGLE-3 head for each of them."""
    draft = random_head(presets.decoder(preset, len(HEAD_DEPTHS)), preset, sizes.head_tokens)
    loop = _loop_with_head(draft, sizes)
    assert loop.drafting is not None
    drafter = loop.drafting.drafter
    for count in sizes.heads:
        params = SamplingParams(2 * MOST_DRAFTED + 2, ignore_eos=True)
        samples = [Sample((1,) * sizes.prompt, params) for _ in range(count)]
        for sample in samples:
            loop.submit(sample)
        while not all(sample.is_held for sample in samples):
            loop.step()
        loop.drain()
        seconds = {
            number: statistics.median(_propose_seconds(drafter, samples, number) for _ in range(sizes.calls))
            for number in (1, MOST_DRAFTED)
        }
        yield {
            "requests": count,
            "seconds": seconds,
            "seconds_a_guess": (seconds[MOST_DRAFTED] - seconds[1]) / (MOST_DRAFTED - 1),
        }
        while not loop.is_idle:
            loop.step()
    loop.close()


def _propose_seconds(drafter: Drafter, samples: Sequence[Sample], number: int) -> float:
    begin = time.perf_counter()
    guesses = drafter.propose(dict.fromkeys(samples, number))
    assert all(len(guess) == number for guess in guesses.values())
    return time.perf_counter() - begin


def random_head(target: Decoder, preset: str, tokens: int) -> Draft:
    """Returns a head with random weights and a table of its own for the first `tokens` tokens."""
    raw = {**presets.MODELS[preset], "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    head_options = Eagle3Options(
        config=DecoderConfig.from_hugging_face(raw | {"num_hidden_layers": 1}, "a random head"),
        depths=HEAD_DEPTHS,
        target_width=target.config.hidden_size,
        draft_vocab_size=tokens,
        has_embedding=False,
        has_lm_head=True,
        has_input_norm=False,
        adds_normalized=False,
    )
    head = Eagle3Head(head_options, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    return Draft(target, head, np.arange(tokens, dtype=np.int64))


def _loop_with_head(draft: Draft, sizes: Sizes) -> StepLoop:
    """Returns a step loop that never guesses by itself, with all programs compiled."""
    slots, pages = max(sizes.heads), ceil_div(sizes.prompt + 2 * MOST_DRAFTED + 2, KV_BLOCK)
    rows = BatchShapes.for_chunks(slots, sizes.token_budget // slots, mixes=True, drafts=MOST_DRAFTED)
    shapes = [BatchShape(count, 0, 0, count) for count in sizes.heads]
    config = StepLoopConfig(
        shapes=BatchShapes([*shapes, *(shape for shape in rows if shape.rows)], rows.limits),
        num_pages=slots * pages,
        pages_per_sequence=pages,
        variants=(SamplingVariant(False, 0),),
        speculative=SpeculativeConfig(method="eagle3", model="a random head", num_speculative_tokens=MOST_DRAFTED),
    )
    loop = StepLoop.for_model(draft.target, config, guesser=draft)
    assert loop.drafting is not None
    vocabulary = draft.target.config.vocab_size
    loop.drafting = Drafting(loop.drafting.drafter, MOST_DRAFTED, vocabulary, lambda sequences, acceptance: 0)
    if backends.backend() != "portable":
        loop.warm_up(ProgramCompiler())
    return loop
