"""Images of prompts: their tokens, chunks that cut them, pages that hold them, and requests that share a step."""

import dataclasses
from typing import Any

import numpy as np
import pytest

import detjax
from detjax.engine import Completion, Engine, Request, SamplingParams
from detjax.engine.model_runner import ModelRunner
from detjax.engine.page_pool import digests
from detjax.engine.sampling_variant import SamplingVariant
from detjax.engine.scheduler import Scheduler
from detjax.models import Decoder, Video, load
from detjax.models.vision.images import ImagePatches
from detjax.models.vision.prompt_images import ImageReader, PromptImages, with_image_tokens
from tests.support import towers
from tests.support.compiled_programs import compiled_programs
from tests.support.small_loops import with_pages
from tests.support.towers import IMAGE, NAMES, VIDEO_NAME, VIDEO_TOKEN, reference, with_one_token_each

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
NIGHTLY = pytest.mark.nightly
SETTINGS: dict[str, Any] = {"max_samples": 4, "token_budget": 48, "max_length": 256, "snapshot_tokens": 1}
SETTINGS |= {"num_pages": 8, "top_logprobs": 2}
CONVERSATIONS = {"conversation": "qwen3-5-vl", "times": "qwen3-vl"}
"""Fixtures whose prompts say the times of a video's frames."""


@pytest.fixture(scope="module", params=[NAMES[0], pytest.param(NAMES[1], marks=NIGHTLY)])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(name: str) -> Decoder:
    return towers.model(name)


@pytest.fixture(scope="module")
def any_model() -> Decoder:
    """One of them, for what does not depend on the tower."""
    return towers.model(NAMES[0])


def images(name: str = NAMES[0]) -> list[np.ndarray]:
    return towers.images(name)


def prompt(name: str = NAMES[0]) -> list[int]:
    return reference(name)["prompt"].tolist()


def generated(model: Decoder, requests: list[Request], **options: Any) -> list[Completion]:
    """The answers of `generate`."""
    prompts, params = [request.prompt for request in requests], [request.sampling for request in requests]
    given = [request.images for request in requests]
    answers = detjax.generate(model, prompts, params, images=given, **options)
    return [answer.completions[0] for answer in answers]


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "prefill_chunk"),
    [
        (NAMES[0], 13),
        (NAMES[1], 128),
        *(
            pytest.param(*case, marks=NIGHTLY)
            for case in (("qwen3-vl-moe", 13), (NAMES[0], 1), (NAMES[0], 128), (NAMES[1], 1), (NAMES[1], 13))
        ),
    ],
)
def test_greedy_continuations_are_those_of_transformers(prefill_chunk: int, name: str) -> None:
    """Runs a prompt alone, and in chunks next to a text and the same prompt with its images in reverse order."""
    model = towers.model(name)
    continuation = tuple(reference(name)["continuation"].tolist())
    params = SamplingParams(max_tokens=len(continuation), ignore_eos=True)
    request = Request(prompt(name), params, images=images(name))
    if prefill_chunk == 128:
        (answer,) = generated(model, [request])
    else:
        swapped = Request(with_one_token_each(prompt(name)), params, images=images(name)[::-1])
        requests = [swapped, request, Request([5, 6, 7], params)]
        other, answer, text = generated(model, requests, prefill_chunk=prefill_chunk)
        assert answer.tokens not in (other.tokens, text.tokens)
    assert answer.tokens == continuation


def requests_of(what: str, params: SamplingParams) -> list[Request]:
    """Requests; the last one is the first one again."""
    if what in CONVERSATIONS:
        name = CONVERSATIONS[what]
        requests = [conversation(name, params=params), conversation(name, 3.0, params=params)]
        requests.append(Request([9, 8, 7, 6], params))
    elif what == "video":
        requests = [
            Request(with_one_token_each(prompt(VIDEO_NAME)), params, images=shown()),
            Request(prompt(VIDEO_NAME), params, images=[shown()[0], Video(towers.video().frames, 0.5)]),
            Request([5, VIDEO_TOKEN, 6], params, images=shown()[1:]),
        ]
    else:
        other = [255 - images(what)[0], images(what)[1]]
        requests = [
            Request(prompt(what), params, images=images(what)),
            Request(with_one_token_each(prompt(what)), params, images=other),
            Request([9, 8, 7, 6], params),
            Request([5, IMAGE, 6], params, images=images(what)[1:]),
        ]
    return [*requests, requests[0]]


@pytest.mark.parametrize(
    "what",
    ["qwen3-vl", *(pytest.param(x, marks=NIGHTLY) for x in (*NAMES[:2], "video", "conversation", "times"))],
)
def test_an_engine_gives_a_request_the_same_answer_in_a_crowd(what: str) -> None:
    """With 3 pages, sequences are preempted and computed again. Steps of 48 tokens cut the images."""
    model = towers.model(({"video": VIDEO_NAME} | CONVERSATIONS).get(what, what))
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=5, ignore_eos=True, top_logprobs=2)
    requests = requests_of(what, params)
    with Engine(model, towers.character_tokenizer(), **SETTINGS | {"prefix_cache": False}) as engine:
        alone = [engine.generate([request])[0] for request in requests[:-1]]
        together = engine.generate(requests)
    assert together[:-1] == alone and together[-1] == together[0] != together[1]
    with with_pages(Engine(model, towers.character_tokenizer(), **SETTINGS), 3) as engine:
        assert engine.generate(requests) == together
        assert engine.stats().preemptions > 0


def noted_images(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of images in calls of towers from now on."""
    seen, image_rows = list[int](), ModelRunner.image_rows

    def noted(runner: ModelRunner, given: Any) -> Any:
        seen.append(len(given))
        return image_rows(runner, given)

    monkeypatch.setattr(ModelRunner, "image_rows", noted)
    return seen


def test_prompts_with_other_images_share_no_pages_with_them(
    name: str, model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images in cached pages are not computed again, unless a step needs them after all."""
    seen = noted_images(monkeypatch)
    tokens = [7 + index % 50 for index in range(60)] + prompt(name)
    first = Request(tokens, GREEDY, images=images(name))
    other = Request(tokens, GREEDY, images=[255 - images(name)[0], images(name)[1]])
    with Engine(model, None, **SETTINGS) as engine:
        answers = [engine.generate([request])[0] for request in (first, other, first, other)]
    assert [answer.cached_tokens for answer in answers] == [0, 0, 128, 128]
    assert answers[0] == answers[2] and answers[1] == answers[3]
    assert answers[0].completions != answers[1].completions and seen == [2, 2]
    # Pages that were evicted before the request got its turn.
    monkeypatch.setattr(Scheduler, "most_cached_tokens", lambda *_: len(tokens))
    with Engine(model, None, **SETTINGS | {"prefix_cache": False}) as engine:
        assert engine.generate([first])[0].completions == answers[0].completions
    assert seen == [2, 2, 2]


def test_samples_of_a_request_share_its_images(name: str, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.9, seed=3, n=3, ignore_eos=True)
    request, seen = Request(prompt(name), params, images=images(name)), noted_images(monkeypatch)
    with Engine(model, None, **SETTINGS) as engine:
        (three,) = engine.generate([request])
        assert seen == [2]
        (one,) = engine.generate([dataclasses.replace(request, sampling=dataclasses.replace(params, n=1))])
    assert one.completions == three.completions[:1] and len({one.tokens for one in three.completions}) == 3


@pytest.mark.parametrize("name", [VIDEO_NAME, pytest.param(NAMES[1], marks=NIGHTLY)])
def test_no_image_waits_for_a_program_after_warming_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of several sizes, a video, and several images of one request."""
    monkeypatch.setattr(SamplingVariant, "for_serving", lambda _: (SamplingVariant(False, 0),))
    model = towers.model(name)
    given: list[list[Any]] = [[reference(name)["image_0"]], [random_image(40, 8), random_image(60, 60)]]
    given += [[towers.video()]] if name == VIDEO_NAME else []
    with Engine(model, None, max_samples=1, token_budget=32, max_length=128, top_logprobs=0) as engine:
        engine.warm_up()
        with compiled_programs() as compiled:
            for shown in given:
                tokens = [VIDEO_TOKEN if isinstance(image, Video) else IMAGE for image in shown]
                placed = [token for one in tokens for token in (5, one)]
                engine.generate([Request(placed, SamplingParams(max_tokens=2, ignore_eos=True), images=shown)])
        assert compiled == []


def random_image(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3)).astype(np.uint8)


# --- videos -----------------------------------------------------------------------------------------------------------


def shown() -> list[Any]:
    """The image and the video of the fixture's prompt."""
    return [reference(VIDEO_NAME)["image_0"], towers.video()]


@pytest.mark.parametrize("prefill_chunk", [13, pytest.param(128, marks=NIGHTLY)])
def test_greedy_continuations_of_a_video_are_those_of_transformers(prefill_chunk: int) -> None:
    """Runs a prompt alone, and in chunks next to a text and the same frames at another rate."""
    continuation = tuple(reference(VIDEO_NAME)["continuation"].tolist())
    params = SamplingParams(max_tokens=len(continuation), ignore_eos=True)
    request = Request(prompt(VIDEO_NAME), params, images=shown())
    slower = Request(prompt(VIDEO_NAME), params, images=[shown()[0], Video(towers.video().frames, 0.5)])
    others = [] if prefill_chunk == 128 else [slower, Request([5, 6, 7], params)]
    answer, *rest = generated(towers.model(VIDEO_NAME), [request, *others], prefill_chunk=prefill_chunk)
    assert answer.tokens == continuation and all(other.tokens != answer.tokens for other in rest)


def test_frames_have_places_of_their_own_where_the_prompt_says_their_times() -> None:
    model, frames = towers.model("qwen3-5-vl"), reference(VIDEO_NAME)["video"][:4]
    tokens = [5, VIDEO_TOKEN, 6, VIDEO_TOKEN, 7]
    (whole, swapped, again) = generated(
        model,
        [Request(tokens, GREEDY, images=[Video(part, 2.0)]) for part in (frames, frames[[2, 3, 0, 1]], frames)],
        prefill_chunk=13,
    )
    assert again == whole != swapped
    with pytest.raises(ValueError, match=r"1 places for images.* and 2 images"):
        generated(model, [Request([5, VIDEO_TOKEN], GREEDY, images=[Video(frames, 2.0)])])


def conversation(name: str, pace: float = 1.0, is_text: bool = True, params: SamplingParams = GREEDY) -> Request:
    """The conversation of a fixture whose prompt says the times of a video's frames, which may pass more slowly."""
    given, clip = reference(name), towers.clip(name)
    assert clip.times is not None
    slower = Video(clip.frames, clip.fps / pace, [time * pace for time in clip.times])
    prompt = str(given["clip_text"]) if is_text else given["clip_prompt"].tolist()
    return Request(prompt, params, images=[slower, given["image_1"]])


@pytest.mark.parametrize(
    ("name", "prefill_chunk"),
    [
        ("qwen3-5-vl", 13),
        ("qwen3-vl", 13),
        *(pytest.param(name, 128, marks=NIGHTLY) for name in CONVERSATIONS.values()),
    ],
)
def test_the_times_of_frames_are_written_as_by_transformers(name: str, prefill_chunk: int) -> None:
    """The whole prompt and the greedy continuation, with the video alone and in chunks next to slower ones."""
    given, model = reference(name), towers.model(name)
    params = SamplingParams(max_tokens=len(given["clip_continuation"]), ignore_eos=True)
    requests = [
        conversation(name, params=params),
        conversation(name, 3.0, params=params),
        conversation(name, is_text=False, params=params),
    ]
    requests = requests[: 1 if prefill_chunk == 128 else 3]
    answers = detjax.generate(
        model,
        [request.prompt for request in requests],
        params,
        images=[request.images for request in requests],
        tokenizer=towers.character_tokenizer(),
        prefill_chunk=prefill_chunk,
    )
    tokens = [answer.completions[0].tokens for answer in answers]
    assert answers[0].prompt_tokens == tuple(given["clip_prompt"].tolist())
    assert tokens[0] == tuple(given["clip_continuation"].tolist())
    if len(answers) == 3:
        assert answers[2] == answers[0] and answers[1].prompt_tokens != answers[0].prompt_tokens
        assert tokens[1] != tokens[0]


@pytest.mark.parametrize("name", [VIDEO_NAME, pytest.param("qwen3-5-vl", marks=NIGHTLY)])
def test_videos_of_equal_frames_share_no_pages_with_slower_ones(name: str) -> None:
    """A page's digest depends on the pace where positions do, and on the tokens of times where prompts say them."""
    model, tokenizer = towers.model(name), towers.character_tokenizer()
    before, params = "x" * (100 if name == VIDEO_NAME else 90), SamplingParams(max_tokens=2, ignore_eos=True)
    frames = towers.clip().frames
    requests = [
        Request(f"{before}<vs><video><ve>{'y' * 60}", params, images=[Video(frames, fps)]) for fps in (2.0, 0.5)
    ]
    with Engine(model, tokenizer, **SETTINGS) as engine:
        answers = [engine.generate([request])[0] for request in (*requests, *requests)]
    assert [answer.cached_tokens for answer in answers] == [0, 0, 128, 128]
    assert answers[0] == answers[2] and answers[1] == answers[3]
    assert answers[0].completions != answers[1].completions


def test_times_that_a_prompt_has_are_not_written_again() -> None:
    model, tokenizer = towers.model("qwen3-5-vl"), towers.character_tokenizer()
    one = Video(towers.clip().frames[:2], 2.0)
    (patches,) = ImageReader(model.config, model.image_options, model.video_options).patches("the test", [one])
    tokens = tokenizer.encode("A <vs><video><ve>")
    written = with_image_tokens("it", model.config, tokens, [patches], tokenizer)
    # Of 8 by 12 patches, each four make a token.
    place = [102, *[VIDEO_TOKEN] * 24, 103]
    assert list(written) == [*tokens[:-2], *tokenizer.encode("<0.2 seconds>"), *place, 103]
    assert list(with_image_tokens("it", model.config, written, [patches], tokenizer)) == list(written)
    (grid,) = PromptImages([patches], written, model.config).spans
    assert grid[:2] == (len(written) - 26, len(written) - 2)


def test_a_prompt_without_places_for_frames_is_refused_without_a_tokenizer() -> None:
    with pytest.raises(ValueError, match=r"1 places for .* and 3 images; accepted: .* with a tokenizer, one place"):
        generated(towers.model("qwen3-5-vl"), [Request([5, VIDEO_TOKEN, 6], GREEDY, images=[towers.clip()])])


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([5, IMAGE, 6], "token 100 at 1; accepted: 101, as image 0 is a video"),
        ([VIDEO_TOKEN] * 2, "2 tokens 101 from token 0 on; accepted: 1 or 45, as image 0 has 3 frames of 3 rows of 5"),
    ],
)
def test_prompts_that_do_not_fit_their_videos_are_refused(tokens: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=f"generate: prompt 0 has {words}"):
        detjax.generate(towers.model(VIDEO_NAME), [tokens], GREEDY, images=[shown()[1:]])


# --- tokens and digests -----------------------------------------------------------------------------------------------


def test_one_token_stands_for_an_image(any_model: Decoder) -> None:
    (short,) = detjax.generate(any_model, [with_one_token_each(prompt())], GREEDY, images=[images()])
    assert list(short.prompt_tokens) == prompt()


@pytest.mark.parametrize(
    ("tokens", "count", "words"),
    [
        ([5, IMAGE, 6], 0, "1 places for images.* and 0 images; accepted: one place for each image"),
        ([5, 6], 1, "0 places for images.* and 1 images"),
        ([5, IMAGE, IMAGE, 6], 1, "2 tokens 100 from token 1 on; accepted: 1 or 35, as image 0 has 5 rows of 7 tokens"),
        ([5, IMAGE, 6, IMAGE], 1, "2 places for images"),
        ([5, IMAGE] * 400, 1, "800 tokens and asks for 24 more; accepted: 512 in all"),
    ],
)
def test_prompts_that_do_not_fit_their_images_are_refused(
    tokens: list[int], count: int, words: str, any_model: Decoder
) -> None:
    with pytest.raises(ValueError, match=f"generate: prompt 0 has .*{words}"):
        detjax.generate(any_model, [tokens], GREEDY, images=[images()[:count]])


def test_what_is_no_image_is_refused(any_model: Decoder) -> None:
    with pytest.raises(ValueError, match="prompt 0, image 0: image_patches: the image has 3 rows and 900 columns"):
        detjax.generate(any_model, [[IMAGE]], GREEDY, images=[[np.zeros((3, 900, 3), np.uint8)]])
    with pytest.raises(ValueError, match="1 prompts and 2 lists of images; accepted: a list for each prompt"):
        detjax.generate(any_model, [[5]], GREEDY, images=[[], []])


def test_a_model_that_reads_text_alone_refuses_images() -> None:
    text_model = load(towers.FIXTURES / "qwen3", progress=False)[0]
    with pytest.raises(ValueError, match="has 2 images, and Qwen3ForCausalLM reads only text; accepted: no images"):
        detjax.generate(text_model, [[5]], GREEDY, images=[images()])


def test_digests_of_pages_depend_on_the_images_in_them() -> None:
    tokens, spans = [1] * 384, [(100, 140, b"a"), (300, 310, b"b")]
    plain, shown = digests(tokens), digests(tokens, images=spans)
    assert shown == digests(tokens, known=shown[:1], images=spans)
    assert len({*plain, *shown}) == 6  # each page's digest depends on those before it
    other_end = digests(tokens, images=[spans[0], (300, 310, b"c")])
    assert other_end[:2] == shown[:2] and other_end[2] != shown[2]
    for span in ((128, 256, b"a"), (255, 256, b"a"), (128, 129, b"a")):
        between = digests(tokens, images=[span])
        assert (between[0], between[1] == plain[1]) == (plain[0], False)
    assert digests(tokens, images=[(256, 257, b"a")])[:2] == plain[:2]


def test_arrangements_of_an_image_have_digests_of_their_own() -> None:
    pixels = np.zeros((8, 96), np.float32)
    same = [ImagePatches(pixels.copy(), *shape).digest for shape in ((2, 4), (4, 2), (2, 4))]
    assert same[0] == same[2] != same[1]


def test_generated_tokens_go_on_behind_the_images(any_model: Decoder) -> None:
    patches = [ImagePatches(np.zeros((24, 96), np.float32), 4, 6)]
    shown = PromptImages(patches, [5, *[IMAGE] * 6, 7], any_model.config)
    assert shown.coordinates(6, 4).tolist() == [[1, 2, 3], [4] * 3, [5] * 3, [6] * 3]
    assert shown.excess == -3 and shown.coordinates(200, 1).tolist() == [[197] * 3]
