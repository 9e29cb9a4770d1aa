"""Declarations of the state that parts need: what a layer keeps of the tokens that it has seen."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import DTypeLike

from detjax.contract import KV_BLOCK
from detjax.models.parts.sharding import AXES, head_shards
from detjax.operands.kv_pages import KeyColumns, KVPages
from detjax.operands.linear_attention_state import DeltaNetState, DeltaState, empty_inputs
from detjax.operands.options import KVQuantization
from detjax.ops.quantized_kv import check_kind


@dataclasses.dataclass(frozen=True)
class StateSize:
    """How much state there is to be, and of which dtypes; the same for all layers of a model.

    Attributes:
        num_pages: pages of `contract.KV_BLOCK` tokens that requests share.
        dtype: the model's dtype.
        kv_quantization: how keys and values are quantized; None: they are numbers of the model's dtype.
        slots: requests that have a slot, for what is kept of each request; None: nothing is to be.
    """

    num_pages: int
    dtype: DTypeLike
    kv_quantization: KVQuantization | None = None
    slots: int | None = None


@runtime_checkable
class StateDeclaration(Protocol):
    """What a part says of its state. Whoever runs a model allocates the state, and does not look into it."""

    def empty(self, size: StateSize) -> Any:
        """Returns the state without any tokens, as a pytree of arrays.

        Raises:
            ValueError: the part cannot have a state like this.
        """
        ...

    def shared_by(self, devices: int) -> "StateDeclaration":
        """Returns the declaration of what each device has where so many share the part."""
        ...

    def spec(self, devices: int) -> Any:
        """Returns how the state lies on a mesh of so many devices: a tree of specs, or the beginning of one."""
        ...


@dataclasses.dataclass(frozen=True)
class PagedKeysAndValues:
    """Keys and values of every token, in pages.

    Attributes:
        kv_heads: heads of keys, and of values.
        head_dim: columns of a head.
        heads: heads of queries, which decide how many devices have keys of their own.
    """

    kv_heads: int
    head_dim: int
    heads: int

    def empty(self, size: StateSize) -> KVPages:
        """Returns pages of zeros.

        Raises:
            ValueError: the quantization does not exist, or does not take the head size.
        """
        if size.kv_quantization is not None:
            check_kind("KVCache", size.kv_quantization, self.head_dim)
        return KVPages.empty(size.num_pages, self.kv_heads, self.head_dim, size.dtype, size.kv_quantization)

    def shared_by(self, devices: int) -> "PagedKeysAndValues":
        """Returns the declaration of a device's heads."""
        queries, keys = head_shards(self.heads, self.kv_heads, devices)
        return dataclasses.replace(self, kv_heads=self.kv_heads // keys, heads=self.heads // queries)

    def spec(self, devices: int) -> P:
        """Returns how pages lie on a mesh: by heads."""
        return P(None, AXES) if head_shards(self.heads, self.kv_heads, devices)[1] > 1 else P()


@dataclasses.dataclass(frozen=True)
class PagedLatents:
    """One key of every token in pages, whose first columns are the token's latent and its value.

    Attributes:
        key_width: columns of a key.
        value_width: columns of a latent.
    """

    key_width: int
    value_width: int

    def empty(self, size: StateSize) -> KVPages:
        """Returns pages of zeros.

        Raises:
            ValueError: the state is to be quantized.
        """
        if size.kv_quantization is not None:
            raise ValueError(
                f"KVCache: the quantization is {size.kv_quantization!r} and the model has latent attention; accepted: "
                "None. Leave out the quantization."
            )
        shape = (size.num_pages, 1, KV_BLOCK, self.key_width)
        return KVPages(jnp.zeros(shape, size.dtype), KeyColumns(self.value_width))

    def shared_by(self, devices: int) -> "PagedLatents":
        """Returns this declaration: every device has all latents."""
        del devices
        return self

    def spec(self, devices: int) -> P:
        """Returns that every device has all latents."""
        del devices
        return P()


class InSlots:
    """Declarations of state that every request has in a slot, as `Queries.slots` says, and that is not in pages.

    What it holds is that of the request's last tokens, so a request cannot go on from a page of another one, but it can
    from a copy of what a slot held at the page's end. Slots are the first axis of every array.
    """


@dataclasses.dataclass(frozen=True)
class DeltaNetInSlots(InSlots):
    """The state of the gated delta rule, and the last inputs of the convolution before it.

    Attributes:
        key_heads: heads of queries, and of keys.
        value_heads: heads of values.
        key_dim: columns of a query, and of a key.
        value_dim: columns of a value.
        taps: inputs that the convolution meets at once.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def channels(self) -> int:
        """The channels of the convolution: all queries, all keys, all values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def empty(self, size: StateSize) -> DeltaNetState:
        """Returns the state of requests without tokens.

        Raises:
            ValueError: it is not said how many requests there are.
        """
        if size.slots is None:
            raise ValueError(
                "empty_state: slots is None and the model keeps a state of each request; accepted: the number of "
                "requests"
            )
        shape = self.key_heads, self.value_heads, self.key_dim, self.value_dim
        rule = DeltaState.empty(size.slots, *shape, size.dtype)
        return DeltaNetState(empty_inputs(size.slots, self.taps, self.channels, size.dtype), rule)

    def shared_by(self, devices: int) -> "DeltaNetInSlots":
        """Returns the declaration of a device's heads."""
        values, keys = head_shards(self.value_heads, self.key_heads, devices)
        return dataclasses.replace(self, key_heads=self.key_heads // keys, value_heads=self.value_heads // values)

    def spec(self, devices: int) -> Any:
        """Returns how the state lies on a mesh: by heads."""
        values, keys = head_shards(self.value_heads, self.key_heads, devices)
        by_value = AXES if values > 1 else None
        by_key = AXES if keys > 1 else None
        third = P(None, None, by_value)
        rule = DeltaState(P(None, by_value), P(None, None, by_key), third, third, P())  # pyright: ignore
        return DeltaNetState(third, rule)  # pyright: ignore
