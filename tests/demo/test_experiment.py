"""The experiment runs the same loads with both numerics, answers every ask and counts every answer."""

import dataclasses
import io
from collections import Counter

import jax.numpy as jnp
import pytest
from flax import nnx
from rich.console import Console

from detjax.demo import CHECKPOINT, DEFAULT_PROMPT
from detjax.demo.experiment import (
    LARGEST_BATCH,
    Answer,
    Divergence,
    Load,
    Request,
    Result,
    Tally,
    ask,
    compare,
    concurrent_groups,
    contender,
    draw_loads,
    pose,
)
from detjax.demo.report import as_json, report, verdict_on_detjax, verdict_on_stock
from detjax.engine import Completion, Generation
from detjax.models import Decoder, DecoderConfig, Tokenizer, load
from detjax.runtime import backends, fingerprints

type Loaded = tuple[Decoder, Tokenizer]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """One layer with random weights, of the width and with the tokenizer of the model that is shipped."""
    shipped, tokenizer = load(CHECKPOINT, progress=False)
    assert tokenizer is not None
    config: DecoderConfig = dataclasses.replace(shipped.config, layers=1, windows=(None,))
    return Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16), tokenizer


@pytest.fixture(scope="module")
def question(loaded: Loaded) -> Request:
    return pose(*loaded, None, 4, seed=0)


def answers(*completions: tuple[int, ...], logprobs: bytes = b"") -> list[Answer]:
    return [Answer(tokens, logprobs, 0, slot) for slot, tokens in enumerate(completions)]


def test_the_question_is_the_prompt_in_tokens(loaded: Loaded) -> None:
    model, tokenizer = loaded
    assert tokenizer.decode(pose(model, tokenizer, None, 4, seed=0).prompt) == DEFAULT_PROMPT
    assert tokenizer.decode(pose(model, tokenizer, "ROMEO:", 4, seed=0).prompt) == "ROMEO:"


def test_without_a_tokenizer_the_question_is_drawn_by_chance(loaded: Loaded) -> None:
    model, _ = loaded
    drawn = pose(model, None, None, 4, seed=1)
    assert drawn == pose(model, None, None, 4, seed=1) != pose(model, None, None, 4, seed=2)
    assert all(0 <= token < model.config.vocab_size for token in drawn.prompt)
    with pytest.raises(ValueError, match=r"the prompt is 'ROMEO:' and the checkpoint has no tokenizer.json; accepted:"):
        pose(model, None, "ROMEO:", 4, seed=0)


@pytest.mark.parametrize("max_tokens", [0, 10_000])
def test_an_answer_without_room_is_refused(loaded: Loaded, max_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"max_tokens is {max_tokens}; accepted: 1 to "):
        pose(*loaded, None, max_tokens, seed=0)


def test_an_empty_prompt_is_refused(loaded: Loaded) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        pose(*loaded, "", 4, seed=0)


def test_loads_ask_as_often_as_they_are_to(loaded: Loaded, question: Request) -> None:
    for asks in (1, 24, 1000):
        loads = draw_loads(*loaded, question, asks, seed=0)
        assert sum(len(load.asked) for load in loads) == asks
        assert all(load.requests[slot] is question for load in loads for slot in load.asked)


def test_loads_have_all_sizes_slots_neighbours_and_both_kinds_of_prefill(loaded: Loaded, question: Request) -> None:
    loads = draw_loads(*loaded, question, 1000, seed=0)
    sizes = Counter(len(load.requests) for load in loads)
    assert set(sizes) == set(range(1, LARGEST_BATCH + 1))
    assert max(sizes.values()) - min(sizes.values()) <= 1
    assert {slot for load in loads for slot in load.asked} == set(range(LARGEST_BATCH))
    assert {load.prefill_chunk for load in loads} == {1, len(question.prompt)}
    neighbours = [request for load in loads for request in load.requests if request is not question]
    assert len({request.prompt for request in neighbours}) > len(neighbours) / 2
    assert {request.max_tokens for request in neighbours} == set(range(1, question.max_tokens + 1))
    room = len(question.prompt) + question.max_tokens
    assert all(len(request.prompt) + request.max_tokens <= room for request in neighbours)


def test_a_seed_draws_the_same_loads_again(loaded: Loaded, question: Request) -> None:
    first = draw_loads(*loaded, question, 100, seed=7)
    assert first == draw_loads(*loaded, question, 100, seed=7)
    assert first != draw_loads(*loaded, question, 100, seed=8)


def test_long_prompts_come_in_a_few_dozen_chunks(loaded: Loaded) -> None:
    long = pose(*loaded, DEFAULT_PROMPT * 10, 4, seed=0)
    chunks = {load.prefill_chunk for load in draw_loads(*loaded, long, 100, seed=0)}
    assert {-(-len(long.prompt) // chunk) for chunk in chunks} == {1, 30}


def test_no_asks_are_refused(loaded: Loaded, question: Request) -> None:
    with pytest.raises(ValueError, match="asks is 0; accepted: at least 1"):
        draw_loads(*loaded, question, 0, seed=0)


@pytest.mark.parametrize("computes", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_detjax_answers_every_ask_with_the_same_bits_and_stock_xla_does_not(
    loaded: Loaded, question: Request, monkeypatch: pytest.MonkeyPatch, computes: bool
) -> None:
    """Logprobs that are not computed are the sizes of batches with stock XLA, and 0 with detjax."""

    def generate(model: Decoder, prompts: list, sampling: list, prefill_chunk: int) -> list[Generation]:
        logprob = -float(len(prompts)) if backends.backend() == "stock" else 0.0
        made = [Completion((5,) * one.max_tokens, (logprob,) * one.max_tokens, (), None, "length") for one in sampling]
        return [Generation(tuple(prompt), (one,)) for prompt, one in zip(prompts, made, strict=True)]

    if not computes:
        monkeypatch.setattr("detjax.demo.experiment.generate", generate)
    model, tokenizer = loaded
    neighbour = Request(question.prompt[:3], 2)
    company = (*[neighbour] * 4, *[question] * 5)
    loads = [Load((question,), (0,), 1), Load(company, tuple(range(4, 9)), len(question.prompt))]
    advanced = list[tuple[str, int]]()
    result = compare(model, loads, "portable", lambda numerics, count: advanced.append((numerics, count)))
    asks = 6
    assert advanced[0] == ("stock", 0) and ("detjax", 0) in advanced
    assert {numerics: sum(n for one, n in advanced if one == numerics) for numerics in ("stock", "detjax")} == {
        "stock": asks,
        "detjax": asks,
    }
    assert (result.stock.asks, result.detjax.asks, result.loads) == (asks, asks, len(loads))
    assert result.detjax.reproduced
    assert (len(result.detjax.counts), result.detjax.divergence) == (1, None)
    assert result.stock.bit_patterns > 1
    if not computes:
        assert (result.stock.bit_patterns, result.stock.counts) == (2, (((5,) * question.max_tokens, asks),))
    assert result.stock_seconds > 0 and result.detjax_seconds > 0
    assert result.fingerprint.backend == "portable"

    content = as_json(result, question, tokenizer, seed=0)
    assert content["detjax"]["completions"] == [
        {
            "count": asks,
            "text": tokenizer.decode(result.detjax.counts[0][0]),
            "tokens": result.detjax.counts[0][0],
        }
    ]
    assert content["fingerprint"]["digest"] == result.fingerprint.digest


def test_answers_come_by_load_and_slot_under_the_backend_asked_for(
    loaded: Loaded, question: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = loaded
    loads = draw_loads(model, tokenizer, question, 60, seed=0)
    met = []

    def generate(model: Decoder, prompts: list, sampling: list, prefill_chunk: int) -> list:
        met.append((len(prompts), prefill_chunk, backends.backend()))
        raise KeyboardInterrupt

    monkeypatch.setattr("detjax.demo.experiment.generate", generate)
    with pytest.raises(KeyboardInterrupt):
        ask(model, loads, "stock")
    assert 1 <= len(met) <= 2, "an interruption reaches the loads that have not begun"
    assert {backend for *_, backend in met} == {"stock"}


def test_stock_programs_on_a_gpu_are_compiled_and_run_by_one_thread() -> None:
    with backends.tracing_for("gpu"):
        assert (concurrent_groups("stock"), concurrent_groups("hopper")) == (1, 2)
    assert concurrent_groups("stock") == 2


def test_a_tally_counts_completions_and_bits() -> None:
    one, other = (5, 6, 7), (5, 6, 8)
    tally = Tally.from_answers([*answers(one, other, one), *answers(one, logprobs=b"other bits")])
    assert tally == Tally(((one, 3), (other, 1)), bit_patterns=3)
    assert (tally.asks, tally.commonest, tally.reproduced) == (4, 3, False)


def test_one_completion_does_not_diverge() -> None:
    tally = Tally.from_answers(answers((5, 6), (5, 6)))
    assert (tally.divergence, tally.reproduced) == (None, True)


@pytest.mark.parametrize(
    ("completions", "divergence"),
    [
        ([(1, 2, 3), (1, 2, 3), (9, 2, 3)], Divergence(0, (1, 2, 3), (9, 2, 3))),
        ([(1, 2, 3), (1, 2, 3), (1, 2)], Divergence(2, (1, 2, 3), (1, 2))),
        ([(1, 2, 3), (1, 2, 3), (1, 2, 4), (1, 2, 4), (1, 8, 3)], Divergence(1, (1, 2, 3), (1, 8, 3))),
        ([(1, 7, 3), (1, 7, 3), (1, 7, 3), (1, 2, 4), (1, 2, 4), (1, 2, 5)], Divergence(1, (1, 7, 3), (1, 2, 4))),
    ],
    ids=["at the first token", "prefix of another", "earliest of several", "commonest of each side"],
)
def test_a_divergence_is_where_two_completions_first_differ(completions: list, divergence: Divergence) -> None:
    assert Tally.from_answers(answers(*completions)).divergence == divergence


SAME = Tally((((1, 2), 9),), bit_patterns=1)
SAME_TEXT = Tally((((1, 2), 9),), bit_patterns=4)
DIFFERENT = Tally((((1, 2), 5), ((1, 3), 4)), bit_patterns=4)


@pytest.mark.parametrize(
    ("tally", "stock", "detjax"),
    [
        (SAME, "these loads made no difference", "9 of 9 times"),
        (SAME_TEXT, "with 4 different sets of logprob bits", "broke its promise: 1 answer, 4 sets"),
        (DIFFERENT, "gave 2 different answers", "broke its promise: 2 answers, 4 sets"),
    ],
)
def test_verdicts_say_what_happened(tally: Tally, stock: str, detjax: str) -> None:
    assert stock in verdict_on_stock(tally)
    assert detjax in verdict_on_detjax(tally)


@pytest.mark.parametrize("words", [True, False])
def test_the_report_shows_both_sides_of_a_divergence(loaded: Loaded, words: bool) -> None:
    tokenizer = loaded[1] if words else None
    one, other = (tuple(loaded[1].encode(text)) for text in ("I will not be so.", "I will go."))
    tally = Tally(((one, 7), (other, 3)), bit_patterns=2)
    result = Result(4, tally, 1.0, Tally(((one, 10),), 1), 2.0, fingerprints.fingerprint())
    console = Console(width=100, file=io.StringIO())
    console.print(report(result, Request(tuple(loaded[1].encode("ROMEO:")), 8), tokenizer))
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert f"after {tally.divergence.position} tokens" in shown
    assert "7 of 10" in shown and "3 of 10" in shown and "10 of 10" in shown
    marked = "I will ▶not be so." if words else f"▶ {' '.join(map(str, one[tally.divergence.position :]))}"
    assert marked in shown


def test_stock_xla_is_not_compared_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert contender(None) == contender("portable") == "portable"
    for forced in ("argument", "environment"):
        if forced == "environment":
            monkeypatch.setenv("DETJAX_BACKEND", "stock")
        with pytest.raises(ValueError, match="the backend is 'stock', the baseline of the demo; accepted:"):
            contender("stock" if forced == "argument" else None)
