"""Drafts where numbers are quantized: keys and values in pages, and weights. No bit depends on guesses."""

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest

from detjax.engine import (
    BatchShapes,
    EngineConfig,
    Request,
    SamplingParams,
    SamplingVariant,
    Sequence,
    SpeculativeConfig,
    StepLoop,
    StepLoopConfig,
)
from detjax.engine.drafts.drafter import Drafter
from detjax.engine.drafts.loading import Guesser
from detjax.engine.request_reader import RequestReader
from detjax.models import Decoder, load
from detjax.operands.options import KVQuantization
from tests.engine.state_schedules import bits
from tests.models import quantized_checkpoints as checkpoints
from tests.models.hugging_face import FIXTURES
from tests.support.bits import assert_same_bits, same_bits

MOST = 3
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=MOST)
SMALLER = SpeculativeConfig(method="draft_model", model="x", num_speculative_tokens=MOST)


def loop_of(
    model: Decoder,
    speculative: SpeculativeConfig | None = None,
    guesser: Guesser = None,
    quantization: KVQuantization | None = None,
) -> StepLoop:
    config = StepLoopConfig(
        shapes=BatchShapes.for_chunks(3, 48, mixes=True, drafts=0 if speculative is None else MOST),
        num_pages=6,
        pages_per_sequence=2,
        variants=(SamplingVariant(True, 0),),
        kv_cache_dtype=quantization,
        speculative=speculative,
    )
    loop = StepLoop.for_model(model, config, guesser=guesser)
    numbers = random.Random(1)
    if loop.drafting is not None:
        loop.drafting._lengths = lambda sequences, acceptance: numbers.randint(0, MOST)
    return loop


def play(loop: StepLoop, model: Decoder) -> list[Sequence]:
    """Answers that end a page, that begin with one token, and that are preempted."""
    numbers = random.Random(0)
    temperatures = {121: 0.7, 1: 0.0, 60: 1.3, 125: 0.0}
    reader = RequestReader(model, None, EngineConfig(max_length=160))
    samples = [
        sample
        for length, temperature in temperatures.items()
        for sample in reader.samples_of(
            "r",
            Request(
                numbers.choices(range(90), k=length),
                SamplingParams(max_tokens=12, temperature=temperature, seed=length, ignore_eos=True),
            ),
            is_streamed=False,
        )
    ]
    waiting, steps = list(samples), 0
    while waiting or not loop.is_idle:
        if waiting:
            loop.submit(waiting.pop(0))
        loop.step()
        steps += 1
        if steps == 6:
            loop.drain()
            loop.scheduler.preempt_all()
    return samples


class Mixed(Drafter):
    """Guesses the right tokens up to a random one, and wrong ones from there."""

    def __init__(self, plain: Seq[Sequence]) -> None:
        self._answers, self._numbers = {one.prompt: one.generated for one in plain}, random.Random(2)

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        guesses = {}
        for one, most in wanted.items():
            right = self._answers[one.prompt][len(one.generated) :][:most]
            count = self._numbers.randint(0, len(right))
            guesses[one] = [*right[:count], *(token ^ 1 for token in right[count:])]
        return guesses


@pytest.fixture(scope="module")
def model() -> Decoder:
    """A model whose heads have as many columns as each quantization accepts."""
    return load(FIXTURES / "llama3", progress=False)[0]


def check(samples: Seq[Sequence], plain: Seq[Sequence]) -> None:
    for sample, expected in zip(samples, plain, strict=True):
        assert sample.failure is None
        assert_same_bits(bits(sample), bits(expected))


@pytest.mark.parametrize(
    "quantization", ["q4_0", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("int8", "fp8_e4m3"))]
)
def test_guesses_change_no_bit_with_quantized_pages(model: Decoder, quantization: KVQuantization) -> None:
    plain = play(loop_of(model, quantization=quantization), model)
    loop = loop_of(model, NGRAM, quantization=quantization)
    assert loop.drafting is not None
    loop.drafting.drafter = Mixed(plain)
    check(play(loop, model), plain)
    assert loop.drafting.proposed > sum(loop.drafting.accepted_at) > 5


def test_a_draft_model_guesses_for_quantized_pages_of_the_model(model: Decoder) -> None:
    """Its own pages are plain, so it is not always right."""
    plain = play(loop_of(model, quantization="q4_0"), model)
    loop = loop_of(model, SMALLER, model, "q4_0")
    check(play(loop, model), plain)
    assert loop.drafting is not None and sum(loop.drafting.accepted_at) > 5


@pytest.mark.parametrize("kind", ["fp8 blocks", pytest.param("int4", marks=pytest.mark.nightly)])
def test_quantized_weights_guess_for_themselves_and_for_plain_ones(kind: str, tmp_path: Path) -> None:
    checkpoints.write(kind, tmp_path / "model")
    computed, widened = (load(tmp_path / "model", progress=False, quantized=way)[0] for way in ("computed", "widened"))
    shares = []
    answers = {id(model): play(loop_of(model), model) for model in (computed, widened)}
    for model in (computed, widened):
        loop = loop_of(model, SMALLER, computed)
        check(play(loop, model), answers[id(model)])
        assert loop.drafting is not None
        shares.append(sum(loop.drafting.accepted_at) / loop.drafting.proposed)
    assert shares[0] == 1 and shares[1] > 0
    is_another_function = not all(
        same_bits(bits(one), bits(other)) for one, other in zip(*answers.values(), strict=True)
    )
    assert is_another_function == (kind == "fp8 blocks")
