"""The results of the sampling programs."""

from typing import Any, NamedTuple

import numpy as np

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

    def start_copy(self) -> "SampledTokens":
        """Starts copying the arrays to the host, and returns them."""
        for x in self:
            if x is not None and x.size:
                x.copy_to_host_async()
        return self

    def read(self) -> "SampledTokens":
        """Waits for the arrays and returns them on the host; arrays of one number per row become lists."""
        # Empty arrays are not worth a copy, and `jax.device_get` would start the others again.
        read = type(self)(
            *(None if x is None else np.asarray(x) if x.size else np.empty(x.shape, x.dtype) for x in self)
        )
        sampling_logprob = None if read.sampling_logprob is None else read.sampling_logprob.tolist()
        # Reading a number from a list is five times as fast as from an array.
        return read._replace(
            token=read.token.tolist(), logprob=read.logprob.tolist(), sampling_logprob=sampling_logprob
        )

    def by_step(self) -> "list[SampledTokens]":
        """Splits the result of `read` for a run, `[steps, R]`, into its steps."""
        steps = range(len(self.token))
        return [type(self)(*(None if x is None else x[step] for x in self)) for step in steps]

    def read_tokens(self) -> list[int]:
        """Waits for the tokens, but not for the other arrays, and returns them."""
        return np.asarray(self.token).tolist()

    def at(self, row: int, params: SamplingParams) -> tuple[int, float, TopLogprobs, float | None, TopLogprobs]:
        """Returns one row of the result of `read` for a request with these parameters.

        The row is the token, its logprob, the likeliest tokens with their logprobs, and the token's sampling logprob
        and the likeliest tokens under the sampling distribution.
        """
        top, likeliest, sampling_logprob, sampling_top = params.top_logprobs, (), None, ()
        if top:  # few requests ask for them, and all requests wait here
            likeliest = zip(self.top_tokens[row, :top].tolist(), self.top_logprobs[row, :top].tolist(), strict=True)
        if params.sampling_logprobs and self.sampling_logprob is not None:
            sampling_logprob = self.sampling_logprob[row]
            if top and self.sampling_top_tokens is not None:
                arrays = self.sampling_top_tokens[row, :top], self.sampling_top_logprobs[row, :top]
                sampling_top = zip(*(x.tolist() for x in arrays), strict=True)
        return self.token[row], self.logprob[row], tuple(likeliest), sampling_logprob, tuple(sampling_top)
