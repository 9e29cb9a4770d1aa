"""API calls: converts them to requests of the engine, and the engine's generations to responses.

Lists in a whole response with an entry per choice or token are iterators, so that they are built while they are sent;
see `json_pieces`.
"""

import abc
import dataclasses
import itertools
import secrets
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from starlette.concurrency import run_in_threadpool

from detjax.audit import Origin
from detjax.audit.verification.transcripts import transcript_of
from detjax.engine import (
    Aborted,
    Completion,
    Constraint,
    Engine,
    Generation,
    Request,
    SamplingParams,
    Token,
)
from detjax.engine.job import ABORT
from detjax.models import Adapter, Tokenizer
from detjax.models.vision.images import VisualInput
from detjax.server.api.request_fields import SamplingRequest
from detjax.server.http.errors import ApiError
from detjax.server.http.settings import PROCESSED, RAW, LogprobsMode
from detjax.server.http.streaming import event
from detjax.server.replicated_engine import ReplicatedEngine, completion_of
from detjax.server.text.texts import Texts
from detjax.server.text.token_texts import Json, TokenTexts, TopLogprobs
from detjax.server.tools.reasoning import ReasoningFormat
from detjax.server.tools.tool_format import ToolFormat

TOO_LONG: Final = "context_length_exceeded"
"""OpenAI's error code for a prompt that is too long. Clients check for it."""
_SAMPLING_FIELDS: Final = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "n", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Fields of a body that are also fields of `SamplingParams`."""
NO_TOKEN: Final = -1
"""Stands for the missing token at the end of an aborted stream."""
_DRAWN_BITS: Final = 53
"""Bits of a seed that the server draws: JavaScript represents such numbers exactly."""


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """The model that a server offers.

    Attributes:
        name: its name for clients.
        engine: its engine.
        tokenizer: its tokenizer.
        texts: does the text work of its requests.
        defaults: fields of `SamplingParams` for requests that omit them.
        fingerprint: the system fingerprint.
        token_texts: the texts of its tokens.
        tool_format: its format of tool calls; None if unknown.
        image_directory: directory of image files that requests may name, or None.
        origin: the origin of answers, for receipts.
        reasoning_format: its format of reasoning; None if its answers have none.
        draws_seeds: True to draw an unpredictable seed for requests without one, False to use 0.
        logprobs_mode: the distribution of the logprobs in answers; see `Settings.logprobs_mode`.
        created: start time of the server, in seconds since 1970.
        adapter: the adapter that the call's model name stands for; None: the model itself.
    """

    name: str
    engine: Engine | ReplicatedEngine
    tokenizer: Tokenizer
    texts: Texts
    defaults: Json
    fingerprint: str
    token_texts: TokenTexts
    tool_format: ToolFormat | None = None
    image_directory: Path | None = None
    origin: Origin = dataclasses.field(default_factory=Origin)
    draws_seeds: bool = True
    logprobs_mode: LogprobsMode = RAW
    reasoning_format: ReasoningFormat | None = None
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    adapter: Adapter | None = None


@dataclasses.dataclass(frozen=True)
class Caller:
    """The sender of a request.

    Attributes:
        client: identifies the client for round-robin scheduling; see `Request.client`.
        has_own_prefixes: True if the client does not share the prefix cache with others.
    """

    client: str | None = None
    has_own_prefixes: bool = False

    def cache_salt(self, salt: str | None) -> str | None:
        """Returns the cache salt of the engine's request, given the body's salt."""
        return f"{self.client or ''}/{salt or ''}" if self.has_own_prefixes else salt


NOBODY: Final = Caller()


class ApiCall(abc.ABC):
    """A call of the API: its requests to the engine, and its whole or streamed response.

    Attributes:
        requests: requests to the engine, one per prompt, set by `encode_prompts`.
    """

    ENDS_WITH_DONE = True
    """True if a stream ends with the event [DONE]."""
    _ID_PREFIX: str
    _params: SamplingParams

    def __init__(self, body: SamplingRequest, model: ServedModel, caller: Caller = NOBODY) -> None:
        """Checks the parameters; raises a ValueError if they contradict each other."""
        self.model = model
        self.requests: list[Request] = []
        self._id = f"{self._ID_PREFIX}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._returns_receipts = bool(body.receipt)
        self._receipts: dict[tuple[int, int], Json] = {}
        """Receipts by prompt and sample."""
        self._recorded: dict[tuple[int, int], list[Token]] = {}
        """Tokens of streamed answers, for receipts."""
        self._draws_seeds = model.draws_seeds and body.seed is None
        self._caller, self._cache_salt = caller, caller.cache_salt(body.cache_salt)
        self._speculative = body.speculative is not False
        values = {name: getattr(body, name, None) for name in _SAMPLING_FIELDS}
        self._fields = model.defaults | {name: value for name, value in values.items() if value is not None}
        self._fields |= {"stop": body.stops, "ignore_eos": body.ignore_eos}
        self._fields |= {"stop_token_ids": tuple(body.stop_token_ids or ())} | body.text_fields
        self._as_ids, self._truncates_to = bool(body.return_tokens_as_token_ids), body.truncate_prompt_tokens
        self._reports_processed = model.logprobs_mode == PROCESSED and body.reports_logprobs
        """True if logprobs are reported under the sampling distribution."""
        self._adds_sampling_logprobs = bool(body.sampling_logprobs) and body.reports_logprobs
        """True if logprobs of the sampling distribution are reported in addition."""
        self._fields |= {"sampling_logprobs": bool(body.sampling_logprobs) or self._reports_processed}
        if body.logit_bias:
            self._fields |= {"logit_bias": tuple((int(token), bias) for token, bias in body.logit_bias.items())}

    @property
    def id(self) -> str:
        """The id of the response."""
        return self._id

    @property
    @abc.abstractmethod
    def num_samples(self) -> int:
        """The number of choices in the response."""

    async def prepare(self) -> None:
        """Makes the requests to the engine, and compiles the constraint, which may depend on the prompt."""
        await self.encode_prompts()
        limits = await self._limits()
        if any(limit is not None for limit in limits.values()):  # copies check all parameters again
            self._params = dataclasses.replace(self._params, **limits)
            self.requests = [
                dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, **limits))
                for request in self.requests
            ]
        if self._returns_receipts and any(request.images for request in self.requests):
            raise ApiError(
                400,
                "receipt is true and the request has images; accepted: one of the two, since receipts have only tokens",
                param="receipt",
            )

    # --- logprobs -----------------------------------------------------------------------------------------------------

    def _shown(self, completion: Completion) -> Completion:
        """Returns a completion with the logprobs that the answer reports."""
        if not self._reports_processed:
            return completion
        top = completion.sampling_top_logprobs or completion.top_logprobs
        return dataclasses.replace(completion, logprobs=completion.sampling_logprobs, top_logprobs=top)

    def _shown_token(self, token: Token) -> Token:
        """Returns a token of a stream with the logprobs that the answer reports."""
        if not self._reports_processed or token.sampling_logprob is None:
            return token
        return dataclasses.replace(token, logprob=token.sampling_logprob, top_logprobs=token.sampling_top_logprobs)

    def _shown_generation(self, generation: Generation) -> Generation:
        """Returns a generation with the logprobs that the answer reports."""
        if not self._reports_processed:
            return generation
        scores, completions = generation.prompt, tuple(map(self._shown, generation.completions))
        if scores is not None:
            sampling = scores.sampling_logprobs, scores.sampling_top_logprobs or scores.top_logprobs
            scores = dataclasses.replace(scores, logprobs=sampling[0], top_logprobs=sampling[1])
        return dataclasses.replace(generation, completions=completions, prompt=scores)

    def _added_logprobs(self, values: Sequence[float]) -> Iterable[float | None]:
        """Returns sampling logprobs if the answer reports them in addition, else None for each token."""
        return values if self._adds_sampling_logprobs else itertools.repeat(None)

    def _mode(self) -> Json:
        """Returns the field that says which logprobs the answer reports, unless they are the model's."""
        return {"logprobs_mode": PROCESSED} if self._reports_processed else {}

    def _chat_logprob(self, token: int, logprob: float, top: TopLogprobs, sampling: float | None) -> Json:
        """Returns a token with its logprobs in the format of chats."""
        return self.model.token_texts.chat_json(token, logprob, top, sampling, as_ids=self._as_ids)

    # --- prompts ------------------------------------------------------------------------------------------------------

    def _most_prompt_tokens(self, max_tokens: int | None) -> int | None:
        """Returns the number of tokens that a prompt is cut to, given the length of its answer; None: it is not cut."""
        if self._truncates_to is None or self._truncates_to > 0:
            return self._truncates_to
        return max(self.model.engine.max_length - (max_tokens or 1), 1)

    async def _limits(self) -> Json:
        """Returns the sampling parameters that limit the answer's text. Raises a ValueError if they are not valid."""
        return {"constraint": await run_in_threadpool(self._constraint)}

    @abc.abstractmethod
    def _constraint(self) -> Constraint | None:
        """Compiles and returns the answer's constraint; None for any text. Raises a ValueError if it is not valid."""

    @abc.abstractmethod
    async def encode_prompts(self) -> None:
        """Sets the requests to the engine. Raises a ValueError or an ApiError if a prompt is invalid or too long."""

    def _request(self, prompt: Sequence[int], params: SamplingParams, images: Sequence[VisualInput] = ()) -> Request:
        """Returns the request for a prompt, with its own seed if it samples and the body has none."""
        if self._draws_seeds and params.temperature > 0:
            params = dataclasses.replace(params, seed=secrets.randbits(_DRAWN_BITS))
        caller = self._caller.client
        return Request(
            prompt,
            params,
            images=images,
            cache_salt=self._cache_salt,
            client=caller,
            id=self._id,
            speculative=self._speculative,
            adapter=self.model.adapter,
        )

    async def read(self, generations: Sequence[Generation]) -> None:
        """Does the slow part of making a whole response, before `full_response`."""

        def make_receipts() -> None:
            for prompt, generation in enumerate(generations):
                for sample, completion in enumerate(generation.completions):
                    self._make_receipt(prompt, sample, completion)

        if self._returns_receipts:
            await run_in_threadpool(make_receipts)

    def _make_receipt(self, prompt: int, sample: int, completion: Completion) -> None:
        request = self.requests[prompt]
        assert not isinstance(request.prompt, str)
        if not completion.tokens:  # aborted before its first token
            return
        transcript = transcript_of(request.prompt, completion, request.sampling, sample, self.model.origin)
        self._receipts[prompt, sample] = transcript.sealed().as_json()

    def _record_token(self, prompt: int, token: Token) -> None:
        """Records a token of a stream, and makes the answer's receipt at its last token."""
        if not self._returns_receipts:
            return
        tokens = self._recorded.setdefault((prompt, token.sample), [])
        tokens.append(token)
        if token.finish_reason is not None:
            self._make_receipt(prompt, token.sample, completion_of(tokens))

    def _record_abort(self, prompt: int, aborted: Aborted) -> Token:
        """Makes the receipt of a streamed answer that was aborted, if it has tokens, and returns the end of its text.

        The end has the form of a token, but nothing must be reported about the token itself.
        """
        if tokens := self._recorded.get((prompt, aborted.sample)):
            self._make_receipt(prompt, aborted.sample, completion_of(tokens, aborted))
        return Token(aborted.sample, NO_TOKEN, 0.0, (), aborted.text, ABORT, batch=0)

    def _receipt(self, prompt: int, sample: int, *, is_whole: bool = False) -> Json:
        """Returns the receipt field of an answer, if requested; with iterators for a whole response."""
        if (receipt := self._receipts.get((prompt, sample))) is None:
            return {}
        if is_whole:
            receipt = {name: iter(value) if isinstance(value, list) else value for name, value in receipt.items()}
        return {"receipt": receipt}

    def _seed(self, prompt: int) -> Json:
        """Returns the field with the seed of a prompt's answers, with which they can be reproduced."""
        return {"seed": self.requests[prompt].sampling.seed}

    @abc.abstractmethod
    def full_response(self, generations: Sequence[Generation]) -> Json:
        """Returns the whole response, with iterators for long lists."""

    @abc.abstractmethod
    def first_chunks(self) -> Iterator[Json]:
        """Yields the chunks before the first token."""

    @abc.abstractmethod
    def token_chunks(self, prompt: int, token: Token) -> Iterator[Json]:
        """Yields the chunks of a token: none if its text is held back, as the possible beginning of a stop string."""

    @abc.abstractmethod
    def abort_chunks(self, prompt: int, aborted: Aborted) -> Iterator[Json]:
        """Yields the chunks at the end of a sample that was aborted."""

    @abc.abstractmethod
    def last_chunks(self, generated: int) -> Iterator[Json]:
        """Yields the chunks after the last token; `generated` is the number of tokens."""

    def event(self, chunk: Json) -> bytes:
        """Returns the server-sent event of a chunk."""
        return event(chunk)

    def error_event(self, error: ApiError) -> bytes:
        """Returns the server-sent event of an error after the first chunk."""
        return event(error.body)
