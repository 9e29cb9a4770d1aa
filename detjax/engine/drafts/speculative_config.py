"""Settings of speculative decoding."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Final, Literal, get_args

Method = Literal["ngram", "draft_model", "eagle3", "mtp"]
"""The kind of guesses."""
MOST_DRAFTED: Final = 7
"""Maximum number of drafted tokens of a sequence in a step. Layers with state in slots can drop that many."""
_METHODS: Final = ", ".join(map(repr, get_args(Method)))
_LOOKUP: Final = 2, 4
"""Default minimum and maximum number of tokens that prompt lookup searches for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Settings of speculative decoding, with vLLM's names. No bit of a request depends on them.

    Attributes:
        method: "ngram" looks for the last tokens in the text so far, "draft_model" asks a smaller model, and "eagle3"
            and "mtp" a head over the model's hidden states.
        model: the directory of the smaller model or of the head; "mtp": of the model itself.
        num_speculative_tokens: maximum number of tokens guessed for a sample in a step. The engine guesses fewer where
            guesses are often wrong, and none for large batches.
        prompt_lookup_min: minimum number of tokens that "ngram" searches for. Default: 2, or the maximum if less.
        prompt_lookup_max: maximum number of tokens that "ngram" searches for. Default: 4, or the minimum if more.

    Example:
        >>> detjax.engine.SpeculativeConfig(method="ngram", num_speculative_tokens=3).lookup
        (2, 4)
    """

    method: Method
    model: str | None = None
    num_speculative_tokens: int = 4
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
            ValueError: names the field, what was given and what is accepted.
        """
        looks_up, methods = self.method == "ngram", get_args(Method)
        lookup = self.prompt_lookup_min, self.prompt_lookup_max
        low, high = (None, None) if self.method not in methods or not all(map(_is_count, lookup)) else self.lookup
        needs_model = f"the directory of a checkpoint, which method {self.method!r} needs"
        range_ = "1 and more, the minimum up to the maximum" if looks_up else "None: only the method 'ngram' looks up"
        accepted = {
            "method": (self.method in methods, _METHODS),
            "model": (
                self.model is None if looks_up else bool(self.model) and isinstance(self.model, str),
                "None: the method 'ngram' has no model" if looks_up else needs_model,
            ),
            "num_speculative_tokens": (
                _is_count(self.num_speculative_tokens) and self.num_speculative_tokens in range(1, MOST_DRAFTED + 1),
                f"an integer from 1 to {MOST_DRAFTED}",
            ),
        } | {
            name: (
                given is None if not looks_up else low is not None and high is not None and 1 <= low <= high,
                range_,
            )
            for name, given in zip(("prompt_lookup_min", "prompt_lookup_max"), lookup, strict=True)
        }
        for name, (is_accepted, description) in accepted.items():
            if not is_accepted:
                raise ValueError(f"speculative: {name} is {getattr(self, name)!r}; accepted: {description}")

    @property
    def lookup(self) -> tuple[int, int]:
        """The minimum and the maximum number of tokens that prompt lookup searches for."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is None:
            low = _LOOKUP[0] if high is None else min(_LOOKUP[0], high)
        return low, max(_LOOKUP[1], low) if high is None else high

    @classmethod
    def from_json(cls, text: str, target: Path | None = None) -> "SpeculativeConfig":
        """Returns the settings in a JSON object, as in vLLM's `--speculative-config`.

        Args:
            text: the JSON object.
            target: the directory of the model that tokens are guessed for; it is the default `model` of "mtp".

        Raises:
            ValueError: the text is not a JSON object, a key is unknown, or a value is not accepted.
        """
        try:
            content: Any = json.loads(text)
        except ValueError as error:
            raise ValueError(f"speculative is {text!r}, which is not JSON ({error})") from None
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(content, dict) or "method" not in content:
            raise ValueError(f"speculative is {text!r}; accepted: a JSON object with the key 'method'")
        if unknown := sorted(content.keys() - set(names)):
            raise ValueError(
                f"speculative has the key {unknown[0]!r} with the value {content[unknown[0]]!r}; accepted: "
                f"{', '.join(names)}"
            )
        if content["method"] not in get_args(Method):
            raise ValueError(f"speculative: method is {content['method']!r}; accepted: {_METHODS}")
        if content["method"] == "mtp" and target is not None:
            content = {"model": str(target)} | content
        return cls(**content)


def _is_count(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))
