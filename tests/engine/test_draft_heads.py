"""Heads that guess in the engine: each guess is the one that the head gives for the text so far, computed afresh."""

import dataclasses
import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from detjax import ops
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
from detjax.engine.batch import BatchShape, sampling_arrays
from detjax.engine.drafts.draft_head import HeadDrafter
from detjax.engine.drafts.drafter import Drafter
from detjax.engine.request_reader import RequestReader
from detjax.models import Decoder, Draft, KVCache, load, load_draft
from detjax.models.drafts.draft import target_states
from tests.engine.state_schedules import bits
from tests.models.draft_files import eagle3_config, eagle3_tensors, with_next_token_layer, write
from tests.models.hugging_face import FIXTURES
from tests.support.bits import assert_same_bits

LENGTH, MOST = 160, 3


@pytest.fixture(scope="module", params=["eagle3", pytest.param("mtp", marks=pytest.mark.nightly)])
def draft(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Draft:
    folder: Path = tmp_path_factory.mktemp("draft")
    if request.param == "mtp":
        folder = with_next_token_layer("deepseek-v3", folder)
        return load_draft(folder, load(folder, dtype="float32", progress=False)[0])
    model = load(FIXTURES / "qwen3", dtype="float32", progress=False)[0]
    width, vocabulary = model.config.hidden_size, model.config.vocab_size
    head = eagle3_tensors(width, vocabulary, 100)
    head["fc.weight"] = head["fc.weight"][:, : 2 * width]
    config = eagle3_config(width, vocabulary, 100, eagle_aux_hidden_state_layer_ids=[0, 1])
    return load_draft(write(folder, config, head), model)


def loop_of(model: Decoder, draft: Draft | None) -> StepLoop:
    method = None if draft is None else draft.head.METHOD
    speculative = None if method is None else SpeculativeConfig(method=method, model="x", num_speculative_tokens=MOST)
    decodes_guesses = not model.has_slots
    shapes = BatchShapes.for_chunks(
        3, 48, mixes=True, drafts=0 if draft is None else MOST, decodes_guesses=decodes_guesses
    )
    if draft is not None and decodes_guesses:  # a sequence with its guesses is one request, as in an engine
        rows = 3 * (1 + MOST)
        shapes = BatchShapes([*shapes, BatchShape(rows, 0, 0, rows, queries=1 + MOST)], shapes.limits)
    config = StepLoopConfig(
        shapes=shapes,
        num_pages=6,
        pages_per_sequence=2,
        variants=(SamplingVariant(True, 0),),
        prefix_cache=True,
        speculative=speculative,
    )
    return StepLoop.for_model(model, config, guesser=draft)


def play(loop: StepLoop, model: Decoder) -> list[Sequence]:
    """Requests whose prompts have one token, several chunks or a page in common, and answers that end a page."""
    numbers = random.Random(0)
    common = numbers.choices(range(100), k=130)
    prompts = [common, [7], numbers.choices(range(100), k=124), [*common, 3, 4], numbers.choices(range(100), k=40)]
    reader = RequestReader(model, None, EngineConfig(max_length=LENGTH))
    params = [SamplingParams(max_tokens=9, temperature=t, seed=5, ignore_eos=True) for t in (0.0, 0.7, 1.0, 0.7, 0.0)]
    requests = [Request(*pair) for pair in zip(prompts, params, strict=True)]
    samples = [one for request in requests for one in reader.samples_of("r", request, is_streamed=False)]
    waiting = list(samples)
    while waiting or not loop.is_idle:
        if waiting:
            loop.submit(waiting.pop(0))
        loop.step()
    return samples


class Afresh:
    """The guesses of a head, without what the engine keeps. Programs have one shape: causal rows ignore later ones."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    def guesses(self, sequence: Sequence, count: int) -> list[int]:
        draft, known = self._draft, list(sequence.tokens)
        ids = jnp.asarray([known + [0] * (LENGTH - len(known))], jnp.int32)
        cache = draft.target.empty_cache(1, LENGTH)
        queries = cache.next_queries(jnp.full(1, LENGTH))
        _, features, _ = target_states(draft.target, draft.head.depths, ids, queries, cache.state)
        rows = KVCache.empty(draft.head.config, 1, LENGTH, draft.dtype)
        queries = rows.next_queries(jnp.full(1, LENGTH - 1))
        hidden, state = draft.rows(ids[:, 1:], draft.mapped(features[:, :-1]), queries, rows.state[0])
        hidden, guesses = hidden[:, len(known) - 2][:, None], []
        rows = dataclasses.replace(rows, state=(state,), lengths=jnp.full(1, len(known) - 1))
        for number in range(count):
            guesses.append(self._sampled(hidden, sequence, len(known) + number))
            queries = rows.next_queries(jnp.ones(1, jnp.int32))
            token = jnp.asarray([guesses[-1:]], jnp.int32)
            hidden, state = draft.rows(token, draft.head.chained(hidden), queries, rows.state[0])
            rows = rows.written((state,), queries)
        return guesses

    def _sampled(self, hidden: jnp.ndarray, sequence: Sequence, position: int) -> int:
        logits = self._draft.row_logits(hidden)[0]
        if self._draft.target_ids is not None:
            everything = jnp.full((1, self._draft.target.config.vocab_size), -jnp.inf)
            logits = everything.at[:, self._draft.target_ids].set(logits)
        arrays = sampling_arrays([sequence.params], [sequence.noise_key])
        arrays = arrays._replace(position=np.array([position], np.int32))
        return int(ops.sample(logits, arrays, filtered=True)[0][0])


class Checked(Drafter):
    """A head whose guesses are checked, and replaced by known answers for some sequences, so that some are right."""

    follows = True

    def __init__(self, drafter: HeadDrafter, afresh: Afresh, answers: Mapping[tuple[int, ...], Seq[int]]) -> None:
        self.note_sampled = drafter.note_sampled
        self._drafter, self._afresh, self._answers = drafter, afresh, answers
        self.checked = 0

    def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Seq[int]]:
        guesses = dict(self._drafter.propose(wanted))
        for sequence, count in wanted.items():
            assert list(guesses[sequence]) == self._afresh.guesses(sequence, count)
            self.checked += count
            if self.checked % 3:
                done = len(sequence.generated)
                guesses[sequence] = self._answers[sequence.prompt][done : done + count]
        return guesses


def test_each_guess_is_the_head_s_own_and_changes_no_bit(draft: Draft) -> None:
    plain = play(loop_of(draft.target, None), draft.target)
    loop = loop_of(draft.target, draft)
    drafting = loop.drafting
    assert drafting is not None and isinstance(drafting.drafter, HeadDrafter)
    drafting.drafter.drop_state()
    drafting.drafter.make_state()
    # Programs of the head do not take the weights of the model's layers.
    weights = drafting.drafter.programs().parameters.model.weights
    assert 0 < sum(weight is not None for weight in weights) <= 3
    numbers = random.Random(3)
    drafting._lengths = lambda sequences, acceptance: numbers.randint(0, MOST)
    answers = {one.prompt: one.generated for one in plain}
    checked = drafting.drafter = Checked(drafting.drafter, Afresh(draft), answers)
    for sample, expected in zip(play(loop, draft.target), plain, strict=True):
        assert sample.failure is None
        assert_same_bits(bits(sample), bits(expected))
    assert checked.checked > 20
    assert drafting.proposed > sum(drafting.accepted_at) > 5
