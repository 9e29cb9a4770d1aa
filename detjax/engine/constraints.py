"""Compiles constraints on a sample's text, such as a JSON schema, to masks of the tokens that may come next.

llguidance computes the masks; see `token_masks`.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from jaxtyping import UInt32

from detjax.engine import json_schemas
from detjax.engine.constraint import FORMATS, Constraint
from detjax.engine.field_error import FieldError
from detjax.engine.sampling_params import SamplingParams
from detjax.engine.token_masks import MaskComputer, Matcher, TokenRules, all_allowed
from detjax.models import DecoderConfig, GenerationDefaults, Tokenizer
from detjax.operands.numerics import ceil_div

if TYPE_CHECKING:
    import llguidance

_MAX_COMPILED: Final = 64
"""Maximum number of constraints that are kept compiled."""
_SLICES: Final = [
    r"[\x20\x0A\x0D\x09]+",
    *(rf'[^"\\\x00-\x1F\x7F]{{1,{length}}}' for length in (4, 5, 6, 7, 8, 10, 30)),
    r'[^"\\\x00-\x1F\x7F]+',
]
"""Classes of tokens that llguidance allows as a whole where it can; no mask depends on them. Some are llguidance's own.
Classes of less than 10 characters halve the time of the slowest masks, near the end of a string with a maximum length:
from 2.4 ms to 1.2 ms with 152k tokens."""
_MAX_ERROR_LENGTH: Final = 400
"""Characters of an error of llguidance, which may quote a constraint of any length."""
_STARTING_THREADS: Final = 16
"""Threads that make the matchers of a step's new samples."""
_MAX_POOLED: Final = 256
"""Maximum number of new matchers that are kept for future samples. One takes about 0.1 MB."""
_PAUSE: Final = 0.002
"""Seconds between two matchers of the pool. Making one takes 0.4 ms, a tenth of it with the GIL; freeing one takes
0.04 ms or more, all of it with the GIL."""
_FREED: Final = 32
"""One in this many ended matchers is freed between two pauses, rounded up."""
_LIMITS: Final = {
    "initial_lexer_fuel": 100_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""Limits on compiling a constraint: the expression `(a{1000}){1000}` fails after 0.05 s and 25 MB; with llguidance's
own limit it takes 1.1 s and 265 MB, and all requests would wait. A state of a lexer takes up to 2 kB, and each sample
has its own lexer: for 256 samples of a typical schema they took 0.1 to 0.9 MB each."""


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledConstraint:
    """A constraint that was validated for the tokens of a model.

    Attributes:
        compiler: the compiler that made it.
        start: returns a new llguidance matcher at the beginning of a text.
    """

    compiler: "ConstraintCompiler"
    start: "Callable[[], llguidance.LLMatcher]"

    def matcher(self, begun: Sequence[int] = ()) -> Matcher:
        """Returns a matcher positioned after the tokens that a text has already."""
        return Matcher(self, begun)


class ConstraintCompiler(MaskComputer):
    """Compiles constraints for the tokens of one model, with a cache of recent ones. It is thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, end_tokens: Sequence[int]) -> None:
        """A compiler for a model with `vocabulary` logits, which may exceed the number of tokens.

        Raises:
            ValueError: llguidance is not installed, or the model has no end token.
        """
        try:
            import llguidance
            import llguidance.numpy
        except ModuleNotFoundError as error:
            raise FieldError(
                f"constraints need {error.name}, which is not installed: pip install 'detjax[structured]'",
                "constraint",
            ) from error
        if not end_tokens:
            message = "constraints need a model with an end-of-sequence token, and this model has none"
            raise FieldError(message, "constraint")
        super().__init__(vocabulary)
        self._library = llguidance
        self._tokenizer = _library_tokenizer(tokenizer, vocabulary, end_tokens)
        self._executor = llguidance.LLExecutor()
        self._pool = MatcherPool(self._threads)
        self._compiled: collections.OrderedDict[Constraint, CompiledConstraint] = collections.OrderedDict()
        self._lock = threading.Lock()

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        """Returns a compiled constraint.

        Raises:
            ValueError: the constraint is not valid, or too complex.
        """
        with self._lock:
            compiled = self._compiled.get(constraint)
        if compiled is None:
            compiled = self._compile(constraint)  # takes up to a second, so without the lock
        with self._lock:
            self._compiled[constraint] = compiled
            self._compiled.move_to_end(constraint)
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def free(self, matcher: Matcher) -> None:
        """Frees the matcher of an ended sample in the background."""
        self._pool.free(matcher)

    def masks_of(self, constraint: CompiledConstraint, tokens: Sequence[int]) -> Iterator[UInt32[np.ndarray, "W"]]:
        """Yields the mask of allowed tokens at the position of each token of a text, on the host.

        Masks end after a token that the constraint refuses.
        """
        state = constraint.start()
        for token in tokens:
            allowed = all_allowed(1, self._vocabulary)
            self._library.numpy.fill_next_token_bitmask(state, allowed.view(np.int32))
            if state.is_error():
                return
            yield allowed[0]
            if not state.consume_token(token):
                return

    def masks_after(self, state: "llguidance.LLMatcher", guesses: Sequence[int]) -> Iterator[UInt32[np.ndarray, "W"]]:
        """Yields the mask after each guess, on the host, as long as the constraint accepts the guesses.

        At the end the matcher's state is as before, or an error that the constraint's limits caused.
        """
        accepted = state.validate_tokens(list(guesses))
        for token in guesses[:accepted]:
            state.consume_token(token)
            allowed = all_allowed(1, self._vocabulary)
            self._library.numpy.fill_next_token_bitmask(state, allowed.view(np.int32))
            if state.is_error():
                return
            yield allowed[0]
        state.rollback(accepted)

    def _start(self, matchers: Sequence[Matcher]) -> None:
        """Starts making llguidance matchers for those that need one and get none from the pool."""
        super()._start([matcher for matcher in matchers if matcher.constraint is None])
        matchers = self._pool.hand_out([matcher for matcher in matchers if matcher.constraint is not None])

        def make(part: Sequence[Matcher]) -> None:
            for matcher in part:
                _ = matcher.state

        for first in range(min(_STARTING_THREADS, len(matchers))):
            part = matchers[first::_STARTING_THREADS]
            starting = self._threads.submit(make, part)
            for matcher in part:
                matcher.starting = starting

    def _fill(
        self, allowed: np.ndarray, matchers: Mapping[int, Matcher], last_tokens: Sequence[tuple[Matcher, int]]
    ) -> dict[int, str]:
        by_state = [(matcher.state, row) for row, matcher in matchers.items() if matcher.constraint is not None]
        consumed = [(matcher.state, token) for matcher, token in last_tokens if matcher.constraint is not None]
        if consumed:
            self._library.numpy.consume_token_par(self._executor, consumed)
        if by_state:
            self._library.numpy.fill_next_token_bitmask_par(self._executor, by_state, allowed.view(np.int32))
        return {row: one_line(state.get_error()) for state, row in by_state if state.is_error()}

    def _compile(self, constraint: Constraint) -> CompiledConstraint:
        library = self._library.LLMatcher
        kind, text = constraint.kind, constraint.text
        if kind == "choice":
            _check_choice(text)
        try:
            if kind == "json_schema":
                grammar = library.grammar_from_json_schema(json_schemas.prepared_schema(text))
            else:
                text = json_schemas.prepared_grammar(text) if kind == "grammar" else text
                grammar = self._library.grammar_from(FORMATS[kind], text)
        except ValueError as error:
            raise _invalid(kind, str(error)) from None
        limits = self._library.LLParserLimits(**_LIMITS)
        start = functools.partial(library, self._tokenizer, grammar, limits=limits, log_level=0)
        state = start()
        if state.is_error():
            raise _invalid(kind, state.get_error())
        self._library.numpy.fill_next_token_bitmask(state, all_allowed(1, self._vocabulary).view(np.int32))
        if state.is_error():
            raise _invalid(kind, f"no text satisfies it ({one_line(state.get_error())})")
        return CompiledConstraint(self, start)


class MatcherPool:
    """A pool of new llguidance matchers for recently used constraints, made in the background while steps run.

    A step that starts many samples then need not wait for their matchers. A matcher from the pool is as new as any
    other, so no mask depends on it. Matchers of ended samples are freed in the background, too.
    """

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        """An empty pool; the threads fill it, one matcher at a time."""
        self._threads = threads
        self._matchers: collections.OrderedDict[CompiledConstraint, list[llguidance.LLMatcher]]
        self._matchers = collections.OrderedDict()
        """By constraint, the most recently used one at the end."""
        self._wanted: dict[CompiledConstraint, int] = {}
        """Target number of matchers of each of these constraints."""
        self._ended: collections.deque[Matcher] = collections.deque()
        self._is_busy = False
        self._lock = threading.Lock()

    def hand_out(self, matchers: Sequence[Matcher]) -> list[Matcher]:
        """Assigns matchers of the pool to new samples. Returns the samples' matchers that got none.

        Many constraints occur in a single request. So a constraint gets matchers in the pool from its second use on,
        at most as many as samples started together with it.
        """
        without = []
        with self._lock:
            constraints = [matcher.constraint for matcher in matchers if matcher.constraint is not None]
            for constraint, count in collections.Counter(constraints).items():
                wanted = max(self._wanted[constraint], count) if constraint in self._matchers else 0
                self._wanted[constraint] = min(wanted, _MAX_POOLED)
                self._matchers.setdefault(constraint, [])
                self._matchers.move_to_end(constraint)
            for matcher in matchers:
                assert matcher.constraint is not None
                if pooled := self._matchers[matcher.constraint]:
                    matcher.begin_with(pooled.pop())
                else:
                    without.append(matcher)
            while len(self._matchers) > _MAX_COMPILED or sum(self._wanted.values()) > _MAX_POOLED:
                del self._wanted[self._matchers.popitem(last=False)[0]]
        self._begin()
        return without

    def free(self, matcher: Matcher) -> None:
        """Frees a matcher in the background."""
        self._ended.append(matcher)
        self._begin()

    def _begin(self) -> None:
        """Starts freeing and making matchers in the background, until all is done."""
        with self._lock:
            is_busy, self._is_busy = self._is_busy, True
        if not is_busy:
            self._continue()

    def _continue(self) -> None:
        with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
            self._threads.submit(self._free_and_make)

    def _free_and_make(self) -> None:
        time.sleep(_PAUSE)
        for _ in range(ceil_div(len(self._ended), _FREED)):
            self._ended.popleft()
        with self._lock:
            lacking = (one for one, pooled in reversed(self._matchers.items()) if len(pooled) < self._wanted[one])
            constraint = next(lacking, None)
            is_busy = self._is_busy = constraint is not None or bool(self._ended)
        if constraint is not None:
            matcher = constraint.start()
            with self._lock:
                if constraint in self._matchers:
                    self._matchers[constraint].append(matcher)
        if is_busy:
            self._continue()


class ModelConstraints:
    """Compiles the constraints and the rules of one model's requests.

    The first constraint makes the model's compiler, which takes up to a second for a large vocabulary.
    """

    def __init__(self, config: DecoderConfig, defaults: GenerationDefaults | None, tokenizer: Tokenizer | None) -> None:
        """Constraints for a model with this configuration."""
        self._vocabulary, self._tokenizer = config.vocab_size, tokenizer
        self._end_tokens = sorted(defaults.eos_token_ids) if defaults is not None else []

    def compile(self, constraint: Constraint | None) -> CompiledConstraint | None:
        """Returns a compiled constraint, or None for None.

        Raises:
            ValueError: the constraint is not valid, or too complex; llguidance is not installed; or the model has no
                tokenizer or no end token.
        """
        return None if constraint is None else self._compiler.compile(constraint)

    def rules(self, params: SamplingParams, end_tokens: Collection[int]) -> TokenRules | None:
        """Returns the rules of a request whose samples end at these tokens; None if all tokens may be chosen.

        Raises:
            ValueError: the model's vocabulary does not have the tokens, or no token is left to choose.
        """
        if not params.has_rules:
            return None
        return TokenRules(self._computer, self._vocabulary, params, end_tokens, self._tokenizer)

    @functools.cached_property
    def _computer(self) -> MaskComputer:
        return MaskComputer(self._vocabulary)

    @functools.cached_property
    def _compiler(self) -> ConstraintCompiler:
        if self._tokenizer is None:
            message = "constraints need a tokenizer, and none was given. Pass the checkpoint's tokenizer."
            raise FieldError(message, "constraint")
        return ConstraintCompiler(self._tokenizer, self._vocabulary, self._end_tokens)


def one_line(error: str) -> str:
    """Returns an error of llguidance without the lines that quote the constraint."""
    first, *rest = error.splitlines() or [""]
    reason = next((line.removeprefix("error: ") for line in rest if line.startswith("error: ")), None)
    text = first if reason is None else f"{first} {reason}"
    return text if len(text) <= _MAX_ERROR_LENGTH else f"{text[:_MAX_ERROR_LENGTH]}..."


def _invalid(kind: str, error: str) -> FieldError:
    """Returns the error of a constraint that llguidance or a check refuses."""
    syntax = "; accepted: the syntax of Rust's crate regex, without look-around and backreferences"
    message = f"the constraint's {kind} is not valid: {one_line(error)}{syntax if kind == 'regex' else ''}"
    return FieldError(message, "constraint")


def _library_tokenizer(tokenizer: Tokenizer, vocabulary: int, end_tokens: Sequence[int]) -> "llguidance.LLTokenizer":
    """Returns a model's tokens in llguidance's form.

    If a constraint allows only one continuation, llguidance tokenizes it. It uses its own tokenizer if that reads the
    same tokens in `tokenizer.json` as `Tokenizer` does. Otherwise it calls `Tokenizer`, and the threads that compute
    masks contend for the GIL: on an H200's host with 16 processors, they did the work of three.
    """
    import llguidance

    options: dict[str, Any] = {"eos_token": list(end_tokens), "slices": _SLICES}
    called = _CalledTokenizer(tokenizer, vocabulary, end_tokens[0])
    try:
        native = llguidance.LLTokenizer(tokenizer.with_all_added_special(), n_vocab=vocabulary, **options)
    except ValueError:  # an unsupported kind of tokenizer
        native = None
    if native is not None and called.has_tokens_of(native):
        return native
    library_takes: Any = called
    return llguidance.LLTokenizer(library_takes, **options)


class _CalledTokenizer:
    """A tokenizer in the form that llguidance calls."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, end_token: int) -> None:
        self.eos_token_id = end_token
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocabulary)]
        self.special_token_ids = [token for token in tokenizer.added_tokens if token < vocabulary]
        self._tokenizer = tokenizer

    def has_tokens_of(self, other: "llguidance.LLTokenizer") -> bool:
        """Returns whether an llguidance tokenizer has the same tokens and the same special tokens."""
        # llguidance never allows a token without text, or of the byte 255, which marks special tokens.
        special = set(self.special_token_ids)
        return all(
            other.decode_bytes([token]) == text and other.is_special_token(token) == (token in special)
            for token, text in enumerate(self.tokens)
            if text and not text.startswith(b"\xff")
        )

    def __call__(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.decode(errors="replace")
        return self._tokenizer.encode(text, add_special_tokens=False)


def _check_choice(text: str) -> None:
    try:
        texts = json.loads(text)
    except ValueError:
        texts = None
    if not isinstance(texts, list) or not texts or not all(isinstance(one, str) for one in texts):
        raise _invalid("choice", "it is not a list of strings; accepted: a JSON list of at least one string")
