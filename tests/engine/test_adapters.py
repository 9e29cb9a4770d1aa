"""Adapters in an engine: a request has the bits that it has alone, whoever shares its steps, slots and pages."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax.engine.adapter_slots import AdapterSlots
from detjax.engine.model_runner import ModelRunner
from detjax.engine.packed_batch import PackedBatch
from detjax.engine.page_pool import PagePool
from detjax.engine.request import Token
from detjax.engine.sampled_tokens import PackedTokens
from detjax.engine.sampling_variant import SamplingVariant
from detjax.engine.scheduler import Scheduler, StepLimits
from detjax.engine.sequence import RequestContext, Sequence
from detjax.models import Adapter, CheckpointError, read_adapter
from detjax.models.adapters.adapter_config import AdapterConfig
from detjax.operands.adapted_weight import NO_ADAPTER
from tests.support.adapters import FIXTURE, LINEAR, make_adapter
from tests.support.compiled_programs import compiled_programs
from tests.support.waits import HANGS_AFTER

NAMES = ("small", "middle", "large")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Adapter]:
    """Adapters of ranks 3, 8 and 64; the first has no factors in some modules."""
    folder = tmp_path_factory.mktemp("adapters")
    targets = {"small": ["q_proj", "down_proj"], "middle": LINEAR, "large": LINEAR}
    ranks = {"small": 3, "middle": 8, "large": 64}
    return {
        name: read_adapter(make_adapter(folder / name, targets[name], ranks[name], seed=seed))
        for seed, name in enumerate(NAMES)
    }


@pytest.fixture(scope="module")
def engine(adapters: dict[str, Adapter]) -> Iterator[detjax.Engine]:
    """An engine with two slots for three adapters."""
    model, _ = detjax.models.load(FIXTURE, dtype="float32", progress=False)
    options: dict[str, Any] = {"max_samples": 4, "token_budget": 64, "max_length": 160, "max_loras": 2}
    with detjax.Engine(model, max_lora_rank=64, **options) as engine:
        for name, adapter in adapters.items():
            engine.load_adapter(name, adapter)
        yield engine


def request(name: str | None, prompt: int = 0, length: int = 6, tokens: int = 5) -> detjax.Request:
    ids = np.random.default_rng([prompt]).integers(0, 100, length).tolist()
    return detjax.Request(ids, detjax.SamplingParams(max_tokens=tokens, temperature=0.7, seed=3), adapter=name)


@pytest.fixture(scope="module")
def alone(engine: detjax.Engine) -> dict[str | None, detjax.Generation]:
    """The answer of each adapter's request when no other request is in flight."""
    return {name: engine.generate([request(name)])[0] for name in (None, *NAMES)}


def test_requests_with_different_adapters_and_without_one_have_the_bits_that_they_have_alone(
    engine: detjax.Engine, alone: dict[str | None, detjax.Generation]
) -> None:
    order = ["middle", None, "large", "small", None, "small", "large", "middle"]
    assert engine.generate(map(request, order)) == [alone[name] for name in order]
    assert len({generation.completions[0].logprobs for generation in alone.values()}) == 4


def test_rows_with_the_same_adapter_are_neighbours_in_a_step(adapters: dict[str, Adapter]) -> None:
    limits = StepLimits(slots=6, tokens=60, prefills=6, rows=60, prefill_chunk=8)
    scheduler = Scheduler(PagePool(6), limits, AdapterSlots(2))
    names = ["middle", None, "large", "middle", None, "large"]
    for name in names:
        context = RequestContext(adapter=None if name is None else adapters[name])
        scheduler.submit(Sequence((1, 2, 3), detjax.SamplingParams(max_tokens=4), context=context))
    scheduler.mark_submitted(scheduler.plan())
    decodes = scheduler.plan().decodes
    assert [chunk.sequence.adapter_slot for chunk in decodes] == [None, None, 0, 0, 1, 1]
    assert {chunk.sequence for chunk in decodes} == {*scheduler.running}


def test_answers_are_those_of_the_model_and_the_base_requests_those_of_an_engine_without_adapters(
    engine: detjax.Engine, adapters: dict[str, Adapter], alone: dict[str | None, detjax.Generation], tmp_path: Path
) -> None:
    for name, adapter in adapters.items():
        detjax.models.save_adapter(adapter, tmp_path / name)
    folders = {name: tmp_path / name for name in NAMES}
    model, _ = detjax.models.load(FIXTURE, dtype="float32", progress=False, adapters=folders)
    plain = detjax.generate(model, [request(None).prompt], request(None).sampling)
    assert list(plain) == [alone[None]]
    rows = [[*alone[name].prompt_tokens, *alone[name].completions[0].tokens] for name in ("middle", "large")]
    logits = np.asarray(model(jnp.asarray(rows), adapter=["middle", "large"]))
    logprobs = np.asarray(detjax.jit(detjax.ops.log_softmax)(logits))
    for row, name in enumerate(("middle", "large")):
        completion, first = alone[name].completions[0], len(alone[name].prompt_tokens)
        expected = [logprobs[row, first + n - 1, token] for n, token in enumerate(completion.tokens)]
        assert np.array(completion.logprobs, np.float32).tobytes() == np.array(expected, np.float32).tobytes()


def test_an_adapter_has_the_same_bits_after_it_left_and_came_back_elsewhere(
    engine: detjax.Engine, adapters: dict[str, Adapter], alone: dict[str | None, detjax.Generation]
) -> None:
    engine.unload_adapter("small")
    with pytest.raises(ValueError, match="adapter is 'small'"):
        engine.generate([request("small")])
    with pytest.raises(KeyError, match="not loaded"):
        engine.unload_adapter("small")
    engine.generate([request("middle"), request("large")])
    engine.load_adapter("again", adapters["small"])
    engine.load_adapter("small", adapters["small"])
    assert engine.generate([request("again")]) == [alone["small"]]
    with pytest.raises(ValueError, match="loaded already"):
        engine.load_adapter("small", adapters["large"])


def test_a_prefix_that_was_computed_with_one_adapter_never_serves_another(
    engine: detjax.Engine, adapters: dict[str, Adapter]
) -> None:
    def answers(*names: str | None) -> list[detjax.Generation]:
        return [engine.generate([request(name, prompt=7, length=140)])[0] for name in names]

    engine.forget_prefixes()
    expected = answers("middle", "large", None)
    assert [one.cached_tokens for one in expected] == [0, 0, 0]
    engine.load_adapter("same content", adapters["middle"])
    again = answers("same content", "large", None)
    assert again == expected
    assert [one.cached_tokens for one in again] == [128, 128, 128]
    engine.load_adapter("same content", adapters["large"], replaces=True)
    (replaced,) = answers("same content")
    assert replaced == expected[1] and replaced.cached_tokens == 128
    engine.unload_adapter("same content")


def test_runs_of_decodes_compute_each_row_with_its_adapter(
    engine: detjax.Engine, adapters: dict[str, Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("middle", None, "large", "middle")
    requests = [request(name, prompt, tokens=9) for prompt, name in enumerate(names)]
    expected, runs = engine.generate(requests), list[tuple[int, ...]]()
    decode_run = ModelRunner.decode_run

    def counted(self: ModelRunner, batch: PackedBatch, needed: SamplingVariant) -> PackedTokens:
        runs.append(() if batch.adapters is None else tuple(batch.adapters.read().tolist()))
        return decode_run(self, batch, needed)

    monkeypatch.setattr(ModelRunner, "decode_run", counted)
    model, _ = detjax.models.load(FIXTURE, dtype="float32", progress=False)
    options: dict[str, Any] = {"max_samples": 4, "token_budget": 64, "max_length": 160, "max_loras": 2, "runs_of": 4}
    with detjax.Engine(model, max_lora_rank=64, **options) as other:
        for name in ("middle", "large"):
            other.load_adapter(name, adapters[name])
        assert other.generate(requests) == expected
    assert any({0, 1, NO_ADAPTER} <= set(slots) for slots in runs), runs


def test_unloading_refuses_new_requests_and_waits_for_those_in_flight(
    engine: detjax.Engine, adapters: dict[str, Adapter]
) -> None:
    (expected,) = engine.generate([request("middle", tokens=12)])
    engine.load_adapter("leaving", adapters["middle"])
    has_begun, may_continue, ended = threading.Event(), threading.Event(), list[bool]()

    def wait(token: Token) -> None:
        has_begun.set()
        assert may_continue.wait(HANGS_AFTER)

    future = engine.submit(request("leaving", tokens=12), wait)

    def unload() -> None:
        engine.unload_adapter("leaving")
        ended.append(future.done())

    assert has_begun.wait(HANGS_AFTER)
    thread = threading.Thread(target=unload)
    thread.start()
    while "leaving" in engine.adapters:
        time.sleep(0.001)
    with pytest.raises(ValueError, match="adapter is 'leaving'"):
        engine.submit(request("leaving"))
    thread.join(0.2)
    may_continue.set()  # the engine's thread waits for it, whatever has happened
    thread.join(HANGS_AFTER)
    assert ended == [True] and future.result() == expected


def test_sleep_empties_the_slots_and_changes_no_bit(
    engine: detjax.Engine, alone: dict[str | None, detjax.Generation]
) -> None:
    engine.sleep()
    engine.wake_up()
    assert engine.generate([request("middle"), request(None)]) == [alone["middle"], alone[None]]


def test_another_adapter_compiles_nothing(
    engine: detjax.Engine, alone: dict[str | None, detjax.Generation], tmp_path: Path
) -> None:
    engine.load_adapter("new", read_adapter(make_adapter(tmp_path / "new", ["v_proj"], 5, seed=9)))
    # The programs of one request may have been forgotten since another test compiled them.
    assert engine.generate([request("middle")]) == [alone["middle"]]
    with compiled_programs() as compiled:
        (new,) = engine.generate([request("new")])
    assert not compiled
    assert new not in alone.values()
    engine.unload_adapter("new")


def test_adapters_that_cannot_share_steps_are_refused(engine: detjax.Engine, tmp_path: Path) -> None:
    saved = make_adapter(tmp_path / "saved", ["q_proj"], 4, replaced=["model.norm.weight"], modules_to_save=["norm"])
    with pytest.raises(CheckpointError, match=r"replaces 'model\.norm\.weight'"):
        engine.load_adapter("saved", read_adapter(saved))
    with pytest.raises(CheckpointError, match="has rank 65; accepted: up to 64"):
        engine.load_adapter("wide", read_adapter(make_adapter(tmp_path / "wide", ["q_proj"], 65)))
    with pytest.raises(ValueError, match=r"adapter is 'nobody'; accepted: None, .*'middle'"):
        engine.generate([request("nobody")])


def test_an_engine_of_a_model_with_an_adapter_serves_modules_to_save(tmp_path: Path) -> None:
    replaced = {
        "replaced": ["model.norm.weight", "model.embed_tokens.weight"],
        "modules_to_save": ["norm", "embed_tokens"],
    }
    folder = make_adapter(tmp_path / "saved", LINEAR, 4, **replaced)
    model, _ = detjax.models.load(FIXTURE, dtype="float32", progress=False, adapters={"saved": folder})
    base, _ = detjax.models.load(FIXTURE, dtype="float32", progress=False)
    options: dict[str, Any] = {"max_samples": 1, "token_budget": 16, "max_length": 32}
    with detjax.Engine(detjax.models.with_adapter(base, read_adapter(folder)), **options) as engine:
        (answer,) = engine.generate([request(None)])
    completion, first = answer.completions[0], len(answer.prompt_tokens)
    logits = model(jnp.asarray([[*answer.prompt_tokens, *completion.tokens]]), adapter=["saved"])
    logprobs = np.asarray(detjax.jit(detjax.ops.log_softmax)(logits))[0]
    expected = [logprobs[first + n - 1, token] for n, token in enumerate(completion.tokens)]
    assert np.array(completion.logprobs, np.float32).tobytes() == np.array(expected, np.float32).tobytes()
    with pytest.raises(CheckpointError, match=r"accepted next to other adapters: factors alone"):
        detjax.Engine(model, max_loras=1, **options)


def test_the_least_recently_used_adapter_that_nobody_runs_leaves_its_slot() -> None:
    a, b, c = (Adapter(AdapterConfig(rank=1, alpha=1.0), {}, {name: np.zeros(1)}) for name in "abc")
    slots = AdapterSlots(2)
    assert [slots.take(a), slots.take(b), slots.take(a)] == [0, 1, 0]
    assert not slots.has_room_for(c)
    slots.release(a)
    assert not slots.has_room_for(c) and slots.has_room_for(b)
    slots.release(a)
    slots.release(b)
    assert slots.take(c) == 1  # b was used before a's last use
    assert [slot for slot, _ in slots.take_pending()] == [0, 1, 1]
    slots.release(c)
    slots.forget()
    assert slots.take(b) == 0
