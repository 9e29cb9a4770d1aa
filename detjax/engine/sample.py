"""A sample on its way: what it has generated, and what of it is in the cache."""

from detjax.engine.pages import Digest, digests
from detjax.engine.request import Completion, PromptLogprobs, Token
from detjax.engine.sampling import SamplingParams
from detjax.models import Tokenizer


class Sample:
    """One sample of a request.

    Attributes:
        tokens: the prompt and what is known of the sample.
        computed: tokens in the cache, of those that the device was given to compute.
        unread: tokens that the device was told to sample, and that nobody has read yet.
        pages: of the cache, in order.
        named: of these, how many others can find.
        slot: where the device keeps its last token; None while it waits.
        is_held: whether its last token is there, and the only one left to compute.
        finish_reason: "stop", "length" or "cancelled" once it has ended.
    """

    def __init__(
        self,
        prompt: tuple[int, ...],
        index: int,
        params: SamplingParams,
        end_tokens: frozenset[int],
        tokenizer: Tokenizer | None,
        leader: "Sample | None" = None,
        *,
        is_streamed: bool = False,
    ) -> None:
        self.prompt = prompt
        self.index = index
        self.params = params
        self.leader = leader
        """The first sample of the same request, whose pages of the prompt this one waits for."""
        self.tokens = list(prompt)
        self.logprobs: list[float] = []
        self.top_logprobs: list[tuple[tuple[int, float], ...]] = []
        self.prompt_logprobs: list[tuple[float, tuple[tuple[int, float], ...]]] = []
        self.finish_reason: str | None = None
        self.computed = 0
        self.unread = 0
        self.pages: list[int] = []
        self.named = 0
        self.slot: int | None = None
        self.is_held = False
        self._end_tokens = end_tokens
        self._tokenizer = tokenizer
        self._digests: list[Digest] = []
        # Text takes longer to make than all else here: it is made at every token only where somebody looks at it.
        is_read = is_streamed or bool(params.stop)
        self._stream = tokenizer.stream() if tokenizer is not None and is_read else None
        self._longest_stop = max(map(len, params.stop), default=0)
        self._text = ""
        self._told = 0

    @property
    def length(self) -> int:
        """Tokens that there are, those that nobody has read included."""
        return len(self.tokens) + self.unread

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def has_all(self) -> bool:
        """Whether every token it may have is sampled already, if not read."""
        return self.length == len(self.prompt) + self.params.max_tokens

    @property
    def text(self) -> str | None:
        """What has been generated, cut before a stop string; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        return self._text if self._stream is not None else self._tokenizer.decode(self.generated)

    def completion(self) -> Completion:
        """What came of it, once it has ended."""
        assert self.finish_reason is not None
        found = tuple(self.generated), tuple(self.logprobs), tuple(self.top_logprobs)
        return Completion(*found, self.text, self.finish_reason)

    def scored_prompt(self) -> PromptLogprobs | None:
        """The prompt's logprobs, if they were asked for."""
        if not self.params.prompt_logprobs:
            return None
        logprobs, top = zip(*self.prompt_logprobs, strict=True) if self.prompt_logprobs else ((), ())
        return PromptLogprobs(logprobs, top)

    def digests(self) -> list[Digest]:
        """Of the full pages whose tokens are known."""
        self._digests = digests(self.tokens, self._digests)
        return self._digests

    def add(self, token: int, logprob: float, top: tuple[tuple[int, float], ...], *, batch: int) -> Token:
        """Takes the next token that was read, of a step of `batch` samples, and sees whether it ends the sample."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.top_logprobs.append(top)
        stopped = False
        if self._stream is not None:
            # No stop string ended in what was finished of the text before, but one may have begun there.
            first = max(0, self._stream.finished - self._longest_stop)
            self._text = self._stream.add(token)
            if found := [at for stop in self.params.stop if (at := self._text.find(stop, first)) >= 0]:
                self._text, stopped = self._text[: min(found)], True
        if stopped or token in self._end_tokens:
            self.finish_reason = "stop"
        elif len(self.logprobs) == self.params.max_tokens:
            self.finish_reason = "length"
        return Token(self.index, token, logprob, top, self._news(), self.finish_reason, batch)

    def _news(self) -> str | None:
        """Text that nobody has been told, up to where a stop string or an unfinished character may begin."""
        if self._stream is None:
            return None
        end = len(self._text)
        if self.finish_reason is None:
            held = [
                length
                for stop in self.params.stop
                for length in range(1, len(stop))
                if self._text.endswith(stop[:length])
            ]
            end -= max(held, default=0)
            end = min(end, self._stream.finished)
        news, self._told = self._text[self._told : end], max(self._told, end)
        return news
