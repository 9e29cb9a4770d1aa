"""Requests for everything that a token may depend on."""

import random
from collections.abc import Iterator, Mapping
from typing import Any, Final

from detjax.contract import KV_BLOCK
from detjax.engine import Constraint, ReasoningBudget, ReasoningMarks, Request, SamplingParams, Sequence
from detjax.models import Tokenizer

TEMPERATURES: Final = 0.0, 0.7, 1.3
LONGEST: Final = 2 * KV_BLOCK + 40
"""Maximum number of tokens of a request and its answer."""
_SCHEMA: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_STOPS: Final = "the", "ou", ".\n", ", and", "!"


def requests(name: str, count: int, tokens: int, vocabulary: int, tokenizer: Tokenizer | None) -> list[Request]:
    """Returns random requests; the name stands for their content.

    Args:
        name: seeds the choices.
        count: number of requests.
        tokens: maximum number of tokens of an answer.
        vocabulary: the model's tokens.
        tokenizer: None: requests have no texts.
    """
    numbers = random.Random(name)
    return [_request(numbers, index, tokens, vocabulary, tokenizer) for index in range(count)]


def _request(numbers: random.Random, index: int, tokens: int, vocabulary: int, tokenizer: Tokenizer | None) -> Request:
    # A third of the answers cross the end of a page, and some begin at one.
    answer = numbers.randint(max(1, tokens // 2), tokens)
    ends = numbers.choice((KV_BLOCK, 2 * KV_BLOCK))
    length = max(1, ends - numbers.randint(0, answer)) if index % 3 == 0 else numbers.randint(1, KV_BLOCK)
    length = min(length, LONGEST - answer)
    given: dict[str, Any] = {
        "max_tokens": answer,
        "temperature": TEMPERATURES[index % len(TEMPERATURES)],
        "seed": numbers.getrandbits(63),
        "ignore_eos": numbers.random() < 0.8,
        "top_logprobs": numbers.choice((0, 0, 2)),
        "sampling_logprobs": numbers.random() < 0.2,
        "prompt_logprobs": numbers.random() < 0.1,
    }
    for chance, some in _choices(numbers, vocabulary, tokenizer):
        if numbers.random() < chance:
            given |= some
    if given.get("constraint") is not None:
        given |= {"ignore_eos": False, "min_tokens": 0, "reasoning_budget": None, "allowed_token_ids": ()}
        given["prompt_logprobs"] &= not given["sampling_logprobs"]  # the two and a constraint are refused
    given["min_tokens"] = min(given.get("min_tokens", 0), answer)
    return Request(numbers.choices(range(vocabulary), k=length), SamplingParams(**given))


def _choices(
    numbers: random.Random, vocabulary: int, tokenizer: Tokenizer | None
) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yields sampling parameters, each with its probability."""
    yield 0.3, {"frequency_penalty": 0.4, "presence_penalty": 0.5, "repetition_penalty": 1.2}
    yield 0.2, {"logit_bias": tuple((token, numbers.uniform(-4, 4)) for token in numbers.sample(range(vocabulary), 5))}
    yield 0.2, {"top_k": numbers.randint(2, 40), "top_p": numbers.uniform(0.5, 1)}
    yield 0.1, {"min_p": numbers.uniform(0, 0.05)}
    ends = tuple(numbers.sample(range(vocabulary), vocabulary // 40))
    yield 0.2, {"min_tokens": numbers.randint(1, 12), "stop_token_ids": ends}
    yield 0.1, {"allowed_token_ids": tuple(numbers.sample(range(vocabulary), 9))}
    marks = ReasoningMarks((11, 12), is_open=True)
    yield 0.1, {"reasoning_budget": ReasoningBudget(numbers.randint(1, 12), marks)}
    if tokenizer is not None:
        yield 0.3, {"stop": (numbers.choice(_STOPS),)}
        yield 0.1, {"bad_words": ("the", "and")}
        yield 0.2, {"constraint": Constraint.json_schema(_SCHEMA)}


def covered(samples: list[Sequence]) -> dict[str, int]:
    """Returns the number of tokens that depend on something, by what this is."""
    counts: dict[str, int] = {}
    for one in samples:
        params, tokens = one.params, len(one.generated)
        first, last = len(one.prompt), len(one.prompt) + tokens - 1
        restricted = params.allowed_token_ids or params.bad_words or params.reasoning_budget
        parts = {
            f"temperature {params.temperature:g}": True,
            "penalties or biases": params.penalized or params.logit_bias,
            "filters": params.filtered,
            "least tokens": params.min_tokens,
            "schema": params.constraint is not None,
            "stop strings or tokens": params.stop or params.stop_token_ids,
            "other restrictions": restricted,
            "end of a page in the answer": first // KV_BLOCK != last // KV_BLOCK,
        }
        for part, is_there in parts.items():
            counts[part] = counts.get(part, 0) + (tokens if is_there else 0)
    return counts


def everything(sample: Sequence) -> tuple[Any, ...]:
    """Returns all that a sample's answer consists of; logprobs are float32 numbers, which Python holds exactly."""
    outputs = _exact([*vars(sample.output).values()])
    return sample.generated, sample.finish_reason, sample.text, str(sample.failure), outputs


def _exact(value: Any) -> Any:
    """Returns numbers as text that differs if their bits do, also for zeros, and is equal for equal NaN."""
    if isinstance(value, float):
        return value.hex()
    return tuple(map(_exact, value)) if isinstance(value, list | tuple) else value
