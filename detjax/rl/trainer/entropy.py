"""The entropy of next-token distributions, computed from all logits."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from detjax import ops
from detjax.models import Decoder
from detjax.operands.options import Distribution
from detjax.ops.token_logprobs import CHUNK
from detjax.portable.tiles import map_rows, row_sum
from detjax.runtime import backends


def entropies(model: Decoder, hidden: Float[Array, "*B D"], distribution: Distribution) -> Float32[Array, "*B"]:
    """Returns the entropy, in nats, of the next-token distribution after each normalized last hidden state.

    Logits are computed for a chunk of tokens at a time. On CPUs no bit depends on the number of tokens.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    if distribution.temperature == 0:
        return jnp.zeros(hidden.shape[:-1], jnp.float32)
    size = min(CHUNK, len(flat))
    chunks = jnp.pad(flat, ((0, -len(flat) % size), (0, 0))).reshape(-1, size, flat.shape[1])

    def entropy(rows: Array) -> Array:
        logits = model.logits(rows)
        return _entropy(logits if distribution.is_model else ops.drawn_logits(logits, distribution))

    values: Array = lax.map(entropy, chunks)
    return values.reshape(-1)[: len(flat)].reshape(hidden.shape[:-1])


def _entropy(logits: Array) -> Array:
    probabilities, logprobs = ops.softmax(logits), ops.log_softmax(logits)

    def entropy(rows: tuple[Array, Array], _: Any) -> Array:
        probability, logprob = rows
        return row_sum(jnp.where(probability > 0, -probability * logprob, 0.0))[:, 0]

    if backends.target() == "cpu":
        return map_rows(entropy, (probabilities, logprobs), None)
    return entropy((probabilities, logprobs), None)
