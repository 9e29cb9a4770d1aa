"""What is asked of the engine, and what comes back."""

import dataclasses
from collections.abc import Sequence

from detjax.engine.sampling import SamplingParams
from detjax.models import DecoderConfig, GenerationDefaults, Tokenizer


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, text or token ids, and how it is to go on."""

    prompt: str | Sequence[int]
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)


@dataclasses.dataclass(frozen=True)
class Token:
    """One generated token.

    Attributes:
        sample: which of the request's samples it belongs to.
        token: its id.
        logprob: under the model, before temperature and filters; a float32 number, held exactly.
        top_logprobs: the likeliest tokens at this step and their logprobs, as many as were asked for.
        text: what it adds to the sample's text, as far as no stop string can begin there; None without a tokenizer.
            Pieces of all tokens make the completion's text.
        finish_reason: of a sample's last token "stop" (an end token or a stop string) or "length"; else None.
        batch: how many samples the step had that computed it. It depends on who else is there; nothing else does.
    """

    sample: int
    token: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]
    text: str | None
    finish_reason: str | None
    batch: int


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sample.

    Attributes:
        tokens: what was generated, the token that ended it included.
        logprobs: of each token under the model, before temperature and filters; float32 numbers, held exactly.
        top_logprobs: at each step the likeliest tokens and their logprobs, as many as were asked for.
        text: the tokens as text, cut before a stop string; None without a tokenizer.
        finish_reason: "stop" (an end token or a stop string) or "length".
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...]
    text: str | None
    finish_reason: str


@dataclasses.dataclass(frozen=True)
class PromptLogprobs:
    """Logprobs of a prompt's tokens from its second one on, each under the model with those before it.

    Attributes:
        logprobs: float32 numbers, held exactly.
        top_logprobs: at each of these places the likeliest tokens, as in `Completion`.
    """

    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...]


@dataclasses.dataclass(frozen=True)
class Generation:
    """A prompt's tokens and its samples, in order of their index; and the prompt's logprobs, if asked for."""

    prompt_tokens: tuple[int, ...]
    completions: tuple[Completion, ...]
    prompt: PromptLogprobs | None = None


def encoded(
    name: str, config: DecoderConfig, prompt: str | Sequence[int], params: SamplingParams, tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """The prompt's tokens.

    Raises:
        ValueError: the prompt, which errors call `name`, is empty, holds ids outside the vocabulary, is too long for
            the model with what is to be generated, or is text without a tokenizer; or more of the likeliest tokens are
            asked for than there are.
    """
    if tokenizer is None and (isinstance(prompt, str) or params.stop):
        what = "is text" if isinstance(prompt, str) else "has stop strings"
        raise ValueError(
            f"{name} {what} and there is no tokenizer; accepted: token ids and stop_token_ids. "
            "Give the tokenizer that detjax.models.load returned, if the checkpoint has one."
        )
    tokens = tokenizer.encode(prompt) if isinstance(prompt, str) and tokenizer is not None else [int(t) for t in prompt]
    if not tokens:
        raise ValueError(f"{name} is empty; accepted: at least one token")
    strange = [token for token in tokens if not 0 <= token < config.vocab_size]
    if strange:
        raise ValueError(f"{name} has token {strange[0]}; accepted: ids 0 to {config.vocab_size - 1}")
    if len(tokens) + params.max_tokens > config.max_positions:
        raise ValueError(
            f"{name} has {len(tokens)} tokens and asks for {params.max_tokens} more; accepted: "
            f"{config.max_positions} in all, the model's max_position_embeddings. Lower max_tokens or cut the prompt."
        )
    if params.top_logprobs > config.vocab_size:
        raise ValueError(f"{name}: top_logprobs is {params.top_logprobs}; accepted: up to {config.vocab_size}")
    return tuple(tokens)


def end_tokens(defaults: GenerationDefaults | None, params: SamplingParams) -> frozenset[int]:
    """Tokens that end a sample."""
    eos = () if params.ignore_eos or defaults is None else defaults.eos_token_ids
    return frozenset(eos) | frozenset(params.stop_token_ids)
