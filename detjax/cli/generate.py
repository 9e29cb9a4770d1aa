"""Print completions of prompts. The same prompt and seed always give the same bits, whatever else is in the batch."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from detjax import engine, models
from detjax.cli.fingerprint import as_json as fingerprint_as_json
from detjax.cli.loading import Backend, Loading
from detjax.cli.options import Fields, Option, command
from detjax.models.configuration.json_object import read_file
from detjax.models.text.video_texts import VideoTexts
from detjax.models.vision.frame_sampling import FrameSampling
from detjax.models.vision.image_files import read_pixels
from detjax.models.vision.prompt_images import ImageReader, video_texts
from detjax.models.vision.video_files import read_frames, read_video
from detjax.operands.options import KVQuantization
from detjax.runtime import backends, fingerprints

_SAMPLING = Fields(
    engine.SamplingParams,
    without=(
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens", "stop_token_ids"),
        *("ignore_eos", "top_logprobs", "prompt_logprobs", "sampling_logprobs", "constraint", "reasoning_budget"),
        *("allowed_token_ids", "bad_words", "include_stop_str_in_output", "skip_special_tokens", "scored_answer"),
    ),
    options={
        "temperature": Option(default="the checkpoint's, else 0"),
        "top_k": Option(default="the checkpoint's, else 0"),
        "top_p": Option(default="the checkpoint's, else 1"),
        "min_p": Option(default="the checkpoint's, else 0"),
    },
)


@command
def generate(
    *,
    loading: Annotated[Loading, Fields(Loading, without=("chat_template",))],
    prompts: tuple[str, ...],
    chat: bool = False,
    images: tuple[Path, ...] = (),
    videos: tuple[Path, ...] = (),
    fps: float | None = None,
    sampling: Annotated[dict[str, Any], _SAMPLING],
    logprobs: int | None = None,
    kv_cache_dtype: KVQuantization | None = None,
    speculative_config: str | None = None,
    backend: Backend = None,
    as_json: Annotated[bool, Option(name="--json")] = False,
) -> None:
    """Generates completions.

    Args:
        prompts: prompt to complete; - reads it from standard input.
        chat: treat the prompt as a user message and apply the chat template.
        images: image for a model with a vision tower; with --chat it precedes the prompt, otherwise the prompt must
            contain the image tokens.
        videos: video for a model with a vision tower: an animation (WEBP, PNG or GIF), or a directory of images, which
            are the frames in the order of their names; videos follow images.
        fps: frames per second to sample from videos; for a directory, the frame rate of its images. Default: the
            checkpoint's, else 2.
        logprobs: print each token with its logprob and the N most likely tokens. Default: no logprobs.
        kv_cache_dtype: quantize the KV cache to this type. Default: the model's dtype, not quantized.
        speculative_config: JSON object with the settings of speculative decoding, as for vLLM: method, model,
            num_speculative_tokens, prompt_lookup_min and prompt_lookup_max. Default: no tokens are guessed.
        as_json: print texts, tokens, logprobs and the fingerprint as JSON.
    """
    sampling |= {"top_logprobs": logprobs or 0}
    speculative = loading.speculative(speculative_config)
    engine.SamplingParams(**sampling)  # refuses bad values before loading takes minutes
    if prompts.count("-") > 1:
        raise ValueError("--prompt is - more than once; accepted: once, because there is one standard input")
    texts = [sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt for prompt in prompts]
    pictures = [read_pixels(f"--image {str(file)!r}", read_file(file)) for file in images]
    if fps is not None and not videos:
        raise ValueError(f"--fps is {fps} and there is no --video; accepted: --fps with --video")
    with backends.use_backend(backend):
        backends.check_device()
        fingerprint = fingerprints.fingerprint()
        decoder, tokenizer = loading.load()
        reader = ImageReader(decoder.config, decoder.image_options, decoder.video_options)
        shown = [*pictures, *(_video(path, reader.sampling.changed(fps)) for path in videos)]
        clips = None
        if decoder.config.video_text is not None:  # the times of clips are in the text
            shown = reader.patches("--image and --video", shown)
            clips = video_texts(decoder.config, shown)
        generations = engine.generate(
            decoder,
            _conversations(tokenizer, texts, len(images), len(videos), clips) if chat else texts,
            engine.SamplingParams.recommended(decoder, **sampling),
            images=[shown] * len(texts),
            tokenizer=tokenizer,
            kv_cache_dtype=kv_cache_dtype,
            speculative=speculative,
            progress=sys.stderr.isatty(),
        )
    if as_json:
        content = [_as_json(text, generation) for text, generation in zip(texts, generations, strict=True)]
        print(json.dumps({"generations": content, "fingerprint": fingerprint_as_json(fingerprint)}, indent=2))
        return
    for number, (text, generation) in enumerate(zip(texts, generations, strict=True), 1):
        samples = len(generation.completions)
        for sample, completion in enumerate(generation.completions, 1):
            if len(texts) * samples > 1:
                print(f"=== prompt {number} of {len(texts)}, sample {sample} of {samples}: {text!r}")
            print(completion.text)
            if logprobs is not None:
                _print_logprobs(completion, tokenizer)


def _conversations(
    tokenizer: models.Tokenizer, texts: Sequence[str], images: int, videos: int, clips: VideoTexts | None
) -> list[list[int]]:
    """Returns the tokens of one-message conversations in which images and videos precede the text."""
    shown = [{"type": "image"}] * images + [{"type": "video"}] * videos
    contents = [[*shown, {"type": "text", "text": text}] if shown else text for text in texts]
    conversations = [tokenizer.apply_chat_template([{"role": "user", "content": content}]) for content in contents]
    if clips is not None:
        conversations = [clips.put_into(conversation) for conversation in conversations]
    return [tokenizer.encode(conversation, add_special_tokens=False) for conversation in conversations]


def _video(path: Path, sampling: FrameSampling) -> models.Video:
    """Returns the sampled frames of an animation, or of a directory of images."""
    name = f"--video {str(path)!r}"
    if path.is_dir():
        return read_frames(name, [read_file(file) for file in sorted(path.iterdir()) if file.is_file()], sampling)
    return read_video(name, read_file(path), sampling)


def _print_logprobs(completion: engine.Completion, tokenizer: models.Tokenizer) -> None:
    """Prints a line per token: id, text, logprob, and the most likely tokens at its position."""
    for token, logprob, top in zip(completion.tokens, completion.logprobs, completion.top_logprobs, strict=True):
        likeliest = [f"{tokenizer.decode([candidate])!r} {value:.6f}" for candidate, value in top]
        print("\t".join([str(token), repr(tokenizer.decode([token])), f"{logprob:.6f}", *likeliest]))


def _as_json(prompt: str, generation: engine.Generation) -> dict[str, Any]:
    completions = [
        {
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "tokens": completion.tokens,
            # A double holds a float32 exactly, so a reader gets the same bits.
            "logprobs": completion.logprobs,
            "top_logprobs": [
                [{"token": token, "logprob": value} for token, value in top] for top in completion.top_logprobs
            ],
        }
        for completion in generation.completions
    ]
    return {"prompt": prompt, "prompt_tokens": generation.prompt_tokens, "completions": completions}
