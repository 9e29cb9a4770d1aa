"""The time to verify transcripts compared with the time to generate them.

    python -m benchmarks verify --out benchmarks/results/verify-h200.json

An engine of Qwen3-8B's shape answers 1000 requests, greedy, sampled, filtered and with penalties: all at once, 64 at a
time and 4 at a time. `detjax.verify` checks the transcripts by one forward pass over prompts and answers, and must
refuse each one with a changed token, logprob bit or prompt. Times of generation include prefills.

`--small` takes seconds on a CPU, and minutes with `--requests 1000`. The exit code is 1 if a verdict is wrong, or if
bits differ between runs.
"""

import dataclasses
import gc
import random
import time
from collections.abc import Sequence
from typing import Annotated, Any, Final, cast

import jax
import numpy as np

from benchmarks import study as options
from benchmarks.study import Result, Run
from detjax.audit import Origin, Transcript, Verifier, transcripts_of
from detjax.bench import presets
from detjax.bench.serve import Workload
from detjax.cli.options import Option, usage_errors
from detjax.engine import Engine, EngineConfig, Request
from detjax.models import Decoder
from detjax.models.network import split
from detjax.operands.options import KVQuantization

STYLES: Final = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 50},
    {"temperature": 1.2, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.1},
)
"""Sampling parameters that the requests of a mixed workload cycle through; greedy workloads use the first."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the measurement.

    Attributes:
        preset: the shape of the model, whose weights are random.
        layers: number of layers; None: the preset's own.
        requests: the number of requests.
        prompt: minimum and maximum number of tokens of a prompt.
        output: minimum and maximum number of tokens of an answer.
        at_once: the number of concurrent requests of each run.
        mixed: whether sampling parameters vary, or all requests are greedy.
        kv_cache_dtype: the KV cache quantization.
        token_budget: tokens per step of the engine.
        compiled_before: whether all programs are compiled before timing, which takes minutes on a CPU.
    """

    preset: str = "Qwen3-8B"
    layers: int | None = None
    requests: int = 1000
    prompt: tuple[int, int] = (16, 256)
    output: tuple[int, int] = (90, 110)
    at_once: tuple[int, ...] = (1000, 64, 4)
    mixed: bool = True
    kv_cache_dtype: KVQuantization | None = None
    token_budget: int = 8192
    compiled_before: bool = True


SMALL: Final = Sizes("tiny", 1, 12, (4, 40), (5, 9), (4, 2), mixed=False, token_budget=64, compiled_before=False)


def measured(sizes: Sizes) -> dict[str, Any]:
    """Returns the content of a result: seconds of each run and of the verification, and counts of verdicts."""
    decoder = presets.decoder(sizes.preset, sizes.layers)
    jax.block_until_ready(split(decoder)[1])
    requests = _requests(sizes, decoder.config.vocab_size)
    origin = Origin.here(decoder, None, sizes.kv_cache_dtype)
    runs = {str(count): _generated(decoder, requests, sizes, count, origin) for count in sizes.at_once}
    answers = {count: run.pop("transcripts") for count, run in runs.items()}
    first, *others = answers.values()
    verifier = Verifier(decoder)
    verified, refused = _verified(verifier, first), _refused(verifier, first)
    tokens = {
        "prompt_tokens": sum(len(one.prompt) for one in first),
        "generated_tokens": sum(len(one.tokens) for one in first),
    }
    for run in runs.values():
        run["verified_in_this_share"] = verified["seconds"] / run["seconds"]
    return {
        "sizes": dataclasses.asdict(sizes),
        "fingerprint_of_transcripts": first[0].origin.environment,
        **tokens,
        "generated": runs,
        "same_bits_of_all_runs": all(other == first for other in others),
        "verified": verified,
        "altered": refused,
    }


def problems(result: dict[str, Any]) -> Sequence[str]:
    """Returns the problems of a result's verdicts."""
    verified, altered = result["verified"], result["altered"]
    messages = []
    if not result["same_bits_of_all_runs"]:
        messages.append("bits differ between runs")
    if verified["refused"]:
        messages.append(f"{verified['refused']} honest transcripts are refused: {verified['first_refusal']}")
    messages += [f"{count} transcripts with another {kind} are accepted" for kind, count in altered["accepted"].items()]
    return messages


def _requests(sizes: Sizes, vocabulary: int) -> list[Request]:
    """The requests of `detjax.bench.serve` with these sizes, sampled in several ways."""
    drawn = Workload(sizes.requests, sizes.prompt, sizes.output).draw(vocabulary)
    styles = STYLES if sizes.mixed else STYLES[:1]
    return [
        dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, **styles[number % len(styles)]))
        for number, one in enumerate(drawn)
    ]


def _generated(
    decoder: Decoder, requests: Sequence[Request], sizes: Sizes, count: int, origin: Origin
) -> dict[str, Any]:
    """Returns an engine's seconds for all requests with `count` at a time, and the transcripts."""
    config = EngineConfig(
        max_samples=count,
        token_budget=sizes.token_budget,
        max_length=sizes.prompt[1] + sizes.output[1],
        kv_cache_dtype=sizes.kv_cache_dtype,
        top_logprobs=0,
    )
    with Engine(decoder, config=config) as engine:
        if sizes.compiled_before:
            engine.warm_up(progress=True)
        start = time.perf_counter()
        answers = engine.generate(requests)
        seconds = time.perf_counter() - start
        preemptions = engine.stats().preemptions
    del engine
    gc.collect()  # the next engine's cache needs its memory
    pairs = zip(requests, answers, strict=True)
    transcripts = [one for request, answer in pairs for one in transcripts_of(answer, request.sampling, origin)]
    return {"seconds": seconds, "preemptions": preemptions, "transcripts": transcripts}


def _verified(verifier: Verifier, transcripts: Sequence[Transcript]) -> dict[str, Any]:
    """Returns the time of all verdicts, without compilation and the weights' digest."""
    start = time.perf_counter()
    verdicts = verifier.verify(transcripts)
    first = time.perf_counter() - start
    start = time.perf_counter()
    again = verifier.verify(transcripts)
    seconds = time.perf_counter() - start
    assert again == verdicts
    refused = [str(verdict) for verdict in verdicts if not verdict.is_verified]
    return {
        "seconds": seconds,
        "seconds_with_compilation_and_digest": first,
        "tokens_per_second": sum(len(one.prompt) + len(one.tokens) for one in transcripts) / seconds,
        "transcripts": len(verdicts),
        "refused": len(refused),
        "first_refusal": refused[0] if refused else None,
    }


def _refused(verifier: Verifier, transcripts: Sequence[Transcript]) -> dict[str, Any]:
    """Returns the number of transcripts refused after one alteration each, with the digest removed."""
    altered = {
        kind: [alter(random.Random(number), one) for number, one in enumerate(transcripts)]
        for kind, alter in {"token": _other_token, "logprob bit": _other_bit, "prompt": _other_prompt}.items()
    }
    verdicts = {kind: verifier.verify(changed) for kind, changed in altered.items()}
    accepted = {kind: sum(verdict.is_verified for verdict in given) for kind, given in verdicts.items()}
    return {
        "refused": {kind: len(verdicts[kind]) - count for kind, count in accepted.items()},
        "accepted": {kind: count for kind, count in accepted.items() if count},
    }


def _other_token(draw: random.Random, one: Transcript) -> Transcript:
    place = draw.randrange(len(one.tokens))
    other = one.tokens[place] - 1 if one.tokens[place] else 1
    return dataclasses.replace(one, tokens=(*one.tokens[:place], other, *one.tokens[place + 1 :]))


def _other_bit(draw: random.Random, one: Transcript) -> Transcript:
    bits = np.array(one.logprobs, np.float32).view(np.uint32)
    bits[draw.randrange(len(bits))] ^= 1
    return dataclasses.replace(one, logprobs=tuple(bits.view(np.float32).tolist()))


def _other_prompt(draw: random.Random, one: Transcript) -> Transcript:
    place = draw.randrange(len(one.prompt))
    other = one.prompt[place] - 1 if one.prompt[place] else 1
    return dataclasses.replace(one, prompt=(*one.prompt[:place], other, *one.prompt[place + 1 :]))


def study(
    run: Run,
    *,
    preset: options.Preset = Sizes.preset,
    layers: options.Layers = None,
    requests: Annotated[
        int | None,
        Option("The number of requests.", minimum=1, default=f"{Sizes.requests}; {SMALL.requests} with --small"),
    ] = None,
    prompt: Annotated[tuple[int, int], Option("Minimum and maximum tokens of a prompt.", minimum=1)] = Sizes.prompt,
    output: Annotated[tuple[int, int], Option("Minimum and maximum tokens of an answer.", minimum=1)] = Sizes.output,
    at_once: Annotated[
        list[int] | None,
        Option("Concurrent requests.", minimum=1, default="1000 64 4"),
    ] = None,
    greedy: Annotated[bool, Option("Sample all requests greedily.")] = False,
    kv_cache_dtype: Annotated[str | None, Option("Quantize the KV cache.")] = None,
) -> Result:
    with usage_errors():
        cache = cast(KVQuantization | None, kv_cache_dtype)
        sizes = SMALL if run.small else Sizes(preset, layers, prompt=prompt, output=output)
        given = {"requests": requests, "at_once": None if at_once is None else tuple(at_once)}
        chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        sizes = dataclasses.replace(sizes, mixed=sizes.mixed and not greedy, kv_cache_dtype=cache, **chosen)
        result = measured(sizes)
    return Result(result, "; ".join(problems(result)))
