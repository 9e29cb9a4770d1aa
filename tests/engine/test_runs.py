"""Runs of decode steps: no bit of a request depends on how many steps the device is given at once."""

import dataclasses
import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax import SamplingParams
from detjax.contract import KV_BLOCK
from detjax.engine import (
    BatchShapes,
    Constraint,
    Request,
    SamplingVariant,
    Sequence,
    SpeculativeConfig,
    StepLoop,
    StepLoopConfig,
    Token,
)
from detjax.engine.model_runner import ModelRunner
from detjax.engine.page_pool import PagePool
from detjax.engine.sequence import RequestContext, samples
from detjax.engine.step_programs import RUN_STEPS
from detjax.models import Decoder, load, mesh_of, sharded
from detjax.operands.kv_pages import Queries
from tests.engine.state_schedules import FIXTURES, bits
from tests.support.bits import assert_same_bits
from tests.support.simulated_devices import ALL_HOLD, run_on_devices
from tests.support.small_loops import small_engine, small_model, small_tokenizer
from tests.support.waits import HANGS_AFTER

VARIANTS: Final = (
    SamplingVariant(filtered=False, top_logprobs=0),
    SamplingVariant(filtered=False, top_logprobs=0, distribution=True),
    SamplingVariant(filtered=True, top_logprobs=0),
    SamplingVariant(filtered=True, top_logprobs=2, adjusted=True, distribution=True),
)
SLOTS, NUM_PAGES = 4, 8
PAIR: Final = (0, SLOTS)
"""Values of `runs_of`: without runs and with them."""

type Arrivals = Mapping[int, Seq[list[Sequence]]]
"""Samples of requests, by the number of the step before which they arrive."""


def loop_of(
    model: Decoder, runs_of: int, *, has_few_shapes: bool = True, speculative: SpeculativeConfig | None = None
) -> StepLoop:
    """Returns a loop whose runs have one program for any number of decodes, or one for each of several numbers."""
    drafts = 0 if speculative is None else speculative.num_speculative_tokens
    few_shapes = BatchShapes.for_chunks(SLOTS, 16, mixes=drafts > 0, drafts=drafts, decodes_guesses=True)
    config = StepLoopConfig(
        shapes=few_shapes if has_few_shapes else BatchShapes.for_serving(SLOTS, 64),
        speculative=speculative,
        num_pages=NUM_PAGES,
        pages_per_sequence=2,
        variants=VARIANTS,
        prefix_cache=True,
        snapshot_bytes=1 << 24,
        runs_of=runs_of,
    )
    return StepLoop.for_model(model, config)


def request(prompt: Seq[int], context: RequestContext | None = None, **params: Any) -> list[Sequence]:
    return samples(tuple(prompt), SamplingParams(**{"temperature": 0.8, **params}), context or RequestContext())


@dataclasses.dataclass
class Played:
    """The results of a loop for some requests.

    Attributes:
        samples: all samples, in the order of their requests.
        runs: how many decodes took part in each step of each run.
        tokens: the tokens of each step of the loop.
        unread: for each sample that was cancelled, how many tokens the device was sampling for it.
    """

    samples: list[Sequence]
    runs: list[list[int]]
    tokens: list[list[tuple[Sequence, Token]]]
    unread: list[int]

    @property
    def outputs(self) -> list[Any]:
        """Everything that was computed, and how each sample ended."""
        return [(one.finish_reason, one.text, one.cached_tokens, bits(one)) for one in self.samples]


def play(loop: StepLoop, arrivals: Arrivals, cancelled: Mapping[int, int] | None = None) -> Played:
    """Returns what a loop makes of requests.

    Args:
        loop: the loop.
        arrivals: the requests.
        cancelled: the number of a sample, and the tokens after which it is cancelled.
    """
    played = Played([one for some in arrivals.values() for together in some for one in together], [], [], [])

    def noted(runner: ModelRunner, batch: Any, needed: SamplingVariant) -> Any:
        steps = batch.read().steps
        played.runs.append([int((number < steps).sum()) for number in range(RUN_STEPS)])
        return decode_run(runner, batch, needed)

    decode_run, step = ModelRunner.decode_run, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "decode_run", noted)
        while step <= max(arrivals) or not loop.is_idle:
            for one in [one for together in arrivals.get(step, ()) for one in together]:
                loop.submit(one)
            played.tokens.append([] if loop.is_idle else loop.step())
            step += 1
            for one, count in [(played.samples[index], count) for index, count in (cancelled or {}).items()]:
                if len(one.generated) >= count and one.finish_reason is None:
                    played.unread.append(one.unread)
                    loop.scheduler.cancel(one)
    assert loop.scheduler.pool.in_use == 0
    return played


def assert_same_outputs(played: Played, expected: Played, has_runs: bool = True) -> None:
    assert not expected.runs and bool(played.runs) == has_runs, "one of two loops has runs"
    for one, other in zip(played.outputs, expected.outputs, strict=True):
        assert one[:-1] == other[:-1]
        assert_same_bits(one[-1], other[-1])


def both(arrivals_of: Any, model: Decoder | None = None, **options: Any) -> Played:
    """Plays requests without runs and with them, compares all that was computed, and returns what had runs."""
    expected, played = (play(loop_of(model or small_model(), runs_of, **options), arrivals_of()) for runs_of in PAIR)
    assert_same_outputs(played, expected)
    return played


# --- the positions of a run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_queries_of_a_later_step_are_those_packed_for_it(tokens: int) -> None:
    page_table, start = np.array([[4, 1], [2, 7], [3, 5], [0, 0]], np.int32), np.array([5, 126, 0, 0], np.int32)
    count, is_active = np.array([1, 1, 1, 0], np.int32), np.array([True, True, False, False])
    first = Queries.packed(page_table, start, count, decodes=4, rows=0)
    first = dataclasses.replace(first, coordinates=jnp.asarray(start[:, None] + np.array([0, 10, 20], np.int32)))
    later = first.later(jnp.int32(tokens), jnp.asarray(is_active))
    wanted = Queries.packed(
        page_table, np.where(is_active, start + tokens, 0), np.where(is_active, count, 0), decodes=4, rows=0
    )
    for name in ("page_table", "start", "length", "count", "first_row"):
        assert_same_bits(np.asarray(getattr(later, name)), getattr(wanted, name))
    assert later.rows is not None and wanted.rows is not None and first.rows is not None
    for name in ("position", "present"):
        assert_same_bits(np.asarray(getattr(later.rows, name)), getattr(wanted.rows, name))
    present = np.flatnonzero(wanted.rows.present)
    assert_same_bits(np.asarray(later.rows.request)[present], wanted.rows.request[present])
    assert_same_bits(np.asarray(later.coordinates)[present], np.asarray(first.coordinates)[present] + tokens)


# --- the bits of a run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_few_shapes", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 5}, {"top_p": 0.7, "min_p": 0.01}, {"sampling_logprobs": True}],
    ids=["plain", "top-k", "top-p and min-p", "sampling logprobs"],
)
def test_runs_of_samples_that_end_at_any_length_have_the_bits_of_single_steps(
    options: dict[str, Any], has_few_shapes: bool
) -> None:
    lengths = {1: 0.0, 2: 0.7, 7: 0.0, 14: 1.3}

    def arrivals() -> Arrivals:
        some = (
            request([seed, 2, 3], max_tokens=count, seed=seed, temperature=temperature, **options)
            for seed, (count, temperature) in enumerate(lengths.items())
        )
        return {0: [*some]}

    played = both(arrivals, has_few_shapes=has_few_shapes)
    assert [len(one.generated) for one in played.samples] == [*lengths]
    # After the step that prefills: three samples, then two, then one.
    assert played.runs == [[3, 2, 2, 2], [2, 2, 1, 1], [1, 1, 1, 1]]
    assert max(len(tokens) for tokens in played.tokens) == 9


def test_a_sample_ends_in_the_middle_of_a_run_with_an_end_token_or_a_stop_string() -> None:
    model, tokenizer = small_model(), small_tokenizer()
    with_text = RequestContext(tokenizer=tokenizer)
    (free,) = play(loop_of(model, 0), {0: [request([5, 6, 7], with_text, max_tokens=16, seed=3)]}).samples
    text = free.text
    assert text is not None
    end = next(index for index in range(6, 14) if free.generated[index] not in free.generated[:index] and index % 4)
    prefix = tokenizer.decode(free.generated[: end + 1])
    stop = next(prefix[-size:] for size in range(1, 20) if text.find(prefix[-size:]) == len(prefix) - size)
    ending = RequestContext(tokenizer=tokenizer, end_tokens=frozenset([free.generated[end]]))
    streamed = RequestContext(tokenizer=tokenizer, is_streamed=True)

    def arrivals() -> Arrivals:
        requests = (
            request([5, 6, 7], ending, max_tokens=16, seed=3),
            request([5, 6, 7], with_text, max_tokens=16, seed=3, stop=(stop,)),
            request([5, 6, 7], streamed, max_tokens=16, seed=3, stop=(stop,)),
            request([5, 6, 7], streamed, max_tokens=16, seed=3),
        )
        return {0: requests}

    played = both(arrivals)
    by_token, by_text, in_stream, whole = played.samples
    assert by_token.generated == free.generated[: end + 1]
    assert [one.finish_reason for one in played.samples] == ["stop"] * 3 + ["length"]
    assert by_text.text == in_stream.text == text[: text.find(stop)]
    for sample in (in_stream, whole):
        texts = [token.text for some in played.tokens for one, token in some if one is sample]
        assert "".join(texts) == sample.text  # pyright: ignore[reportCallIssue]
    # The other samples continue, in the same run and after it.
    assert len(whole.generated) == 16


def test_samples_that_arrive_while_runs_are_computed_change_no_other() -> None:
    def arrivals(*steps: int) -> Arrivals:
        first, second = steps
        early = [request([seed, 9], max_tokens=25, seed=seed) for seed in range(2)]
        return {0: early, first: [request(range(40), max_tokens=9)], second: [request([4], max_tokens=6, n=3)]}

    # Both times the first two have tokens before the others come.
    expected, played = (
        play(loop_of(small_model(), 0), arrivals(8, 12)),
        play(loop_of(small_model(), SLOTS), arrivals(3, 4)),
    )
    assert_same_outputs(played, expected)
    assert {counts[0] for counts in played.runs} > {2, 4}


def test_a_sample_is_cancelled_while_a_run_is_computed() -> None:
    def arrivals() -> Arrivals:
        return {0: [request([seed, 9], max_tokens=25, seed=seed) for seed in range(2)], 6: [request([4], max_tokens=6)]}

    expected, played = (play(loop_of(small_model(), runs_of), arrivals(), {1: 5}) for runs_of in PAIR)
    assert (expected.unread, played.unread) == ([1], [RUN_STEPS])
    assert [len(one.generated) for one in played.samples] == [25, 5, 6]
    assert_same_outputs(played, expected)


@pytest.mark.parametrize("num_pages", [8, 3, 2])
def test_preempted_samples_go_on_in_runs_with_the_same_bits(num_pages: int) -> None:
    def arrivals() -> Arrivals:
        return {0: [request(range(118 + seed), max_tokens=20, seed=seed, temperature=1.0) for seed in range(4)]}

    loops = [loop_of(small_model(), runs_of) for runs_of in PAIR]
    for loop in loops:  # the device has more pages, so that one program serves all of these
        loop.scheduler.pool = PagePool(num_pages)
    expected, played = (play(loop, arrivals()) for loop in loops)
    for one, other in zip(played.samples, expected.samples, strict=True):
        assert_same_bits(bits(one), bits(other))
    assert played.runs and not expected.runs
    assert [loop.scheduler.preemptions > 0 for loop in loops] == [num_pages < 8] * 2


def test_pages_that_runs_have_filled_are_found_by_the_next_request() -> None:
    def turns(runs_of: int) -> list[Any]:
        loop = loop_of(small_model(), runs_of)
        first = play(loop, {0: [request(range(120), max_tokens=21)]})
        assert bool(first.runs) == bool(runs_of)
        (one,) = first.samples
        (alike,) = play(loop, {0: [request([*one.tokens[:], 7], max_tokens=5)]}).samples
        (other,) = play(loop, {0: [request([*one.tokens[: KV_BLOCK - 1], 99, 7], max_tokens=5)]}).samples
        assert (alike.cached_tokens, other.cached_tokens) == (KV_BLOCK, 0)
        return [bits(sample) for sample in (one, alike, other)]

    assert_same_bits(*(turns(runs_of) for runs_of in PAIR))


def test_samples_that_need_more_between_two_steps_are_computed_step_by_step_among_others() -> None:
    more: list[dict[str, Any]] = [
        {"frequency_penalty": 0.5},
        {"logit_bias": ((7, 3.0), (9, -2.0))},
        {"min_tokens": 4},
        {"top_logprobs": 2},
        {"sampling_logprobs": True, "top_k": 5},
    ]
    for options in more:

        def arrivals(options: dict[str, Any] = options) -> Arrivals:
            return {0: [request([1, 2], max_tokens=12, seed=1), request([3], max_tokens=5, seed=2, **options)]}

        # The other sample continues in runs only.
        assert both(arrivals).runs == [[1, 1, 1, 1], [1, 1, 0, 0]], options


def test_constraints_are_computed_step_by_step_among_others() -> None:
    params = SamplingParams(max_tokens=12, temperature=0.8, ignore_eos=True)
    constrained = SamplingParams(max_tokens=6, constraint=Constraint.choice(["ab", "abcd"]))
    more = dataclasses.replace(params, seed=9)
    requests = [Request([1, 2, 3], params), Request([4, 5], constrained), Request([6], more)]
    answers, calls = [], list[int]()

    def noted(runner: ModelRunner, *args: Any) -> Any:
        calls.append(runner._runs_of)
        return decode_run(runner, *args)

    decode_run = ModelRunner.decode_run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "decode_run", noted)
        for runs_of in PAIR:
            with small_engine(runs_of=runs_of) as engine:
                assert engine.config.runs_of == runs_of
                answers.append([answer.completions for answer in engine.generate(requests)])
    assert answers[0] == answers[1]
    assert answers[0][1][0].text in ("ab", "abcd")
    assert {*calls} == {SLOTS}


def test_a_stream_has_the_tokens_before_a_failure_in_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    failure, note_end = ValueError("no text"), Sequence._note_end

    def fail_at_the_seventh(sample: Sequence) -> None:
        if len(sample.generated) == 7:
            raise failure
        note_end(sample)

    monkeypatch.setattr(Sequence, "_note_end", fail_at_the_seventh)
    tokens = list[Token]()
    with small_engine(runs_of=SLOTS) as engine:
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        assert engine.submit(Request([1, 2, 3], params), tokens.append).exception(HANGS_AFTER) is failure
        assert [token.finish_reason for token in tokens] == [None] * 6
        assert engine.failure is None


# --- what is compiled, and when there are runs ------------------------------------------------------------------------


@pytest.mark.parametrize("runs_of", [0, 1, 3, 4, 64])
def test_batches_of_so_many_decodes_have_runs(runs_of: int) -> None:
    loop = loop_of(small_model(), runs_of, has_few_shapes=False)
    keys = [key for key in loop.programs().by_key() if isinstance(key, tuple) and key[0] == "_decode_run"]
    sizes = [size for size in (1, 4) if size <= runs_of]
    assert sorted(keys) == [("_decode_run", size, variant, RUN_STEPS) for size in sizes for variant in VARIANTS[:3]]
    assert not any(loop.programs().by_key()[key].is_essential for key in keys)
    for shape in loop._shapes:
        for needed in VARIANTS:
            has_run = not shape.rows and shape.decodes in sizes and needed in VARIANTS[:3]
            assert loop._runner.steps_of_run(shape, needed) == (RUN_STEPS if has_run else 1)


# --- models that devices share ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "devices"),
    [
        ("llama3", 2),
        *(
            pytest.param(family, devices, marks=pytest.mark.nightly)
            for family in ("llama3", "qwen3-next", "gpt-oss")
            for devices in (2, 4)
            if (family, devices) != ("llama3", 2)
        ),
    ],
)
def test_devices_that_share_a_model_have_runs_with_the_bits_of_one(family: str, devices: int) -> None:
    run_on_devices(__name__, family, devices=devices)


def main(family: str) -> None:
    """Compares runs of a model that all devices share with the single steps of one."""
    model = load(FIXTURES / family, dtype="float32", progress=False)[0]

    def arrivals() -> Arrivals:
        return {0: [request(range(3, 8), max_tokens=7, seed=1), request([9, 8], max_tokens=4, seed=2)]}

    expected = play(loop_of(model, 0), arrivals())
    mesh = mesh_of(jax.device_count())
    assert mesh is not None
    shared = sharded(model, mesh)
    assert_same_outputs(play(loop_of(shared, SLOTS), arrivals()), expected)
    if len(mesh.devices.flat) > 2 or family != "llama3":  # nor do guesses change a bit; at night
        loop = loop_of(shared, 0, speculative=SpeculativeConfig(method="ngram"))
        known = {one.prompt: one.generated for one in expected.samples}

        def propose(wanted: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
            """Returns two right guesses and a wrong one."""
            return {one: [*known[one.prompt][len(one.generated) :][:2], 0][:most] for one, most in wanted.items()}

        assert loop.drafting is not None
        loop.drafting.drafter.propose = propose
        assert_same_outputs(play(loop, arrivals()), expected, has_runs=False)
        assert loop.drafting.proposed > sum(loop.drafting.accepted_at) > 0
    print(ALL_HOLD)


if __name__ == "__main__":
    main(*sys.argv[1:])
