"""Kimi K2.5: its configurations, tensors, images and clips, and a conversation with a video."""

import copy
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

import detjax
from detjax.engine import Engine, Request, SamplingParams
from detjax.models import CheckpointError, DecoderConfig, Tokenizer, Video, digest, load, save
from detjax.models.parts.moonvit import MoonViTOptions, frame_positions
from detjax.models.vision.clips import ClipOptions, clip_text
from detjax.models.vision.frame_sampling import FrameSampling
from detjax.models.vision.images import ImagePatches, VideoPatches, image_patches, image_rows
from detjax.models.vision.prompt_images import ImageReader, with_video_texts
from detjax.models.vision.videos import video_patches
from tests.models.hugging_face import SINGLE, changed_json, changed_tensors, copied, tensors
from tests.models.test_quantization import EXPERT, in_int4, int4_config
from tests.support import towers
from tests.support.bits import assert_same_bits
from tests.support.towers import CHARACTERS, FIXTURES, reference

NAME = "kimi-k2-5"
TOLERANCE = 2e-4
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
PUBLISHED: dict[str, Any] = {
    "vt_hidden_size": 1152,
    "vt_num_attention_heads": 16,
    "vt_num_hidden_layers": 27,
    "vt_intermediate_size": 4304,
    "patch_size": 14,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "init_pos_emb_time": 4,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "pos_emb_type": "divided_fixed",
    "video_attn_type": "spatial_temporal",
    "mm_projector_type": "patchmerger",
    "mm_hidden_size": 1152,
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
    "text_hidden_size": 44,
}


def raw_config() -> dict[str, Any]:
    return json.loads((FIXTURES / NAME / "config.json").read_text())


def read(vision: dict[str, Any] | None = None, **changes: Any) -> DecoderConfig:
    tower = {} if vision is None else {"vision_config": vision}
    return DecoderConfig.from_hugging_face(raw_config() | tower | changes, "some/config.json")


def refusal(vision: dict[str, Any] | None = None, **changes: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        read(vision, **changes)
    return str(error.value)


def in_form_of_vllm(vision: dict[str, Any]) -> dict[str, Any]:
    return {key.removeprefix("vt_"): value for key, value in vision.items()}


def in_form_of_transformers(vision: dict[str, Any]) -> dict[str, Any]:
    known = {key.removeprefix("vt_").removeprefix("init_"): value for key, value in vision.items()}
    names = ("mm_hidden_size", "text_hidden_size", "projector_ln_eps", "projector_hidden_act")
    return {key: value for key, value in known.items() if "_type" not in key and key not in names}


# --- configurations ---------------------------------------------------------------------------------------------------


def test_three_forms_of_the_tower_say_the_same() -> None:
    published = raw_config()["vision_config"]
    expected = read()
    assert isinstance(expected.vision, MoonViTOptions)
    assert (expected.vision.width, expected.vision.most_frames, expected.vision.projector_eps) == (24, 3, 0.02)
    assert read(in_form_of_vllm(published)) == expected
    top = {"projection_hidden_size": 24, "projection_layer_norm_eps": 0.02, "image_token_id": 100}
    top |= {"media_placeholder_token_id": None, "architectures": ["Kimi_K25ForConditionalGeneration"]}
    rope = {"rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0}}
    # transformers writes that embeddings are tied, and a token that does not exist.
    top |= {"tie_word_embeddings": True, "video_token_id": 131}
    assert read(in_form_of_transformers(published) | rope, **top) == expected
    assert expected.placeholders == (100,) and not expected.tied_embeddings


def test_keys_that_are_left_out_have_the_published_values() -> None:
    changes = {"media_placeholder_token_id": None, "video_placeholder": None}
    assert read({}, **changes) == read(PUBLISHED, **changes)
    config = read({}, **changes)
    assert config.image_token == config.video_token == 163605
    assert config.video_text == "<|kimi_k25_video_placeholder|>"
    assert isinstance(config.vision, MoonViTOptions)
    assert (config.vision.head_dim, config.vision.positions, config.vision.projector_eps) == (72, 4096, 1e-5)


def test_a_written_configuration_says_the_same_in_all_forms() -> None:
    written = read().to_hugging_face()
    vision = written["vision_config"]
    assert vision["vt_hidden_size"] == vision["hidden_size"] == 24
    assert vision["init_pos_emb_time"] == vision["pos_emb_time"] == 3
    assert (written["projection_layer_norm_eps"], written["image_token_id"]) == (0.02, 100)
    assert written["text_config"]["model_type"] == "kimi_k2" and not written["tie_word_embeddings"]


@pytest.mark.parametrize(
    ("vision", "words"),
    [
        ({"hidden_size": 28}, "vision_config.hidden_size is 28; accepted: 24, which is vt_hidden_size"),
        ({"vt_hidden_size": 26}, "vision_config.vt_hidden_size is 26; accepted: a multiple of 8"),
        ({"init_pos_emb_width": 8}, "vision_config.init_pos_emb_width is 8; accepted: 7, which is init_pos_emb_height"),
        ({"vt_num_hidden_layers": 5000}, "vision_config.vt_num_hidden_layers is 5000; accepted: an integer from 1"),
        ({"vt_num_attention_heads": 0}, "vision_config.vt_num_attention_heads is 0; accepted: an integer >= 1"),
        ({"merge_kernel_size": [2, 4]}, "vision_config.merge_kernel_size is [2, 4]; accepted: [2, 2]"),
        ({"merge_type": "sd2"}, "vision_config.merge_type is 'sd2'; accepted: sd2_tpool"),
        ({"pos_emb_type": "x"}, "vision_config.pos_emb_type is 'x'; accepted: divided_fixed"),
        ({"video_attn_type": "x"}, "vision_config.video_attn_type is 'x'; accepted: spatial_temporal"),
        ({"mm_projector_type": "mlp"}, "vision_config.mm_projector_type is 'mlp'; accepted: patchmerger"),
        ({"projector_hidden_act": "relu"}, "vision_config.projector_hidden_act is 'relu'; accepted: gelu"),
        ({"hidden_act": "gelu"}, "vision_config.hidden_act is 'gelu'; accepted: gelu_pytorch_tanh"),
        ({"mm_hidden_size": 25}, "vision_config.mm_hidden_size is 25; accepted: 24, the tower's width"),
        (
            {"text_hidden_size": 43},
            "vision_config.text_hidden_size is 43; accepted: 44, the hidden_size of the decoder",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn"}},
            "vision_config.rope_parameters.rope_type is 'yarn'; accepted: axial",
        ),
        ({"projector_ln_eps": "x"}, "vision_config.projector_ln_eps is 'x'; accepted: a finite number > 0"),
    ],
)
def test_other_towers_are_refused(vision: dict[str, Any], words: str) -> None:
    assert words in refusal(raw_config()["vision_config"] | vision)


def test_other_models_are_refused() -> None:
    other = {"text_config": raw_config()["text_config"] | {"model_type": "llama"}}
    assert "text_config.model_type is 'llama'; accepted: kimi_k2, deepseek_v3" in refusal(**other)
    assert "image_token_id is 7; accepted: 100, which is media_placeholder_token_id" in refusal(image_token_id=7)
    assert "projection_hidden_size is 7; accepted: 24" in refusal(projection_hidden_size=7)
    words = "vision_config.projector_ln_eps is 0.02; accepted: 1e-06, which is projection_layer_norm_eps"
    assert words in refusal(projection_layer_norm_eps=1e-6)
    assert "video_placeholder is 7; accepted: a text" in refusal(video_placeholder=7)


# --- tensors ----------------------------------------------------------------------------------------------------------


def test_a_saved_directory_has_the_published_tensors(tmp_path: Path) -> None:
    model = towers.model(NAME, "bfloat16")
    save(model, tmp_path / "saved")
    assert_same_bits(tensors(tmp_path / "saved"), tensors(FIXTURES / NAME))
    assert digest(load(tmp_path / "saved", progress=False)[0]) == digest(model)


def as_in_the_network(name: str, x: np.ndarray) -> dict[str, np.ndarray]:
    """A tensor in the form of the network's parameters in transformers, with the first columns of all pairs first."""
    heads = 2
    names = {
        "language_model.model.": "model.language_model.",
        "language_model.": "",
        "vision_tower.patch_embed.pos_emb.weight": "model.vision_tower.patch_embed.pos_emb.position_embeddings",
        "vision_tower.encoder.blocks.": "model.vision_tower.layers.",
        "vision_tower.encoder.": "model.vision_tower.",
        "vision_tower.": "model.vision_tower.",
        "mm_projector.proj.0.": "model.mm_projector.in_proj.",
        "mm_projector.proj.2.": "model.mm_projector.out_proj.",
        "mm_projector.": "model.mm_projector.",
    }
    old = next(old for old in names if name.startswith(old))
    name = names[old] + name.removeprefix(old)
    if ".vision_tower.layers." not in name:
        return {name: x}
    if ".wqkv." in name:
        parts = []
        for part, rows in zip("qkv", np.split(x, 3), strict=True):
            pairs = rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
            parts.append((f"attn.{part}_proj", rows if part == "v" else pairs))
        return {name.replace("wqkv", part): rows for part, rows in parts}
    changes = {".norm1.": ".norm2.", ".norm0.": ".norm1.", ".fc1.": ".fc2.", ".fc0.": ".fc1.", ".wo.": ".attn.proj."}
    old = next(old for old in changes if old in name)
    return {name.replace(old, changes[old]): x}


def as_saved_by_transformers(name: str, x: np.ndarray) -> dict[str, np.ndarray]:
    """A tensor under the name which transformers 5.24 gives it in `save_pretrained`."""
    names = {
        "language_model.model.layers.": "language_model.model.blocks.",
        "mm_projector.pre_norm.": "model.mm_projector.pre_norm.",
        "vision_tower.patch_embed.proj.": "vision_tower.encoder.patch_embed.proj.",
    }
    old = next((old for old in names if name.startswith(old)), "")
    return {names.get(old, "") + name.removeprefix(old): x}


@pytest.mark.parametrize("form", [as_in_the_network, as_saved_by_transformers])
def test_tensors_of_transformers_are_read(form: Callable[[str, np.ndarray], dict], tmp_path: Path) -> None:
    directory = copied(NAME, tmp_path)
    with changed_tensors(directory / SINGLE) as stored:
        for name in list(stored):
            renamed = form(name, stored.pop(name))
            assert not renamed.keys() & stored.keys()
            stored |= {new: np.ascontiguousarray(x) for new, x in renamed.items()}
    assert digest(load(directory, progress=False)[0]) == digest(load(FIXTURES / NAME, progress=False)[0])


@pytest.mark.parametrize("place", ["text_config", "top"])
def test_experts_in_int4_are_read(place: str, tmp_path: Path) -> None:
    directory, plain = copied(NAME, tmp_path), copied(NAME, tmp_path / "plain")
    with changed_json(directory / "config.json") as raw:
        (raw["text_config"] if place == "text_config" else raw)["quantization_config"] = int4_config(32)
    numbers = {}
    with changed_tensors(directory / SINGLE) as stored:
        for name in [name for name in stored if EXPERT.fullmatch(name)]:
            parts, numbers[name] = in_int4(name, stored.pop(name))
            stored |= parts
    with changed_tensors(plain / SINGLE) as stored:
        assert len(numbers) == 15
        stored |= {name: x.astype(np.float32).astype(stored[name].dtype) for name, x in numbers.items()}
    assert digest(load(directory, progress=False)[0]) == digest(load(plain, progress=False)[0])


# --- images -----------------------------------------------------------------------------------------------------------


@functools.cache
def vision() -> MoonViTOptions:
    options = towers.model(NAME).config.vision
    assert isinstance(options, MoonViTOptions)
    return options


@functools.cache
def options() -> ClipOptions:
    read_options = towers.model(NAME).image_options
    assert isinstance(read_options, ClipOptions)
    return read_options


def grid(height: int, width: int, **changes: Any) -> tuple[int, int]:
    """Rows and columns of patches of an image, with published options but for changes."""
    given = ClipOptions.from_hugging_face({"media_proc_cfg": changes}, "file", read(PUBLISHED).vision)  # pyright: ignore[reportArgumentType]
    patches = image_patches(np.zeros((height, width, 3), np.uint8), given, read(PUBLISHED).vision)  # pyright: ignore[reportArgumentType]
    return patches.rows, patches.columns


def test_images_are_never_enlarged() -> None:
    assert grid(1, 1) == (2, 2) and grid(28, 29) == (2, 4) and grid(280, 300) == (20, 22)
    # 40 x 40 patches are counted, so sides are multiplied by 1/2 and rounded down.
    assert grid(560, 561, in_patch_limit=400) == (20, 20)
    assert grid(575, 573, in_patch_limit=400) == (22, 22)
    # Sides of at most 16 patches.
    assert grid(30, 448, patch_limit_on_one_side=16) == (2, 16)
    assert grid(3, 4480, patch_limit_on_one_side=16) == (2, 16)


def test_black_fills_images_below_and_to_the_right() -> None:
    patches = image_patches(np.full((9, 13, 3), 255, np.uint8), options(), vision())
    pixels = patches.pixels.reshape(1, 2, 2, 2, 3, 6, 6).transpose(0, 2, 5, 1, 3, 6, 4).reshape(12, 24, 3)
    mean, std = np.array(options().mean), np.array(options().std)
    np.testing.assert_allclose(pixels[:9, :13], np.broadcast_to((1 - mean) / std, (9, 13, 3)), rtol=1e-6)
    for rest in (pixels[9:], pixels[:, 13:]):
        np.testing.assert_allclose(rest, np.broadcast_to(-mean / std, rest.shape), rtol=1e-6)


def processor(raw: dict[str, Any], **changes: Any) -> ClipOptions:
    return ClipOptions.from_hugging_face(raw, "some/file.json", vision(), **changes)


def test_files_of_transformers_say_the_same() -> None:
    scales = {"image_mean": [0.5, 0.45, 0.4], "image_std": [0.5, 0.55, 0.6], "patch_size": 6, "merge_size": 2}
    shared = scales | {"size": {"max_height": 16, "max_width": 16}, "resample": 3, "do_resize": True}
    images = processor(shared | {"max_patches": 150})
    videos = processor(shared | {"max_patches": 28, "temporal_patch_size": 3, "fps": 2}, is_for_videos=True)
    image = reference(NAME)["image_0"]
    assert image_patches(image, images, vision()).digest == image_patches(image, options(), vision()).digest
    video = Video(reference(NAME)["clip"], 3.0)
    assert video_patches(video, videos, vision()).digest == video_patches(video, options(), vision()).digest
    for read_options, is_for_videos in ((images, False), (videos, True), (options(), False)):
        written = read_options.to_hugging_face(vision())
        assert processor(written, is_for_videos=is_for_videos) == read_options


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"patch_size": 14}, "patch_size is 14; accepted: 6"),
        ({"merge_kernel_size": 3}, "merge_kernel_size is 3; accepted: 2"),
        ({"do_resize": False}, "do_resize is False; accepted: true"),
        ({"resample": 2}, "resample is 2; accepted: 3"),
        ({"fixed_output_tokens": 9}, "fixed_output_tokens is 9; accepted: null"),
        ({"in_patch_limit_video": 9}, "in_patch_limit_video is 9; accepted: null"),
        ({"max_num_frames_each_video": 9}, "max_num_frames_each_video is 9; accepted: null"),
        ({"timestamp_mode": "mm:ss"}, "timestamp_mode is 'mm:ss'; accepted: hh:mm:ss.fff"),
        ({"temporal_merge_kernel_size": 4}, "temporal_merge_kernel_size is 4; accepted: 1 to 3"),
        ({"patch_limit_on_one_side": 1}, "patch_limit_on_one_side is 1; accepted: an integer >= 2"),
        ({"max_patches": 9}, "in_patch_limit is 150; accepted: 9, as the file says in transformers' form"),
        ({"size": {"max_height": 16, "max_width": 9}}, "size.max_width is 9; accepted: 16, which is max_height"),
        ({"image_std": [1.0, 0.0, 1.0]}, "image_std is [1.0, 0.0, 1.0]; accepted: numbers other than 0"),
        ({"sample_fps": 0}, "sample_fps is 0; accepted: a finite number > 0"),
    ],
)
def test_other_image_processors_are_refused(changes: dict[str, Any], words: str) -> None:
    raw = copy.deepcopy(json.loads((FIXTURES / NAME / "preprocessor_config.json").read_text()))
    raw["media_proc_cfg"] |= changes
    with pytest.raises(CheckpointError) as error:
        processor(raw)
    assert words in str(error.value)


# --- clips ------------------------------------------------------------------------------------------------------------


def video() -> Video:
    """The video of the conversation, with the frames that the model sees."""
    given = reference(NAME)
    fps = float(given["clip_fps"])
    indices = FrameSampling.from_options(options(), vision()).indices(len(given["clip"]), fps)
    assert list(indices) == [0, 2, 4, 5, 7]
    return Video(given["clip"][list(indices)], 2.0, [index / fps for index in indices])


def clips() -> VideoPatches:
    return video_patches(video(), options(), vision())


def rows_of(*images: ImagePatches | VideoPatches, dtype: str = "float32") -> list[np.ndarray]:
    tower = towers.model(NAME, dtype).vision
    assert tower is not None
    return image_rows(tower, images)


def test_clips_have_the_patches_and_rows_of_the_reference() -> None:
    given, patches = reference(NAME), clips()
    assert [[clip.frames, clip.rows, clip.columns] for clip in patches.frames] == given["clip_grid"].tolist()
    pixels = np.concatenate([clip.pixels for clip in patches.frames])
    assert hashlib.sha256(pixels.tobytes()).hexdigest() == str(given["clip_patches"])
    np.testing.assert_allclose(rows_of(patches)[0], given["clip_rows"], rtol=0, atol=TOLERANCE)
    assert patches.times == (0.0, 5 / 3)


def test_numbers_of_frames_are_rounded_to_the_nearest() -> None:
    sampling = FrameSampling.from_options(options(), vision())
    assert list(sampling.indices(3, 30.0)) == [0]
    assert list(sampling.indices(3, 1.0)) == [0, 1, 2]
    assert list(sampling.indices(38, 30.0)) == [0, 18, 37]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_clip_has_the_same_rows_in_every_pack(dtype: str) -> None:
    """Among images, and among clips that hold NaN."""
    first, second = clips().frames
    alone = [rows_of(clip, dtype=dtype)[0] for clip in (first, second)]
    image = towers.random_patches(NAME, 50, 70)
    poisoned = ImagePatches(np.full_like(first.pixels, np.nan), first.rows, first.columns, first.frames)
    together = rows_of(image, second, poisoned, first, dtype=dtype)
    assert_same_bits([together[3], together[1]], alone)
    assert not np.isfinite(together[2]).any()


def test_frames_of_a_clip_see_one_another_in_order() -> None:
    first, _ = clips().frames
    frames = np.split(first.pixels, 3)
    backwards = ImagePatches(np.concatenate(frames[::-1]), first.rows, first.columns, 3)
    single = [ImagePatches(frame, first.rows, first.columns) for frame in frames]
    rows, other, *alone = rows_of(first, backwards, *single)
    assert np.abs(rows - other).max() > 0.01 and np.abs(rows - np.mean(alone, axis=0)).max() > 0.01
    assert first.digest != backwards.digest


def test_a_clip_of_one_frame_is_an_image() -> None:
    frame = video().frames[:1]
    (clip,) = video_patches(Video(frame, 2.0), options(), vision()).frames
    assert_same_bits(rows_of(clip)[0], rows_of(ImagePatches(clip.pixels, clip.rows, clip.columns))[0])


def test_positions_of_frames_are_sines_and_cosines() -> None:
    frequencies = 10000.0 ** (-2 * np.arange(576) / 1152)
    angles = np.arange(4)[:, None] * frequencies
    np.testing.assert_allclose(frame_positions(4, 1152), np.concatenate([np.sin(angles), np.cos(angles)], 1), atol=3e-7)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "00:00:00.000"), (5 / 3, "00:00:01.666"), (3725.9999, "01:02:05.999"), (86400.5, "00:00:00.500")],
)
def test_times_of_clips_are_cut_to_milliseconds(seconds: float, text: str) -> None:
    assert clip_text(seconds) == f"{text}<|media_begin|>video<|media_content|><|media_pad|><|media_end|>"


# --- conversations ----------------------------------------------------------------------------------------------------


@functools.cache
def tokenizer() -> Tokenizer:
    """A token for each character, and image tokens."""
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({token: index for index, token in enumerate(CHARACTERS)}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    made.add_special_tokens(["<|media_pad|>", "<|media_begin|>", "<|media_content|>", "<|media_end|>"])
    return Tokenizer({"tokenizer.json": made.to_str().encode(), "tokenizer_config.json": b"{}"}, "the test")


def conversation(is_text: bool = True, params: SamplingParams = GREEDY) -> Request:
    given = reference(NAME)
    prompt = str(given["clip_text"]) if is_text else given["clip_prompt"].tolist()
    return Request(prompt, params, images=[video(), given["image_1"]])


def test_a_conversation_with_a_video_has_the_tokens_and_the_continuation_of_transformers() -> None:
    """Sends it as text and as tokens; alone, and in chunks that cut clips next to another request."""
    given, model = reference(NAME), towers.model(NAME)
    requests = [conversation(), conversation(is_text=False), Request([5, 6, 7], GREEDY)]
    for chosen, chunk in ((requests, 13), (requests[:1], 128)):
        prompts, images = [request.prompt for request in chosen], [request.images for request in chosen]
        answers = detjax.generate(model, prompts, GREEDY, images=images, tokenizer=tokenizer(), prefill_chunk=chunk)
        assert answers[0].prompt_tokens == tuple(given["clip_prompt"].tolist())
        for answer in answers[:2]:
            assert answer.completions[0].tokens == tuple(given["clip_continuation"].tolist())


def test_images_have_the_continuation_of_transformers() -> None:
    given, model = reference(NAME), towers.model(NAME)
    (answer,) = detjax.generate(model, [given["prompt"].tolist()], GREEDY, images=[towers.images(NAME)])
    assert answer.completions[0].tokens == tuple(given["continuation"].tolist())


def test_an_engine_gives_a_conversation_the_same_answer_in_a_crowd() -> None:
    """Pages are shared and taken back; steps of 48 tokens cut clips."""
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=5, ignore_eos=True, top_logprobs=2)
    given = reference(NAME)
    other = Request(given["prompt"].tolist(), params, images=[255 - towers.images(NAME)[0], towers.images(NAME)[1]])
    slower = Request(given["clip_prompt"].tolist(), params, images=[Video(255 - video().frames, 2.0), given["image_1"]])
    requests = [conversation(params=params), other, slower, conversation(params=params)]
    settings: dict[str, Any] = {"max_samples": 4, "token_budget": 48, "max_length": 256, "snapshot_tokens": 1}
    with Engine(towers.model(NAME), tokenizer(), **settings, num_pages=8, top_logprobs=2, prefix_cache=False) as engine:
        alone = [engine.generate([request])[0] for request in requests[:3]]
    with Engine(towers.model(NAME), tokenizer(), **settings, num_pages=4, top_logprobs=2) as engine:
        together = engine.generate(requests)
        assert engine.stats().preemptions > 0
        assert [answer.completions for answer in together[:3]] == [answer.completions for answer in alone]
        assert together[3].completions == together[0].completions != together[2].completions
        assert [answer.completions for answer in engine.generate(requests)] == [one.completions for one in together]


def test_videos_that_do_not_match_the_text_are_refused() -> None:
    config, reader = towers.model(NAME).config, ImageReader(towers.model(NAME).config, options(), None)
    patches = reader.patches("the prompt", [video()])
    text = config.video_text
    assert text is not None
    assert with_video_texts(config, "no video", patches) == "no video"
    assert with_video_texts(config, f"a{text}b", patches).count("<|media_pad|>") == 2
    with pytest.raises(ValueError, match=r"the prompt has 2 times the text .*; accepted: 1, once for each video"):
        with_video_texts(config, text + text, patches)
    with pytest.raises(
        ValueError, match=r"1 places for images.* and 2 images.* one for each clip of a video; in a text"
    ):
        detjax.generate(towers.model(NAME), [[5, 100, 6]], GREEDY, images=[[video()]])
