"""Sampling parameters: how a request's tokens are chosen and when it ends."""

import dataclasses
import functools
import json
import warnings
from typing import Any, Final

from detjax.engine.constraint import Constraint
from detjax.engine.field_error import FieldError
from detjax.engine.reasoning_budget import ReasoningBudget
from detjax.models import Decoder, ModelMetadata

MAX_BIASES: Final = 300
"""Maximum number of tokens with a bias in a request, as in OpenAI's API."""
MAX_STOP_TOKENS: Final = 200
"""Maximum number of stop tokens in a request with `min_tokens`."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request.

    Attributes:
        max_tokens: maximum number of tokens to generate.
        temperature: divides the logits; 0 chooses the likeliest token.
        top_k: the number of likeliest tokens to choose from; 0: all tokens.
        top_p: choose from the smallest set of likeliest tokens whose probabilities reach this sum; 1: from all tokens.
        min_p: choose from tokens with at least this share of the likeliest token's probability; 0: from all tokens.
        presence_penalty: subtracted from the logit of each generated token; -2 to 2.
        frequency_penalty: subtracted once for each time that the token was generated; -2 to 2.
        repetition_penalty: divides the logit of each token of the prompt or the answer so far, or multiplies it if it
            is negative; 1: none.
        logit_bias: (token, bias) pairs; the bias is added to the token's logit; -100 to 100.
        min_tokens: minimum number of tokens before a token or a stop string may end the sample.
        seed: seed of the random choices, 0 to 2^64 - 1. A choice depends on the seed, the prompt with its images, the
            token's position and the sample's index, and on no other request. So two prompts have different random
            numbers under one seed.
        n: number of samples of the prompt.
        allowed_token_ids: tokens that may be chosen; (): all tokens. An end token must be among them to be chosen.
        bad_words: words that are not generated, in a text or at its beginning: the last token of a word is not chosen
            after its other tokens. They need a tokenizer.
        stop: strings that end the text, which is cut before the first of them. They need a tokenizer.
        stop_token_ids: tokens that end a sample. They are part of its tokens.
        ignore_eos: do not end a sample at the model's end-of-sequence tokens.
        include_stop_str_in_output: the text includes the stop string, or the text of the token, that ended it.
        skip_special_tokens: the text has no special tokens.
        top_logprobs: number of likeliest tokens to report at each step.
        prompt_logprobs: also report logprobs of the prompt's tokens, with the likeliest tokens at each position.
        sampling_logprobs: also report each token's logprob under the distribution it was drawn from, and the likeliest
            tokens under it; with `prompt_logprobs`, also for the prompt's tokens.
        scored_answer: number of tokens at the prompt's end that penalties, `min_tokens` and bad words regard as an
            answer to the tokens before them, in their sampling logprobs. By default, each token of the prompt is scored
            as the first token of an answer.
        reasoning_budget: limits the tokens of the answer's reasoning, by forcing the mark that ends it.
        constraint: restricts the text, for example to JSON of a schema. It needs a tokenizer. A sample that reaches
            `max_tokens` may be incomplete.

    Example:
        >>> detjax.SamplingParams(max_tokens=64, temperature=0.8, top_p=0.95, seed=7).filtered
        True
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    seed: int = 0
    n: int = 1
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    sampling_logprobs: bool = False
    scored_answer: int = 0
    reasoning_budget: ReasoningBudget | None = None
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        """Checks every field.

        Raises:
            ValueError: names the field, what was given and what is accepted.
        """
        accepted = {
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (self.temperature == 0 or 1e-30 <= self.temperature <= 1e30, "0, or 1e-30 to 1e30"),
            "top_k": (0 <= self.top_k < 2**31, "0 to 2^31 - 1"),
            "top_p": (0 < self.top_p <= 1, "above 0, up to 1"),
            "min_p": (0 <= self.min_p <= 1, "0 to 1"),
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "-2 to 2"),
            "frequency_penalty": (-2 <= self.frequency_penalty <= 2, "-2 to 2"),
            "repetition_penalty": (1e-6 <= self.repetition_penalty <= 1e6, "above 0: 1e-6 to 1e6"),
            "min_tokens": (0 <= self.min_tokens <= self.max_tokens, f"0 to {self.max_tokens}, max_tokens"),
            "seed": (0 <= self.seed < 2**64, "0 to 2^64 - 1"),
            "n": (self.n >= 1, "at least 1"),
            "allowed_token_ids": (min(self.allowed_token_ids, default=0) >= 0, "token ids, which are at least 0"),
            "bad_words": (
                not isinstance(self.bad_words, str) and all(self.bad_words),
                "a tuple of strings that are not empty",
            ),
            "stop": (not isinstance(self.stop, str) and all(self.stop), "a tuple of strings that are not empty"),
            "top_logprobs": (self.top_logprobs >= 0, "at least 0"),
            "scored_answer": (
                self.scored_answer == 0 or (self.scored_answer > 0 and self.prompt_logprobs and self.sampling_logprobs),
                "0, or with prompt_logprobs and sampling_logprobs more",
            ),
        }
        for name, (is_accepted, description) in accepted.items():
            if not is_accepted:
                raise FieldError(f"SamplingParams: {name} is {getattr(self, name)!r}; accepted: {description}", name)
        self._check_biases()
        if self.constraint is not None and self.prompt_logprobs and self.sampling_logprobs:
            raise FieldError(
                "SamplingParams: prompt_logprobs and sampling_logprobs are given with a constraint; accepted: two of "
                "the three, because a constraint is about the answer's text and gives the prompt's tokens no "
                "probability",
                "sampling_logprobs",
            )
        if self.constraint is not None and (self.ignore_eos or self.min_tokens):
            raise FieldError(
                f"SamplingParams: constraint is given with ignore_eos {self.ignore_eos} and min_tokens "
                f"{self.min_tokens}; accepted: False and 0, because a constrained text ends when it is complete",
                "ignore_eos" if self.ignore_eos else "min_tokens",
            )

    def _check_biases(self) -> None:
        biases = dict(self.logit_bias)
        if len(biases) < len(self.logit_bias):
            raise FieldError("SamplingParams: logit_bias has a token twice; accepted: one bias per token", "logit_bias")
        if len(biases) > MAX_BIASES:
            raise FieldError(
                f"SamplingParams: logit_bias has {len(biases)} tokens; accepted: up to {MAX_BIASES}", "logit_bias"
            )
        for token, bias in biases.items():
            if not (token >= 0 and -100 <= bias <= 100):
                raise FieldError(
                    f"SamplingParams: logit_bias is {bias!r} for token {token!r}; accepted: -100 to 100, for token ids",
                    "logit_bias",
                )
        if self.min_tokens and len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise FieldError(
                f"SamplingParams: min_tokens is {self.min_tokens} and there are {len(self.stop_token_ids)} "
                f"stop_token_ids; accepted: up to {MAX_STOP_TOKENS} with min_tokens",
                "stop_token_ids",
            )

    @classmethod
    def recommended(cls, model: Decoder | ModelMetadata, **fields: Any) -> "SamplingParams":
        """Returns the settings that the checkpoint recommends in `generation_config.json`.

        Args:
            model: the decoder, or its metadata.
            fields: settings that override the recommended ones.

        Warns:
            UserWarning: the checkpoint recommends penalties other than `repetition_penalty`; they are ignored.
        """
        defaults = model.generation_defaults
        known: dict[str, Any] = {}
        if defaults is not None and defaults.do_sample:
            known = {"temperature": 1.0 if defaults.temperature is None else defaults.temperature}
            names = ("top_k", "top_p", "min_p")
            known |= {name: value for name in names if (value := getattr(defaults, name)) is not None}
        if defaults is not None and defaults.repetition_penalty is not None:
            known["repetition_penalty"] = defaults.repetition_penalty
        unread = {} if defaults is None else json.loads(defaults.unread)
        penalties = {
            name: value
            for name, value in unread.items()
            if name.endswith("_penalty") and name != "repetition_penalty" and value not in (1, None)
        }
        if penalties:
            warnings.warn(
                f"SamplingParams.recommended leaves out {penalties}, which the checkpoint asks for", stacklevel=2
            )
        return cls(**(known | fields))

    @functools.cached_property
    def needs(self) -> tuple[bool, int, bool, bool, bool]:
        """The fields of the smallest `SamplingVariant` that can sample for the request."""
        return self.filtered, self.top_logprobs, self.adjusted, self.masked, self.sampling_logprobs

    @property
    def filtered(self) -> bool:
        """True if top-k, top-p or min-p may exclude tokens."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def masked(self) -> bool:
        """True if a constraint or a rule may exclude tokens."""
        return self.constraint is not None or self.has_rules

    @property
    def has_rules(self) -> bool:
        """True if a rule may exclude single tokens."""
        return bool(self.allowed_token_ids or self.bad_words) or self.reasoning_budget is not None

    @property
    def field_of_masks(self) -> str:
        """The name of a field that excludes tokens."""
        if self.constraint is not None:
            return "constraint"
        if self.allowed_token_ids or self.bad_words:
            return "allowed_token_ids" if self.allowed_token_ids else "bad_words"
        return "reasoning_budget"

    @property
    def penalized(self) -> bool:
        """True if a penalty makes the choice depend on earlier tokens."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def adjusted(self) -> bool:
        """True if penalties, biases or `min_tokens` may change the logits that tokens are chosen by."""
        return self.penalized or bool(self.logit_bias) or self.min_tokens > 0
