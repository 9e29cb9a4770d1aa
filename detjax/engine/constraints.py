"""Constraints on a sample's text, such as a JSON schema: which tokens may come next, as a mask for the sampler.

A mask is a function of the constraint and of the tokens that the sample has so far, so a constrained answer has the
same bits alone and among others. llguidance computes the masks on the host, while the device computes hidden states.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, UInt32

from detjax.engine import json_schemas
from detjax.engine.field_error import FieldError
from detjax.models import DecoderConfig, GenerationDefaults, Tokenizer
from detjax.operands.numerics import ceil_div

if TYPE_CHECKING:
    import llguidance

_FORMATS: Final[Mapping[str, Any]] = {"json_schema": None, "regex": "regex", "grammar": "lark", "choice": "choice"}
"""The kinds of constraints, with the names that llguidance has for them; schemas have a function of their own there."""
_WORD_BITS: Final = 32
"""Tokens of one word of a mask. Bit i of word w stands for token 32 w + i."""
_ALL_ALLOWED: Final = np.uint32(0xFFFFFFFF)
"""A word of a mask that allows all of its tokens."""
_MAX_COMPILED: Final = 64
"""Constraints that are kept compiled."""
_SLICES: Final = [
    r"[\x20\x0A\x0D\x09]+",
    *(rf'[^"\\\x00-\x1F\x7F]{{1,{length}}}' for length in (4, 5, 6, 7, 8, 10, 30)),
    r'[^"\\\x00-\x1F\x7F]+',
]
"""Classes of tokens that llguidance allows as a whole where it can; no mask depends on them. It has some of them by
itself. Those of less than 10 characters halve the time of its slowest masks, which are those near the end of a string
that has a maximum length: with 152k tokens 1.2 ms in place of 2.4 ms."""
_LONGEST_ERROR: Final = 400
"""Characters of an error of llguidance, which may quote a constraint of any length."""
_STARTING_THREADS: Final = 16
"""Threads that make the matchers of a step's new samples."""
_MAX_SPARE: Final = 256
"""New matchers that are kept for samples to come. One takes about 0.1 MB."""
_PAUSE: Final = 0.002
"""Seconds between one spare matcher and the next. To make one takes 0.4 ms, a tenth of which needs the interpreter, and
so does all of the time that it takes to free one, 0.04 ms and more."""
_FREED: Final = 32
"""Matchers that are to be freed, for each one that is freed between two pauses."""
_LIMITS: Final = {
    "initial_lexer_fuel": 100_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""What a constraint may cost. With this fuel the expression `(a{1000}){1000}` takes 0.05 s and 25 MB until it ends
and 1.1 s and 265 MB with the own limit of llguidance, for which all requests would wait. A state of a
lexer takes up to 2 kB, and each sample has a lexer of its own: those of 256 samples that answered a usual schema took
0.1 to 0.9 MB each."""


@dataclasses.dataclass(frozen=True)
class Constraint:
    r"""What the text of a sample must be.

    Attributes:
        kind: "json_schema": JSON that a schema accepts; "regex": text that a regular expression matches from beginning
            to end, in the syntax of Rust's crate regex; "grammar": text of a context-free grammar in llguidance's
            variant of Lark's syntax; "choice": one of several texts.
        text: the schema as JSON, the expression, the grammar, or the texts as a list in JSON.

    Example:
        >>> from detjax.engine import Constraint
        >>> Constraint.choice(["yes", "no"])
        Constraint(kind='choice', text='["yes","no"]')
        >>> Constraint.json_schema({"type": "integer"}).text
        '{"type":"integer"}'
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        """Checks the kind.

        Raises:
            ValueError: the kind is unknown.
        """
        if self.kind not in _FORMATS:
            raise ValueError(f"Constraint: kind is {self.kind!r}; accepted: {', '.join(_FORMATS)}")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any], *, any_whitespace: bool = False) -> "Constraint":
        """Returns the constraint of JSON that a schema accepts; `{"type": "object"}` accepts any object.

        Args:
            schema: the schema. Its `x-guidance` may have options of llguidance.
            any_whitespace: whether any white space may be between the parts of JSON. By default the JSON is one line,
                with a space or none after each comma and colon, because models may go on with white space until their
                tokens are used up.
        """
        options = {"x-guidance": json_schemas.ANY_WHITE_SPACE | schema.get("x-guidance", {})} if any_whitespace else {}
        return cls("json_schema", _compact({**schema, **options}))

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "Constraint":
        """Returns the constraint of one of several texts."""
        return cls("choice", _compact(list(texts)))


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledConstraint:
    """A constraint that is known to be valid for the tokens of a model.

    Attributes:
        compiler: what compiled it.
        start: makes the library's matcher at the beginning of a text.
    """

    compiler: "ConstraintCompiler"
    start: "Callable[[], llguidance.LLMatcher]"

    def matcher(self, begun: Sequence[int] = ()) -> "Matcher":
        """Returns a matcher behind the tokens that a text has already."""
        return Matcher(self, begun)


_DONE: Final[Future[None]] = Future()
_DONE.set_result(None)


class Matcher:
    """How far one sample has come in its constraint.

    It shares nothing with the matchers of other samples. Copies of one matcher would share a lexer, and with it a lock,
    so that no two masks are computed at the same time, and the states that the constraint's limits count, so that a
    sample may fail for what its neighbours sampled.

    Attributes:
        constraint: the constraint.
        starting: done as soon as the library's matcher is there; None before `ConstraintCompiler.start_masks`.
    """

    def __init__(self, constraint: CompiledConstraint, begun: Sequence[int] = ()) -> None:
        self.constraint = constraint
        self.starting: Future[None] | None = None
        self._begun = tuple(begun)

    @functools.cached_property
    def state(self) -> "llguidance.LLMatcher":
        """The library's matcher. The first use makes it, which takes up to 50 ms, most of them without the GIL."""
        return self._behind_begun(self.constraint.start())

    def begin_with(self, spare: "llguidance.LLMatcher") -> None:
        """Takes a new matcher of the library, which no other sample has."""
        self.state, self.starting = self._behind_begun(spare), _DONE

    def _behind_begun(self, new: "llguidance.LLMatcher") -> "llguidance.LLMatcher":
        for token in self._begun:  # a matcher that refuses one says so of the sample's next mask
            new.consume_token(token)
        return new

    def end(self) -> None:
        """Has the library's matcher freed behind the steps, as soon as nothing else needs it."""
        self.constraint.compiler.free(self)


class Masks(NamedTuple):
    """Which tokens may come next in the rows of a step.

    Attributes:
        allowed: a bit per token, on the device; see `ops.adjust_logits`.
        failures: why the constraints of some rows cannot go on. These rows allow all tokens.
    """

    allowed: UInt32[Array, "R W"]
    failures: Mapping[int, str]


class ConstraintCompiler:
    """Compiles constraints for the tokens of one model.

    It is safe to use from several threads, and keeps the constraints that it compiled last.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, end_tokens: Sequence[int]) -> None:
        """A compiler for a model.

        Args:
            tokenizer: the model's tokenizer.
            vocabulary: the number of the model's logits, which may exceed the number of tokens.
            end_tokens: tokens that end a text. A constraint allows them where its text is complete.

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
        self._vocabulary = vocabulary
        self._library = llguidance
        self._tokenizer = _library_tokenizer(tokenizer, vocabulary, end_tokens)
        self._executor = llguidance.LLExecutor()
        self._threads = ThreadPoolExecutor(thread_name_prefix="detjax-constraints")
        self._spares = SpareMatchers(self._threads)
        self._compiled: collections.OrderedDict[Constraint, CompiledConstraint] = collections.OrderedDict()
        self._lock = threading.Lock()

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        """Returns a constraint that samples may have.

        Raises:
            ValueError: the constraint is not valid, or too complex.
        """
        with self._lock:
            compiled = self._compiled.get(constraint)
        if compiled is None:
            compiled = self._compile(constraint)  # takes up to a second, and other constraints need not wait
        with self._lock:
            self._compiled[constraint] = compiled
            self._compiled.move_to_end(constraint)
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def free(self, matcher: Matcher) -> None:
        """Keeps the matcher of a sample that has ended until there is time to free it."""
        self._spares.free(matcher)

    def start_masks(
        self, rows: int, matchers: Mapping[int, Matcher], accepted: Callable[[], Iterable[tuple[Matcher, int]]]
    ) -> Future[Masks]:
        """Begins to compute the tokens that each row allows, in other threads and without the GIL.

        The matchers must be left alone until the result is there, except that masks of later steps may be asked for.

        Args:
            rows: the number of rows, R.
            matchers: by row; of this compiler or of another one for the same tokens. Other rows allow all tokens.
            accepted: returns matchers, each with its sample's last token, which it has not been told yet. It is called
                in another thread, so it may wait for the tokens, and must wait for the masks of earlier steps. A
                constraint that refuses its token, or that becomes too complex to go on, is among the failures from
                then on.
        """
        if begin := [matcher for matcher in matchers.values() if matcher.starting is None]:
            self._start(begin)

        def masks() -> Masks:
            concurrent.futures.wait({matcher.starting for matcher in matchers.values() if matcher.starting is not None})
            # The device waits for what is done after the last tokens are known.
            allowed = all_allowed(rows, self._vocabulary)
            by_state = [(matcher.state, row) for row, matcher in matchers.items()]
            last_tokens = [(matcher.state, token) for matcher, token in accepted()]
            if last_tokens:
                self._library.numpy.consume_token_par(self._executor, last_tokens)
            if by_state:
                self._library.numpy.fill_next_token_bitmask_par(self._executor, by_state, allowed.view(np.int32))
            failures = {row: one_line(state.get_error()) for state, row in by_state if state.is_error()}
            allowed[[*failures]] = _ALL_ALLOWED
            return Masks(jax.device_put(allowed), failures)

        return self._threads.submit(masks)

    def masks_of(self, constraint: CompiledConstraint, tokens: Sequence[int]) -> Iterator[UInt32[np.ndarray, "W"]]:
        """Yields the tokens that a text's constraint allows in the place of each of its tokens, on the host.

        Args:
            constraint: the constraint.
            tokens: the text's tokens. Behind one that the constraint refuses there are no more masks.
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

    def _start(self, matchers: Sequence[Matcher]) -> None:
        """Begins to make the library's matchers, as far as there are no spare ones."""
        matchers = self._spares.hand_out(matchers)

        def make(part: Sequence[Matcher]) -> None:
            for matcher in part:
                _ = matcher.state

        for first in range(min(_STARTING_THREADS, len(matchers))):
            part = matchers[first::_STARTING_THREADS]
            starting = self._threads.submit(make, part)
            for matcher in part:
                matcher.starting = starting

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
                grammar = self._library.grammar_from(_FORMATS[kind], text)
        except ValueError as error:
            raise _invalid(kind, str(error)) from None
        limits = self._library.LLParserLimits(**_LIMITS)
        start = functools.partial(library, self._tokenizer, grammar, limits=limits, log_level=0)
        state = start()
        if state.is_error():
            raise _invalid(kind, state.get_error())
        self._library.numpy.fill_next_token_bitmask(state, all_allowed(1, self._vocabulary).view(np.int32))
        if state.is_error():
            raise _invalid(kind, f"no text can be what it asks for ({one_line(state.get_error())})")
        return CompiledConstraint(self, start)


class SpareMatchers:
    """New matchers of the library for the constraints that samples began with last, made behind the steps.

    A step that begins with many samples need not wait for their matchers then. A spare matcher is as new as any other,
    so no mask depends on whether there was one. Matchers of samples that have ended are freed behind the steps, too.
    """

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        """No matchers yet; the threads will make them, one at a time."""
        self._threads = threads
        self._spares: collections.OrderedDict[CompiledConstraint, list[llguidance.LLMatcher]]
        self._spares = collections.OrderedDict()
        """By constraint, the one that samples began with last at the end."""
        self._wanted: dict[CompiledConstraint, int] = {}
        """How many each of these constraints is to have."""
        self._ended: collections.deque[Matcher] = collections.deque()
        self._is_busy = False
        self._lock = threading.Lock()

    def hand_out(self, matchers: Sequence[Matcher]) -> list[Matcher]:
        """Gives the spare matchers there are to samples that begin. Returns the samples' matchers that get none.

        Many constraints are those of a single request. So a constraint has spares from the second time on that samples
        begin with it, as many as began together at most.
        """
        without = []
        with self._lock:
            for constraint, count in collections.Counter(matcher.constraint for matcher in matchers).items():
                wanted = max(self._wanted[constraint], count) if constraint in self._spares else 0
                self._wanted[constraint] = min(wanted, _MAX_SPARE)
                self._spares.setdefault(constraint, [])
                self._spares.move_to_end(constraint)
            for matcher in matchers:
                if spares := self._spares[matcher.constraint]:
                    matcher.begin_with(spares.pop())
                else:
                    without.append(matcher)
            while len(self._spares) > _MAX_COMPILED or sum(self._wanted.values()) > _MAX_SPARE:
                del self._wanted[self._spares.popitem(last=False)[0]]
        self._begin()
        return without

    def free(self, matcher: Matcher) -> None:
        """Keeps a matcher until there is time to free it."""
        self._ended.append(matcher)
        self._begin()

    def _begin(self) -> None:
        """Begins to free matchers and to make spare ones, until all is done."""
        with self._lock:
            is_busy, self._is_busy = self._is_busy, True
        if not is_busy:
            self._go_on()

    def _go_on(self) -> None:
        with contextlib.suppress(RuntimeError):  # the interpreter is about to end
            self._threads.submit(self._free_and_make)

    def _free_and_make(self) -> None:
        time.sleep(_PAUSE)
        for _ in range(ceil_div(len(self._ended), _FREED)):
            self._ended.popleft()
        with self._lock:
            lacking = (one for one, spares in reversed(self._spares.items()) if len(spares) < self._wanted[one])
            constraint = next(lacking, None)
            is_busy = self._is_busy = constraint is not None or bool(self._ended)
        if constraint is not None:
            spare = constraint.start()
            with self._lock:
                if constraint in self._spares:
                    self._spares[constraint].append(spare)
        if is_busy:
            self._go_on()


class ModelConstraints:
    """The constraints of one model's requests.

    The first one makes the model's compiler, which takes up to a second for a large vocabulary.
    """

    def __init__(self, config: DecoderConfig, defaults: GenerationDefaults | None, tokenizer: Tokenizer | None) -> None:
        """Constraints for a model with these settings."""
        self._vocabulary, self._tokenizer = config.vocab_size, tokenizer
        self._end_tokens = sorted(defaults.eos_token_ids) if defaults is not None else []

    def compile(self, constraint: Constraint | None) -> CompiledConstraint | None:
        """Returns a constraint that samples may have; None for None, which constrains nothing.

        Raises:
            ValueError: the constraint is not valid, or too complex; llguidance is not installed; or the model has no
                tokenizer or no end token.
        """
        return None if constraint is None else self._compiler.compile(constraint)

    @functools.cached_property
    def _compiler(self) -> ConstraintCompiler:
        if self._tokenizer is None:
            message = "constraints need a tokenizer, and there is none. Give the one of the checkpoint."
            raise FieldError(message, "constraint")
        return ConstraintCompiler(self._tokenizer, self._vocabulary, self._end_tokens)


def all_allowed(rows: int, vocabulary: int) -> UInt32[np.ndarray, "R W"]:
    """Returns masks that allow every token of a vocabulary in each row."""
    return np.full((rows, ceil_div(vocabulary, _WORD_BITS)), _ALL_ALLOWED)


def one_line(error: str) -> str:
    """Returns what an error of llguidance says, without the lines that quote the constraint."""
    first, *rest = error.splitlines() or [""]
    reason = next((line.removeprefix("error: ") for line in rest if line.startswith("error: ")), None)
    text = first if reason is None else f"{first} {reason}"
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}..."


def _invalid(kind: str, error: str) -> FieldError:
    """The error of a constraint that the library or a check refuses."""
    syntax = "; accepted: the syntax of Rust's crate regex, without look-around and backreferences"
    message = f"the constraint's {kind} is not valid: {one_line(error)}{syntax if kind == 'regex' else ''}"
    return FieldError(message, "constraint")


def _library_tokenizer(tokenizer: Tokenizer, vocabulary: int, end_tokens: Sequence[int]) -> "llguidance.LLTokenizer":
    """Returns a model's tokens in llguidance's form.

    Where a constraint leaves one way to go on, llguidance tokenizes it. It does so by itself if it reads the same
    tokens in `tokenizer.json` as `Tokenizer` does. Otherwise it calls `Tokenizer`, and then the threads that compute
    masks wait for the interpreter and for one another: on an H200's host with 16 processors, three of them did as much.
    """
    import llguidance

    options: dict[str, Any] = {"eos_token": list(end_tokens), "slices": _SLICES}
    called = _CalledTokenizer(tokenizer, vocabulary, end_tokens[0])
    try:
        native = llguidance.LLTokenizer(tokenizer.with_all_added_special(), n_vocab=vocabulary, **options)
    except ValueError:  # a kind of tokenizer that it does not know
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
        """Whether a tokenizer of the library has the same tokens, and the same special ones among them."""
        # The library never allows a token without text, or one of the byte 255, by which it marks special tokens.
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
        raise _invalid("choice", "it is no list of strings; accepted: a list of strings in JSON, with at least one")


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
