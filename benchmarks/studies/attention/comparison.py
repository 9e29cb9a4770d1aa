"""The counts and notes of a comparison of bits."""

import dataclasses
from collections.abc import Callable, Iterable

from detjax.bench.failures import reason


@dataclasses.dataclass
class Comparison:
    """A comparison of outputs with a prefill of each request alone.

    Attributes:
        tokens: tokens compared, by the way in which they were computed.
        repeats: repeated runs compared.
        options: combinations of head size and option compared.
        seconds: duration of the comparison.
        differences: a line for each difference.
        refused: what our attention does not support, with the reason.
        failed: what could not be compared for another reason.
    """

    tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    repeats: int = 0
    options: int = 0
    seconds: float = 0.0
    differences: list[str] = dataclasses.field(default_factory=list)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)

    def attempt(self, what: str, compare: Callable[[], None]) -> bool:
        """Runs `compare`, notes a failure's reason, and returns whether it succeeded."""
        try:
            compare()
        except NotImplementedError as error:
            self.refused[what] = reason(error)
        except Exception as error:
            self.failed[what] = reason(error)
        return what not in self.refused and what not in self.failed

    def include(self, others: Iterable["Comparison"]) -> None:
        """Adds the counts and notes of others, except for seconds, since they may have run in parallel."""
        for other in others:
            for kind, count in other.tokens.items():
                self.tokens[kind] = self.tokens.get(kind, 0) + count
            self.repeats += other.repeats
            self.options += other.options
            self.differences += other.differences
            self.refused |= other.refused
            self.failed |= other.failed
