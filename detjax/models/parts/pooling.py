"""Pooling: what a pooling model makes of a prompt's hidden states, and the head that scores them.

A chunk of a prompt adds its rows to the sum of the chunks before it, in ascending order of their positions, so the sum
does not depend on the division into chunks.
"""

import dataclasses
from typing import Any, Final, Literal, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, DTypeLike, Float, Float32, Int32

from detjax import ops
from detjax.contract import ACCUMULATOR
from detjax.models.parts.parameters import Tensors, optional, random_weight, zero_bias
from detjax.operands.numerics import unique_scatter_indices
from detjax.operands.sampling_arrays import Arrays
from detjax.ops.elements import map_elements

type Method = Literal["last", "mean", "cls"]
"""The hidden state that stands for a prompt: its last token's, the mean of all tokens', or its first token's."""
type Score = Literal["softmax", "sigmoid", "identity"]
"""The function that turns logits of classes into scores."""

_SMALLEST_SQUARE: Final = 1e-24
"""Added to the sum of squares of an embedding: PyTorch's smallest length of a normalized vector, 1e-12, squared."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolingOptions:
    """The results of a model that pools instead of generating.

    Attributes:
        architecture: the name of the checkpoint's class.
        method: the hidden state that stands for a prompt.
        normalized: whether an embedding is divided by its length.
        labels: the names of the classes; empty: the model gives embeddings.
        score: the function that turns logits into scores.
        has_inner_layer: whether the head has a layer of the hidden states' width before the one that gives logits.
        answers: tokens whose logits are the classes' in a model with a language model's head, if `config.json` names
            them.
        answer_ids: the ids of these tokens; empty: the model has a head for the classes.
        has_contrast: whether the logit of the only class is the second answer's minus the first answer's.
        dimensions: the lengths that an embedding may be cut to before it is normalized; None: none; empty: any.
        prompts: texts before a text, by name.
        default_prompt: the name of the text before texts without a prompt's name; None: no text.
    """

    architecture: str
    method: Method = "last"
    normalized: bool = True
    labels: tuple[str, ...] = ()
    score: Score = "identity"
    has_inner_layer: bool = False
    answers: tuple[str, ...] = ()
    answer_ids: tuple[int, ...] = ()
    has_contrast: bool = False
    dimensions: tuple[int, ...] | None = None
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None

    @property
    def gives_embeddings(self) -> bool:
        """True if results are embeddings, False if they are scores of classes."""
        return not self.labels

    @property
    def has_answers(self) -> bool:
        """True if the logits of some tokens are the classes'."""
        return bool(self.answers or self.answer_ids)

    @property
    def is_in_sentence_files(self) -> bool:
        """True if files of Sentence Transformers say how the model pools, and `config.json` does not."""
        return self.gives_embeddings or (self.has_answers and not self.answers)

    def classifier(self, width: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> "Classifier | None":
        """Returns the head for the classes, with random weights; None if the model has no such head."""
        is_needed = bool(self.labels) and not self.has_answers
        return Classifier(width, self, rngs=rngs, dtype=dtype) if is_needed else None


class Classifier(nnx.Module):
    """A head that gives a logit for each class; the checkpoint's `score`."""

    def __init__(self, width: int, options: PoolingOptions, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        """A head of random weights; the inner layer has a bias and a ReLU, and the layer after it has a bias."""
        classes, has_inner_layer = len(options.labels), options.has_inner_layer
        self.inner = random_weight(rngs, (width, width), dtype) if has_inner_layer else None
        self.inner_bias = zero_bias(has_inner_layer, (width,), dtype)
        self.weight = random_weight(rngs, (classes, width), dtype)
        self.bias = zero_bias(has_inner_layer, (classes,), dtype)

    def __call__(self, hidden: Float[Array, "*N D"]) -> Float32[Array, "*N L"]:
        """Returns the logit of each class."""
        if self.inner is not None:
            options: Any = {"bias": optional(self.inner_bias), "activation": "relu"}
            hidden = ops.matmul(hidden, self.inner[...], layout="nk", **options)
        return ops.matmul(hidden, self.weight[...], layout="nk", bias=optional(self.bias), out_dtype=jnp.float32)

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        if self.inner is None:
            return {"weight": Tensors(("weight",))}
        names = {"inner": "0.weight", "inner_bias": "0.bias", "weight": "2.weight", "bias": "2.bias"}
        return {parameter: Tensors((name,)) for parameter, name in names.items()}


class PooledRows(NamedTuple):
    """The options of results.

    Attributes:
        is_scored: whether the embedding is normalized, or logits become scores.
        dimensions: the columns of the embedding that are kept; the others are zeros.
    """

    is_scored: Bool[Arrays, "R"]
    dimensions: Int32[Arrays, "R"]


class ChunkRows(NamedTuple):
    """The rows of each chunk of a step.

    Attributes:
        first: the index of its first row.
        count: the number of its rows.
        start: the position of its first token.
        slot: the slot of its sequence; without a chunk, the number of slots.
    """

    first: Int32[Arrays, "C"]
    count: Int32[Arrays, "C"]
    start: Int32[Arrays, "C"]
    slot: Int32[Arrays, "C"]


def carried_on(
    carried: Float32[Array, "slots D"], hidden: Float[Array, "N D"], chunks: ChunkRows, *, method: Method
) -> Float32[Array, "slots D"]:
    """Returns what slots carry to the next chunk, after chunks: the sum of all rows so far, or the first one.

    Rows are added in float32, in the order of their positions.
    """
    first, count, start, slot = map(jnp.asarray, chunks)
    slot = unique_scatter_indices(slot < len(carried), slot, len(carried))
    last_row = hidden.shape[0] - 1
    total = jnp.where(start[:, None] == 0, 0.0, carried.at[slot].get(mode="fill", fill_value=0.0))
    if method == "cls":
        rows = hidden[jnp.minimum(first, last_row)].astype(ACCUMULATOR)
        total = jnp.where((start == 0)[:, None], rows, total)
        return carried.at[slot].set(total, mode="drop", unique_indices=True)

    def with_row(number: Array, total: Array) -> Array:
        rows = hidden[jnp.minimum(first + number, last_row)].astype(ACCUMULATOR)
        return jnp.where((number < count)[:, None], ops.add(total, rows), total)

    total = lax.fori_loop(jnp.int32(0), jnp.max(count), with_row, total)
    return carried.at[slot].set(total, mode="drop", unique_indices=True)


def embeddings(rows: Float[Array, "R D"], wanted: PooledRows) -> Float32[Array, "R D"]:
    """Returns the embeddings of pooled rows: cut, and then normalized where that is wanted."""
    column = jnp.arange(rows.shape[1], dtype=jnp.int32)
    is_kept = column[None] < jnp.asarray(wanted.dimensions)[:, None]
    cut = jnp.where(is_kept, rows.astype(jnp.float32), 0.0)
    unit = ops.l2_norm(cut, eps=_SMALLEST_SQUARE)
    return jnp.where(jnp.asarray(wanted.is_scored)[:, None], unit, cut)


def scores(logits: Float32[Array, "R L"], options: PoolingOptions, wanted: PooledRows) -> Float32[Array, "R L"]:
    """Returns the scores of classes, or their logits where these are wanted."""
    given = logits
    if options.score == "softmax":
        given = ops.softmax(logits)
    elif options.score == "sigmoid":
        given = ops.sigmoid(logits)
    return jnp.where(jnp.asarray(wanted.is_scored)[:, None], given, logits)


def pooled(
    model: Any,
    rows: Float[Array, "R D"],
    wanted: PooledRows,
    factors: Float32[Arrays, "R"] | None = None,
) -> Float32[Array, "R W"]:
    """Returns a model's results for pooled rows: embeddings, or scores of classes.

    Args:
        model: a decoder with this device's weights.
        rows: hidden states, or sums of them.
        wanted: the options of each result.
        factors: multiply the rows; None: nothing does.
    """
    options: PoolingOptions = model.config.pooling
    if factors is not None:
        wide = jnp.broadcast_to(jnp.asarray(factors)[:, None], rows.shape)
        rows = map_elements(jnp.multiply, rows, wide)
    if options.gives_embeddings:
        return embeddings(rows, wanted)
    return scores(model.logits(rows.astype(model.dtype)), options, wanted)
