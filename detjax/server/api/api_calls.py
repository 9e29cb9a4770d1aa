"""Translates calls of the API to requests of the engine, and what the engine generates to responses.

What grows with an answer is made while it is sent: lists of a whole response that have an entry for each choice or
token are iterators, see `json_pieces`.
"""

import abc
import dataclasses
import secrets
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from starlette.concurrency import run_in_threadpool

from detjax.audit import Origin
from detjax.audit.verification.transcripts import transcript_of
from detjax.engine import Completion, Constraint, Engine, Generation, Request, SamplingParams, Token
from detjax.models import Tokenizer
from detjax.server.api.request_fields import SamplingRequest
from detjax.server.http.errors import ApiError
from detjax.server.http.streaming import event
from detjax.server.replicated_engine import ReplicatedEngine
from detjax.server.text.texts import Texts
from detjax.server.text.token_texts import Json, TokenTexts
from detjax.server.tools.formats import ToolFormat

TOO_LONG: Final = "context_length_exceeded"
"""OpenAI's code for a prompt with more tokens than fit. Clients look for it."""
_SAMPLING_FIELDS: Final = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "n", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Fields of a body that are fields of `SamplingParams`."""
_DRAWN_BITS: Final = 53
"""Bits of a seed that the server draws: every client of JSON holds such a number exactly, JavaScript's too."""


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """The model that a server offers.

    Attributes:
        name: what clients call it.
        engine: computes with it.
        tokenizer: the engine's.
        texts: does the text work of requests with it.
        defaults: fields of `SamplingParams` for requests that do not give them.
        fingerprint: what answers depend on besides requests.
        token_texts: the texts of its tokens.
        tool_format: how it writes calls of tools; None: in no way that is known here.
        image_directory: where files of images may lie that requests name; None: nowhere.
        origin: what receipts say of the fingerprint.
        draws_seeds: whether requests without a seed get one that nobody can foresee. Otherwise it is 0.
        created: when the server started, in seconds since 1970.
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
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))


@dataclasses.dataclass(frozen=True)
class Caller:
    """Who sent a request.

    Attributes:
        client: whose turn the request takes; see `Request.client`.
        has_own_prefixes: whether no other client's requests share pages of the prefix cache with it.
    """

    client: str | None = None
    has_own_prefixes: bool = False

    def cache_salt(self, salt: str | None) -> str | None:
        """The salt of the engine's request, given that of the body."""
        return f"{self.client or ''}/{salt or ''}" if self.has_own_prefixes else salt


NOBODY: Final = Caller()


class ApiCall(abc.ABC):
    """A call of the API: its requests to the engine, and its response, whole or streamed.

    Attributes:
        requests: requests to the engine, one for each prompt, once `encode_prompts` has made them.
    """

    ENDS_WITH_DONE = True
    """Whether a stream ends with the event [DONE]."""
    _ID_PREFIX: str
    _params: SamplingParams

    def __init__(self, body: SamplingRequest, model: ServedModel, caller: Caller = NOBODY) -> None:
        """Checks the parameters.

        Args:
            body: the request's body.
            model: answers it.
            caller: who sent the request.

        Raises:
            ValueError: the parameters contradict each other.
        """
        self.model = model
        self.requests: list[Request] = []
        self._id = f"{self._ID_PREFIX}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._returns_receipts = bool(body.receipt)
        self._receipts: dict[tuple[int, int], Json] = {}
        """By prompt and sample."""
        self._heard: dict[tuple[int, int], list[Token]] = {}
        """The tokens of streamed answers that are to have receipts."""
        self._draws_seeds = model.draws_seeds and body.seed is None
        self._caller, self._cache_salt = caller, caller.cache_salt(body.cache_salt)
        given = {name: getattr(body, name, None) for name in _SAMPLING_FIELDS}
        self._fields = model.defaults | {name: value for name, value in given.items() if value is not None}
        self._fields |= {"stop": body.stops, "ignore_eos": body.ignore_eos}
        self._fields |= {"stop_token_ids": tuple(body.stop_token_ids or ())}
        if body.logit_bias:
            self._fields |= {"logit_bias": tuple((int(token), bias) for token, bias in body.logit_bias.items())}

    @property
    @abc.abstractmethod
    def num_samples(self) -> int:
        """The number of choices of the response."""

    async def prepare(self) -> None:
        """Makes the requests to the engine, and does for them what takes long.

        Raises:
            ApiError: see `encode_prompts`; or receipts are asked for, which images have no place in.
            ValueError: the constraint is not valid.
        """
        if (constraint := await run_in_threadpool(self._constraint)) is not None:
            await run_in_threadpool(self._compile, constraint)
            self._params = dataclasses.replace(self._params, constraint=constraint)
        await self.encode_prompts()
        if self._returns_receipts and any(request.images for request in self.requests):
            raise ApiError(
                400,
                "receipt is true and there are images; accepted: one of them, since a receipt holds tokens alone",
                param="receipt",
            )

    def _compile(self, constraint: Constraint) -> None:
        """Compiles a constraint; see `Engine.compile_constraint`."""
        self.model.engine.compile_constraint(constraint)

    @abc.abstractmethod
    def _constraint(self) -> Constraint | None:
        """What an answer has to be; None: any text.

        Raises:
            ValueError: nothing can be all that the body asks for.
        """

    @abc.abstractmethod
    async def encode_prompts(self) -> None:
        """Makes the requests to the engine.

        Raises:
            ValueError: a prompt cannot be encoded, or it has more tokens than fit.
        """

    def _request(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        """The request for a prompt. Without a seed in the body, each prompt whose tokens are drawn gets its own."""
        if self._draws_seeds and params.temperature > 0:
            params = dataclasses.replace(params, seed=secrets.randbits(_DRAWN_BITS))
        return Request(prompt, params, cache_salt=self._cache_salt, client=self._caller.client)

    async def read(self, generations: Sequence[Generation]) -> None:
        """Does what takes long before `full_response`."""
        if self._returns_receipts:
            await run_in_threadpool(self._make_receipts, generations)

    def _make_receipts(self, generations: Sequence[Generation]) -> None:
        for prompt, generation in enumerate(generations):
            for sample, completion in enumerate(generation.completions):
                self._make_receipt(prompt, sample, completion)

    def _make_receipt(self, prompt: int, sample: int, completion: Completion) -> None:
        request = self.requests[prompt]
        assert not isinstance(request.prompt, str)
        transcript = transcript_of(request.prompt, completion, request.sampling, sample, self.model.origin)
        self._receipts[prompt, sample] = transcript.sealed().as_json()

    def _hear(self, prompt: int, token: Token) -> None:
        """Notes a token of a stream, whose last one makes its answer's receipt."""
        if not self._returns_receipts:
            return
        tokens = self._heard.setdefault((prompt, token.sample), [])
        tokens.append(token)
        if token.finish_reason is not None:
            completion = Completion(
                tokens=tuple(one.token for one in tokens),
                logprobs=tuple(one.logprob for one in tokens),
                top_logprobs=tuple(one.top_logprobs for one in tokens),
                text="".join(one.text or "" for one in tokens),
                finish_reason=token.finish_reason,
            )
            self._make_receipt(prompt, token.sample, completion)

    def _receipt(self, prompt: int, sample: int, *, is_whole: bool = False) -> Json:
        """The field of an answer's receipt, if the request asks for it. Those of whole responses have iterators."""
        if (receipt := self._receipts.get((prompt, sample))) is None:
            return {}
        if is_whole:
            receipt = {name: iter(value) if isinstance(value, list) else value for name, value in receipt.items()}
        return {"receipt": receipt}

    def _seed(self, prompt: int) -> Json:
        """The field that says which seed a prompt's answers were drawn with, so that they can be asked for again."""
        return {"seed": self.requests[prompt].sampling.seed}

    @abc.abstractmethod
    def full_response(self, generations: Sequence[Generation]) -> Json:
        """The response in one piece. Its long lists are iterators."""

    @abc.abstractmethod
    def first_chunks(self) -> Iterator[Json]:
        """The chunks before the first token."""

    @abc.abstractmethod
    def token_chunks(self, prompt: int, token: Token) -> Iterator[Json]:
        """The chunks of a token. There is none while its text may still begin a stop string or half a character."""

    @abc.abstractmethod
    def last_chunks(self, generated: int) -> Iterator[Json]:
        """The chunks after the last token; `generated` is the number of tokens."""

    def event(self, chunk: Json) -> bytes:
        """The server-sent event of a chunk."""
        return event(chunk)

    def error_event(self, error: ApiError) -> bytes:
        """The server-sent event of an error after the first chunk."""
        return event(error.body)
