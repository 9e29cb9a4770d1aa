"""The logits of rows; on a mesh, each device may hold its own part of the vocabulary.

Code that chooses tokens or reports their logprobs uses `Logits`, and is the same on one device and on many. Devices
exchange two numbers and one candidate per block of the vocabulary; see `detjax.ops.vocabulary_blocks`.
"""

import dataclasses
import functools
from typing import Final

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, UInt32

from detjax import ops
from detjax.contract import SOFTMAX_BLOCK
from detjax.models.parts.sharding import (
    OutputSharding,
    ShardGroup,
    first_output,
    gathered,
    indivisible_shards,
    local_columns,
    owned_rows,
)
from detjax.operands.numerics import ceil_div
from detjax.operands.sampling_arrays import Arrays, LogitAdjustments, SamplingArrays, SeenTokens
from detjax.ops import vocabulary_blocks as blocks
from detjax.ops.elements import map_elements
from detjax.ops.softmax import log_softmax_statistics
from detjax.portable.sampling import likeliest, reciprocal, sampling_exponents

_WORD: Final = 32
"""Tokens per word of a mask."""


def vocabulary_sharding(vocabulary: int, devices: int) -> OutputSharding:
    """Returns the sharding of a vocabulary by whole blocks of `contract.SOFTMAX_BLOCK` tokens."""
    shards = indivisible_shards(ceil_div(vocabulary, SOFTMAX_BLOCK), devices)
    return OutputSharding((ShardGroup(vocabulary, shards, SOFTMAX_BLOCK if shards > 1 else 1),))


@dataclasses.dataclass(frozen=True)
class Logits:
    """The logits of rows.

    Attributes:
        part: this device's logits, `[R, v]`; all of them if the vocabulary is not sharded. Padding is -inf.
        sharding: the sharding of the vocabulary.
    """

    part: Float32[Array, "R v"]
    sharding: OutputSharding

    @classmethod
    def from_part(cls, part: Float32[Array, "R v"], sharding: OutputSharding) -> "Logits":
        """Returns logits from this device's part, whose padding is undefined.

        On a backend without statistics of blocks, every device gets all logits.
        """
        if not sharding.is_sharded:
            return cls(part, sharding)
        if not blocks.are_served():
            return cls(gathered(part, sharding), _all_of(sharding.size))
        token = first_output(sharding) + jnp.arange(part.shape[1], dtype=jnp.int32)
        return cls(jnp.where(token < sharding.size, part, -jnp.inf), sharding)

    @property
    def whole(self) -> Float32[Array, "R V"]:
        """All logits, on every device."""
        return gathered(self.part, self.sharding)

    def filtered(self, arrays: SamplingArrays) -> "Logits":
        """Returns the logits with -inf where filters remove tokens. Filters sort, so every device gets all logits."""
        return Logits(ops.filter_logits(self.whole, arrays), _all_of(self.sharding.size))

    def constrained(self, allowed: UInt32[Arrays, "R W"]) -> "Logits":
        """Returns the logits with -inf where the mask forbids a token; see `ops.constrain_logits`."""
        return Logits(ops.constrain_logits(self.part, self._local_mask(allowed)), self.sharding)

    def adjusted(
        self, seen: SeenTokens, adjustments: LogitAdjustments, allowed: UInt32[Arrays, "R W"] | None
    ) -> "Logits":
        """Returns the adjusted logits; see `ops.adjust_logits`."""
        mask = None if allowed is None else self._local_mask(allowed)
        if self.sharding.is_sharded:
            seen = SeenTokens(*(local_columns(jnp.asarray(x), self.sharding.at(-1)) for x in seen))
            adjustments = adjustments._replace(biased=jnp.asarray(adjustments.biased) - first_output(self.sharding))
        return Logits(ops.adjust_logits(self.part, seen, adjustments, mask), self.sharding)

    def sample(self, arrays: SamplingArrays, *, filtered: bool) -> tuple[Int32[Array, "R"], Float32[Array, "R"]]:
        """Returns the result of `ops.sample`: tokens, and their logprobs under the softmax of the logits.

        With `filtered`, every device gets all logits. It may be False if no row has a filter.
        """
        if filtered or not self.sharding.is_sharded:
            return ops.sample(self.whole, arrays, filtered=filtered)
        candidates = blocks.block_candidates(
            self.part, arrays, jnp.asarray(first_output(self.sharding), jnp.int32), vocabulary=self.sharding.size
        )
        tokens = blocks.best_candidate(*map(self._all_blocks, candidates))
        return tokens, self.logprobs(tokens)

    def logprobs(self, tokens: Int32[Arrays, "R"]) -> Float32[Array, "R"]:
        """Returns the logprob of one given token in each row, with the bits of `ops.log_softmax`."""
        tokens = jnp.asarray(tokens)
        if self._statistics is None:
            return jnp.take_along_axis(ops.log_softmax(self.part), tokens[:, None], axis=1)[:, 0]
        # The same bits; logits are read once and no logprobs are written.
        first, second = self._statistics
        return self._at(tokens) - first - second

    def sampling_logprobs(self, tokens: Int32[Array, "R"], arrays: SamplingArrays) -> Float32[Array, "R"]:
        """Returns the result of `ops.sampling_logprobs` without filters, for tokens that `sample` returned."""
        if not self.sharding.is_sharded:
            return ops.sampling_logprobs(self.part, tokens, arrays, filtered=False)
        temperature = jnp.asarray(arrays.temperature)
        factors = jnp.broadcast_to(reciprocal(temperature)[:, None], self.part.shape)
        exponents = Logits(map_elements(sampling_exponents, self.part, factors), self.sharding)
        # At temperature 0 no token but the likeliest one can be drawn.
        return jnp.where(temperature == 0, 0.0, exponents.logprobs(tokens))

    def top_logprobs(self, count: int) -> tuple[Int32[Array, "R n"], Float32[Array, "R n"]]:
        """Returns the likeliest tokens with their logprobs; a count of 0 gives arrays without columns."""
        if not count:
            none = jnp.zeros((self.part.shape[0], 0))
            return none.astype(jnp.int32), none
        if not self.sharding.is_sharded:
            return ops.top_logprobs(self.part, count)
        assert self._statistics is not None
        first, second = self._statistics
        few, shards = min(count, self.part.shape[1]), self.sharding.groups[0].shards
        columns, logprobs = likeliest((self.part - first[:, None]) - second[:, None], count=few)
        # Shards are in the order of their tokens, so among equal logprobs the lowest token comes first.
        candidates = OutputSharding((ShardGroup(few * shards, shards),), -1)
        tokens, logprobs = gathered(columns + first_output(self.sharding), candidates), gathered(logprobs, candidates)
        index, logprobs = likeliest(logprobs, count=count)
        return jnp.take_along_axis(tokens, index, axis=1), logprobs

    def sampling_top_logprobs(
        self, count: int, arrays: SamplingArrays, likeliest_token: Int32[Array, "R"]
    ) -> tuple[Int32[Array, "R n"], Float32[Array, "R n"]]:
        """Returns the likeliest tokens under the distribution of `sampling_logprobs`, with their logprobs.

        `likeliest_token` matters in rows of temperature 0, which can draw no other token.
        """
        if not count:
            return self.top_logprobs(0)
        temperature = jnp.asarray(arrays.temperature)
        factors = jnp.broadcast_to(reciprocal(temperature)[:, None], self.part.shape)
        exponents = map_elements(sampling_exponents, self.part, factors)
        first = first_output(self.sharding) if self.sharding.is_sharded else 0
        token = first + jnp.arange(self.part.shape[1], dtype=jnp.int32)
        greedy = jnp.where(token[None] == likeliest_token[:, None], 0.0, -jnp.inf)
        exponents = jnp.where((temperature == 0)[:, None], greedy, exponents)
        return Logits(exponents, self.sharding).top_logprobs(count)

    @functools.cached_property
    def _statistics(self) -> tuple[Array, Array] | None:
        """The numbers that log-softmax subtracts from each row; None: the backend does not provide them."""
        if not self.sharding.is_sharded:
            return log_softmax_statistics(self.part)
        return blocks.merged_statistics(*map(self._all_blocks, blocks.block_statistics(self.part)))

    def _all_blocks(self, x: Array) -> Array:
        """Gathers numbers per block, `[R, blocks]`."""
        count = ceil_div(self.sharding.size, SOFTMAX_BLOCK)
        return gathered(x, OutputSharding((ShardGroup(count, self.sharding.groups[0].shards, x.shape[1]),), -1))

    def _at(self, tokens: Array) -> Array:
        """The logit of a token in each row."""
        if not self.sharding.is_sharded:
            return jnp.take_along_axis(self.part, tokens[:, None], axis=1)[:, 0]
        owner, column = jnp.divmod(tokens, self.sharding.length)
        return owned_rows(jnp.take_along_axis(self.part, column[:, None], axis=1), owner, self.sharding)[:, 0]

    def _local_mask(self, allowed: UInt32[Arrays, "R W"]) -> UInt32[Array, "R w"]:
        """The mask words of this device's tokens."""
        (group,) = self.sharding.groups
        # A block is a multiple of a word.
        words = ShardGroup(ceil_div(group.size, _WORD), group.shards, ceil_div(group.length, _WORD))
        return local_columns(jnp.asarray(allowed), OutputSharding((words,), -1))


def _all_of(vocabulary: int) -> OutputSharding:
    return OutputSharding((ShardGroup(vocabulary, 1),))
