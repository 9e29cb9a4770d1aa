"""Limits on the tokens of an answer's reasoning.

Models reason between two marks, such as `<think>` and `</think>`. A budget forces the closing mark once the reasoning
has its number of tokens. It depends on the sample's own tokens alone, and until then it forbids no token. So an answer
within its budget has the same bits as an answer without one.
"""

import dataclasses
from collections.abc import Sequence

from detjax.engine.field_error import FieldError


@dataclasses.dataclass(frozen=True)
class ReasoningMarks:
    """The tokens around the reasoning in an answer.

    Attributes:
        end: the mark that ends reasoning.
        begin: the mark that begins it, at the beginning of the answer; empty: only the prompt begins reasoning.
        is_open: True if the prompt ends within reasoning.
        spaces: tokens that may precede `begin`.
        repeats: True if reasoning may begin anywhere in the answer, any number of times.
    """

    end: tuple[int, ...]
    begin: tuple[int, ...] = ()
    is_open: bool = False
    spaces: tuple[int, ...] = ()
    repeats: bool = False


@dataclasses.dataclass(frozen=True)
class ReasoningBudget:
    """A limit on the tokens of reasoning, without its marks.

    Attributes:
        tokens: the maximum number of tokens, over all pieces of reasoning in an answer. With a constraint, up to three
            more may complete a character.
        marks: the tokens around the reasoning.
    """

    tokens: int
    marks: ReasoningMarks

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
            ValueError: the number is negative, or the closing mark has no tokens.
        """
        if self.tokens < 0 or not self.marks.end:
            problem = f"tokens is {self.tokens}" if self.tokens < 0 else "the closing mark has no tokens"
            raise FieldError(
                f"ReasoningBudget: {problem}; accepted: at least 0 tokens, and a mark of at least one token",
                "reasoning_budget",
            )


class ReasoningTokens:
    """The reasoning in the tokens of a sample so far.

    Attributes:
        count: the number of tokens of reasoning, without its marks.
        is_open: True within reasoning.
    """

    def __init__(self, marks: ReasoningMarks, tokens: Sequence[int] = ()) -> None:
        """The reasoning in the tokens that a sample has already."""
        self.count = 0
        self.is_open = marks.is_open
        self._marks = marks
        self._may_begin = bool(marks.begin) and (marks.repeats or not marks.is_open)
        self._matched = 0
        """Tokens of the next mark that the last tokens are."""
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Reads the sample's next token."""
        marks = self._marks
        if self.is_open:
            self.count += 1
            self._matched = _matched(marks.end, self._matched, token)
            if self._matched == len(marks.end):
                self.count -= len(marks.end)
                self.is_open, self._matched, self._may_begin = False, 0, marks.repeats and bool(marks.begin)
        elif self._may_begin and not (not marks.repeats and not self._matched and token in marks.spaces):
            before, self._matched = self._matched, _matched(marks.begin, self._matched, token)
            self._may_begin = marks.repeats or self._matched == before + 1
            if self._matched == len(marks.begin):
                self.is_open, self._matched = True, 0

    def forced(self, budget: int) -> int | None:
        """Returns the only token that may come next, if the reasoning has as many tokens as its budget."""
        return self._marks.end[self._matched] if self.is_open and self.count >= budget else None


def _matched(mark: Sequence[int], matched: int, token: int) -> int:
    """Returns how many tokens of a mark the last tokens are, given their number before the last token."""
    last = [*mark[:matched], token]
    return next(size for size in range(len(last), -1, -1) if tuple(last[len(last) - size :]) == tuple(mark[:size]))
