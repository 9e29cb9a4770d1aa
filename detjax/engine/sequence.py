"""Sequences: samples of a request while they are scheduled, with their output and text."""

import dataclasses
import functools
import math
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Final, overload

import numpy as np

from detjax.engine.constraints import CompiledConstraint
from detjax.engine.page_pool import Digest, digests
from detjax.engine.pooling import Pooling, Vectors
from detjax.engine.request import Completion, NotFinite, PromptLogprobs, Token, TopLogprobs
from detjax.engine.sampling_params import SamplingParams
from detjax.engine.snapshots import Snapshot
from detjax.engine.text_stream import StopStrings, TextStream
from detjax.engine.token_masks import Matcher, TokenRules
from detjax.models import Adapter, Tokenizer
from detjax.models.vision.prompt_images import PromptImages
from detjax.operands.noise import NO_NOISE, noise_key, prompt_digest

NO_TOKEN: Final = -1
"""Stands for the missing token at the end of a sequence that pools."""


class TokenIds(Seq[int]):
    """The tokens of a sequence: the prompt, which the request's samples share, then the generated tokens."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self.prompt = prompt
        self.generated: list[int] = []

    def __len__(self) -> int:
        return len(self.prompt) + len(self.generated)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Seq[int]: ...

    def __getitem__(self, index: int | slice) -> int | Seq[int]:
        """Returns the token at a position, or the tokens of a slice."""
        first = len(self.prompt)
        if isinstance(index, int):
            index = range(len(self))[index]
            return self.prompt[index] if index < first else self.generated[index - first]
        start, stop, step = index.indices(len(self))
        assert step == 1
        return *self.prompt[start:stop], *self.generated[max(0, start - first) : max(0, stop - first)]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RequestContext:
    """Fields of a request that all its samples share, in addition to prompt and parameters.

    Attributes:
        end_tokens: tokens that end a sample.
        tokenizer: decodes the text; needed for stop strings.
        is_streamed: decode the text at every token.
        prefix_root: the root of page digests; see `page_pool.prefix_root`.
        client: identifies the client for round-robin scheduling.
        constraint: restricts the text; None: any text.
        rules: forbid single tokens; None: any tokens.
        images: the prompt's images, if it has any.
        pooling: the result of a model that pools, in full; None: the request generates.
        reads_all_rows: True if the result depends on the hidden states of all tokens of the prompt.
        adapter: the adapter of its rows; None: they have the model's bits.
        drafts: whether tokens may be guessed.
    """

    end_tokens: frozenset[int] = frozenset()
    tokenizer: Tokenizer | None = None
    is_streamed: bool = False
    prefix_root: Digest = b""
    client: str | None = None
    constraint: CompiledConstraint | None = None
    rules: TokenRules | None = None
    images: PromptImages | None = None
    pooling: Pooling | None = None
    reads_all_rows: bool = False
    adapter: Adapter | None = None
    drafts: bool = True


class SampleOutput:
    """The output of one sample.

    Attributes:
        logprobs: one per generated token.
        sampling_logprobs: one per generated token, if the request asks for them.
        sampling_top_logprobs: the likeliest tokens at each generated token under the sampling distribution, if the
            request asks for it.
        top_logprobs: the likeliest tokens at each generated token.
        prompt_logprobs: the logprob and the likeliest tokens at each prompt token from the second one on.
        prompt_sampling_logprobs: the same under the sampling distribution, if the request asks for it.
        pooled: the results of a model that pools: one, or one for each token.
    """

    def __init__(self) -> None:
        self.logprobs: list[float] = []
        self.sampling_logprobs: list[float] = []
        self.top_logprobs: list[TopLogprobs] = []
        self.sampling_top_logprobs: list[TopLogprobs] = []
        self.prompt_logprobs: list[tuple[float, TopLogprobs]] = []
        self.prompt_sampling_logprobs: list[tuple[float, TopLogprobs]] = []
        self.pooled: list[np.ndarray] = []

    def scored_prompt(self) -> PromptLogprobs:
        """Returns the prompt's logprobs."""
        scores = self.prompt_logprobs, self.prompt_sampling_logprobs
        fields = (values for pairs in scores for values in (zip(*pairs, strict=True) if pairs else ((), ())))
        return PromptLogprobs(*fields)


class Sequence:
    """One sample of a request: its tokens and its scheduling state.

    Attributes:
        prompt: token ids of the prompt.
        index: the sample's number in its request.
        params: the request's sampling parameters.
        leader: the request's first sample, whose prompt pages this sequence waits for and shares; None for the first.
        context: other fields that the request's samples share.
        tokens: the prompt and the generated tokens that have been read.
        generated: the generated tokens that have been read, including those given in the request.
        given: the number of generated tokens given in the request.
        output: logprobs of the generated tokens and of the prompt.
        finish_reason: "stop", "length", "abort", "cancelled" or "failed" after the end; None before it.
        failure: the exception that ended a sequence that failed.
        cached_tokens: tokens of the prompt that the request's first sample found in the prefix cache.
        computed: number of leading tokens whose keys and values submitted steps write to the cache.
        unread: number of tokens that submitted steps sample and that have not been read.
        page_ids: pages of the cache, in the order of the tokens.
        named_pages: number of leading pages that other sequences can share.
        turn: number of sequences that got a slot before this one first did; None before that.
        slot: the slot in which the device keeps the last sampled token; None while the sequence waits.
        adapter_slot: the slot of its adapter while it runs; None while it waits, and without an adapter.
        is_held: whether the only token left to compute is the one in the slot.
        restored: the snapshot to restore to the slot before the next chunk, if any.
        snapshot_ends: positions at which to take snapshots of the slot, ascending. Chunks end there.
    """

    def __init__(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        *,
        index: int = 0,
        leader: "Sequence | None" = None,
        context: RequestContext | None = None,
        generated: Seq[int] = (),
    ) -> None:
        """A waiting sequence, or an ended one if `generated` is complete; arguments as in the class.

        Raises:
            ValueError: a token of `generated` before the last one ends the sample.
        """
        self.prompt = prompt
        self.index = index
        self.params = params
        self.leader = leader
        self.context = context or RequestContext()
        # Many samples of a long prompt may wait, so none of them copies the prompt.
        self.tokens = TokenIds(prompt)
        self.generated = self.tokens.generated
        self.output = SampleOutput()
        self.finish_reason: str | None = None
        self.failure: BaseException | None = None
        self.cached_tokens = 0
        self.computed = 0
        self.unread = 0
        self.page_ids: list[int] = []
        self.named_pages = 0
        self.turn: int | None = None
        self.slot: int | None = None
        self.adapter_slot: int | None = None
        self.is_held = False
        self.restored: Snapshot | None = None
        self.snapshot_ends: list[int] = []
        self._digests: list[Digest] = []
        self._stop: StopStrings = StopStrings(params.stop) if leader is None else leader._stop
        # Decoding text takes longer than everything else here, so do it per token only if needed.
        needs_text = self.context.is_streamed or bool(params.stop) or len(generated) > 0
        tokenizer = self.context.tokenizer
        self._text_stream = None
        if tokenizer is not None and needs_text:
            self._text_stream = TextStream(
                tokenizer,
                self._stop,
                includes_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
            )
        self._stops_at_text = self._text_stream is not None and len(self._stop) > 0
        self._texts: deque[str | None] = deque()
        """If text may end the sequence, the texts of accepted tokens that were not reported."""
        self.given = len(generated)
        self._streamed_length = self._take(generated)
        """Characters that a stream has already sent for the given tokens."""

    def _take(self, generated: Seq[int]) -> int:
        """Appends the tokens given in the request. Returns the length of the text that a stream has already sent."""
        for number, token in enumerate(generated):
            if self.finish_reason is not None:
                raise ValueError(
                    f"generated has {len(generated)} tokens for sample {self.index}, which ends after {number} of them "
                    f"({self.finish_reason}); accepted: tokens of one sample up to its end"
                )
            self.generated.append(token)
            self._note_end()
            if not self._stops_at_text:
                self._add_text(token)
        if not generated or self._text_stream is None:
            return 0
        return len(self._text_stream.take_new(is_last=self.finish_reason is not None))

    @functools.cached_property
    def matcher(self) -> Matcher | None:
        """The sample's matcher, if it has a constraint or rules. It is made on first use, when the sample runs."""
        constraint, rules = self.context.constraint, self.context.rules
        return None if constraint is None and rules is None else Matcher(constraint, self.generated, rules)

    @property
    def length(self) -> int:
        """Tokens of the sequence, including unread ones."""
        return len(self.prompt) + len(self.generated) + self.unread

    @property
    def needs_rows(self) -> bool:
        """True if the prompt is computed only in prefill rows, for all hidden states or images."""
        return self.reads_all_rows or self.context.images is not None

    @property
    def reads_all_rows(self) -> bool:
        """True if the hidden states of all tokens of the prompt are needed."""
        return self.params.prompt_logprobs or self.context.reads_all_rows

    @property
    def missing(self) -> int:
        """The number of tokens that the sequence may have after those that submitted steps sample."""
        return self.params.max_tokens - len(self.generated) - self.unread

    @property
    def has_all(self) -> bool:
        """True if submitted steps sample all tokens that the sequence may have."""
        return self.missing == 0

    @property
    def text(self) -> str | None:
        """The generated text up to what ended it; None without a tokenizer."""
        if self.context.tokenizer is None:
            return None
        if self._text_stream is not None:
            return self._text_stream.text
        tokens = shown_tokens(self.generated, self.params, is_stopped=self.finish_reason == "stop")
        return self.context.tokenizer.decode(tokens, self.params.skip_special_tokens)

    def completion(self) -> Completion:
        """Returns the completion of an ended sample, or raises the exception of a failed one."""
        if self.failure is not None:
            raise self.failure
        assert self.finish_reason is not None
        text = self.text
        return Completion(
            tokens=tuple(self.generated[self.given :]),
            logprobs=tuple(self.output.logprobs),
            top_logprobs=tuple(self.output.top_logprobs),
            text=None if text is None else text[self._streamed_length :],
            finish_reason=self.finish_reason,
            sampling_logprobs=tuple(self.output.sampling_logprobs),
            sampling_top_logprobs=tuple(self.output.sampling_top_logprobs),
        )

    def scored_prompt(self) -> PromptLogprobs | None:
        """Returns the prompt's logprobs if the request asks for them, and if they were computed before an abort."""
        is_scored = self.params.prompt_logprobs and len(self.output.prompt_logprobs) == len(self.prompt) - 1
        return self.output.scored_prompt() if is_scored else None

    def add_pooled(self, vector: np.ndarray | None, *, batch: int) -> Token:
        """Ends the sequence of a model that pools, with its result, or None if each token has one.

        Returns:
            The end of the sequence; it has no token.
        """
        if vector is not None:
            self.output.pooled.append(vector)
        self.finish_reason = "stop"
        if not all(np.isfinite(one).all() for one in self.output.pooled):
            self.finish_reason, self.failure = "failed", self._not_finite()
        return Token(self.index, NO_TOKEN, 0.0, (), None, self.finish_reason, batch, self.cached_tokens)

    def pooled(self) -> Vectors | None:
        """Returns the result of a model that pools; None: the request generates, or it was aborted."""
        pooling, vectors = self.context.pooling, self.output.pooled
        if pooling is None or self.finish_reason != "stop":
            return None
        return np.stack(vectors) if pooling.is_of_tokens else vectors[0]

    def held_back(self) -> str | None:
        """Returns the end of an ended sample's text that a stream has not sent; None without a tokenizer."""
        return None if self._text_stream is None else self._text_stream.take_new(is_last=True)

    @functools.cached_property
    def prompt_digest(self) -> bytes:
        """The digest of the prompt and its images that the noise of the request's samples depends on."""
        if self.leader is not None:
            return self.leader.prompt_digest
        images = self.context.images
        return prompt_digest(self.prompt, () if images is None else [digest for _, _, digest in images.spans])

    @functools.cached_property
    def noise_key(self) -> tuple[int, int, int, int]:
        """The key of the sample's noise. It depends on the prompt and not on generated tokens."""
        if self.params.temperature == 0:
            return NO_NOISE
        return noise_key(self.params.seed, self.prompt_digest, self.index)

    def digests(self) -> list[Digest]:
        """Returns the digests of the full pages whose tokens have been read."""
        root, images = self.context.prefix_root, () if self.context.images is None else self.context.images.spans
        if not self._digests and self.leader is not None:
            self._digests = digests(self.prompt, self.leader.digests(), root, images)
        self._digests = digests(self.tokens, self._digests, root, images)
        return self._digests

    def accept(self, sampled: Iterable[tuple[int, float]]) -> int:
        """Appends generated tokens up to one that ends the sequence, and returns their number.

        It does what the next step depends on. `report`, called for each token, makes what a caller gets of it.
        An exception ends only this sequence, with the finish reason "failed".

        Args:
            sampled: the tokens with their logprobs.
        """
        count = 0
        for token, logprob in sampled:
            self.generated.append(token)
            count += 1
            try:
                if math.isnan(logprob):
                    raise self._not_finite()
                if self.failure is not None:
                    raise self.failure
                self._note_end()
                if self._stops_at_text:
                    self._texts.append(self._new_text(is_last=self.finish_reason is not None))
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # the tokenizer library raises BaseException when it panics
                self.finish_reason, self.failure = "failed", error
            if self.finish_reason is not None:
                break
        return count

    def report(
        self,
        token: int,
        logprob: float,
        top: TopLogprobs,
        sampling_logprob: float | None = None,
        sampling_top: TopLogprobs = (),
        *,
        batch: int,
        is_last: bool,
    ) -> Token:
        """Returns an accepted token with its text; `is_last`: it ended the sequence. For other arguments see `Token`.

        Tokens are reported in their order. An exception of the tokenizer ends the sequence, also if it had gone on.
        """
        output = self.output
        output.logprobs.append(logprob)
        output.top_logprobs.append(top)
        if sampling_logprob is not None:
            output.sampling_logprobs.append(sampling_logprob)
        if sampling_top:
            output.sampling_top_logprobs.append(sampling_top)
        text = None
        if self._text_stream is not None and not (is_last and self.failure is not None):
            try:
                text = self._text_of(token, is_last=is_last)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                self.finish_reason, self.failure, is_last = "failed", error, True
        return Token(
            self.index,
            token,
            logprob,
            top,
            text,
            self.finish_reason if is_last else None,
            batch,
            self.cached_tokens,
            sampling_logprob,
            sampling_top,
        )

    def _text_of(self, token: int, *, is_last: bool) -> str | None:
        """Returns the text that the next reported token adds to a stream; None without one."""
        if self._stops_at_text:
            return self._texts.popleft()
        self._add_text(token)
        return self._new_text(is_last=is_last)

    def _new_text(self, *, is_last: bool) -> str | None:
        """Returns the text that a stream has not got; None without one."""
        assert self._text_stream is not None
        return self._text_stream.take_new(is_last=is_last) if self.context.is_streamed else None

    def _add_text(self, token: int) -> None:
        """Adds the text of a token, which is not searched for stop strings, if there is a text."""
        if self._text_stream is not None and (
            token not in self.context.end_tokens or self.params.include_stop_str_in_output
        ):
            self._text_stream.add(token)

    def _note_end(self) -> None:
        """Ends the sequence if the last token does. Adds the token's text if a stop string may end the sequence."""
        token, params = self.generated[-1], self.params
        is_stopped = token in self.context.end_tokens
        if self._stops_at_text and (not is_stopped or params.include_stop_str_in_output):
            assert self._text_stream is not None
            # min_tokens bars end tokens from the choice, but stop strings may consist of any tokens.
            is_stopped |= self._text_stream.add(token, may_stop=len(self.generated) > params.min_tokens)
        if is_stopped:
            self.finish_reason = "stop"
        elif len(self.generated) == self.params.max_tokens:
            self.finish_reason = "length"

    def _not_finite(self) -> NotFinite:
        # Minus infinity is not an error: a constraint may force a token that the model itself never chooses.
        return NotFinite(
            f"the model's logits for position {len(self.tokens) - 1} hold NaN or infinity; accepted: finite numbers. "
            "Check the weights of the checkpoint, and whether the dtype is wide enough for the activations."
        )


def shown_tokens(tokens: Seq[int], params: SamplingParams, *, is_stopped: bool) -> Seq[int]:
    """Returns the tokens whose text a sample without stop strings shows, given whether an end token stopped it."""
    return tokens[:-1] if is_stopped and not params.include_stop_str_in_output else tokens


def samples(
    prompt: tuple[int, ...], params: SamplingParams, context: RequestContext, generated: Seq[Seq[int]] = ()
) -> list[Sequence]:
    """Returns a sequence for each sample of a request.

    The first sample leads: the others can share its prompt pages, and only it computes the prompt's logprobs.

    Raises:
        ValueError: a sample has tokens of `generated` after its end.
    """
    by_sample = [*generated, *[()] * (params.n - len(generated))]
    first = Sequence(prompt, params, context=context, generated=by_sample[0])
    others = dataclasses.replace(params, prompt_logprobs=False, scored_answer=0)
    return [
        first,
        *(
            Sequence(prompt, others, index=index, leader=first, context=context, generated=by_sample[index])
            for index in range(1, params.n)
        ),
    ]
