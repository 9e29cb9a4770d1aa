"""The choice of a replica: by load, and by the beginning of the prompt."""

import numpy as np
import pytest

from detjax import models
from detjax.contract import KV_BLOCK
from detjax.engine import Engine, EngineConfig, Request
from detjax.engine.request_reader import RequestReader
from detjax.models import Decoder, Tokenizer
from detjax.server.replicas.choice import ReplicaChoice, first_pages
from tests.support.towers import FIXTURES, IMAGE

ALL = range(3)
A, B, C = b"a", b"b", b"c"


def test_the_least_loaded_replica_is_chosen_and_of_equals_the_first() -> None:
    choice = ReplicaChoice(3)
    assert choice.in_flight == [0, 0, 0]
    assert choice.choose(ALL, []) == 0
    choice.in_flight[:] = [2, 1, 1]
    assert choice.choose(ALL, []) == 1
    assert choice.choose([0, 2], []) == 2
    assert choice.choose([0], []) == 0


def test_a_prompt_goes_where_most_of_its_pages_are() -> None:
    choice = ReplicaChoice(3, excess=4)
    assert choice.choose([2], [A, B]) == 2
    choice.in_flight[2] = 4
    assert choice.choose(ALL, [A, C]) == 2
    assert choice.choose([1], [A]) == 1
    assert choice.choose(ALL, [A, B, C]) == 2, "the second page is known there alone"
    assert choice.choose(ALL, [A]) == 2, "it had the page last"
    assert choice.choose(ALL, [B[:0]]) == 0, "nobody knows the page"


def test_a_prompt_goes_elsewhere_when_its_replica_has_too_much_to_do() -> None:
    choice = ReplicaChoice(3, excess=4)
    assert choice.choose([1], [A]) == 1
    choice.in_flight[:] = [1, 5, 2]
    assert choice.choose(ALL, [A]) == 1
    choice.in_flight[1] = 6
    assert choice.choose(ALL, [A]) == 0
    choice.in_flight[1] = 0
    assert choice.choose(ALL, [A]) == 0, "the page is there, too, and was there last"


def test_a_replica_that_is_not_ready_or_begins_again_is_not_preferred() -> None:
    choice = ReplicaChoice(3)
    assert choice.choose([1], [A]) == 1
    assert choice.choose([2], [A, B]) == 2
    assert choice.choose([0, 1], [A, B]) == 0
    assert choice.choose([2], [A, B]) == 2
    choice.forget(2)
    assert choice.choose(ALL, [A, B]) == 0


def test_pages_that_were_unused_the_longest_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("detjax.server.replicas.choice._REMEMBERED", 2)
    choice = ReplicaChoice(3)
    assert choice.choose([1], [A]) == 1
    assert choice.choose([2], [B]) == 2
    assert choice.choose(ALL, [A]) == 1, "A has been used again, and B has not"
    assert choice.choose([2], [C]) == 2
    choice.in_flight[:] = [1, 1, 0]
    assert choice.choose(ALL, [A]) == 1
    choice.in_flight[:] = [0, 1, 1]
    assert choice.choose(ALL, [B]) == 0, "nobody is remembered for it"


def test_the_pages_of_a_choice_are_those_of_the_prefix_cache(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> None:
    prompt = [*range(1, 2 * KV_BLOCK + 5)]
    config = loaded[0].config
    for salt in (None, "somebody"):
        request = Request([token % 50 + 1 for token in prompt], cache_salt=salt)
        (sample,) = engine.samples_of("the request", request, is_streamed=False)
        assert len(sample.digests()) == 2
        assert first_pages(request, config) == sample.digests()
    assert first_pages(Request("a text"), config) == []
    assert first_pages(Request([3, 1, 4]), config) == []


def test_the_pages_of_other_images_are_others() -> None:
    model, _ = models.load(FIXTURES / "qwen2_5_vl-tiny", progress=False)
    reader = RequestReader(model, None, EngineConfig(max_length=512, num_pages=8).resolved(model))
    draw = np.random.default_rng(5)
    pages = []
    for _ in range(2):
        pixels = draw.integers(0, 256, (56, 56, 3), np.uint8)
        images = reader.image_patches("the image", pixels)
        tokens = reader.with_image_tokens("the prompt", [7] * 30 + [IMAGE] + [7] * 2 * KV_BLOCK, images)
        request = Request(tokens, images=images)
        (sample,) = reader.samples_of("the request", request, is_streamed=False)
        pages.append(first_pages(request, model.config))
        assert pages[-1] == sample.digests()[: len(pages[-1])] and len(pages[-1]) >= 2
        assert first_pages(Request(tokens, images=[pixels]), model.config) == []
    assert not set(pages[0]) & set(pages[1])


@pytest.mark.parametrize("pages", [64, 65])
def test_no_more_than_the_first_pages_are_looked_at(pages: int, loaded: tuple[Decoder, Tokenizer]) -> None:
    assert len(first_pages(Request([3] * (pages * KV_BLOCK)), loaded[0].config)) == 64
