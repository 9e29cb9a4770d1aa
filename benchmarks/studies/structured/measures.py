"""Structured output: validity and bits of answers, alone and in a crowd, and the cost of constraints.

Weights are random, and the vocabulary is synthetic, with the model's own size; neither affects the work per token.
"""

import dataclasses
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import jax.numpy as jnp
import tokenizers
from flax import nnx

from benchmarks.studies.structured.random_schemas import Schema, random_schema
from detjax.bench import presets
from detjax.bench.serve import digest
from detjax.engine import Constraint, Engine, EngineConfig, Generation, Request, SamplingParams
from detjax.models import Decoder, DecoderConfig, GenerationDefaults, Tokenizer
from detjax.models.text.tokenizer import byte_alphabet

_WITHOUT_END: Final = {
    "type": "array",
    "minItems": 100_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer"},
            "ok": {"type": "boolean"},
        },
        "required": ["name", "age", "ok"],
        "additionalProperties": False,
    },
}
"""A schema that answers cannot complete, so that they have as many tokens as unconstrained answers."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the measurements.

    Attributes:
        preset: the shape of the model for speed.
        layers: layers of the model that answers random schemas.
        schemas: number of random schemas.
        crowd: concurrent requests.
        crowds: numbers of concurrent requests for speed.
        tokens: tokens per answer for speed.
        rounds: measurements of each speed, whose median counts.
    """

    preset: str = "Qwen3-8B"
    layers: int = 1
    schemas: int = 1000
    crowd: int = 64
    crowds: tuple[int, ...] = (1, 64, 256)
    tokens: int = 128
    rounds: int = 3


SMALL: Final = Sizes("tiny", 1, 12, 4, (1, 4), 16, 1)


def made_up_tokenizer(size: int) -> Tokenizer:
    """Returns a byte-level tokenizer of `size` tokens: the bytes, an end token, and pieces of words and JSON."""
    draw, by_byte = random.Random(0), {byte: character for character, byte in byte_alphabet().items()}
    letters, marks = (
        "abcdefghijklmnopqrstuvwxyz",
        ['"', '",', '":', '": "', "{", '{"', "}", "},", "[", "]", ",", ", ", ": "],
    )
    pieces = dict.fromkeys(chr(byte) for byte in range(256))
    pieces |= dict.fromkeys(marks)
    while len(pieces) < size - 1:
        word = "".join(draw.choices(letters, k=draw.randint(2, 9)))
        number = str(draw.randrange(1000))
        pieces[draw.choice([word, " " + word, word.capitalize(), draw.choice(marks) + word, number])] = None
    written = [
        "".join(by_byte[byte] for byte in piece.encode("latin-1")) for piece in itertools.islice(pieces, size - 1)
    ]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({piece: token for token, piece in enumerate(written)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    with tempfile.TemporaryDirectory() as folder:
        made.save(str(Path(folder) / "tokenizer.json"))
        loaded = Tokenizer.load(Path(folder))
    assert loaded is not None and len(loaded) == size
    return loaded


def _decoder(config: DecoderConfig) -> Decoder:
    decoder = Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    decoder.generation_defaults = GenerationDefaults(eos_token_ids=(config.vocab_size - 1,))
    return decoder


def _config(sizes: Sizes, layers: int | None = None) -> DecoderConfig:
    config = presets.config(sizes.preset, layers)
    # The smallest preset has fewer tokens than bytes exist.
    return dataclasses.replace(config, vocab_size=max(config.vocab_size, 600))


def answers_to_schemas(sizes: Sizes) -> dict[str, Any]:
    """Counts valid answers to random schemas, and compares their bits alone and in a crowd."""
    config, draw = _config(sizes, sizes.layers), random.Random(1)
    schemas = [random_schema(draw) for _ in range(sizes.schemas)]
    requests = [_request(schema, number) for number, schema in enumerate(schemas)]
    decoder, tokenizer = _decoder(config), made_up_tokenizer(config.vocab_size)
    runs: dict[int, list[Generation]] = {}
    for samples in (1, sizes.crowd):
        with Engine(decoder, tokenizer, _engine(samples, 1024)) as engine:
            runs[samples] = engine.generate(requests)
    alone, together = runs.values()
    differing = [number for number, pair in enumerate(zip(alone, together, strict=True)) if pair[0] != pair[1]]
    ended = [one.completions[0].finish_reason == "stop" for one in alone]
    valid = [schema.accepts_text(one.completions[0].text or "") for schema, one in zip(schemas, alone, strict=True)]
    return {
        "schemas": len(schemas),
        "ended": sum(ended),
        "valid": sum(valid),
        "valid_or_unfinished": sum(is_valid or not has_ended for is_valid, has_ended in zip(valid, ended, strict=True)),
        "tokens": sum(len(one.completions[0].tokens) for one in alone),
        "differing": differing,
        "digest": digest(alone),
        "invalid": [
            {"schema": json.dumps(schema.schema), "text": one.completions[0].text}
            for schema, one, is_valid in zip(schemas, alone, valid, strict=True)
            if not is_valid
        ][:5],
    }


def _request(schema: Schema, number: int) -> Request:
    constraint = Constraint.json_schema(schema.schema | {"x-guidance": {"whitespace_flexible": False}})
    return Request([number % 200, 1 + number % 50], SamplingParams(900, 1.0, seed=number, constraint=constraint))


def _engine(samples: int, length: int) -> EngineConfig:
    return EngineConfig(max_samples=samples, token_budget=max(64, samples), max_length=length, top_logprobs=0)


def speeds(sizes: Sizes) -> list[dict[str, Any]]:
    """Returns tokens per second of crowds of several sizes, with and without constraints, alternating."""
    config = _config(sizes)
    decoder, tokenizer = _decoder(config), made_up_tokenizer(config.vocab_size)
    results = []
    with Engine(decoder, tokenizer, _engine(max(sizes.crowds), 256)) as engine:
        engine.warm_up()
        for crowd in sizes.crowds:
            seconds: dict[bool, list[float]] = {True: [], False: []}
            _seconds(engine, crowd, sizes.tokens, constrained=True)
            for _ in range(sizes.rounds):
                for constrained, times in seconds.items():
                    times.append(_seconds(engine, crowd, sizes.tokens, constrained=constrained))
            with_, without = (crowd * sizes.tokens / statistics.median(seconds[kind]) for kind in (True, False))
            results.append(
                {"requests": crowd, "tokens_per_second": with_, "unconstrained": without, "ratio": with_ / without}
            )
    return results


def _seconds(engine: Engine, crowd: int, tokens: int, *, constrained: bool) -> float:
    constraint = Constraint.json_schema(_WITHOUT_END) if constrained else None
    requests = [
        Request(
            [1 + number], SamplingParams(tokens, 1.0, seed=number, constraint=constraint, ignore_eos=not constrained)
        )
        for number in range(crowd)
    ]
    if constraint is not None:
        engine.compile_constraint(constraint)
    engine.forget_prefixes()
    start = time.perf_counter()
    answers = engine.generate(requests)
    seconds = time.perf_counter() - start
    assert {len(answer.completions[0].tokens) for answer in answers} == {tokens}
    return seconds


def problems(answers: dict[str, Any]) -> Sequence[str]:
    """Returns the problems of the answers to random schemas."""
    messages = []
    if answers["valid"] < answers["schemas"]:
        messages.append(f"{answers['schemas'] - answers['valid']} of {answers['schemas']} answers are not valid")
    if answers["differing"]:
        messages.append(f"{len(answers['differing'])} answers have other bits in a crowd than alone")
    return messages
