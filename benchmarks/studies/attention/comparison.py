"""What a comparison of bits counts, and what it notes."""

import dataclasses
from collections.abc import Callable, Iterable

from detjax.bench.failures import reason


@dataclasses.dataclass
class Comparison:
    """How many outputs were compared with those of a prefill of their request alone, and which have different bits.

    Attributes:
        tokens: tokens compared, by the way in which they were computed.
        repeats: repeated runs compared.
        options: combinations of head size and option compared.
        seconds: how long it took.
        differences: a line for each difference.
        refused: what our attention says that it does not do, with the reason.
        failed: what could not be compared for any other reason.
    """

    tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    repeats: int = 0
    options: int = 0
    seconds: float = 0.0
    differences: list[str] = dataclasses.field(default_factory=list)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)

    def attempt(self, what: str, compare: Callable[[], None]) -> bool:
        """Runs `compare`, notes why it failed if it did, and returns whether it came to its end."""
        try:
            compare()
        except NotImplementedError as error:
            self.refused[what] = reason(error)
        except Exception as error:
            self.failed[what] = reason(error)
        return what not in self.refused and what not in self.failed

    def include(self, others: Iterable["Comparison"]) -> None:
        """Adds what others counted and noted. Seconds stay, since the others may have run side by side."""
        for other in others:
            for kind, count in other.tokens.items():
                self.tokens[kind] = self.tokens.get(kind, 0) + count
            self.repeats += other.repeats
            self.options += other.options
            self.differences += other.differences
            self.refused |= other.refused
            self.failed |= other.failed
