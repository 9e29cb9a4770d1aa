"""What a request asks of the sampler."""

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
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: tokens kept; 0: all.
        top_p: the likeliest tokens whose probability reaches this are kept; 1: all.
        min_p: tokens of at least this share of the likeliest one's probability are kept; 0: all.
        seed: 0 to 2^64 - 1. A token depends on it, on its position and on the sample's index, on no other request.
        n: samples of the same prompt.
        stop: strings that end the text, which is cut before them. They need a tokenizer.
        stop_token_ids: tokens that end a sample; they stay in its tokens.
        ignore_eos: go on after the model's own end-of-sequence tokens.
        top_logprobs: how many of the likeliest tokens are reported at each step.
        prompt_logprobs: report logprobs of the prompt's tokens too, and the likeliest tokens there. An `Engine` does.
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
        for name, (holds, what) in accepted.items():
            if not holds:
                raise ValueError(f"SamplingParams: {name} is {getattr(self, name)!r}; accepted: {what}")

    @classmethod
    def recommended(cls, model: Decoder, **fields: Any) -> "SamplingParams":
        """The settings that the model's checkpoint recommends (`generation_config.json`), with `fields` before them.

        Warns (UserWarning) of penalties among them, which change the choice of tokens and which no field stands for.
        """
        defaults = model.generation_defaults
        known: dict[str, Any] = {}
        if defaults is not None and defaults.do_sample:
            known = {"temperature": 1.0 if defaults.temperature is None else defaults.temperature}
            names = ("top_k", "top_p", "min_p")
            known |= {name: value for name in names if (value := getattr(defaults, name)) is not None}
        unread = {} if defaults is None else json.loads(defaults.unread)
        left_out = {
            name: value for name, value in unread.items() if name.endswith("_penalty") and value not in (1, None)
        }
        if left_out:
            warnings.warn(
                f"SamplingParams.recommended leaves out {left_out}, which the checkpoint asks for", stacklevel=2
            )
        return cls(**(known | fields))

    @property
    def filtered(self) -> bool:
        """Whether some tokens may be left out of the choice."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
