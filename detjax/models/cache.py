"""The KV cache of a batch of requests: pages of `contract.KV_BLOCK` tokens in every layer, and their fill levels."""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Array, Bool, DTypeLike, Int, Int32

from detjax import ops
from detjax.contract import KV_BLOCK
from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import family_named
from detjax.models.mesh import empty_state
from detjax.models.parts.state import InSlots, StateDeclaration, StateSize
from detjax.operands.kv_pages import Queries
from detjax.operands.linear_attention_state import DROPPABLE_TOKENS, oldest_start
from detjax.operands.options import KVQuantization

_NEVER: Final = 2**31 - 1
"""The oldest position of a request whose state is lost."""

type State = tuple[Any, ...]
"""The layers' state of processed tokens: for each layer, a pytree of arrays that the layer declares."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of a batch of requests, left-aligned: token `i` of a request is in its page `i // KV_BLOCK`.

    Attributes:
        state: each layer's state, such as pages of keys and values. In layers with slots, request `b` has slot `b`.
        page_table: the page of each request's block of tokens.
        lengths: the number of tokens of each request in the cache. A lower number drops the last ones: any number of
            them if all layers keep pages; otherwise only tokens from `oldest` on, or all.
        oldest: the earliest position, except for 0, from which each request can continue, if layers keep state in
            slots: up to `linear_attention_state.DROPPABLE_TOKENS` tokens of the last call can always be dropped. The
            next call refuses lower lengths; in a compiled program, which cannot raise errors, the request's hidden
            states and logits are NaN until it restarts at 0. None: all layers keep pages.
    """

    state: State
    page_table: Int32[Array, "B p"]
    lengths: Int32[Array, "B"]
    oldest: Int32[Array, "B"] | None = None

    @classmethod
    def empty(
        cls,
        config: DecoderConfig,
        batch: int,
        capacity: int,
        dtype: DTypeLike,
        quantized: KVQuantization | None = None,
        mesh: Mesh | None = None,
    ) -> "KVCache":
        """Returns a cache for `batch` requests of up to `capacity` tokens each, whose pages are consecutive.

        Args:
            config: the decoder's configuration.
            batch: the number of requests.
            capacity: tokens of a request.
            dtype: the dtype of keys and values, which is the decoder's.
            quantized: store codes and scales instead of numbers, as in `ops.quantize_kv`.
            mesh: the devices that share the decoder; None: it is on one device.

        Raises:
            ValueError: the quantization does not exist, or does not support the decoder's head size.
        """
        page_table = ops.contiguous_page_table(batch, capacity)
        state = empty_state(mesh, declarations(config), StateSize(page_table.size, dtype, quantized, batch))
        none = jnp.zeros(batch, jnp.int32)
        return cls(state, page_table, none, none if any(layers_in_slots(config)) else None)

    @property
    def capacity(self) -> int:
        """The maximum number of tokens of each request. Further tokens are dropped."""
        return self.page_table.shape[1] * KV_BLOCK

    def next_queries(self, counts: Int[Array, "B"]) -> Queries:
        """Returns the positions of each request's next `counts` tokens, the rest being padding on the right.

        Raises:
            ValueError: more tokens of a request were dropped than its layers' state can go back.
        """
        lost = self.lost
        if lost is not None and not isinstance(lost, Tracer) and lost.any():
            request, lengths, oldest = int(np.argmax(lost)), np.asarray(self.lengths), np.asarray(self.oldest)
            accepted = "0" if oldest[request] == _NEVER else f"{oldest[request]} and more, or 0"
            raise ValueError(
                f"KVCache: lengths of request {request} is {lengths[request]}; accepted: {accepted}, because layers "
                "keep a state that goes back no further. Compute the request's tokens again from position 0, or drop "
                f"at most {DROPPABLE_TOKENS} tokens of a call"
            )
        length = jnp.minimum(self.lengths + counts, self.capacity)
        return Queries(self.page_table, self.lengths, length, counts)

    @property
    def lost(self) -> Bool[Array, "B"] | None:
        """True if each request has lost the state that it needs to continue, see `oldest`; None: none has."""
        return None if self.oldest is None else (self.lengths < self.oldest) & (self.lengths > 0)

    def written(self, state: State, queries: Queries) -> "KVCache":
        """Returns the cache after a call with `next_queries`, with the state that the layers returned."""
        length = jnp.asarray(queries.length, jnp.int32)
        if self.oldest is None or self.lost is None:
            return dataclasses.replace(self, state=state, lengths=length)
        oldest = jnp.where(self.lost, _NEVER, oldest_start(self.oldest, self.lengths, length))
        return dataclasses.replace(self, state=state, lengths=length, oldest=oldest)


def declarations(config: DecoderConfig) -> tuple[StateDeclaration, ...]:
    """Returns each layer's state declaration."""
    layer = family_named("Decoder", config.architecture).layer
    return tuple(layer.state(config, index) for index in range(config.layers))


def layers_in_slots(config: DecoderConfig) -> tuple[bool, ...]:
    """Returns for each layer whether it keeps per-request state in slots, not in pages.

    The first axis of every array of such a state is the slots.
    """
    return tuple(isinstance(declaration, InSlots) for declaration in declarations(config))
