"""Masks of the tokens that may come next in a step's rows, and the rules of a request that forbid single tokens.

A mask is a function of a request's rules and constraint and of the sample's own tokens so far, so an answer has the
same bits in every batch. The host computes masks while the device computes hidden states.
"""

import concurrent.futures
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, UInt32

from detjax.engine.field_error import FieldError
from detjax.engine.reasoning_budget import ReasoningTokens
from detjax.engine.sampling_params import SamplingParams
from detjax.models import Tokenizer
from detjax.operands.numerics import ceil_div

if TYPE_CHECKING:
    import llguidance

    from detjax.engine.constraints import CompiledConstraint

_WORD_BITS: Final = 32
"""Tokens of one word of a mask. Bit i of word w stands for token 32 w + i."""
ALL_ALLOWED: Final = np.uint32(0xFFFFFFFF)
"""A word of a mask that allows all of its tokens."""
_DONE: Final[Future[None]] = Future()
_DONE.set_result(None)


_LONGEST_CHARACTER: Final = 4
"""Maximum number of tokens of a character."""


class Masks(NamedTuple):
    """The tokens that may come next in the rows of a step.

    Attributes:
        allowed: a bit per token, on the device; see `ops.adjust_logits`.
        failures: error messages of the rows whose masks failed. These rows allow all tokens.
    """

    allowed: UInt32[Array, "R W"]
    failures: Mapping[int, str]


def all_allowed(rows: int, vocabulary: int) -> UInt32[np.ndarray, "R W"]:
    """Returns masks that allow every token of a vocabulary in each row."""
    return np.full((rows, ceil_div(vocabulary, _WORD_BITS)), ALL_ALLOWED)


class MaskComputer:
    """Computes masks of samples with rules. A `ConstraintCompiler` is one for samples with constraints as well."""

    def __init__(self, vocabulary: int) -> None:
        """A computer of masks for a model with `vocabulary` logits."""
        self._vocabulary = vocabulary
        self._threads = ThreadPoolExecutor(thread_name_prefix="detjax-constraints")

    def free(self, matcher: "Matcher") -> None:
        """Frees the matcher of an ended sample in the background."""

    def start_masks(
        self,
        rows: int,
        matchers: "Mapping[int, Matcher]",
        accepted: "Callable[[], Iterable[tuple[Matcher, int]]]",
        after_guesses: "Mapping[int, Sequence[UInt32[np.ndarray, 'W']]]" = types.MappingProxyType({}),
    ) -> Future[Masks]:
        """Starts computing the tokens that each row allows, in other threads and without the GIL.

        Until the result is there, the matchers may only be passed to `start_masks` of later steps.

        Args:
            rows: the number of rows, R.
            matchers: by row; from this computer or another one for the same tokens. Other rows allow all tokens.
            accepted: returns matchers with their samples' last tokens, which they have not consumed yet. It is called
                in another thread, so it may wait for the tokens, and must wait for the masks of earlier steps. A
                constraint that refuses its token or becomes too complex is among the failures from then on.
            after_guesses: the masks of the rows after some of these rows, which follow guessed tokens.
        """
        self._start([matcher for matcher in matchers.values() if matcher.starting is None])

        def masks() -> Masks:
            concurrent.futures.wait({matcher.starting for matcher in matchers.values() if matcher.starting is not None})
            # The device waits for everything after `accepted`, which waits for the last tokens.
            allowed = all_allowed(rows, self._vocabulary)
            turns = _in_turns(accepted())
            for tokens, later in itertools.pairwise(turns):
                # A constraint has limits on its work, so its work must not depend on how many tokens come together.
                between = {row: matcher for row, (matcher, _) in enumerate(later)}
                self._fill(all_allowed(len(later), self._vocabulary), between, tokens)
                _note(tokens)
            failures = self._fill(allowed, matchers, turns[-1])
            _note(turns[-1])
            for row, matcher in matchers.items():
                if row not in failures and not matcher.restrict(allowed[row]):
                    failures[row] = NOTHING_LEFT
            allowed[[*failures]] = ALL_ALLOWED
            for row, masks in after_guesses.items():
                allowed[row + 1 : row + 1 + len(masks)] = masks
            return Masks(jax.device_put(allowed), failures)

        return self._threads.submit(masks)

    def _start(self, matchers: "Sequence[Matcher]") -> None:
        """Starts preparing matchers that are new."""
        for matcher in matchers:
            matcher.starting = _DONE

    def _fill(
        self, allowed: np.ndarray, matchers: "Mapping[int, Matcher]", last_tokens: "Sequence[tuple[Matcher, int]]"
    ) -> dict[int, str]:
        """Advances constraints by the last tokens, and writes their masks. Returns error messages by row."""
        return {}


class Matcher:
    """The position of one sample in its constraint and its rules.

    Samples share no matchers. Copies of one matcher would share a lexer: its lock would serialize their masks, and its
    states count towards the constraint's limits, so a sample could fail because of its neighbours' tokens.

    Attributes:
        constraint: the constraint on the text; None: any text.
        rules: the rules for single tokens; None: no rules.
        starting: done once the llguidance matcher exists; None before `MaskComputer.start_masks`.
    """

    def __init__(
        self, constraint: "CompiledConstraint | None", begun: Sequence[int] = (), rules: "TokenRules | None" = None
    ) -> None:
        """A matcher positioned after the tokens that a sample has already."""
        self.constraint, self.rules = constraint, rules
        self.starting: Future[None] | None = None
        self._begun = tuple(begun)
        self._tokens = [*begun] if rules is not None else []
        """The sample's tokens, if there are rules, which may depend on them."""
        self._reasoning = None if rules is None else rules.reasoning(begun)

    @property
    def computer(self) -> MaskComputer:
        """A computer that can compute the sample's masks."""
        if self.constraint is not None:
            return self.constraint.compiler
        assert self.rules is not None
        return self.rules.computer

    @functools.cached_property
    def state(self) -> "llguidance.LLMatcher":
        """The llguidance matcher, made on first use. This takes up to 50 ms, mostly without the GIL."""
        assert self.constraint is not None
        return self._advance(self.constraint.start())

    def begin_with(self, new: "llguidance.LLMatcher") -> None:
        """Uses a new llguidance matcher that no other sample has."""
        self.state, self.starting = self._advance(new), _DONE

    def note(self, token: int) -> None:
        """Takes note of the sample's next token."""
        if self.rules is not None:
            self._tokens.append(token)
        if self._reasoning is not None:
            self._reasoning.add(token)

    def restrict(self, mask: UInt32[np.ndarray, "W"]) -> bool:
        """Forbids the tokens in a mask that the rules exclude. Returns whether any token is left."""
        return self.rules is None or self.rules.restrict(mask, self._tokens, len(self._tokens), self._reasoning)

    def _advance(self, new: "llguidance.LLMatcher") -> "llguidance.LLMatcher":
        for token in self._begun:  # if a token is refused, the sample's next mask reports it
            new.consume_token(token)
        return new

    def end(self) -> None:
        """Frees the llguidance matcher in the background, once nothing else uses it."""
        self.computer.free(self)


def _in_turns(accepted: Iterable[tuple[Matcher, int]]) -> list[list[tuple[Matcher, int]]]:
    """Returns the first token of each matcher, then the second ones, and so on; at least one list."""
    turns: list[list[tuple[Matcher, int]]] = [[]]
    count = dict[Matcher, int]()
    for matcher, token in accepted:
        turn = count[matcher] = count.get(matcher, -1) + 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append((matcher, token))
    return turns


def _note(tokens: Iterable[tuple[Matcher, int]]) -> None:
    for matcher, token in tokens:
        matcher.note(token)


def computer_for(matchers: Iterable[Matcher]) -> MaskComputer | None:
    """Returns a computer for the masks of all these samples of one model; None without samples."""
    some = [*matchers]
    return next((one for one in some if one.constraint is not None), some[0]).computer if some else None


NOTHING_LEFT: Final = (
    "allowed_token_ids, bad_words, min_tokens, the budget of reasoning and the constraint together leave no token to "
    "choose"
)
"""The error of a mask that allows no token."""


class TokenRules:
    """The tokens that a request's samples may choose by `allowed_token_ids`, `bad_words` and `reasoning_budget`.

    Attributes:
        computer: computes masks of samples without a constraint.
    """

    def __init__(
        self,
        computer: MaskComputer,
        vocabulary: int,
        params: SamplingParams,
        end_tokens: Iterable[int],
        tokenizer: Tokenizer | None,
    ) -> None:
        """The rules of a request for a model with `vocabulary` logits.

        Raises:
            ValueError: a token is outside the vocabulary, a word has no tokens, there are words and no tokenizer, or no
                token is left to choose.
        """
        self.computer = computer
        allowed = params.allowed_token_ids
        unknown = next((token for token in allowed if token >= vocabulary), None)
        if unknown is not None:
            message = f"allowed_token_ids has {unknown}; accepted: ids 0 to {vocabulary - 1}"
            raise FieldError(message, "allowed_token_ids")
        words = bad_word_tokens(params.bad_words, tokenizer) if params.bad_words else []
        self._always = _mask_of(allowed or np.arange(vocabulary), vocabulary)
        """The mask of the tokens that are not forbidden at every position."""
        self._by_last: dict[int, list[tuple[int, ...]]] = {}
        """Words of several tokens, by the token before the last one, which is forbidden after the others."""
        for word in words:
            if len(word) == 1:
                _forbid(self._always, word[0])
            else:
                self._by_last.setdefault(word[-2], []).append(word)
        self._budget = params.reasoning_budget
        marks = () if self._budget is None else (*self._budget.marks.begin, *self._budget.marks.end)
        if (unknown := next((token for token in marks if not 0 <= token < vocabulary), None)) is not None:
            message = f"reasoning_budget has marks with token {unknown}; accepted: ids 0 to {vocabulary - 1}"
            raise FieldError(message, "reasoning_budget")
        self._held_back = _mask_of([*end_tokens], vocabulary)
        self._min_tokens = params.min_tokens
        if not self.restrict(all_allowed(1, vocabulary)[0], (), 0):
            name = "allowed_token_ids" if allowed else "bad_words" if words else "reasoning_budget"
            raise FieldError(
                f"{name} leaves no token to choose; accepted: at least one token that bad_words does not forbid and, "
                "with min_tokens, that does not end the sample",
                name,
            )

    def reasoning(self, tokens: Sequence[int] = ()) -> ReasoningTokens | None:
        """Returns the reasoning in the tokens that a sample has already; None without a budget for it."""
        return None if self._budget is None else ReasoningTokens(self._budget.marks, tokens)

    def restrict(
        self,
        mask: UInt32[np.ndarray, "W"],
        tokens: Sequence[int],
        count: int,
        reasoning: ReasoningTokens | None = None,
    ) -> bool:
        """Forbids tokens in the mask of the token after the first `count` tokens of a sample.

        `reasoning` is the reasoning in these tokens, if the caller has it. Returns whether any token is left to choose.
        """
        mask &= self._always
        if self._budget is not None:
            reasoning = reasoning or ReasoningTokens(self._budget.marks, tokens[:count])
            if (forced := reasoning.forced(self._budget.tokens)) is not None:
                # A constraint may not allow the mark within a character.
                may_wait = reasoning.count < self._budget.tokens + _LONGEST_CHARACTER
                if not may_wait or mask[forced // _WORD_BITS] >> (forced % _WORD_BITS) & 1:
                    mask &= _mask_of([forced], len(mask) * _WORD_BITS)
        for word in self._by_last.get(tokens[count - 1], ()) if count else ():
            if tuple(tokens[max(0, count + 1 - len(word)) : count]) == word[:-1]:
                _forbid(mask, word[-1])
        left = mask & ~self._held_back if count < self._min_tokens else mask
        return bool(left.any())


def masks_of(
    constraint: "CompiledConstraint | None", rules: TokenRules | None, tokens: Sequence[int], vocabulary: int
) -> Iterator[UInt32[np.ndarray, "W"]]:
    """Yields the mask of allowed tokens at the position of each token of a sample, on the host.

    Masks end after a token that the constraint refuses.
    """
    any_text = (all_allowed(1, vocabulary)[0] for _ in tokens)
    masks = any_text if constraint is None else constraint.compiler.masks_of(constraint, tokens)
    reasoning = None if rules is None else rules.reasoning()
    for index, mask in enumerate(masks):
        if rules is not None:
            rules.restrict(mask, tokens, index, reasoning)
        yield mask
        if reasoning is not None:
            reasoning.add(tokens[index])


def bad_word_tokens(words: Iterable[str], tokenizer: Tokenizer | None) -> list[tuple[int, ...]]:
    """Returns the sequences of tokens whose last token `bad_words` forbids after the others, as vLLM forms them.

    A word is forbidden at the beginning of a text and within it: as it is without leading spaces, and after a space if
    that gives as many tokens and another first token.

    Raises:
        ValueError: the tokenizer is missing, or a word has no tokens.
    """
    if tokenizer is None:
        message = "bad_words need a tokenizer, and none was given. Pass the checkpoint's tokenizer."
        raise FieldError(message, "bad_words")
    sequences: list[tuple[int, ...]] = []
    for word in words:
        bare, spaced = (
            tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word.lstrip(), f" {word.lstrip()}")
        )
        if not bare:
            raise FieldError(f"bad_words has {word!r}, which has no tokens; accepted: words with tokens", "bad_words")
        sequences.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            sequences.append(spaced)
    return sequences


def _mask_of(tokens: Sequence[int] | np.ndarray, vocabulary: int) -> UInt32[np.ndarray, "W"]:
    """Returns a mask that allows only these tokens. Ids outside the vocabulary have no bit."""
    bits = np.zeros(ceil_div(vocabulary, _WORD_BITS) * _WORD_BITS, bool)
    ids = np.asarray(tokens, np.int64)
    bits[ids[ids < vocabulary]] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


def _forbid(mask: UInt32[np.ndarray, "W"], token: int) -> None:
    mask[token // _WORD_BITS] &= ~np.uint32(1 << token % _WORD_BITS)
