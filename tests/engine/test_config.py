"""Settings of an engine: which are accepted, and the sizes that follow from them."""

import dataclasses
import math
from typing import Any

import jax
import pytest

from detjax.engine import EngineConfig, SpeculativeConfig, config
from detjax.engine.model_runner import bytes_of_page, bytes_of_slot, bytes_of_snapshot
from detjax.engine.sampling_variant import SamplingVariant
from detjax.models import Decoder, load
from detjax.runtime import backends
from tests.support.small_loops import FIXTURE, small_model

POSITIONS, VOCABULARY = 512, 515
"""Sizes of the small checkpoint."""
LIMITS: dict[str, tuple[list[Any], list[Any]]] = {
    "max_samples": ([1], [0, -1]),
    "token_budget": ([1], [0, -1]),
    "max_length": ([2, POSITIONS], [1, 0, POSITIONS + 1]),
    "snapshot_bytes": ([0, 1], [-1]),
    "snapshot_tokens": ([1], [0]),
    "top_logprobs": ([0, VOCABULARY], [-1, VOCABULARY + 1]),
    "runs_of": ([0, 1, None], [-1]),
    "step_seconds": ([1e-9, math.inf, None], [0.0, -1.0, math.nan]),
    "kv_cache_dtype": (["int8", None], ["q4_0"]),
}
"""For each setting, values at the borders of what is accepted, and values beyond them."""


@pytest.fixture(scope="module")
def with_slots() -> Decoder:
    return load(FIXTURE.parent / "qwen3-next", dtype="bfloat16", progress=False)[0]


@pytest.mark.parametrize("name", LIMITS)
def test_settings_are_accepted_up_to_their_limits_and_refused_by_name_beyond(name: str) -> None:
    accepted, refused = LIMITS[name]
    for value in accepted:
        resolved = EngineConfig(**{name: value}).resolved(small_model())
        assert value is None or getattr(resolved, name) == value
    for value in refused:
        with pytest.raises(ValueError, match=r"Engine: .*; accepted: ") as raised:
            EngineConfig(**{name: value}).resolved(small_model())
        assert (f"{name} is {value}" if name != "kv_cache_dtype" else value) in str(raised.value)


def test_the_longest_sample_may_fill_the_models_positions_unless_asked_for_less() -> None:
    assert EngineConfig().resolved(small_model()).max_length == POSITIONS
    assert EngineConfig(max_length=7).resolved(small_model()).max_length == 7


# The last token of a sample is not computed.
@pytest.mark.parametrize(("length", "pages"), [(2, 1), (128, 1), (129, 1), (130, 2), (257, 2), (258, 3)])
def test_there_are_pages_for_the_longest_sample_and_by_default_for_all(length: int, pages: int) -> None:
    for samples in (1, 3):
        settings = EngineConfig(max_samples=samples, max_length=length).resolved(small_model())
        assert settings.num_pages == samples * pages
        assert (settings.step_loop().num_pages, settings.step_loop().pages_per_sequence) == (samples * pages, pages)
    given = EngineConfig(max_samples=3, max_length=length, num_pages=pages)
    assert given.resolved(small_model()).num_pages == pages
    with pytest.raises(ValueError, match=f"num_pages is {pages - 1}; accepted: at least {pages}, for one request of"):
        dataclasses.replace(given, num_pages=pages - 1).resolved(small_model())


def test_pages_take_no_more_memory_than_is_free(monkeypatch: pytest.MonkeyPatch, with_slots: Decoder) -> None:
    def pages(model: Decoder, free: int, **settings: Any) -> int | None:
        monkeypatch.setattr(config, "_free_memory", lambda: free)
        return EngineConfig(max_samples=4, max_length=300, **settings).resolved(model).num_pages

    page = bytes_of_page(small_model(), None)
    assert page == 2 * 2 * 2 * 128 * 80 * 2  # layers, keys and values, heads, tokens, columns, bytes
    assert [pages(small_model(), free) for free in (7 * page, 8 * page - 1, 8 * page, 100 * page)] == [7, 7, 8, 12]
    assert pages(small_model(), page) == 3  # at least one request has to fit
    assert bytes_of_page(small_model(), "int8") < page
    assert pages(small_model(), 4 * page, kv_cache_dtype="int8") == 4 * page // bytes_of_page(small_model(), "int8") > 4
    page, slot = bytes_of_page(with_slots, None), bytes_of_slot(with_slots)
    assert slot > 0 == bytes_of_slot(small_model())
    # Each sample has a slot, and eight more are on their way between device and host.
    assert pages(with_slots, 12 * slot + 9 * page) == pages(with_slots, 12 * slot + 10 * page - 1) == 9
    for settings in ({"snapshot_bytes": 0}, {"prefix_cache": False}):
        assert pages(with_slots, 4 * slot + 9 * page, **settings) == 9


def test_snapshots_have_room_for_one_or_are_off(with_slots: Decoder) -> None:
    size = bytes_of_snapshot(with_slots)
    assert size == bytes_of_slot(with_slots) > 1
    for settings in ({"snapshot_bytes": size}, {"snapshot_bytes": 0}, {"snapshot_bytes": 1, "prefix_cache": False}):
        resolved = EngineConfig(num_pages=9, **settings).resolved(with_slots)
        assert resolved.step_loop().snapshot_bytes == settings["snapshot_bytes"]
    for too_few in (1, size - 1):
        with pytest.raises(ValueError, match=f"snapshot_bytes is {too_few}; accepted: at least {size}, for one snap"):
            EngineConfig(num_pages=9, snapshot_bytes=too_few).resolved(with_slots)


def test_models_that_several_processes_share_have_a_given_number_of_pages_and_no_snapshots(
    monkeypatch: pytest.MonkeyPatch, with_slots: Decoder
) -> None:
    monkeypatch.setattr(config, "spans_processes", lambda _: True)
    with pytest.raises(ValueError, match="num_pages is None, and devices of several processes share the model"):
        EngineConfig().resolved(with_slots)
    assert EngineConfig(num_pages=9).resolved(with_slots).snapshot_bytes == 0


def test_runs_are_for_gpus_and_limits_for_gpus_that_share_a_model_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def defaults(platform: str, is_shared: bool, **settings: Any) -> tuple[int | None, float | None]:
        with backends.tracing_for(platform), monkeypatch.context() as patch:
            if is_shared:
                patch.setattr(small_model(), "mesh", jax.make_mesh((1,), ("tensor",)))
            resolved = EngineConfig(num_pages=9, **settings).resolved(small_model())
        return resolved.runs_of, resolved.step_seconds

    assert defaults("cpu", False) == defaults("cpu", True) == (0, math.inf)
    assert (defaults("gpu", False), defaults("gpu", True)) == ((64, math.inf), (64, 30.0))
    for platform, is_shared in (("cpu", False), ("gpu", True)):
        assert defaults(platform, is_shared, runs_of=3, step_seconds=7.0) == (3, 7.0)
        assert defaults(platform, is_shared, runs_of=0)[0] == 0


def test_a_step_loop_has_the_settings_of_its_engine() -> None:
    settings = EngineConfig(
        max_samples=5,
        token_budget=70,
        max_length=300,
        num_pages=11,
        prefix_cache=False,
        snapshot_bytes=12345,
        snapshot_tokens=77,
        kv_cache_dtype="int8",
        top_logprobs=9,
        runs_of=2,
        speculative=SpeculativeConfig(method="ngram"),
    )
    loop = settings.resolved(small_model()).step_loop()
    assert (loop.shapes.limits.slots, loop.shapes.limits.tokens) == (5, 70)
    assert loop.variants == SamplingVariant.for_serving(9)
    fields = {field.name: getattr(loop, field.name) for field in dataclasses.fields(loop)}
    assert {name: value for name, value in fields.items() if name not in ("shapes", "variants")} == {
        "num_pages": 11,
        "pages_per_sequence": 3,
        "prefix_cache": False,
        "snapshot_bytes": 12345,
        "snapshot_tokens": 77,
        "kv_cache_dtype": "int8",
        "layers_at_once": 16,
        "rows_in_blocks": 2048,
        "runs_of": 2,
        "speculative": SpeculativeConfig(method="ngram"),
        "max_loras": 0,
        "max_lora_rank": 16,
        "adapters": (),
    }
    assert EngineConfig().resolved(small_model()).step_loop().prefix_cache is True


def test_the_cache_may_take_nine_tenths_of_what_the_device_says_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        def __init__(self, stats: dict[str, int] | None) -> None:
            self.memory_stats = lambda: stats

    for stats, free in (
        ({"bytes_limit": 1000, "bytes_in_use": 300}, 630),
        ({}, 1 << 30),
        (None, 1 << 30),
    ):
        monkeypatch.setattr(jax, "local_devices", lambda stats=stats: [Device(stats), Device({"bytes_limit": 1})])
        assert config._free_memory() == free
