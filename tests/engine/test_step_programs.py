"""Programs of steps: what is recorded of tokens, what is read of results, and which program serves what."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from detjax import SamplingParams
from detjax.engine import sampling_programs, sampling_variant, step_programs
from detjax.engine.batch import BatchShape
from detjax.engine.drafts.draft_lengths import MOST_SEQUENCES
from detjax.engine.sampled_tokens import SampledTokens
from detjax.engine.sampling_programs import SeenEntries, seen_entries
from detjax.engine.sampling_variant import SamplingVariant
from detjax.engine.step_programs import StepPrograms
from detjax.operands.sampling_arrays import SeenTokens
from tests.support.small_loops import VARIANTS, small_loop


def entries_of(prompt: list[int], generated: list[int], vocabulary: int) -> list[dict[int, tuple[int, bool]]]:
    """Returns the entries of each batch by token, without padding."""
    batches = []
    for entries in seen_entries(prompt, generated, vocabulary):
        assert len({*entries.token.tolist()}) == len(entries.token) == sampling_programs._SEEN_ENTRIES
        assert (entries.token >= 0).all() and entries.generated.dtype == np.uint16
        rows = zip(*(values.tolist() for values in entries), strict=True)
        batches.append({token: (count, is_there) for token, count, is_there in rows if token < vocabulary})
    return batches


IN_BLOCKS, AT_ONCE, BRIDGED = (True,), (False,), (False, True)


@pytest.mark.parametrize(
    ("shape", "guesses", "expected"),
    [
        (BatchShape(64, 0, 0, 64), True, IN_BLOCKS),
        (BatchShape(MOST_SEQUENCES, 0, 0, MOST_SEQUENCES), True, IN_BLOCKS),
        (BatchShape(MOST_SEQUENCES + 1, 0, 0, MOST_SEQUENCES + 1), True, BRIDGED),
        (BatchShape(256, 0, 0, 256), True, BRIDGED),
        (BatchShape(256, 0, 0, 256, queries=4), True, IN_BLOCKS),
        (BatchShape(64, 0, 0, 64), False, BRIDGED),
        (BatchShape(4, 64, 8, 64), False, BRIDGED),
        (BatchShape(4, 64, 8, 64), True, BRIDGED),
        (BatchShape(4, 1024, 8, 64), False, BRIDGED),
        (BatchShape(4, 2048, 8, 64), False, IN_BLOCKS),
        (BatchShape(0, 8192, 8, 64), True, IN_BLOCKS),
    ],
)
def test_steps_of_many_rows_or_that_may_wait_for_the_host_compute_layers_in_blocks(
    shape: BatchShape, guesses: bool, expected: tuple[bool, ...]
) -> None:
    def ways(*, has_adapters: bool = False, has_images: bool = False) -> tuple[bool, ...]:
        use = step_programs.UseOfBlocks(guesses)
        return use.ways(shape, has_adapters=has_adapters, has_images=has_images)

    assert ways() == expected
    assert ways(has_adapters=True) == AT_ONCE
    assert ways(has_images=True) == (AT_ONCE if shape.rows else expected)


def test_each_token_of_a_sequence_is_noted_once_with_its_count_and_whether_the_prompt_has_it() -> None:
    assert entries_of([3, 5, 3], [5, 7, 7, 0], 9) == [{0: (1, False), 3: (0, True), 5: (1, True), 7: (2, False)}]
    assert entries_of([], [], 9) == [{}]
    assert entries_of([8], [], 9) == [{8: (0, True)}]
    assert entries_of([1], [2] * 70_000, 9) == [{1: (0, True), 2: (65_535, False)}]


@pytest.mark.parametrize(("count", "sizes"), [(3, [3]), (4, [4]), (5, [4, 1]), (8, [4, 4]), (9, [4, 4, 1])])
def test_many_tokens_are_noted_in_several_batches(
    monkeypatch: pytest.MonkeyPatch, count: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(sampling_programs, "_SEEN_ENTRIES", 4)
    batches = entries_of([*range(count)], [count - 1], 40)
    assert [len(batch) for batch in batches] == sizes
    assert {token: batch[token] for batch in batches for token in batch} == {
        token: (int(token == count - 1), True) for token in range(count)
    }


def test_a_slot_is_cleared_by_the_first_batch_of_its_tokens_alone() -> None:
    seen = SeenTokens(jnp.full((2, 5), 3, jnp.uint16), jnp.ones((2, 5), bool))
    entries = SeenEntries(np.array([4, 1, 9], np.int32), np.array([7, 2, 8], np.uint16), np.array([False, True, True]))
    runner = small_loop(VARIANTS[2:])._runner
    wrapped: Any = sampling_programs._note_seen
    network, parameters = runner._network, runner._parameters
    for is_first, counts, prompt in (
        (True, [0, 2, 0, 0, 7], [False, True, False, False, False]),
        (False, [3, 2, 3, 3, 7], [True, True, True, True, False]),
    ):
        copied = SeenTokens(*(jnp.array(x, copy=True) for x in seen))
        noted = wrapped(network, parameters, copied, np.int32(1), np.bool_(is_first), entries)
        assert np.asarray(noted.generated).tolist() == [[3] * 5, counts]
        assert np.asarray(noted.in_prompt).tolist() == [[True] * 5, prompt]


def test_counts_of_tokens_stop_at_the_largest_number_and_rows_without_a_slot_count_nothing() -> None:
    generated = jnp.zeros((3, 4), jnp.uint16).at[2, 1].set(65_534).at[0, 3].set(65_535)
    seen = SeenTokens(generated, jnp.zeros((3, 4), bool))
    rows = SeenTokens(generated[jnp.array([2, 0, 1])], jnp.zeros((3, 4), bool))
    noted = sampling_programs._with_tokens(seen, rows, jnp.array([2, 0, 3], jnp.int32), jnp.array([1, 3, 2], jnp.int32))
    assert np.asarray(noted.generated).tolist() == [[0, 0, 0, 65_535], [0] * 4, [0, 65_535, 0, 0]]


TOKENS = SampledTokens(
    jnp.array([[4, 5], [6, 7]]),
    jnp.array([[-0.5, -1.5], [-2.5, -3.5]]),
    jnp.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]]),
    jnp.array([[[-1.0, -2.0], [-3.0, -4.0]], [[-5.0, -6.0], [-7.0, -8.0]]]),
    jnp.array([[-0.25, -0.75], [-1.25, -1.75]]),
    jnp.array([[[8, 7], [6, 5]], [[4, 3], [2, 1]]]),
    jnp.array([[[-0.5, -1.0], [-1.5, -2.0]], [[-2.5, -3.0], [-3.5, -4.0]]]),
)


def test_a_row_of_a_step_of_a_run_is_read_with_as_much_as_its_request_asks_for() -> None:
    steps = TOKENS.with_lists().by_step()
    assert len(steps) == 2
    asked = SamplingParams(top_logprobs=1, sampling_logprobs=True)
    assert steps[1].at(0, asked) == (6, -2.5, ((5, -5.0),), -1.25, ((4, -2.5),))
    assert steps[1].at(0, SamplingParams(sampling_logprobs=True)) == (6, -2.5, (), -1.25, ())
    assert steps[0].at(1, SamplingParams(top_logprobs=2)) == (5, -1.5, ((3, -3.0), (4, -4.0)), None, ())
    assert steps[0].at(0, SamplingParams()) == (4, -0.5, (), None, ())
    silent = TOKENS._replace(sampling_logprob=None).with_lists()
    assert silent.sampling_logprob is None and silent.by_step()[1].at(1, asked)[3] is None


@pytest.mark.parametrize(("top", "count"), [(0, 8), (1, 10), (20, 10)])
def test_an_engine_has_few_variants_and_the_last_ones_serve_everything(top: int, count: int) -> None:
    variants = SamplingVariant.for_serving(top)
    assert len(variants) == len({*variants}) == count
    assert variants[0] == SamplingVariant(False, 0)
    assert variants[-1] == (True, top, True, True, True)
    for part in itertools.product((False, True), (0, top), *[(False, True)] * 3):
        serving = next(variant for variant in variants if variant.serves(SamplingVariant(*part)))
        assert all(has >= needed for has, needed in zip(serving, part, strict=True))
    # Common requests do not sort the logits, and report nothing that nobody asks for.
    for needed in variants[: count // 2]:
        assert next(variant for variant in variants if variant.serves(needed)) == needed


def test_words_for_a_variant_say_all_that_it_can_do() -> None:
    assert SamplingVariant(False, 0).description == "with nothing but a temperature"
    everything = SamplingVariant(True, 3, True, True, True)
    assert everything.description == (
        "with top-k, top-p and min-p, 3 likeliest tokens, penalties and biases, constraints, sampling logprobs"
    )


@pytest.mark.parametrize(
    ("shape", "most", "is_run"),
    [
        ((4, 0, 0, 4), 4, True),
        ((4, 0, 0, 4), 3, False),
        ((4, 8, 1, 4), 4, False),
        ((3, 0, 0, 4), 4, False),
        ((1, 0, 0, 1), 0, False),
    ],
)
def test_only_steps_that_decode_and_sample_each_row_can_be_runs(
    shape: tuple[int, int, int, int], most: int, is_run: bool
) -> None:
    assert step_programs.has_runs(BatchShape(*shape), most) is is_run


def test_runs_report_a_token_and_its_logprobs_alone() -> None:
    plain, filtered = SamplingVariant(False, 0), SamplingVariant(True, 0)
    drawn = plain._replace(distribution=True)
    changed = [plain._replace(**{name: True}) for name in ("adjusted", "constrained")]
    both = filtered._replace(distribution=True)
    variants = [plain, plain._replace(top_logprobs=1), filtered, *changed, both, drawn]
    assert sampling_variant.run_variants(variants) == [plain, filtered, drawn]


def test_programs_of_a_loop_have_keys_of_their_own_that_lookups_find() -> None:
    loop = small_loop(VARIANTS, runs_of=1)
    programs: StepPrograms = loop.programs()
    keys = [*programs.by_key()]
    assert len({*keys}) == len(keys) == 3 + 3 + 1 + 1 + 2
    shapes = [*loop._shapes]
    looked_up = {step_programs.forward_key(shape) for shape in shapes}
    looked_up |= {sampling_programs.sample_key(shape.sampled, one) for shape in shapes for one in VARIANTS}
    looked_up |= {step_programs.decode_run_key(1, one) for one in VARIANTS[:2]}
    assert looked_up == {key for key in keys if key[0] not in ("_score", "_note_seen")}  # pyright: ignore[reportIndexIssue]
    kinds = [key[0] for key, program in programs.by_key().items() if not program.is_essential]  # pyright: ignore[reportIndexIssue]
    assert kinds == ["_forward", "_sample", "_decode_run", "_decode_run"]


def scatters(jaxpr: Any) -> Iterator[Any]:
    """The scatters of a program that write numbers, in all of its parts."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scatter":
            yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from scatters(inner)


def test_tokens_are_written_to_slots_without_sorting_the_slots() -> None:
    """XLA sorts the places of scatters for GPUs, to be deterministic, unless they say that all are different."""
    programs = small_loop(VARIANTS, runs_of=1).programs()
    for key, program in programs.by_key().items():
        if key[0] in ("_sample", "_decode_run", "_note_seen"):  # pyright: ignore[reportIndexIssue]
            call = functools.partial(program.fn, programs.network, **program.static)
            writes = [*scatters(jax.make_jaxpr(call)(programs.parameters, *program.args).jaxpr)]
            assert writes and all(one.params["unique_indices"] for one in writes), key
