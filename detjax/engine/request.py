"""Requests and their answers."""

import dataclasses
from collections.abc import Sequence

from detjax.engine.pooling import Pooling, Vectors
from detjax.engine.sampling_params import SamplingParams
from detjax.models.adapters.adapter import Adapter
from detjax.models.vision.prompt_images import GivenImage


class NotFinite(ArithmeticError):
    """The model computed NaN for a request: the weights are corrupt, or activations overflow their dtype."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and its sampling parameters.

    Attributes:
        prompt: text, or token ids.
        sampling: sampling parameters. Default: greedy, 128 tokens.
        images: the prompt's images and videos in order, for a model with a vision tower: RGB pixels, uint8
            `[height, width, 3]`; a `Video`; or the result of `Engine.image_patches`. In the prompt, each is one token
            (`DecoderConfig.image_token` or `video_token`), or as many as it has rows. For models whose prompts state
            the time of each frame, such as Qwen3.5, one token stands for each frame that the tower sees.
        cache_salt: the request shares pages of the prefix cache only with requests of the same salt. Response times
            reveal whether a prompt's beginning was sent before, so give different salts to clients who must not learn
            about each other.
        client: identifies the client for round-robin scheduling: while samples wait, clients get slots in turn.
            Requests without a client share one turn.
        id: names the request for `Engine.abort`; requests may share an id.
        generated: tokens that each sample has already, in the order of the samples, to resume a request that another
            engine began; missing lists are empty. The sample continues as if it had never been interrupted, including
            `max_tokens`, penalties and constraints. The answer holds the tokens after them, and the text that a stream
            had not sent yet.
        pooling: the result of a model that pools; `sampling` is not read then. None: the request generates.
        speculative: whether the engine may guess tokens of the request, if it does so at all.
        adapter: the name of an adapter that the engine has loaded, or one of its `adapters`; None: the model alone.

    No bit of the answer depends on `cache_salt`, `client`, `id` or `speculative`.

    Example:
        >>> detjax.Request([3, 1, 4]).sampling.max_tokens
        128
    """

    prompt: str | Sequence[int]
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    cache_salt: str | None = None
    client: str | None = None
    id: str | None = dataclasses.field(default=None, compare=False)
    images: Sequence[GivenImage] = dataclasses.field(default=(), compare=False, repr=False)
    generated: Sequence[Sequence[int]] = ()
    pooling: Pooling | None = None
    speculative: bool = dataclasses.field(default=True, compare=False)
    adapter: str | Adapter | None = None


type TopLogprobs = tuple[tuple[int, float], ...]
"""The likeliest tokens at one position with their logprobs, the likeliest first."""


@dataclasses.dataclass(slots=True)  # frozen ones would take three times as long to make
class Token:
    """One generated token.

    Attributes:
        sample: index of its sample in the request.
        token: its id.
        logprob: its logprob under the model, before penalties, biases, temperature and filters; an exact float32.
        top_logprobs: the likeliest tokens at this step and their logprobs, as many as the request asks for.
        text: the text that the token adds to the sample, without an end that may begin a stop string; None without a
            tokenizer. The texts of all tokens concatenate to the completion's text.
        finish_reason: "stop" (an end token or a stop string) or "length" for a sample's last token, otherwise None.
        batch: number of sequences in the step that sampled it.
        cached_tokens: see `Generation.cached_tokens`.
        sampling_logprob: its logprob under the distribution it was drawn from, as in `Completion`; None unless the
            request asks for it.
        sampling_top_logprobs: the likeliest tokens under this distribution.

    Only `batch` and `cached_tokens` depend on other requests.
    """

    sample: int
    token: int
    logprob: float
    top_logprobs: TopLogprobs
    text: str | None
    finish_reason: str | None
    batch: int
    cached_tokens: int = dataclasses.field(default=0, compare=False)
    sampling_logprob: float | None = None
    sampling_top_logprobs: TopLogprobs = ()


@dataclasses.dataclass(frozen=True)
class Aborted:
    """The end of a streamed sample that `Engine.abort` ended. It has no token.

    Attributes:
        sample: index of the sample in the request.
        text: the end of the sample's text that had been held back; None without a tokenizer.
    """

    sample: int
    text: str | None


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sample.

    Attributes:
        tokens: the generated tokens, including the token that ended the sample.
        logprobs: each token's logprob under the model, before penalties, biases, temperature and filters; exact
            float32 numbers.
        top_logprobs: the likeliest tokens at each step and their logprobs, as many as the request asks for.
        text: the tokens as text, cut before a stop string; None without a tokenizer.
        finish_reason: "stop" (an end token or a stop string), "length", or "abort" if `Engine.abort` ended it, perhaps
            before its first token.
        sampling_logprobs: each token's logprob under the distribution it was drawn from, after penalties, biases,
            masks, temperature and filters; exact float32 numbers, the bits of `ops.sampling_logprobs`. Empty unless
            the request asks for them.
        sampling_top_logprobs: the likeliest tokens at each step under this distribution, as many as in `top_logprobs`.
            Tokens that cannot be drawn have the logprob -inf. Empty unless the request asks for both.

    Example:
        >>> detjax.Completion((5,), (-0.5,), (), " a", "length").finish_reason
        'length'
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...]
    text: str | None
    finish_reason: str
    sampling_logprobs: tuple[float, ...] = ()
    sampling_top_logprobs: tuple[TopLogprobs, ...] = ()


@dataclasses.dataclass(frozen=True)
class PromptLogprobs:
    """Logprobs of a prompt's tokens from the second one on, each given the tokens before it.

    Attributes:
        logprobs: exact float32 numbers.
        top_logprobs: the likeliest tokens at each position, as in `Completion`.
        sampling_logprobs: logprobs under the distribution that the request's parameters draw from, if it asks for
            `sampling_logprobs`; see `SamplingParams.scored_answer`. -inf for tokens that cannot be drawn.
        sampling_top_logprobs: the likeliest tokens under this distribution.
    """

    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...]
    sampling_logprobs: tuple[float, ...] = ()
    sampling_top_logprobs: tuple[TopLogprobs, ...] = ()


@dataclasses.dataclass(frozen=True)
class Generation:
    """The answer to one request.

    Attributes:
        prompt_tokens: token ids of the prompt.
        completions: the request's samples in order.
        prompt: logprobs of the prompt, if the request asks for them.
        cached_tokens: tokens of the prompt found in the prefix cache when the first sample got its slot. Only this
            number depends on other requests, so comparisons of answers ignore it.
        pooled: the result of a model that pools, which then has no completion; None: the request generates, or it was
            aborted.

    Example:
        >>> detjax.Generation((3, 1), (detjax.Completion((5,), (-0.5,), (), " a", "length"),)).completions[0].text
        ' a'
    """

    prompt_tokens: tuple[int, ...]
    completions: tuple[Completion, ...]
    prompt: PromptLogprobs | None = None
    cached_tokens: int = dataclasses.field(default=0, compare=False)
    pooled: Vectors | None = dataclasses.field(default=None, compare=False)
