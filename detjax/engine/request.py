"""Types of a request and of its answer."""

import dataclasses
from collections.abc import Sequence

from detjax.engine.sampling_params import SamplingParams
from detjax.models.vision.prompt_images import GivenImage


class NotFinite(ArithmeticError):
    """The model computed NaN for a request: its weights are damaged, or its activations overflow their dtype."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and its sampling parameters.

    Attributes:
        prompt: text, or token ids.
        sampling: how tokens are chosen, and when a sample ends. Default: greedy, 128 tokens.
        images: for a model with a vision tower, the prompt's images and videos in their order: red, green and blue of
            each pixel, uint8 `[height, width, 3]`; a `Video`; or what `Engine.image_patches` makes of them. In the
            prompt, one token (`DecoderConfig.image_token` or `video_token`) stands for each, or as many as it has.
            Where the prompt says the time of each frame, as for Qwen3.5, one stands for each frame that the tower sees.
        cache_salt: the request shares pages of the prefix cache with requests of the same salt alone. The time that an
            answer takes tells whether somebody sent the prompt's beginning before, so give different salts to clients
            who must not know of one another.
        client: whose turn the request takes. While samples wait, clients get slots in turn, so that nobody waits for
            all that another client has asked for. All requests without one are one client's.
        generated: the tokens that each sample has already, in the order of the samples, for a request that another
            engine has begun; samples behind the last one given have none. They count as generated: for `max_tokens`,
            penalties, constraints and all else the sample goes on as if it had never been interrupted. The answer holds
            what comes after them, and its text is what a stream had not told after them.

    No bit of the answer depends on `cache_salt` and `client`.

    Example:
        >>> detjax.Request([3, 1, 4]).sampling.max_tokens
        128
    """

    prompt: str | Sequence[int]
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    cache_salt: str | None = None
    client: str | None = None
    images: Sequence[GivenImage] = dataclasses.field(default=(), compare=False, repr=False)
    generated: Sequence[Sequence[int]] = ()


@dataclasses.dataclass(frozen=True)
class Token:
    """One generated token.

    Attributes:
        sample: the number of the sample, in its request, that the token belongs to.
        token: its id.
        logprob: its logprob under the model itself, before penalties, biases, temperature and filters; a float32
            number, held exactly.
        top_logprobs: the likeliest tokens at this step and their logprobs, as many as the request asks for.
        text: the text that the token adds to the sample, as far as no stop string can begin there; None without a
            tokenizer. The texts of all tokens make the completion's text.
        finish_reason: at a sample's last token "stop" (an end token or a stop string) or "length"; otherwise None.
        batch: how many sequences the step that sampled it had.
        cached_tokens: what `Generation.cached_tokens` will say.
        sampling_logprob: its logprob under the distribution that it was drawn from, as in `Completion`; None unless the
            request asks for it.

    Of all this `batch` and `cached_tokens` alone depend on other requests.
    """

    sample: int
    token: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]
    text: str | None
    finish_reason: str | None
    batch: int
    cached_tokens: int = dataclasses.field(default=0, compare=False)
    sampling_logprob: float | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sample.

    Attributes:
        tokens: the generated tokens. The token that ended the sample is included.
        logprobs: each token's logprob under the model itself, before penalties, biases, temperature and filters;
            float32 numbers, held exactly.
        top_logprobs: the likeliest tokens at each step and their logprobs, as many as the request asks for.
        text: the tokens as text, cut before a stop string; None without a tokenizer.
        finish_reason: "stop" (an end token or a stop string) or "length".
        sampling_logprobs: each token's logprob under the distribution that it was drawn from, after penalties, biases,
            masks, temperature and filters; float32 numbers, held exactly. Empty unless the request asks for them.
            `ops.sampling_logprobs` computes the same bits.

    Example:
        >>> detjax.Completion((5,), (-0.5,), (), " a", "length").finish_reason
        'length'
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...]
    text: str | None
    finish_reason: str
    sampling_logprobs: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class PromptLogprobs:
    """Logprobs of a prompt's tokens from the second one on, each given the tokens before it.

    Attributes:
        logprobs: float32 numbers, held exactly.
        top_logprobs: the likeliest tokens in each place, as in `Completion`.
    """

    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...]


@dataclasses.dataclass(frozen=True)
class Generation:
    """The answer to one request.

    Attributes:
        prompt_tokens: token ids of the prompt.
        completions: the request's samples, in the order of their index.
        prompt: logprobs of the prompt, if the request asks for them.
        cached_tokens: tokens of the prompt whose keys and values the prefix cache had when the first sample got its
            slot. This number alone depends on other requests, so answers are compared without it.

    Example:
        >>> detjax.Generation((3, 1), (detjax.Completion((5,), (-0.5,), (), " a", "length"),)).completions[0].text
        ' a'
    """

    prompt_tokens: tuple[int, ...]
    completions: tuple[Completion, ...]
    prompt: PromptLogprobs | None = None
    cached_tokens: int = dataclasses.field(default=0, compare=False)
