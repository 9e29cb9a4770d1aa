"""Variants of the sampling program, which differ in what they can do."""

from collections.abc import Sequence
from typing import NamedTuple

from detjax.engine.sampling_params import SamplingParams


class SamplingVariant(NamedTuple):
    """The capabilities of a sampling program. A program with fewer is faster, and no bit depends on the choice.

    Attributes:
        filtered: it can apply top-k, top-p and min-p.
        top_logprobs: number of likeliest tokens that it reports.
        adjusted: it can apply penalties and biases.
        constrained: it can apply masks of allowed tokens.
        distribution: it reports logprobs under the distribution that tokens are drawn from.
    """

    filtered: bool
    top_logprobs: int
    adjusted: bool = False
    constrained: bool = False
    distribution: bool = False

    @classmethod
    def needed_by(cls, params: Sequence[SamplingParams]) -> "SamplingVariant":
        """Returns the smallest variant that serves samples with these parameters."""
        # Hundreds of rows have few different needs.
        return cls(*map(max, zip(*{row.needs for row in params}, strict=True)))

    @classmethod
    def for_serving(cls, top_logprobs: int) -> "tuple[SamplingVariant, ...]":
        """Returns the variants of an engine whose requests may ask for `top_logprobs` likeliest tokens.

        Sorting the logits for filters and searching for the likeliest tokens each take longer than everything else.
        So common requests have programs without these, and the last program serves the rest.
        """
        plain = [cls(filtered, top) for filtered in (False, True) for top in dict.fromkeys((0, top_logprobs))]
        constrained = [cls(filtered, 0, constrained=True) for filtered in (False, True)]
        adjusted = [cls(False, 0, adjusted=True, constrained=True), cls(True, top_logprobs, True, True)]
        reported = [variant._replace(distribution=True) for variant in (plain[0], adjusted[-1])]
        return *plain, *constrained, *adjusted, *reported

    @property
    def description(self) -> str:
        """The capabilities in words."""
        parts = {
            "top-k, top-p and min-p": self.filtered,
            f"{self.top_logprobs} likeliest tokens": self.top_logprobs,
            "penalties and biases": self.adjusted,
            "constraints": self.constrained,
            "sampling logprobs": self.distribution,
        }
        return "with " + (
            ", ".join(name for name, is_there in parts.items() if is_there) or "nothing but a temperature"
        )

    def serves(self, needed: "SamplingVariant") -> bool:
        """Returns whether a program of this variant has the capabilities that are needed."""
        return all(part >= wanted for part, wanted in zip(self, needed, strict=True))


def run_variants(variants: Sequence[SamplingVariant]) -> list[SamplingVariant]:
    """Returns the variants that runs have programs for: they report only a token and its logprobs, and sampling
    logprobs only without filters.
    """
    plain = SamplingVariant(False, 0)
    accepted = plain, plain._replace(filtered=True), plain._replace(distribution=True)
    return [variant for variant in variants if variant in accepted]


def most_likeliest(variants: Sequence[SamplingVariant]) -> int:
    """Returns the largest number of likeliest tokens that a variant reports."""
    return max(variant.top_logprobs for variant in variants)
