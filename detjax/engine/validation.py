"""Checks a request against a model before anything is computed."""

from collections.abc import Collection, Sequence

from detjax.engine.batch import logit_adjustments, no_adjustments, sampling_arrays
from detjax.engine.field_error import FieldError
from detjax.engine.sampling_params import SamplingParams
from detjax.models import DecoderConfig, GenerationDefaults, Tokenizer
from detjax.models.vision.images import VisualInput
from detjax.models.vision.prompt_images import with_image_tokens, with_video_texts
from detjax.operands.noise import noise_key


def encode_prompt(
    name: str,
    config: DecoderConfig,
    prompt: str | Sequence[int],
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    images: Sequence[VisualInput] = (),
    *,
    generates: bool = True,
) -> tuple[int, ...]:
    """Returns the token ids of a prompt that the model can serve, including all tokens of its images.

    `name` is the prompt's name in errors. Without `generates`, no token follows the prompt.

    Raises:
        ValueError: the prompt is empty, does not match its images, holds ids outside the vocabulary, is too long for
            the model together with the tokens to generate, or is text without a tokenizer; or `top_logprobs` exceeds
            the vocabulary.
    """
    if tokenizer is None and (isinstance(prompt, str) or params.stop):
        problem = "is text" if isinstance(prompt, str) else "has stop strings"
        raise FieldError(
            f"{name} {problem} and there is no tokenizer; accepted: token ids and stop_token_ids. "
            "Give the tokenizer that detjax.models.load returned, if the checkpoint has one.",
            "prompt" if isinstance(prompt, str) else "stop",
        )
    if isinstance(prompt, str) and tokenizer is not None:
        prompt = tokenizer.encode(with_video_texts(config, prompt, images))
    if not len(prompt):
        raise FieldError(f"{name} has no tokens; accepted: a prompt of at least one token", "prompt")
    assert not isinstance(prompt, str)
    if len(prompt) <= config.max_positions:
        prompt = with_image_tokens(name, config, prompt, images, tokenizer)
    if not generates and len(prompt) > config.max_positions:
        raise FieldError(
            f"{name} has {len(prompt)} tokens; accepted: up to {config.max_positions}, the model's", "prompt"
        )
    if generates and len(prompt) + params.max_tokens > config.max_positions:  # checked first: such a list may be huge
        raise FieldError(
            f"{name} has {len(prompt)} tokens and asks for {params.max_tokens} more; accepted: "
            f"{config.max_positions} in all, the model's max_position_embeddings. Lower max_tokens or cut the prompt.",
            "prompt" if len(prompt) >= config.max_positions else "max_tokens",
        )
    tokens = tuple(map(int, prompt))
    if min(tokens) < 0 or max(tokens) >= config.vocab_size:  # much faster than a loop over tokens
        unknown = next(token for token in tokens if not 0 <= token < config.vocab_size)
        raise FieldError(f"{name} has token {unknown}; accepted: ids 0 to {config.vocab_size - 1}", "prompt")
    if params.top_logprobs > config.vocab_size:
        raise FieldError(
            f"{name}: top_logprobs is {params.top_logprobs}; accepted: up to {config.vocab_size}", "top_logprobs"
        )
    if params.scored_answer >= len(tokens):
        raise FieldError(
            f"{name} has {len(tokens)} tokens and scored_answer is {params.scored_answer}; accepted: up to "
            f"{len(tokens) - 1}, because an answer follows at least one token",
            "scored_answer",
        )
    biased = next((token for token, _ in params.logit_bias if token >= config.vocab_size), None)
    if biased is not None:
        raise FieldError(
            f"{name}: logit_bias has token {biased}; accepted: ids 0 to {config.vocab_size - 1}", "logit_bias"
        )
    return tokens


def check_arrays(name: str, params: SamplingParams, ends: Collection[int]) -> None:
    """Checks that a request's parameters and end tokens fit into a step's arrays; a failing step would end all
    requests.

    Raises:
        ValueError: they do not fit, for example because too many tokens are held back, or an id has too many bits.
    """
    try:
        sampling_arrays([params], [noise_key(params.seed, b"", params.n - 1)])
        if not params.adjusted:
            return
        row = logit_adjustments(params, ends if params.min_tokens else ())
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: its sampling parameters do not fit into a step: {error}") from error
    given, accepted = row.bias.shape[-1], no_adjustments(1).bias.shape[-1]
    if given != accepted:
        raise FieldError(
            f"{name}: {given} tokens have a bias or are held back by min_tokens; accepted: up to {accepted}, the "
            "model's end-of-sequence tokens among them. Give fewer stop_token_ids or biases.",
            "stop_token_ids" if params.min_tokens else "logit_bias",
        )


def end_tokens(defaults: GenerationDefaults | None, params: SamplingParams) -> frozenset[int]:
    """Returns the tokens that end a sample: the model's end-of-sequence tokens and the request's stop tokens."""
    eos = () if params.ignore_eos or defaults is None else defaults.eos_token_ids
    return frozenset(eos) | frozenset(params.stop_token_ids)


def given_tokens(
    name: str, config: DecoderConfig, params: SamplingParams, generated: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """Validates `Request.generated`, and returns the tokens of each sample.

    Raises:
        ValueError: there are more lists than samples, more tokens than `max_tokens`, or ids outside the vocabulary; or
            the request asks for logprobs of its prompt.
    """
    given = [tuple(map(int, tokens)) for tokens in generated]
    if len(given) > params.n:
        raise ValueError(f"{name} has generated tokens of {len(given)} samples; accepted: up to n, which is {params.n}")
    if any(given) and params.prompt_logprobs:
        raise ValueError(
            f"{name} has generated tokens and asks for prompt_logprobs; accepted: one of them. Ask for the prompt's "
            "logprobs when the request begins."
        )
    for sample, tokens in enumerate(given):
        if len(tokens) > params.max_tokens:
            raise ValueError(
                f"{name} has {len(tokens)} generated tokens for sample {sample}; accepted: up to {params.max_tokens}, "
                "its max_tokens"
            )
        unknown = next((token for token in tokens if not 0 <= token < config.vocab_size), None)
        if unknown is not None:
            raise ValueError(
                f"{name} has the generated token {unknown} for sample {sample}; accepted: ids 0 to "
                f"{config.vocab_size - 1}"
            )
    return given
