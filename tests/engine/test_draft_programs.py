"""Programs of drafters: they are compiled before the first request, kept on disk, and not compiled at a later start."""

import dataclasses
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import pytest

from detjax.bench import presets
from detjax.engine import (
    BatchShapes,
    EngineConfig,
    Request,
    SamplingParams,
    SamplingVariant,
    SpeculativeConfig,
    StepLoop,
    StepLoopConfig,
)
from detjax.engine import Sequence as Sample
from detjax.engine.drafts.loading import Guesser
from detjax.engine.program_compiler import ProgramCompiler
from detjax.engine.request_reader import RequestReader
from detjax.models import Adapter, Decoder, load_draft, mesh_of, sharded
from tests.models.draft_files import eagle3_config, eagle3_tensors, write
from tests.support.compiled_programs import compiled_programs
from tests.support.kept_programs import no_kept_programs
from tests.support.simulated_devices import ALL_HOLD, run_on_devices

_NUM_PAGES = itertools.count(3)
MOST = 2


@pytest.fixture(scope="module")
def model() -> Decoder:
    return presets.decoder("tiny", 1)


def guesser_of(kind: str, model: Decoder, folder: Path) -> Guesser:
    """The model itself, or a head over the residual stream that enters its layer."""
    if kind == "draft_model":
        return model
    width, vocabulary = model.config.hidden_size, model.config.vocab_size
    head = eagle3_tensors(width, vocabulary)
    head["fc.weight"] = head["fc.weight"][:, :width]
    config = eagle3_config(width, vocabulary, eagle_aux_hidden_state_layer_ids=[0])
    return load_draft(write(folder / "head", config, head), model)


def new_loop(model: Decoder, kind: str | None, num_pages: int, guesser: Guesser = None) -> StepLoop:
    """A loop of two slots; programs of other numbers of pages are others."""
    method: Any = kind
    config = StepLoopConfig(
        shapes=BatchShapes.for_chunks(
            2, 16, mixes=True, drafts=MOST if kind else 0, decodes_guesses=not model.has_slots
        ),
        num_pages=num_pages,
        pages_per_sequence=1,
        variants=(SamplingVariant(False, 0),),
        speculative=SpeculativeConfig(method=method, model="x", num_speculative_tokens=MOST) if kind else None,
    )
    loop = StepLoop.for_model(model, config, guesser=guesser)
    if loop.drafting is not None:
        # The guesses of a random head are wrong, and the tuned rule would stop asking for them.
        loop.drafting._lengths = lambda sequences, acceptance: MOST
    return loop


def answers(loop: StepLoop, model: Decoder, adapter: Adapter | None = None) -> list[Any]:
    """The completions of a short and a longer prompt, with an adapter if one is given."""
    reader = RequestReader(model, None, EngineConfig(max_length=64))
    params = SamplingParams(max_tokens=12, temperature=0.7, seed=3, ignore_eos=True)
    requests = [Request(prompt, params) for prompt in ([5], [*range(40, 60)])]
    samples: list[Sample] = [one for request in requests for one in reader.samples_of("r", request, is_streamed=False)]
    for sample in samples:
        if adapter is not None:
            sample.context = dataclasses.replace(sample.context, adapter=adapter)
        loop.submit(sample)
    while not loop.is_idle:
        loop.step()
    return [sample.completion() for sample in samples]


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("draft_model", marks=pytest.mark.nightly)])
def test_a_later_start_compiles_none_of_the_programs_and_has_the_same_bits(
    kind: str, model: Decoder, tmp_path: Path
) -> None:
    pages, guesser = next(_NUM_PAGES), guesser_of(kind, model, tmp_path)
    expected = answers(new_loop(model, None, pages), model)
    with no_kept_programs():
        jax.clear_caches()  # a program for a CPU that has run cannot be serialized
        new_loop(model, kind, pages, guesser).warm_up(ProgramCompiler(tmp_path / "programs", processes=0))
    jax.clear_caches()
    loop = new_loop(model, kind, pages, guesser)
    with compiled_programs() as compiled:
        loop.warm_up(ProgramCompiler(tmp_path / "programs", processes=0))
        assert answers(loop, model) == expected
    names = "_forward", "_sample", "_follow", "_guess", "_decode_run"
    assert not [name for name in compiled if any(one in name for one in names)], compiled
    assert loop.drafting is not None and loop.drafting.proposed > 5


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("draft_model", marks=pytest.mark.nightly)])
def test_devices_that_share_a_model_take_programs_that_were_compiled_in_advance(kind: str) -> None:
    run_on_devices(__name__, kind, devices=2)


def main(kind: str) -> None:
    """Compares drafts on two devices with answers of one device, with programs compiled in advance."""
    alone = presets.decoder("tiny", 1)
    expected = answers(new_loop(alone, None, 4), alone)
    shared = sharded(alone, mesh_of(2))
    with tempfile.TemporaryDirectory() as folder:
        loop = new_loop(shared, kind, 4, guesser_of(kind, shared, Path(folder)))
    loop.warm_up(ProgramCompiler(processes=0))
    with compiled_programs() as compiled:
        assert answers(loop, shared) == expected
    assert not [name for name in compiled if "_follow" in name or "_guess" in name or "_decode_run" in name]
    assert loop.drafting is not None and loop.drafting.proposed > 5
    print(ALL_HOLD)


if __name__ == "__main__":
    main(sys.argv[1])
