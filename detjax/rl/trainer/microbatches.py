"""Layouts of a batch's sequences on the device: in rows of one length, or packed.

A layout is a schedule: no bit of logprobs or gradients depends on it. Every sequence begins at a multiple of
`contract.WEIGHT_GRADIENT_TOKENS`, and the gradients of padding are exact zeros.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Float32, Int32

from detjax.contract import KV_BLOCK, WEIGHT_GRADIENT_TOKENS
from detjax.engine import SamplingParams
from detjax.models.decoder import ImageRows
from detjax.models.vision.images import VisualInput
from detjax.operands.kv_pages import Queries
from detjax.operands.numerics import ceil_div, round_up
from detjax.operands.sampling_arrays import Arrays


class SampleImages(NamedTuple):
    """A model's rows for a sample's images.

    Attributes:
        coordinates: the coordinates of each token.
        images: the image rows among the tokens.
    """

    coordinates: Int32[np.ndarray, "T A"]
    images: ImageRows


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """A sequence of a batch, with its completion's weights in the loss.

    Attributes:
        tokens: the prompt's tokens, at least one, and the completion's.
        weights: the factor of each completion token's term in the loss, such as its advantage divided by the number of
            tokens of the batch; computed in float64 and rounded once.
        old_logprobs: the logprob of each completion token that the loss compares with, such as the sampler's. None if
            the loss needs none.
        images: the patches of the prompt's images and videos, as `Engine.image_patches` returns them.
        shown: the model's rows for the images; set by trainers.
        sampling: the sampling parameters of the completion; None: unknown. Trainers refuse samples drawn from another
            distribution. `Rollout.sample` sets it.
    """

    tokens: Int32[np.ndarray, "T"]
    weights: Float32[np.ndarray, "C"]
    old_logprobs: Float32[np.ndarray, "C"] | None = None
    images: Sequence[VisualInput] = ()
    shown: SampleImages | None = None
    sampling: SamplingParams | None = None

    def __post_init__(self) -> None:
        """Raises `ValueError` if the completion is not shorter than the sequence, or lengths of its arrays differ."""
        tokens, weights = len(self.tokens), len(self.weights)
        old = weights if self.old_logprobs is None else len(self.old_logprobs)
        if not 0 < weights < tokens or weights != old:
            hint = "" if old else ". SamplingParams(sampling_logprobs=True) makes the sampler report them"
            raise ValueError(
                f"Sample: {tokens} tokens, {weights} weights and {old} old logprobs; accepted: one weight and one old "
                f"logprob for each token of the completion, and at least one token before it{hint}"
            )

    @property
    def prompt_tokens(self) -> int:
        """The number of the prompt's tokens."""
        return len(self.tokens) - len(self.weights)


class Microbatch(NamedTuple):
    """Sequences on the device, in rows `[B, T]` or packed, `[N]`.

    Attributes:
        tokens: token ids.
        targets: the token after each token; zero at padding and outside of completions.
        weights: the weight of each target; zero without a target.
        old_logprobs: the old logprob of each target.
        queries: the positions of the tokens in their sequences.
        images: the image rows among the tokens; None if no sequence has images.
    """

    tokens: Int32[Arrays, "*N"]
    targets: Int32[Arrays, "*N"]
    weights: Float32[Arrays, "*N"]
    old_logprobs: Float32[Arrays, "*N"]
    queries: Queries
    images: ImageRows | None = None

    @property
    def num_pages(self) -> int:
        """The maximum number of pages of keys and values."""
        requests, pages = self.queries.page_table.shape
        return requests * pages if self.queries.first_row is None else self.tokens.size // KV_BLOCK + requests


@dataclasses.dataclass(frozen=True)
class PlacedMicrobatch:
    """A microbatch and the places of its sequences.

    Attributes:
        arrays: the microbatch on the host.
        first: the index of its first sequence in the batch.
        targets: the flat index of each sequence's first target; its other targets follow.
        counts: the number of each sequence's targets.
    """

    arrays: Microbatch
    first: int
    targets: tuple[int, ...]
    counts: tuple[int, ...]

    def by_sequence(self, values: np.ndarray) -> list[np.ndarray]:
        """Splits values of the microbatch's tokens into the values of each sequence's targets."""
        flat = values.reshape(-1)
        return [flat[first : first + count] for first, count in zip(self.targets, self.counts, strict=True)]


class Layout(Protocol):
    """A way to lay out sequences."""

    def microbatches(self, samples: Sequence[Sample], first: int = 0) -> Iterator[PlacedMicrobatch]:
        """Yields microbatches of one shape with all sequences, in order.

        A microbatch of zeros has no sequence.

        Args:
            samples: consecutive sequences of a batch.
            first: the index of the first of them in the batch.

        Raises:
            ValueError: a sequence is too long.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Rows:
    """One sequence per row.

    Attributes:
        sequences: rows of a microbatch.
        length: tokens per row, a multiple of `contract.WEIGHT_GRADIENT_TOKENS`.
    """

    sequences: int
    length: int

    def __post_init__(self) -> None:
        """Raises `ValueError` for a number that is not positive, or a length that is not such a multiple."""
        if self.sequences < 1:
            raise ValueError(f"Rows: sequences is {self.sequences}; accepted: at least 1")
        _check_length("Rows: length", self.length)

    def microbatches(self, samples: Sequence[Sample], first: int = 0) -> Iterator[PlacedMicrobatch]:
        """Yields microbatches with all sequences; see `Layout`."""
        _check_fit(samples, first, self.length)
        for place in range(0, len(samples), self.sequences):
            some = samples[place : place + self.sequences]
            counts = [len(sample.tokens) for sample in some]
            arrays = self._arrays(counts)
            rows = [row * self.length for row in range(len(some))]
            yield _placed(arrays, some, rows, first + place)

    def _arrays(self, counts: list[int]) -> Microbatch:
        pages = ceil_div(self.length, KV_BLOCK)
        table = np.arange(self.sequences * pages, dtype=np.int32).reshape(self.sequences, pages)
        count = np.array(counts + [0] * (self.sequences - len(counts)), np.int32)
        queries = Queries(table, np.zeros_like(count), count, count)  # pyright: ignore[reportArgumentType]
        return _zeros((self.sequences, self.length), queries)


@dataclasses.dataclass(frozen=True)
class Packed:
    """Sequences packed into a single row.

    Attributes:
        tokens: tokens of the row, a multiple of `contract.WEIGHT_GRADIENT_TOKENS`. Longer sequences are refused.
    """

    tokens: int

    def __post_init__(self) -> None:
        """Raises `ValueError` unless the number is such a positive multiple."""
        _check_length("Packed: tokens", self.tokens)

    def microbatches(self, samples: Sequence[Sample], first: int = 0) -> Iterator[PlacedMicrobatch]:
        """Yields microbatches with all sequences; see `Layout`."""
        _check_fit(samples, first, self.tokens)
        place = 0
        while place < len(samples):
            ends = np.cumsum([_padded(sample) for sample in samples[place : place + self._max_sequences]])
            count = int(np.searchsorted(ends, self.tokens, side="right"))
            some = samples[place : place + count]
            arrays = self._arrays([_padded(sample) for sample in some])
            rows = arrays.queries.first_row
            assert rows is not None
            yield _placed(arrays, some, [int(row) for row in rows[:count]], first + place)
            place += count

    @property
    def _max_sequences(self) -> int:
        return self.tokens // WEIGHT_GRADIENT_TOKENS

    def _arrays(self, counts: list[int]) -> Microbatch:
        count = np.array(counts + [0] * (self._max_sequences - len(counts)), np.int32)
        pages = -(-count // KV_BLOCK)
        # The bounds on the pages of one sequence, and of all sequences together.
        width, pool = ceil_div(self.tokens, KV_BLOCK), self.tokens // KV_BLOCK + self._max_sequences
        ends = np.cumsum(pages)
        table = np.minimum((ends - pages)[:, None] + np.arange(width)[None], pool - 1).astype(np.int32)
        queries = Queries.packed(table, np.zeros_like(count), count, decodes=0, rows=self.tokens)
        return _zeros((self.tokens,), queries)


def by_sequence(placed: Sequence[PlacedMicrobatch], values: Sequence[Any]) -> list[np.ndarray]:
    """Splits the values of all microbatches' tokens into the values of each sequence's completion."""
    pairs = zip(placed, values, strict=True)
    return [one for microbatch, array in pairs for one in microbatch.by_sequence(np.asarray(array))]


def _placed(arrays: Microbatch, samples: Sequence[Sample], rows: Sequence[int], first: int) -> PlacedMicrobatch:
    """Writes sequences to the rows where they begin."""
    tokens, targets, weights, old = (x.reshape(-1) for x in arrays[:4])
    places = []
    for sample, row in zip(samples, rows, strict=True):
        target, count = row + sample.prompt_tokens - 1, len(sample.weights)
        tokens[row : row + len(sample.tokens)] = sample.tokens
        targets[target : target + count] = sample.tokens[sample.prompt_tokens :]
        weights[target : target + count] = sample.weights
        if sample.old_logprobs is not None:
            old[target : target + count] = sample.old_logprobs
        places.append((target, count))
    arrays = _with_images(arrays, samples, rows)
    return PlacedMicrobatch(arrays, first, tuple(place for place, _ in places), tuple(count for _, count in places))


def _with_images(arrays: Microbatch, samples: Sequence[Sample], rows: Sequence[int]) -> Microbatch:
    """Adds coordinates and image rows to a microbatch if its sequences have them."""
    visual = [(sample.shown, row) for sample, row in zip(samples, rows, strict=True) if sample.shown is not None]
    if not visual:
        return arrays
    size, shape, like = arrays.tokens.size, arrays.tokens.shape, visual[0][0]
    coordinates = np.zeros((size, like.coordinates.shape[1]), np.int32)
    images = ImageRows(np.zeros(size, bool), np.zeros((size, like.images.rows.shape[1]), like.images.rows.dtype))
    for shown, row in visual:
        part = slice(row, row + len(shown.coordinates))
        coordinates[part], images.present[part], images.rows[part] = shown.coordinates, *shown.images
    queries = dataclasses.replace(arrays.queries, coordinates=coordinates.reshape(*shape, -1))
    images = ImageRows(images.present.reshape(shape), images.rows.reshape(*shape, -1))
    return arrays._replace(queries=queries, images=images)


def _zeros(shape: tuple[int, ...], queries: Queries) -> Microbatch:
    tokens, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    return Microbatch(tokens, targets, np.zeros(shape, np.float32), np.zeros(shape, np.float32), queries)


def _padded(sample: Sample) -> int:
    return round_up(len(sample.tokens), WEIGHT_GRADIENT_TOKENS)


def _check_length(name: str, length: int) -> None:
    if length < 1 or length % WEIGHT_GRADIENT_TOKENS:
        raise ValueError(f"{name} is {length}; accepted: positive multiples of {WEIGHT_GRADIENT_TOKENS}")


def _check_fit(samples: Sequence[Sample], first: int, length: int) -> None:
    for number, sample in enumerate(samples, first):
        if len(sample.tokens) > length:
            raise ValueError(
                f"sequence {number} has {len(sample.tokens)} tokens; accepted: at most {length}, the length of a row. "
                "Use longer rows or shorter sequences."
            )
