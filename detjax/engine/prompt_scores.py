"""The arguments of the program that scores a prompt's tokens under the request's sampling distribution.

A token's score is its logprob if the request's parameters had drawn it after the tokens before it. It counts as the
first token of an answer to these, so penalties see them as a prompt. With `SamplingParams.scored_answer`, the tokens at
the prompt's end count as one answer instead, and get the bits that the engine reports when it generates them.
"""

import numpy as np
from jaxtyping import UInt32

from detjax.engine.batch import logit_adjustments, sampling_arrays
from detjax.engine.sampling_params import SamplingParams
from detjax.engine.sampling_programs import COUNT, SCORED_ROWS, ScoredRows
from detjax.engine.sequence import Sequence
from detjax.engine.token_masks import all_allowed
from detjax.operands.noise import NO_NOISE
from detjax.operands.sampling_arrays import LogitAdjustments, SamplingArrays, SeenTokens


def empty_rows(vocabulary: int) -> ScoredRows:
    """Returns rows of any tokens, for compiling the program."""
    return scored_rows(Sequence((0, 0), SamplingParams()), 1, 1, vocabulary)


def scored_rows(sequence: Sequence, position: int, count: int, vocabulary: int) -> ScoredRows:
    """Returns the rows for `count` tokens of a sequence's prompt from a position on, on the host."""
    prompt, params = sequence.prompt, sequence.params
    begin = len(prompt) - params.scored_answer
    """The position from which tokens count as generated."""
    token = np.zeros(SCORED_ROWS, np.int32)
    token[:count] = prompt[position : position + count]
    generated = np.maximum(position + np.arange(SCORED_ROWS) - begin, 0)
    barred = sequence.context.end_tokens if params.min_tokens else ()
    kinds = zip(logit_adjustments(params, barred), logit_adjustments(params), strict=True)
    is_free = (generated >= params.min_tokens).astype(np.int32)
    return ScoredRows(
        token=token,
        is_generated=position + np.arange(SCORED_ROWS) >= begin,
        sampling=SamplingArrays(*(np.repeat(x, SCORED_ROWS, axis=0) for x in sampling_arrays([params], [NO_NOISE]))),
        adjustments=LogitAdjustments(*(np.concatenate(kind)[is_free] for kind in kinds)),
        allowed=_allowed(sequence, begin, generated[:count].tolist(), vocabulary),
        seen=_seen(prompt[:position], begin, vocabulary) if params.penalized else none_seen_by_row(vocabulary),
    )


def none_seen_by_row(vocabulary: int) -> SeenTokens:
    """Returns the seen tokens of a sequence without any."""
    return SeenTokens(np.zeros(vocabulary, COUNT), np.zeros(vocabulary, bool))


def _allowed(sequence: Sequence, begin: int, generated: list[int], vocabulary: int) -> UInt32[np.ndarray, "n W"]:
    """Returns the masks of the request's rules."""
    allowed, rules = all_allowed(SCORED_ROWS, vocabulary), sequence.context.rules
    if rules is not None:
        answer = sequence.prompt[begin:]
        for mask, count in zip(allowed, generated, strict=False):
            rules.restrict(mask, answer, count)
    return allowed


def _seen(tokens: tuple[int, ...], begin: int, vocabulary: int) -> SeenTokens:
    """Returns the tokens that a sequence has seen; those from position `begin` on were generated."""
    count = np.bincount(np.asarray(tokens[begin:], np.int64), minlength=vocabulary)
    in_prompt = np.zeros(vocabulary, bool)
    in_prompt[np.asarray(tokens[:begin], np.int64)] = True
    return SeenTokens(np.minimum(count, np.iinfo(COUNT).max).astype(COUNT), in_prompt)
