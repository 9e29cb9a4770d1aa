"""The table of token embeddings, and the head that gives logits."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Float32, Int

from detjax import ops
from detjax.models.parts.parameters import Tensors, random_weight
from detjax.options import Distribution


class Embedding(nnx.Module):
    """A table `[V, D]` with a row for each token: an embedding, a head, or both."""

    def __init__(
        self,
        vocab_size: int,
        width: int,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        factor: float | None = None,
        soft_cap: float | None = None,
    ) -> None:
        """Makes a table with random rows.

        Args:
            vocab_size: rows.
            width: columns.
            rngs: where the random numbers come from.
            dtype: the table's dtype.
            factor: what an embedding multiplies its rows by; None: nothing.
            soft_cap: the bound of a head's logits, which become `cap * tanh(logit / cap)`; None: no bound.
        """
        self.factor, self.soft_cap = factor, soft_cap
        self.weight = random_weight(rngs, (vocab_size, width), dtype)

    def __call__(self, tokens: Int[Array, "*N"]) -> Float[Array, "*N D"]:
        """Returns the tokens' rows, times the factor."""
        rows = ops.embed(tokens, self.weight[...])
        return rows if self.factor is None else ops.scale(rows, self.factor)

    def logits(self, hidden: Float[Array, "*N D"]) -> Float32[Array, "*N V"]:
        """Returns the logit of each token for each hidden state."""
        return ops.matmul(hidden, self.weight[...], layout="nk", soft_cap=self.soft_cap, out_dtype=jnp.float32)

    def logprobs(
        self, hidden: Float[Array, "*N D"], tokens: Int[Array, "*N"], distribution: Distribution
    ) -> Float32[Array, "*N"]:
        """Returns the logprob of a given token after each hidden state, under a distribution."""
        options = {"distribution": distribution, "soft_cap": self.soft_cap}
        return ops.token_logprobs(hidden, self.weight[...], tokens, **options)

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        return {"weight": Tensors(("weight",))}
