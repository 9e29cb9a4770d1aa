"""Speculative decoding: no bit of an answer depends on guesses, whether they are right, and how many there are."""

import dataclasses
import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, Final

import jax
import pytest

from detjax.engine import (
    BatchShapes,
    Constraint,
    Engine,
    EngineConfig,
    ReasoningBudget,
    ReasoningMarks,
    Request,
    SamplingParams,
    SamplingVariant,
    Sequence,
    SpeculativeConfig,
    StepLoop,
    StepLoopConfig,
    generate,
)
from detjax.engine.batch import BatchShape
from detjax.engine.drafts.draft_lengths import MOST_SEQUENCES, Acceptance, TunedLengths
from detjax.engine.drafts.draft_model import DraftModel
from detjax.engine.drafts.drafter import Drafter
from detjax.engine.drafts.drafting import Drafting
from detjax.engine.drafts.loading import Guesser, check_vocabularies
from detjax.engine.drafts.prompt_lookup import EarlierPlaces
from detjax.engine.page_pool import PagePool
from detjax.engine.request_reader import RequestReader
from detjax.models import read_adapter
from tests.engine.state_schedules import bits
from tests.support.adapters import LINEAR, make_adapter
from tests.support.bits import assert_same_bits
from tests.support.small_loops import FIXTURE, small_model, small_tokenizer

VARIANT: Final = SamplingVariant(True, 2, adjusted=True, constrained=True, distribution=True)
SLOTS, MOST = 4, 7
NGRAM: Final = SpeculativeConfig(method="ngram", num_speculative_tokens=MOST)


def loop_of(speculative: SpeculativeConfig | None, guesser: Guesser = None, pages: int = 4) -> StepLoop:
    """Returns a loop whose scheduler has some of the device's pages."""
    drafts = 0 if speculative is None else MOST
    config = StepLoopConfig(
        shapes=BatchShapes.for_chunks(SLOTS, 32, mixes=True, drafts=drafts, decodes_guesses=True),
        num_pages=5,
        pages_per_sequence=2,
        variants=(VARIANT,),
        prefix_cache=True,
        speculative=speculative,
    )
    loop = StepLoop.for_model(small_model(), config, guesser=guesser)
    loop.scheduler.pool = PagePool(pages)
    return loop


def drafting_of(loop: StepLoop) -> Drafting:
    assert loop.drafting is not None
    return loop.drafting


def requests() -> list[Request]:
    """Requests for everything that a token may depend on; the second one ends a page within its answer."""
    numbers = random.Random(0)

    def request(length: int, **params: Any) -> Request:
        given = {"max_tokens": 16, "seed": length, "ignore_eos": True} | params
        return Request(numbers.choices(range(300), k=length), SamplingParams(**given))

    penalties = {"frequency_penalty": 0.4, "presence_penalty": 0.5, "repetition_penalty": 1.2}
    schema = {"type": "object", "properties": {"ab": {"type": "integer"}}, "required": ["ab"]}
    return [
        request(40, top_logprobs=2),
        request(120, temperature=0.7, **penalties, logit_bias=((7, 2.0),), max_tokens=18),
        request(33, temperature=1.3, top_k=20, sampling_logprobs=True, top_logprobs=1, n=2),
        request(126, temperature=0.7, constraint=Constraint.json_schema(schema), ignore_eos=False),
        request(21, temperature=1.3, min_p=0.01, min_tokens=7, stop_token_ids=tuple(range(200))),
        request(9, **penalties, max_tokens=24),
        request(
            50, temperature=1.3, allowed_token_ids=tuple(range(60, 64)), bad_words=("]^", "_`"), prompt_logprobs=True
        ),
        request(124, temperature=0.7),
        request(22, temperature=0.7, reasoning_budget=ReasoningBudget(6, ReasoningMarks((11, 12), is_open=True))),
        dataclasses.replace(request(125, temperature=0.7), speculative=False),
    ]


def samples_of(requests: Seq[Request]) -> list[Sequence]:
    reader = RequestReader(small_model(), small_tokenizer(), EngineConfig(max_length=256))
    return [one for request in requests for one in reader.samples_of("request", request, is_streamed=True)]


def play(loop: StepLoop, samples: Seq[Sequence], preempted_after: int = 0) -> list[list[str | None]]:
    """Computes samples, with a few arriving before each step, and returns the pieces of their texts.

    After a number of steps, all running samples are preempted.
    """
    pieces: dict[Sequence, list[str | None]] = {sample: [] for sample in samples}
    waiting, steps = list(samples), 0
    while waiting or not loop.is_idle:
        for sample in waiting[:3]:
            loop.submit(sample)
        del waiting[:3]
        tokens, steps = loop.step(), steps + 1
        if steps == preempted_after:
            tokens += loop.drain()
            assert any(sample.generated for sample in loop.scheduler.running)
            loop.scheduler.preempt_all()
        for sample, token in tokens:
            pieces[sample].append(token.text)
    assert loop.scheduler.pool.in_use == 0
    return list(pieces.values())


@dataclasses.dataclass
class Plain:
    """Answers without guesses."""

    requests: list[Request]
    samples: list[Sequence]
    pieces: list[list[str | None]]

    def check(self, samples: Seq[Sequence], pieces: list[list[str | None]]) -> None:
        """Checks that other samples have the same bits, texts, and pieces of texts."""
        for sample, plain in zip(samples, self.samples, strict=True):
            assert sample.failure is None
            assert_same_bits(bits(sample), bits(plain))
            assert (sample.finish_reason, sample.text) == (plain.finish_reason, plain.text)
        assert pieces == self.pieces


@pytest.fixture(scope="module")
def plain() -> Plain:
    some, loop = requests(), loop_of(None)
    first = samples_of(some[:1])
    play(loop, first)
    # A stop string that begins within one token and ends within another.
    text = first[0].text
    assert text is not None
    some.append(dataclasses.replace(some[0], sampling=dataclasses.replace(some[0].sampling, stop=(text[7:13],))))
    samples = samples_of(some)
    pieces = play(loop, samples)
    assert loop.scheduler.preemptions
    assert samples[-1].finish_reason == "stop"
    return Plain(some, samples, pieces)


class Known(Drafter):
    """Guesses tokens from known answers, changed by a function of random numbers: right, wrong or impossible ones."""

    def __init__(self, plain: Plain, change: Callable[[random.Random, list[int]], list[int]], seed: int) -> None:
        self._answers = {(one.prompt, one.params.seed, one.index): one.generated for one in plain.samples[:-1]}
        self._change, self._numbers = change, random.Random(seed)

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Returns guesses for requests that allow them."""
        guesses = {}
        for one, most in wanted.items():
            assert one.context.drafts
            known = self._answers[one.prompt, one.params.seed, one.index][len(one.generated) :][:most]
            guesses[one] = self._change(self._numbers, [*known, *[5] * (most - len(known))])
        return guesses


def mixed(numbers: random.Random, right: list[int]) -> list[int]:
    """Returns a few right guesses, and wrong ones after them."""
    count = numbers.randint(0, len(right))
    return [*right[:count], *[numbers.choice([token + 1, 3, -1, 10**6]) for token in right[count:]]]


CHANGES: Final[dict[str, Callable[[random.Random, list[int]], list[int]]]] = {
    "mixed": mixed,
    "wrong": lambda numbers, right: [token ^ 1 for token in right],
}


@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(10, 30))])
def test_guesses_change_no_bit_of_requests_that_restrict_their_tokens(plain: Plain, seed: int) -> None:
    numbers = random.Random(seed)
    for name, change in CHANGES.items():
        loop, samples = loop_of(NGRAM), samples_of(plain.requests)
        drafting = drafting_of(loop)
        drafting.drafter = Known(plain, change, seed)
        drafting._lengths = lambda sequences, acceptance: numbers.randint(0, MOST)
        plain.check(samples, play(loop, samples, preempted_after=6))
        share = sum(drafting.accepted_at) / drafting.proposed
        low, high = {"mixed": (0.2, 0.95), "wrong": (0.0, 0.3)}[name]
        assert low <= share <= high, (name, share)


def test_prompt_lookup_changes_no_bit(plain: Plain) -> None:
    loop, samples = loop_of(NGRAM), samples_of(plain.requests)
    drafting = drafting_of(loop)
    forced, note = list[tuple[int, int]](), drafting.note

    def noted(sequence: Sequence, proposed: int, accepted: int) -> None:
        if sequence in drafting._forced:
            forced.append((proposed, accepted))
        note(sequence, proposed, accepted)

    drafting.note = noted
    plain.check(samples, play(loop, samples))
    # The schema forces its key, which is then always right.
    assert forced and all(proposed == accepted for proposed, accepted in forced)
    assert drafting.accepted_at[0]


class Silent(Drafter):
    """Counts how often it is asked, and has no guesses."""

    asked = 0

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Returns nothing."""
        self.asked += 1
        return {}


def test_a_drafter_without_a_guess_is_asked_again_ever_later(plain: Plain) -> None:
    loop, silent = loop_of(NGRAM), Silent()
    drafting_of(loop).drafter = silent
    (sample,) = samples_of(plain.requests[:1])
    play(loop, [sample])
    assert 3 <= silent.asked < len(sample.generated) / 2


def test_a_draft_model_with_the_same_weights_is_always_right(plain: Plain) -> None:
    """Its cache has every token, also after a preemption, and it draws with the noise of the request."""
    free = [request for request in plain.requests if SamplingParams(**_free(request.sampling)) == request.sampling]
    assert len(free) >= 2
    prompts = {tuple(request.prompt) for request in free}
    kept = [index for index, one in enumerate(plain.samples[:-1]) if one.prompt in prompts]
    expected = Plain(free, [plain.samples[index] for index in kept], [plain.pieces[index] for index in kept])
    loop, samples = loop_of(NGRAM, small_model()), samples_of(free)
    assert isinstance(drafting_of(loop).drafter, DraftModel)
    expected.check(samples, play(loop, samples, preempted_after=4))
    assert drafting_of(loop).proposed == sum(drafting_of(loop).accepted_at) > 10


def _free(params: SamplingParams) -> dict[str, Any]:
    """Returns what remains of sampling parameters without penalties and restrictions."""
    names = "max_tokens", "temperature", "seed", "top_k", "n", "top_logprobs", "sampling_logprobs", "ignore_eos"
    return {name: getattr(params, name) for name in names}


@pytest.mark.parametrize("adapters", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_generate_and_an_engine_give_the_same_completions_with_a_draft_model(adapters: int, tmp_path: Path) -> None:
    same = SpeculativeConfig(method="draft_model", model=str(FIXTURE), num_speculative_tokens=3)
    sizes: Any = {"max_samples": 1, "token_budget": 8, "max_length": 64, "num_pages": 1, "max_loras": adapters}
    params = SamplingParams(max_tokens=12, temperature=0.7)
    (expected,), drafted = (
        generate(small_model(), [[3, 4, 5]], params, tokenizer=small_tokenizer(), speculative=speculative)
        for speculative in (None, same)
    )
    assert drafted == [expected]
    with Engine(small_model(), small_tokenizer(), speculative=same, **sizes) as engine:
        for is_asleep in (False, True):
            if is_asleep:
                engine.sleep()
                engine.wake_up()
            before = engine.stats().drafts_proposed
            assert engine.generate([Request([3, 4, 5], params, speculative=False)]) == [expected]
            assert engine.stats().drafts_proposed == before
            assert engine.generate([Request([3, 4, 5], params)]) == [expected]
            stats = engine.stats()
            assert before < stats.drafts_proposed == stats.drafts_accepted == sum(stats.drafts_accepted_at)
        if adapters:
            engine.load_adapter("a", read_adapter(make_adapter(tmp_path / "a", LINEAR, 4)))
            answers = [
                engine.generate([Request([3, 4, 5], params, adapter="a", speculative=is_drafted)])
                for is_drafted in (False, True)
            ]
            assert answers[0] == answers[1] != [expected]
            assert engine.stats().drafts_proposed > stats.drafts_proposed


def test_an_engine_without_guesses_has_no_arrays_for_them(plain: Plain) -> None:
    without, with_guesses = (loop_of(one).programs().by_key() for one in (None, NGRAM))
    paths = [str(jax.tree.flatten_with_path([one.args for one in some.values()])) for some in (without, with_guesses)]
    assert ["DraftedRows" in some for some in paths] == [False, True]
    # Where a step has no guess, the layers are the same program.
    shared = [key for key in without if key in with_guesses and key[0] == "_forward"]
    assert shared == [("_forward", BatchShape(SLOTS, 0, 0, SLOTS))]
    for key in shared:
        assert jax.tree.structure(without[key].args) == jax.tree.structure(with_guesses[key].args)


def test_lookup_continues_the_last_earlier_place_of_the_longest_ending() -> None:
    text = random.Random(3).choices(range(3), k=200)
    for shortest, longest in ((1, 1), (2, 4), (3, 3)):
        places = EarlierPlaces(shortest, longest)
        for length in [*range(1, 40), *range(40, 200, 7)]:
            known, expected = text[:length], []
            for size in range(longest, shortest - 1, -1):
                ends = [end for end in range(size, length) if known[end - size : end] == known[length - size :]]
                if ends:
                    expected = (known[ends[-1] :] * 5)[:5]
                    break
            assert places.continuation(known, 5) == expected


def _lengths(rule: TunedLengths, shares: Seq[float], room: int = 99, running: int = 0) -> list[int]:
    """Returns the numbers of guesses for sequences with these shares of right guesses."""
    candidates = {number: (room, Acceptance(share)) for number, share in enumerate(shares)}
    chosen = rule.choose(max(len(shares), running), candidates)
    return [chosen.get(number, 0) for number in candidates]


def test_as_many_tokens_as_possible_are_guessed_while_that_is_faster() -> None:
    rule = TunedLengths(MOST)
    for count in (1, 8, 16):
        assert _lengths(rule, [0.7] * count) == [MOST] * count
    # Half the rows take little more than half the time.
    assert _lengths(rule, [0.7] * MOST_SEQUENCES) == [3] * MOST_SEQUENCES
    assert not any(_lengths(rule, [1.0] * (MOST_SEQUENCES + 1)))
    assert _lengths(rule, [1.0], running=MOST_SEQUENCES + 1) == [0]
    assert _lengths(rule, [0.3]) == [0]
    # The step is slow for all sequences, and rows are free for all.
    assert _lengths(rule, [0.9, 0.1]) == [MOST, MOST]
    assert _lengths(rule, [0.9], running=30) == [0]
    assert _lengths(rule, [1.0], room=2) == [2]
    # A step with a guess takes as long as 1.6 steps without any, and the expected tokens are 1.5.
    assert not any(_lengths(TunedLengths(1), [0.5] * 16))
    assert 0 < _lengths(TunedLengths(MOST, guess_cost=0.11), [0.7])[0] < MOST
    assert _lengths(TunedLengths(MOST, guess_cost=1.0), [0.7]) == [0]


def test_nothing_is_guessed_while_sequences_wait_or_prompts_are_computed() -> None:
    params = SamplingParams(16, ignore_eos=True, logit_bias=((5, 100.0),))  # lookup guesses 5 again
    loop, samples = loop_of(NGRAM), samples_of([Request([5] * 20, params)] * SLOTS)
    for sample in samples:
        loop.submit(sample)
    while not all(sample.is_held for sample in samples):
        loop.step()
    loop.drain()
    drafting, running = drafting_of(loop), loop.scheduler.running
    most = MOST_SEQUENCES - len(running)
    assert [drafting.wants(running, waiting) for waiting in (0, most, most + 1)] == [True, True, False]
    assert [bool(drafting.wanted(running, waiting)) for waiting in (0, most, most + 1)] == [True, True, False]
    (prompt,) = samples_of([Request([7] * 20, SamplingParams(16))])
    assert not drafting.wants([*running, prompt]) and not drafting.wanted([*running, prompt])
    # The loop counts the sequences that wait for a slot.
    late = samples_of([Request([7], SamplingParams(1))] * (most + 1))
    for sample in late:
        loop.submit(sample)
    proposed = drafting.proposed
    for _ in range(3):
        loop.step()
    assert drafting.proposed == proposed and len(loop.scheduler.waiting) == len(late)
    loop.scheduler.waiting.remove(late[0])
    for _ in range(3):
        loop.step()
    assert drafting.proposed > proposed


def test_guesses_that_are_often_wrong_are_tried_again_ever_more_rarely() -> None:
    rule, acceptance = TunedLengths(MOST), Acceptance()
    steps, trials = 2000, []
    for step in range(steps):
        chosen = rule.choose(1, {0: (99, acceptance)})
        rule.note(has_guesses=bool(chosen))
        if chosen:
            trials.append(step)
            acceptance.note(chosen[0], 0)
    assert 10 < len(trials) < 36
    assert trials[-1] - trials[-2] > 250
    while not acceptance.share > 0.9:
        acceptance.note(5, 5)
    assert rule.choose(1, {0: (99, acceptance)}) == {0: MOST}


def test_a_drafter_without_a_guess_is_asked_again_later() -> None:
    rule, acceptance = TunedLengths(MOST), Acceptance()
    for wait in (1, 2, 4, 8, 16, 16):
        acceptance.miss()
        for _ in range(wait):
            assert not rule.choose(1, {0: (99, acceptance)})
            acceptance.skip()
        assert rule.choose(1, {0: (99, acceptance)}) == {0: MOST}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"method": "ngram", "draft_tensor_parallel_size": 2}', "'draft_tensor_parallel_size' with the value 2; acc"),
        ('{"method": "medusa"}', "method is 'medusa'; accepted: 'ngram', 'draft_model', 'eagle3', 'mtp'"),
        ('{"method": "ngram", "model": "x"}', "model is 'x'; accepted: None"),
        ('{"method": "eagle3"}', "model is None; accepted: the directory"),
        (
            '{"method": "ngram", "num_speculative_tokens": 8}',
            "num_speculative_tokens is 8; accepted: an integer from 1",
        ),
        ('{"method": "ngram", "num_speculative_tokens": true}', "num_speculative_tokens is True; accepted"),
        ('{"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}', "prompt_lookup_min is 5; accepted"),
        ('{"method": "mtp", "model": "x", "prompt_lookup_max": 3}', "prompt_lookup_max is 3; accepted: None"),
        ('{"model": "x"}', "accepted: a JSON object with the key 'method'"),
        ("ngram", "which is not JSON"),
    ],
)
def test_settings_that_are_not_accepted_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="speculative") as raised:
        SpeculativeConfig.from_json(text)
    assert message in str(raised.value)


def test_settings_are_read_from_json() -> None:
    assert SpeculativeConfig.from_json('{"method": "ngram", "num_speculative_tokens": 7}') == NGRAM
    assert SpeculativeConfig(method="ngram", prompt_lookup_min=5).lookup == (5, 5)
    assert SpeculativeConfig(method="ngram", prompt_lookup_max=1).lookup == (1, 1)


def test_a_draft_model_with_another_vocabulary_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = small_tokenizer()
    check_vocabularies(tokenizer, tokenizer, "x")
    other = type(tokenizer)(tokenizer.files, "x")
    monkeypatch.setattr(other, "_bytes", {5: b"?"})
    with pytest.raises(ValueError, match=r"token 5 is .* in the model's vocabulary and b'\?' in the draft model 'x'"):
        check_vocabularies(tokenizer, other, "x")
    with pytest.raises(ValueError, match="the engine has no tokenizer"):
        check_vocabularies(None, other, "x")
