"""The table of token embeddings, and the head that gives logits."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Float32, Int

from detjax import ops
from detjax.models.parts.cuts import Cut, all_rows, devices, outputs, owned_rows, whole_product
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
        self.vocab_size = vocab_size
        self.weight = random_weight(rngs, (vocab_size, width), dtype)

    def __call__(self, tokens: Int[Array, "*N"]) -> Float[Array, "*N D"]:
        """Returns the tokens' rows, times the factor."""
        cut, table = self.cuts(devices())["weight"], self.weight[...]
        if cut.is_cut:
            owner, row = jnp.divmod(tokens, cut.length)
            rows = owned_rows(ops.embed(row, table), owner, cut)
        else:
            rows = ops.embed(tokens, table)
        return rows if self.factor is None else ops.scale(rows, self.factor)

    def logits(self, hidden: Float[Array, "*N D"]) -> Float32[Array, "*N V"]:
        """Returns the logit of each token for each hidden state."""
        cut, options = self.cuts(devices())["weight"], {"soft_cap": self.soft_cap, "out_dtype": jnp.float32}
        return whole_product(ops.matmul, hidden, self.weight[...], cut=cut, **options)

    def logprobs(
        self, hidden: Float[Array, "*N D"], tokens: Int[Array, "*N"], distribution: Distribution
    ) -> Float32[Array, "*N"]:
        """Returns the logprob of a given token after each hidden state, under a distribution."""
        options = {"distribution": distribution, "soft_cap": self.soft_cap}
        return ops.token_logprobs(hidden, all_rows(self.weight[...], self.cuts(devices())["weight"]), tokens, **options)

    def cuts(self, devices: int) -> dict[str, Cut]:
        """Returns how the table is cut: by tokens."""
        return {"weight": outputs(self.vocab_size, devices)}

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        return {"weight": Tensors(("weight",))}
