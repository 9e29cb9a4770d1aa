"""The results that a step computes for prompts: logprobs of tokens and, in a model that pools, results of tokens."""

import dataclasses
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from detjax.engine.model_runner import ModelRunner
from detjax.engine.packed_batch import PackedBatch
from detjax.engine.pooling import PooledBatch, pooled_rows
from detjax.engine.sampled_tokens import PackedTokens
from detjax.engine.sampling_programs import SCORED_ROWS
from detjax.engine.scheduler import ScheduledChunk
from detjax.engine.sequence import Sequence
from detjax.models.parts.pooling import ChunkRows


@dataclasses.dataclass(frozen=True)
class PromptScore:
    """Logprobs of some tokens of a prompt, which a step in flight computes."""

    sequence: Sequence
    position: int
    """Position of the first of the tokens."""
    count: int
    tokens: PackedTokens

    def read(self) -> None:
        """Waits for the logprobs, and appends them to the sequence's output."""
        tokens, logprobs = self.tokens.read(), self.sequence.output.prompt_logprobs
        for index in range(self.count):
            # A preempted sequence computes some of its logprobs twice.
            if self.position + index == len(logprobs) + 1:
                _, logprob, top, sampling_logprob, sampling_top = tokens.at(index, self.sequence.params)
                logprobs.append((logprob, top))
                if sampling_logprob is not None:
                    self.sequence.output.prompt_sampling_logprobs.append((sampling_logprob, sampling_top))


@dataclasses.dataclass(frozen=True)
class TokenResults:
    """Results for some tokens of a prompt, which a step in flight computes in a model that pools."""

    sequence: Sequence
    position: int
    """Position of the first of the tokens."""
    count: int
    rows: PooledBatch

    def read(self) -> None:
        """Waits for the results, and appends them to the sequence's output."""
        rows, results, pooling = self.rows.read(), self.sequence.output.pooled, self.sequence.context.pooling
        assert pooling is not None
        for index in range(self.count):
            # A preempted sequence computes some of its results twice.
            if self.position + index == len(results):
                results.append(rows.at(index, pooling))


def prompt_scores(runner: ModelRunner, chunk: ScheduledChunk, first_row: int, hidden: Any) -> Iterator[PromptScore]:
    """Computes the prompt logprobs of a chunk if the request asks for them."""
    prompt = chunk.sequence.prompt
    if not chunk.sequence.params.prompt_logprobs:
        return
    # The hidden state at a position gives the logprob of the token after it.
    end = min(chunk.start + chunk.count + 1, len(prompt))
    for position in range(chunk.start + 1, end, SCORED_ROWS):
        count, row = min(SCORED_ROWS, end - position), first_row + position - 1 - chunk.start
        if chunk.sequence.params.sampling_logprobs:
            scored = runner.score_drawn(hidden, row, chunk.sequence, position, count)
        else:
            scored = runner.score(hidden, row, np.asarray(prompt[position : position + count], np.int32))
        yield PromptScore(chunk.sequence, position, count, scored.start_copy())


def token_results(runner: ModelRunner, chunk: ScheduledChunk, first_row: int, rows: Any) -> Iterator[TokenResults]:
    """Computes the results of a chunk's tokens, in a model that pools, if the request asks for them."""
    pooling = chunk.sequence.context.pooling
    assert pooling is not None
    for begin in range(0, chunk.count if pooling.is_of_tokens else 0, SCORED_ROWS):
        count = min(SCORED_ROWS, chunk.count - begin)
        results = runner.pool_rows(rows, first_row + begin, pooled_rows([pooling] * count, SCORED_ROWS))
        yield TokenResults(chunk.sequence, chunk.start + begin, count, results.start_copy())


def chunk_rows(prefills: Seq[tuple[ScheduledChunk, int]], batch: PackedBatch, no_slot: int) -> ChunkRows:
    """Returns the rows of a step's prefill chunks, in arrays of the size that its programs are compiled for."""
    first, count, start = np.zeros((3, batch.shape.prefills), np.int32)
    slot = np.full(batch.shape.prefills, no_slot, np.int32)
    for index, (chunk, first_row) in enumerate(prefills):
        assert chunk.sequence.slot is not None
        first[index], count[index], start[index] = first_row, chunk.count, chunk.start
        slot[index] = chunk.sequence.slot
    return ChunkRows(first, count, start, slot)
