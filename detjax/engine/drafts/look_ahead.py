"""Reads guessed tokens ahead of a sample with a constraint or rules: what they allow after each guess."""

import copy
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt32

from detjax.engine.constraints import CompiledConstraint
from detjax.engine.token_masks import TokenRules, all_allowed

if TYPE_CHECKING:
    import llguidance


class LookAhead:
    """A reader of guesses: finds what a sample's constraint and rules allow after each of them.

    It has an llguidance matcher of its own. The sample's matcher reads only the sample's tokens: its lexer keeps a
    limited number of states, so guesses could make a constraint fail that does not fail without them.
    """

    def __init__(self, constraint: CompiledConstraint | None, rules: TokenRules | None, vocabulary: int) -> None:
        """Begins before the sample's first token."""
        self._constraint, self._rules, self._vocabulary = constraint, rules, vocabulary
        self._state: llguidance.LLMatcher | None = None if constraint is None else constraint.start()
        self._reasoning = None if rules is None else rules.reasoning()
        self._read = 0

    def follow(self, tokens: Seq[int]) -> None:
        """Reads the sample's tokens that it has not read."""
        for token in tokens[self._read :]:
            if self._state is not None:
                self._state.consume_token(token)
            if self._reasoning is not None:
                self._reasoning.add(token)
        self._read = len(tokens)

    @property
    def has_failed(self) -> bool:
        """True if the constraint is too complex to look ahead."""
        return self._state is not None and self._state.is_error()

    def forced(self) -> list[int]:
        """Returns the tokens that must come next, if the constraint allows a single text."""
        return [] if self._state is None or self.has_failed else self._state.compute_ff_tokens()

    def masks(self, tokens: Seq[int], guesses: Seq[int]) -> list[UInt32[np.ndarray, "W"]]:
        """Returns the tokens allowed after each guess, up to the first guess that is not allowed itself.

        Args:
            tokens: the sample's tokens, which must have been read.
            guesses: the guesses after them.
        """
        if self._constraint is None or self._state is None:
            masks = [all_allowed(1, self._vocabulary)[0] for _ in guesses]
        else:
            masks = [] if self.has_failed else [*self._constraint.compiler.masks_after(self._state, guesses)]
        if self._rules is None:
            return masks
        together, reasoning = [*tokens, *guesses], copy.copy(self._reasoning)
        for number, (mask, guess) in enumerate(zip(masks, guesses, strict=False)):
            if reasoning is not None:
                reasoning.add(guess)
            if not self._rules.restrict(mask, together, len(tokens) + number + 1, reasoning):
                return masks[:number]
        return masks
