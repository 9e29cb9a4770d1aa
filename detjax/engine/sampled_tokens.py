"""The results of the sampling programs."""

from typing import Any, NamedTuple

from detjax.engine.packed import Packed
from detjax.engine.request import TopLogprobs
from detjax.engine.sampling_params import SamplingParams


class SampledTokens(NamedTuple):
    """Sampled tokens, one per row, with their logprobs and the likeliest tokens at their positions.

    The fields of the sampling distribution are None if the program does not compute them.
    """

    token: Any
    logprob: Any
    top_tokens: Any
    top_logprobs: Any
    sampling_logprob: Any = None
    sampling_top_tokens: Any = None
    sampling_top_logprobs: Any = None

    def with_lists(self) -> "SampledTokens":
        """Returns lists in place of arrays of one number per row, which are on the host."""
        sampling_logprob = None if self.sampling_logprob is None else self.sampling_logprob.tolist()
        # Reading a number from a list is five times as fast as from an array.
        return self._replace(
            token=self.token.tolist(), logprob=self.logprob.tolist(), sampling_logprob=sampling_logprob
        )

    def by_step(self) -> "list[SampledTokens]":
        """Splits the result of `PackedTokens.read` for a run, `[steps, R]`, into its steps."""
        steps = range(len(self.token))
        return [type(self)(*(None if x is None else x[step] for x in self)) for step in steps]

    def at(self, row: int, params: SamplingParams) -> tuple[int, float, TopLogprobs, float | None, TopLogprobs]:
        """Returns one row of the result of `PackedTokens.read` for a request with these parameters.

        The row is the token, its logprob, the likeliest tokens with their logprobs, and the token's sampling logprob
        and the likeliest tokens under the sampling distribution.
        """
        top, likeliest, sampling_logprob, sampling_top = params.top_logprobs, (), None, ()
        if not top and not params.sampling_logprobs:  # few requests ask for them, and all requests wait here
            return self.token[row], self.logprob[row], (), None, ()
        if top:
            likeliest = zip(self.top_tokens[row, :top].tolist(), self.top_logprobs[row, :top].tolist(), strict=True)
        if params.sampling_logprobs and self.sampling_logprob is not None:
            sampling_logprob = self.sampling_logprob[row]
            if top and self.sampling_top_tokens is not None:
                arrays = self.sampling_top_tokens[row, :top], self.sampling_top_logprobs[row, :top]
                sampling_top = zip(*(x.tolist() for x in arrays), strict=True)
        return self.token[row], self.logprob[row], tuple(likeliest), sampling_logprob, tuple(sampling_top)


class PackedTokens(NamedTuple):
    """The results of a sampling program on the device.

    Attributes:
        token: the tokens, for other programs.
        packed: all results, for the host.
    """

    token: Any
    packed: Packed[SampledTokens]

    @classmethod
    def in_program(cls, sampled: SampledTokens) -> "PackedTokens":
        """Packs the results of a program that is traced."""
        return cls(sampled.token, Packed.in_program(sampled))

    def start_copy(self) -> "PackedTokens":
        """Starts copying the results to the host, and returns them."""
        self.packed.words.copy_to_host_async()
        return self

    @property
    def is_ready(self) -> bool:
        """True if the devices have computed the results.

        Always False if devices of several processes share the model, because their hosts would find it out at different
        times, and all of them must do the same.
        """
        words: Any = self.packed.words
        return words.is_fully_addressable and words.is_ready()

    def read(self) -> SampledTokens:
        """Waits for the results and returns them on the host; arrays of one number per row become lists."""
        return self.packed.read().with_lists()

    def read_tokens(self) -> list[int]:
        """Waits for the results and returns the tokens."""
        return self.packed.read().token.tolist()
