"""Jobs: requests that an engine answers, and the futures of their answers."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from detjax.engine.request import Generation, Token
from detjax.engine.sequence import Sequence

ABORT: Final = "abort"
"""The finish reason of samples that `Engine.abort` ended."""


class Job:
    """A request in flight.

    Attributes:
        samples: its samples.
        id: see `Request.id`.
        future: a future of its answer.
    """

    def __init__(
        self, samples: list[Sequence], on_token: Callable[[Token], None] | None, request_id: str | None = None
    ) -> None:
        """A job whose listener, if any, gets the tokens."""
        self.samples, self.id = samples, request_id
        self.future: Future[Generation] = Future()
        self._on_token = on_token
        self._unfinished = sum(sample.finish_reason is None for sample in samples)

    def deliver(self, token: Token) -> None:
        """Passes a token to the listener. The last token of the request settles its future.

        Raises:
            BaseException: the sample or the listener has failed, and the request with it.
        """
        failure = self.samples[token.sample].failure
        # All tokens of a run are read before the first is delivered; a failure belongs to the last one.
        if failure is not None and token.finish_reason is not None:
            raise failure
        if self._on_token is not None:
            self._on_token(token)
        self._unfinished -= token.finish_reason is not None
        self.settle_if_done()

    def settle_if_done(self) -> None:
        """Sets the future's result if every sample has ended."""
        if not self._unfinished:
            first = self.samples[0]
            completions = tuple(sample.completion() for sample in self.samples)
            pooled = first.pooled()
            self.settle(Generation(first.prompt, completions, first.scored_prompt(), first.cached_tokens, pooled))

    def abort(self) -> None:
        """Ends all samples that the scheduler does not have any more, and settles the future with their tokens."""
        for sample in self.samples:
            if sample.finish_reason is None:
                sample.finish_reason = ABORT
        self._unfinished = 0
        self.settle_if_done()

    def settle(self, outcome: Generation | BaseException) -> None:
        """Sets the future's result or exception, unless the request was cancelled."""
        if self.future.set_running_or_notify_cancel():
            if isinstance(outcome, BaseException):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)
