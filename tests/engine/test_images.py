"""Images of prompts: their tokens, chunks that cut them, pages that hold them, and requests that share a step."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import detjax
from detjax.engine import Completion, Engine, Request, SamplingParams
from detjax.engine.images import PromptImages
from detjax.engine.page_pool import digests
from detjax.models import Decoder, load
from detjax.models.images import ImagePatches

FIXTURES = Path(__file__).parents[1] / "fixtures"
IMAGE = 100
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SETTINGS: dict[str, Any] = {"max_samples": 4, "token_budget": 48, "max_length": 256}


@pytest.fixture(scope="module")
def model() -> Decoder:
    return load(FIXTURES / "qwen2_5_vl-tiny", dtype="float32", progress=False)[0]


@functools.cache
def reference() -> dict[str, np.ndarray]:
    return dict(np.load(FIXTURES / "qwen2_5_vl-tiny" / "reference.npz"))


def images() -> list[np.ndarray]:
    return [reference()["image_0"], reference()["image_1"]]


def prompt() -> list[int]:
    return reference()["prompt"].tolist()


def with_one_token_each(tokens: list[int]) -> list[int]:
    before = [None, *tokens]
    return [token for token, last in zip(tokens, before, strict=False) if token != IMAGE or last != IMAGE]


def generated(model: Decoder, requests: list[Request], **options: Any) -> list[Completion]:
    """The answers of `generate`."""
    prompts, params = [request.prompt for request in requests], [request.sampling for request in requests]
    given = [request.images for request in requests]
    answers = detjax.generate(model, prompts, params, images=given, **options)
    return [answer.completions[0] for answer in answers]


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefill_chunk", [128, 13, 1])
def test_greedy_continuations_are_those_of_transformers(prefill_chunk: int, model: Decoder) -> None:
    """Alone, and cut into chunks beside a text and the same prompt with its images in the other order."""
    continuation = tuple(reference()["continuation"].tolist())
    params = SamplingParams(max_tokens=len(continuation), ignore_eos=True)
    request = Request(prompt(), params, images=images())
    if prefill_chunk == 128:
        (answer,) = generated(model, [request])
    else:
        swapped = Request(with_one_token_each(prompt()), params, images=images()[::-1])
        requests = [swapped, request, Request([5, 6, 7], params)]
        other, answer, text = generated(model, requests, prefill_chunk=prefill_chunk)
        assert answer.tokens not in (other.tokens, text.tokens)
    assert answer.tokens == continuation


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_pages", [None, 3])
def test_an_engine_gives_a_request_the_same_answer_in_a_crowd(num_pages: int | None, model: Decoder) -> None:
    """With 3 pages, sequences are preempted and computed again. Steps of 48 tokens cut the images."""
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=5, ignore_eos=True, top_logprobs=2)
    other = [255 - images()[0], images()[1]]
    requests = [
        Request(prompt(), params, images=images()),
        Request(with_one_token_each(prompt()), params, images=other),
        Request([9, 8, 7, 6], params),
        Request([5, IMAGE, 6], params, images=images()[1:]),
        Request(prompt(), params, images=images()),
    ]
    with Engine(model, None, num_pages=num_pages, **SETTINGS, top_logprobs=2) as engine:
        together = [generation.completions[0] for generation in engine.generate(requests)]
        assert num_pages is None or engine.stats().preemptions > 0
    assert together[0] == together[4] != together[1]
    alone = [generated(model, [request])[0] for request in requests[:4]]
    assert together[:4] == alone


def test_prompts_with_other_images_share_no_pages_with_them(model: Decoder) -> None:
    tokens = [7 + index % 50 for index in range(60)] + prompt()
    first = Request(tokens, GREEDY, images=images())
    other = Request(tokens, GREEDY, images=[255 - images()[0], images()[1]])
    with Engine(model, None, **SETTINGS) as engine:
        answers = [engine.generate([request])[0] for request in (first, other, first, other)]
    assert [answer.cached_tokens for answer in answers] == [0, 0, 128, 128]
    assert answers[0] == answers[2] and answers[1] == answers[3]
    assert answers[0].completions != answers[1].completions
    assert [answer.completions[0] for answer in answers[:2]] == generated(model, [first, other])


def test_samples_of_a_request_share_its_images(model: Decoder) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.9, seed=3, n=3, ignore_eos=True)
    request = Request(prompt(), params, images=images())
    (offline,) = detjax.generate(model, [prompt()], params, images=[images()])
    with Engine(model, None, **SETTINGS) as engine:
        (generation,) = engine.generate([request])
    assert generation == offline and len({completion.tokens for completion in generation.completions}) > 1


# --- tokens and digests -----------------------------------------------------------------------------------------------


def test_one_token_stands_for_an_image(model: Decoder) -> None:
    (short,) = detjax.generate(model, [with_one_token_each(prompt())], GREEDY, images=[images()])
    assert list(short.prompt_tokens) == prompt()


@pytest.mark.parametrize(
    ("tokens", "count", "words"),
    [
        ([5, IMAGE, 6], 0, "1 places for images.* and comes with 0 images; accepted: one place for each image"),
        ([5, 6], 1, "0 places for images.* and comes with 1 images"),
        ([5, IMAGE, IMAGE, 6], 1, "2 tokens 100 from token 1 on; accepted: 1 or 35, as image 0 has 5 rows of 7 tokens"),
        ([5, IMAGE, 6, IMAGE], 1, "2 places for images"),
        ([5, IMAGE] * 400, 1, "800 tokens and asks for 24 more; accepted: 512 in all"),
    ],
)
def test_prompts_that_do_not_fit_their_images_are_refused(
    tokens: list[int], count: int, words: str, model: Decoder
) -> None:
    with pytest.raises(ValueError, match=f"generate: prompt 0 has .*{words}"):
        detjax.generate(model, [tokens], GREEDY, images=[images()[:count]])


def test_what_is_no_image_is_refused(model: Decoder) -> None:
    with pytest.raises(ValueError, match="prompt 0, image 0: image_patches: the image has 3 rows and 900 columns"):
        detjax.generate(model, [[IMAGE]], GREEDY, images=[[np.zeros((3, 900, 3), np.uint8)]])
    with pytest.raises(ValueError, match="1 prompts and images of 2; accepted: a list of images for each prompt"):
        detjax.generate(model, [[5]], GREEDY, images=[[], []])


def test_a_model_that_reads_text_alone_refuses_images() -> None:
    text_model = load(FIXTURES / "qwen3", progress=False)[0]
    with pytest.raises(ValueError, match="has 2 images, and Qwen3ForCausalLM reads text alone; accepted: no images"):
        detjax.generate(text_model, [[5]], GREEDY, images=[images()])


def test_digests_of_pages_depend_on_the_images_in_them() -> None:
    tokens, spans = [1] * 384, [(100, 140, b"a"), (300, 310, b"b")]
    plain, shown = digests(tokens), digests(tokens, images=spans)
    assert shown == digests(tokens, known=shown[:1], images=spans)
    assert len({*plain, *shown}) == 6  # each page's digest depends on those before it
    other_end = digests(tokens, images=[spans[0], (300, 310, b"c")])
    assert other_end[:2] == shown[:2] and other_end[2] != shown[2]
    assert digests(tokens, images=[(128, 200, b"a")])[0] == plain[0]


def test_arrangements_of_an_image_have_digests_of_their_own() -> None:
    pixels = np.zeros((8, 96), np.float32)
    same = [ImagePatches(pixels.copy(), *shape).digest for shape in ((2, 4), (4, 2), (2, 4))]
    assert same[0] == same[2] != same[1]


def test_generated_tokens_go_on_behind_the_images(model: Decoder) -> None:
    patches = [ImagePatches(np.zeros((24, 96), np.float32), 4, 6)]
    shown = PromptImages(patches, [5, *[IMAGE] * 6, 7], model.config)
    assert shown.coordinates(6, 4).tolist() == [[1, 2, 3], [4] * 3, [5] * 3, [6] * 3]
    assert shown.excess == -3 and shown.coordinates(200, 1).tolist() == [[197] * 3]
