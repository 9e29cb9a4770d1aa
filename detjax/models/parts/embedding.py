"""The table of token embeddings, and the head that computes logits."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Float32, Int

from detjax import ops
from detjax.models.parts.logits import Logits, vocabulary_sharding
from detjax.models.parts.parameters import Tensors, random_weight
from detjax.models.parts.sharding import (
    OutputSharding,
    all_rows,
    devices,
    gathered,
    owned_rows,
    refusing_gradients,
    sharded_matmul,
)
from detjax.operands.accumulated_weight import Weight
from detjax.operands.numerics import flat_rows
from detjax.operands.options import Distribution
from detjax.ops import vocabulary_blocks
from detjax.ops.token_logprobs import CHUNK
from detjax.portable.tiles import map_rows


class Embedding(nnx.Module):
    """A table `[V, D]` with a row for each token: an embedding, a head, or both."""

    def __init__(  # noqa: PLR0913
        self,
        vocab_size: int,
        width: int,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        factor: float | None = None,
        factor_dtype: DTypeLike | None = None,
        soft_cap: float | None = None,
        logit_factor: float | None = None,
    ) -> None:
        """Makes a table with random rows.

        Args:
            vocab_size: rows.
            width: columns.
            rngs: the source of random numbers.
            dtype: the table's dtype.
            factor: multiplies an embedding's rows; None: nothing does.
            factor_dtype: the dtype that this factor is rounded to; None: the table's.
            soft_cap: the bound of a head's logits, which become `cap * tanh(logit / cap)`; None: no bound.
            logit_factor: multiplies a head's logits; None: nothing does.
        """
        self.factor, self.factor_dtype = factor, factor_dtype
        self.soft_cap, self.logit_factor = soft_cap, logit_factor
        self.vocab_size = vocab_size
        self.weight = random_weight(rngs, (vocab_size, width), dtype)

    def __call__(self, tokens: Int[Array, "*N"]) -> Float[Array, "*N D"]:
        """Returns the tokens' rows, times the factor."""
        rows = self.rows(tokens)
        return rows if self.factor is None else ops.scale(rows, self.factor, factor_dtype=self.factor_dtype)

    def rows(self, tokens: Int[Array, "*N"]) -> Float[Array, "*N D"]:
        """Returns the tokens' rows in the table."""
        sharding, table = self.shardings(devices())["weight"], self.weight[...]
        if not sharding.is_sharded:
            return ops.embed(tokens, table)
        owner, row = jnp.divmod(tokens, sharding.length)
        return owned_rows(ops.embed(row, table), owner, sharding)

    def logits(self, hidden: Float[Array, "*N D"]) -> Float32[Array, "*N V"]:
        """Returns the logit of each token for each hidden state."""
        return gathered(self._local_logits(hidden, self.weight[...]), self.shardings(devices())["weight"])

    def shared_logits(self, hidden: Float[Array, "R D"]) -> Logits:
        """Returns the logits of rows; this device may hold a part of the vocabulary."""
        return Logits.from_part(self._local_logits(hidden, self.weight[...]), self.shardings(devices())["weight"])

    def _local_logits(self, hidden: Float[Array, "*N D"], weight: Weight) -> Float32[Array, "*N v"]:
        sharding, options = self.shardings(devices())["weight"], {"soft_cap": self.soft_cap, "out_dtype": jnp.float32}
        logits = sharded_matmul(hidden, weight, sharding=sharding, **options)
        return logits if self.logit_factor is None else ops.scale(logits, self.logit_factor)

    @property
    def logit_options(self) -> dict[str, Any]:
        """The options of `ops.token_logprobs` for this head's logits."""
        return {"soft_cap": self.soft_cap, "logit_factor": self.logit_factor}

    def logprobs(
        self, hidden: Float[Array, "*N D"], tokens: Int[Array, "*N"], distribution: Distribution
    ) -> Float32[Array, "*N"]:
        """Returns the logprob of one given token after each hidden state, under a distribution."""
        sharding = self.shardings(devices())["weight"]
        if sharding.is_sharded and distribution.is_model and vocabulary_blocks.are_served():
            return refusing_gradients(self._logprobs_by_blocks)(hidden, self.weight[...], tokens)
        head = all_rows(self.weight[...], sharding)
        return ops.token_logprobs(hidden, head, tokens, distribution=distribution, **self.logit_options)

    def _logprobs_by_blocks(
        self, hidden: Float[Array, "*N D"], weight: Weight, tokens: Int[Array, "*N"]
    ) -> Float32[Array, "*N"]:
        """Logprobs under the model's own distribution; devices exchange only the statistics of vocabulary blocks."""

        def logprobs(rows: tuple[Array, Array], weight: Weight) -> Array:
            hidden, tokens = rows
            part = self._local_logits(hidden, weight)
            return Logits.from_part(part, self.shardings(devices())["weight"]).logprobs(tokens)

        # As in `ops.token_logprobs`, only some rows have logits at a time.
        rows = flat_rows(hidden), tokens.reshape(-1).astype(jnp.int32)
        return map_rows(logprobs, rows, weight, min(CHUNK, tokens.size)).reshape(tokens.shape)

    def shardings(self, devices: int) -> dict[str, OutputSharding]:
        """Returns the sharding of the table: by blocks of tokens."""
        return {"weight": vocabulary_sharding(self.vocab_size, devices)}

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        return {"weight": Tensors(("weight",))}
