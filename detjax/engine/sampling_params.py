"""Sampling parameters: how the tokens of a request are chosen, and when it ends."""

import dataclasses
import json
import warnings
from typing import Any

from detjax import ops
from detjax.models import Decoder


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a request are chosen, and when it ends.

    Attributes:
        max_tokens: tokens to generate at most.
        temperature: divides the logits; 0 chooses the likeliest token.
        top_k: the number of likeliest tokens to choose from; 0: all tokens.
        top_p: choose from the fewest likeliest tokens whose probabilities reach this sum; 1: from all tokens.
        min_p: choose from tokens of at least this share of the likeliest token's probability; 0: from all tokens.
        seed: 0 to 2^64 - 1. A token depends on the seed, its position and the sample's index, and on no other request.
        n: samples of the same prompt.
        stop: strings that end the text, which is cut before the first of them. They need a tokenizer.
        stop_token_ids: tokens that end a sample. They stay in its tokens.
        ignore_eos: do not end a sample at the model's own end-of-sequence tokens.
        top_logprobs: how many of the likeliest tokens are reported at each step.
        prompt_logprobs: also report logprobs of the prompt's tokens, and the likeliest tokens in their places.

    Example:
        >>> SamplingParams(max_tokens=64, temperature=0.8, top_p=0.95, seed=7).filtered
        True
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        """Checks every field.

        Raises:
            ValueError: names the field, what was given and what is accepted.
        """
        ops.seed_words(self.seed)
        accepted = {
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (self.temperature == 0 or 1e-30 <= self.temperature <= 1e30, "0, or 1e-30 to 1e30"),
            "top_k": (0 <= self.top_k < 2**31, "0 to 2^31 - 1"),
            "top_p": (0 < self.top_p <= 1, "above 0, up to 1"),
            "min_p": (0 <= self.min_p <= 1, "0 to 1"),
            "n": (self.n >= 1, "at least 1"),
            "stop": (not isinstance(self.stop, str) and all(self.stop), "a tuple of strings that are not empty"),
            "top_logprobs": (self.top_logprobs >= 0, "at least 0"),
        }
        for name, (is_accepted, description) in accepted.items():
            if not is_accepted:
                raise ValueError(f"SamplingParams: {name} is {getattr(self, name)!r}; accepted: {description}")

    @classmethod
    def recommended(cls, model: Decoder, **fields: Any) -> "SamplingParams":
        """Returns the settings that the model's checkpoint recommends in `generation_config.json`.

        Args:
            model: the decoder.
            fields: settings that replace the recommended ones.

        Warns:
            UserWarning: the checkpoint recommends penalties. They change the choice of tokens, and no field holds them.
        """
        defaults = model.generation_defaults
        known: dict[str, Any] = {}
        if defaults is not None and defaults.do_sample:
            known = {"temperature": 1.0 if defaults.temperature is None else defaults.temperature}
            names = ("top_k", "top_p", "min_p")
            known |= {name: value for name in names if (value := getattr(defaults, name)) is not None}
        unread = {} if defaults is None else json.loads(defaults.unread)
        penalties = {
            name: value for name, value in unread.items() if name.endswith("_penalty") and value not in (1, None)
        }
        if penalties:
            warnings.warn(
                f"SamplingParams.recommended leaves out {penalties}, which the checkpoint asks for", stacklevel=2
            )
        return cls(**(known | fields))

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p may exclude tokens from the choice."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
