"""A sequence: one sample of a request while it is scheduled, what has been generated for it, and its text."""

import dataclasses

from detjax.engine.page_pool import Digest, digests
from detjax.engine.request import Completion, PromptLogprobs, Token
from detjax.engine.sampling_params import SamplingParams
from detjax.models import Tokenizer

type TopLogprobs = tuple[tuple[int, float], ...]
"""The likeliest tokens at one position with their logprobs, the likeliest first."""


class TextStream:
    """The text of a sample while it grows. It ends before the first stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self.text = ""
        self._decoder = tokenizer.stream()
        self._stop = stop
        self._longest_stop = max(map(len, stop), default=0)
        self._streamed = 0

    def add(self, token: int) -> bool:
        """Appends a token's text. Returns whether a stop string ended the text, which is then cut before it."""
        # The finished part of the text before held no whole stop string, but one may have begun there.
        first = max(0, self._decoder.finished - self._longest_stop)
        self.text = self._decoder.add(token)
        starts = [start for stop in self._stop if (start := self.text.find(stop, first)) >= 0]
        if starts:
            self.text = self.text[: min(starts)]
        return bool(starts)

    def take_new(self, *, is_last: bool) -> str:
        """Returns the text that was not returned before.

        Before the last token, the text stops where a stop string or an unfinished character may begin.
        """
        text = self.text
        if not is_last:
            text = text[: self._decoder.finished]
            text = text[: len(text) - self._length_of_begun_stop(text)]
        new, self._streamed = text[self._streamed :], max(self._streamed, len(text))
        return new

    def _length_of_begun_stop(self, text: str) -> int:
        """Returns how many characters at the end of a text may be the beginning of a stop string."""
        begun = (length for stop in self._stop for length in range(1, len(stop)) if text.endswith(stop[:length]))
        return max(begun, default=0)


class SampleOutput:
    """What has been generated for one sample.

    Attributes:
        logprobs: one per generated token.
        top_logprobs: the likeliest tokens at each generated token.
        prompt_logprobs: the logprob and the likeliest tokens at each prompt token from the second one on.
    """

    def __init__(self) -> None:
        self.logprobs: list[float] = []
        self.top_logprobs: list[TopLogprobs] = []
        self.prompt_logprobs: list[tuple[float, TopLogprobs]] = []

    def scored_prompt(self) -> PromptLogprobs:
        """Returns the prompt's logprobs."""
        logprobs, top = zip(*self.prompt_logprobs, strict=True) if self.prompt_logprobs else ((), ())
        return PromptLogprobs(logprobs, top)


class Sequence:
    """One sample of a request: its tokens, and the scheduler's state of them.

    Attributes:
        prompt: token ids of the prompt.
        index: the sample's number in its request.
        params: the request's sampling parameters.
        leader: the request's first sample, whose prompt pages this sequence waits for and shares; None for the first.
        tokens: the prompt and the generated tokens that have been read.
        output: logprobs of the generated tokens and of the prompt.
        finish_reason: "stop", "length" or "cancelled" after the end; None before it.
        computed: tokens, from the first on, whose keys and values the submitted steps put into the cache.
        unread: tokens that submitted steps sample and that have not been read.
        page_ids: pages of the cache, in the order of the tokens.
        named_pages: how many of these pages, from the first on, other sequences can share.
        slot: the number under which the device keeps the last sampled token; None while the sequence waits.
        is_held: whether the only token left to compute is the one in the slot.
    """

    def __init__(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        *,
        index: int = 0,
        end_tokens: frozenset[int] = frozenset(),
        tokenizer: Tokenizer | None = None,
        leader: "Sequence | None" = None,
        is_streamed: bool = False,
    ) -> None:
        """A sequence that waits.

        Args:
            prompt: token ids.
            params: sampling parameters.
            index: the sample's number in its request.
            end_tokens: tokens that end the sequence.
            tokenizer: makes the text; needed for stop strings.
            leader: the request's first sample.
            is_streamed: make the text at every token.
        """
        self.prompt = prompt
        self.index = index
        self.params = params
        self.leader = leader
        self.tokens = list(prompt)
        self.output = SampleOutput()
        self.finish_reason: str | None = None
        self.computed = 0
        self.unread = 0
        self.page_ids: list[int] = []
        self.named_pages = 0
        self.slot: int | None = None
        self.is_held = False
        self._end_tokens = end_tokens
        self._tokenizer = tokenizer
        self._digests: list[Digest] = []
        # Decoding text takes longer than everything else here, so it is done at every token only where it is needed.
        needs_text = is_streamed or bool(params.stop)
        self._text_stream = TextStream(tokenizer, params.stop) if tokenizer is not None and needs_text else None

    @property
    def length(self) -> int:
        """Tokens of the sequence, those that have not been read included."""
        return len(self.tokens) + self.unread

    @property
    def generated(self) -> list[int]:
        """The generated tokens that have been read."""
        return self.tokens[len(self.prompt) :]

    @property
    def has_all(self) -> bool:
        """Whether submitted steps sample every token that the sequence may have."""
        return self.length == len(self.prompt) + self.params.max_tokens

    @property
    def text(self) -> str | None:
        """The generated text, cut before a stop string; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        return self._tokenizer.decode(self.generated) if self._text_stream is None else self._text_stream.text

    def completion(self) -> Completion:
        """Returns the sample after its end."""
        assert self.finish_reason is not None
        return Completion(
            tokens=tuple(self.generated),
            logprobs=tuple(self.output.logprobs),
            top_logprobs=tuple(self.output.top_logprobs),
            text=self.text,
            finish_reason=self.finish_reason,
        )

    def scored_prompt(self) -> PromptLogprobs | None:
        """Returns the prompt's logprobs if the request asks for them."""
        return self.output.scored_prompt() if self.params.prompt_logprobs else None

    def digests(self) -> list[Digest]:
        """Returns the digests of the full pages whose tokens have been read."""
        self._digests = digests(self.tokens, self._digests)
        return self._digests

    def add(self, token: int, logprob: float, top: TopLogprobs, *, batch: int) -> Token:
        """Appends the next generated token, and ends the sequence if it is the last one.

        Args:
            token: its id.
            logprob: its logprob.
            top: the likeliest tokens in its place.
            batch: sequences of the step that sampled it.
        """
        self.tokens.append(token)
        self.output.logprobs.append(logprob)
        self.output.top_logprobs.append(top)
        is_stopped = self._text_stream is not None and self._text_stream.add(token)
        if is_stopped or token in self._end_tokens:
            self.finish_reason = "stop"
        elif len(self.generated) == self.params.max_tokens:
            self.finish_reason = "length"
        text = None if self._text_stream is None else self._text_stream.take_new(is_last=self.finish_reason is not None)
        return Token(self.index, token, logprob, top, text, self.finish_reason, batch)


def samples(
    prompt: tuple[int, ...],
    params: SamplingParams,
    *,
    end_tokens: frozenset[int],
    tokenizer: Tokenizer | None,
    is_streamed: bool = False,
) -> list[Sequence]:
    """Returns a sequence for each sample of a request; arguments as `Sequence` takes them.

    The first sample leads: the others can share its prompt pages, and it alone computes the prompt's logprobs.
    """
    others = dataclasses.replace(params, prompt_logprobs=False)
    sequences: list[Sequence] = []
    for index in range(params.n):
        sequence = Sequence(
            prompt,
            others if index else params,
            index=index,
            end_tokens=end_tokens,
            tokenizer=tokenizer,
            leader=sequences[0] if sequences else None,
            is_streamed=is_streamed,
        )
        sequences.append(sequence)
    return sequences
