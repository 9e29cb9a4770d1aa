"""Steps that compute the layers in blocks have the bits of steps that compute them at once, and are ready before."""

import dataclasses
import functools
import itertools
import threading
from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from detjax.bench import presets
from detjax.engine import (
    BatchShapes,
    SamplingVariant,
    SpeculativeConfig,
    StepLoop,
    StepLoopConfig,
    program_compiler,
)
from detjax.engine import Sequence as Sample
from detjax.engine.batch import BatchShape
from detjax.engine.drafts.drafter import Drafter, SampledStep
from detjax.engine.model_runner import ModelRunner, StateSizes
from detjax.engine.program_compiler import ProgramCompiler
from detjax.engine.scheduler import ScheduledStep
from detjax.models import AdapterConfig, Decoder, new_adapter
from tests.engine.test_draft_programs import answers
from tests.engine.test_program_compiler import CompilerHere
from tests.support.bits import assert_same_bits
from tests.support.compiled_programs import compiled_programs
from tests.support.kept_programs import no_kept_programs
from tests.support.waits import HANGS_AFTER

_NUM_PAGES = itertools.count(5)
MOST = 2


@pytest.fixture(scope="module")
def model() -> Decoder:
    return presets.decoder("tiny", 4)


class Constant(Drafter):
    """A drafter whose guesses are seldom right. It notes what it learns of the rows of a step."""

    def __init__(self) -> None:
        self.noted: list[tuple[np.ndarray, ...]] = []

    def note_sampled(self, step: SampledStep) -> None:
        """Notes the tokens and the hidden states of the rows of a step."""
        rows = step.batch.read().queries.rows
        assert rows is not None
        present = np.asarray(rows.present) > 0
        self.noted.append((np.asarray(step.computed.token)[present], np.asarray(step.computed.hidden)[present]))

    def propose(self, wanted: Mapping[Sample, int]) -> dict[Sample, Seq[int]]:
        """Returns the same token for all."""
        return {sample: [7] * most for sample, most in wanted.items()}


def new_loop(model: Decoder, num_pages: int, layers_at_once: int | None, max_loras: int = 0) -> StepLoop:
    """A loop of two slots that always guesses; programs of other numbers of pages are others."""
    config = StepLoopConfig(
        shapes=BatchShapes.for_serving(2, 16, MOST, decodes_guesses=True),
        num_pages=num_pages,
        pages_per_sequence=1,
        variants=(SamplingVariant(False, 0),),
        speculative=SpeculativeConfig(method="ngram", num_speculative_tokens=MOST),
        max_loras=max_loras,
        max_lora_rank=2,
        layers_at_once=layers_at_once,
    )
    loop = StepLoop.for_model(model, config)
    assert loop.drafting is not None
    loop.drafting.drafter, loop.drafting._lengths = Constant(), lambda sequences, acceptance: MOST
    return loop


def plain_loop(model: Decoder, num_pages: int, layers_at_once: int | None, rows_in_blocks: int = 16) -> StepLoop:
    """A loop of two slots that makes no guesses, whose steps have up to 16 rows."""
    config = StepLoopConfig(
        shapes=BatchShapes.for_serving(2, 16),
        num_pages=num_pages,
        pages_per_sequence=1,
        variants=(SamplingVariant(False, 0),),
        layers_at_once=layers_at_once,
        rows_in_blocks=rows_in_blocks,
    )
    return StepLoop.for_model(model, config)


def steps_in_blocks(loop: StepLoop) -> list[BatchShape]:
    """The shapes of steps in blocks, which the loop notes from now on."""
    runner, shapes = loop._runner, list[BatchShape]()
    forward = runner._forward_in_blocks

    def noted(batch: Any, **options: Any) -> Any:
        shapes.append(batch.shape)
        return forward(batch, **options)

    runner._forward_in_blocks = noted
    return shapes


def test_prefills_of_many_rows_are_computed_in_blocks_with_the_same_bits(model: Decoder) -> None:
    pages = next(_NUM_PAGES)
    expected = answers(plain_loop(model, pages, None), model)
    for rows in (16, 17):
        loop = plain_loop(model, pages, 2, rows)
        shapes = steps_in_blocks(loop)
        assert answers(loop, model) == expected
        assert {shape.rows for shape in shapes} == ({16} if rows == 16 else set())


@pytest.mark.parametrize("rows_in_blocks", [16, 17])
def test_blocks_are_computed_until_the_programs_of_all_layers_are_there(
    rows_in_blocks: int, model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, go_on = next(_NUM_PAGES), threading.Event()
    expected = answers(plain_loop(model, pages, None), model)
    jax.clear_caches()  # a program for a CPU that has run cannot be serialized
    loop = plain_loop(model, pages, 2, rows_in_blocks)
    programs: Any = loop.programs().by_key()
    at_once = [key for key in programs if key[0] == "_forward"]
    rare = [key for key, program in programs.items() if not program.is_essential]
    awaited = [key for key in at_once if key in {program.until for program in programs.values()}]
    assert rare[: len(awaited)] == awaited
    assert sorted(shape.rows for _, shape in awaited) == ([0, 0] if rows_in_blocks == 16 else [0, 0, 16])
    assert {shape.rows for _, shape in at_once} == ({0} if rows_in_blocks == 16 else {0, 16})

    def wait_if_rare(key: Hashable) -> None:
        assert key not in rare or go_on.wait(HANGS_AFTER)

    monkeypatch.setattr(program_compiler, "CompilerProcess", CompilerHere)
    monkeypatch.setattr(CompilerHere, "before", staticmethod(wait_if_rare))
    with no_kept_programs():
        loop.warm_up(ProgramCompiler(processes=len(programs), in_background=True))
        compilation = loop._runner._compilation
        assert compilation is not None and compilation.pending == {*rare}
        shapes = steps_in_blocks(loop)
        assert answers(loop, model) == expected
        assert {bool(shape.rows) for shape in shapes} == {False, True}
        go_on.set()
        loop.wait_for_programs()
        assert not compilation.pending
        shapes.clear()
        assert answers(loop, model) == expected
        assert {shape.rows for shape in shapes} == ({16} if rows_in_blocks == 16 else set())
        loop.close()


def test_blocks_that_nothing_has_to_wait_for_are_not_compiled(model: Decoder, tmp_path: Path) -> None:
    pages, counts = next(_NUM_PAGES), list[int]()

    def track(programs: Any, count: int) -> Any:
        counts.append(count)
        return programs

    jax.clear_caches()
    with no_kept_programs():
        for processes, in_background in ((0, False), (1, True)):
            loop = plain_loop(model, pages, 2)
            loop.warm_up(
                ProgramCompiler(tmp_path / "kept", processes=processes, in_background=in_background, track=track)
            )
            programs, compilation = loop.programs().by_key(), loop._runner._compilation
            bridging = {key for key, program in programs.items() if program.until is not None}
            assert len(bridging) == 2  # the decodes of one sequence and of two
            assert compilation is not None and compilation.pending == bridging
            shapes = steps_in_blocks(loop)
            answers(loop, model)
            assert shapes and all(shape.rows for shape in shapes)
            loop.close()
    assert counts == [len(programs) - len(bridging), 0]


def test_steps_in_blocks_have_the_same_bits_and_need_no_program_at_a_later_start(
    model: Decoder, tmp_path: Path
) -> None:
    pages = next(_NUM_PAGES)
    expected = answers(new_loop(model, pages, None), model)
    with no_kept_programs():
        jax.clear_caches()  # a program for a CPU that has run cannot be serialized
        new_loop(model, pages, 2).warm_up(ProgramCompiler(tmp_path / "programs", processes=0))
    jax.clear_caches()
    loop = new_loop(model, pages, 2)
    with compiled_programs() as compiled:
        loop.warm_up(ProgramCompiler(tmp_path / "programs", processes=0))
        assert loop._runner.has_layers(BatchShape(6, 0, 0, 6, queries=3))
        shapes = steps_in_blocks(loop)
        assert answers(loop, model) == expected
    assert not [name for name in compiled if "_forward" in name or "_sample" in name or "_embed" in name], compiled
    assert [shape.queries for shape in shapes].count(3) > 5
    assert loop.drafting is not None and loop.drafting.proposed > 5


def test_rows_with_adapters_are_computed_at_once_and_others_in_blocks(model: Decoder) -> None:
    pages, adapter = next(_NUM_PAGES), new_adapter(model, AdapterConfig(rank=2, alpha=4.0, targets="all-linear"))
    factors = {name: one._replace(b=np.ones_like(one.b)) for name, one in adapter.factors.items()}
    adapter = dataclasses.replace(adapter, factors=factors)
    at_once, in_blocks = (new_loop(model, pages, most, max_loras=1) for most in (None, 2))
    shapes = steps_in_blocks(in_blocks)
    for one in (adapter, None):
        assert answers(in_blocks, model, one) == answers(at_once, model, one)
        assert bool(shapes) == (one is None)


def test_a_loop_that_has_slept_computes_blocks_again(model: Decoder) -> None:
    loop = new_loop(model, next(_NUM_PAGES), 2)
    expected = answers(loop, model)
    loop.sleep(keeps_weights=True)
    assert not loop._runner._before_first
    loop.wake_weights()
    loop.wake_state()
    assert answers(loop, model) == expected


def test_a_drafter_learns_the_same_of_rows_in_blocks(model: Decoder) -> None:
    noted = []
    for layers_at_once in (None, 2):
        loop = new_loop(model, next(_NUM_PAGES), layers_at_once)
        assert loop.drafting is not None
        sizes, empty = (
            StateSizes(loop.scheduler.pool.num_pages, 2, None),
            functools.partial(loop._slots.batch, ScheduledStep()),
        )
        options: dict[str, Any] = {"depths": (), "layers_at_once": layers_at_once}
        loop._runner = ModelRunner(model, sizes, variants=(SamplingVariant(False, 0),), empty_batch=empty, **options)
        answers(loop, model)
        drafter = loop.drafting.drafter
        assert isinstance(drafter, Constant) and (loop._runner._blocks is None) == (layers_at_once is None)
        noted.append(drafter.noted)
    at_once, in_blocks = noted
    assert len(at_once) == len(in_blocks) > 5
    for one, other in zip(at_once, in_blocks, strict=True):
        assert_same_bits(one, other)
