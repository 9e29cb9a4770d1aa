"""Declarations of the state that parts need: what a layer keeps of the tokens that it has processed."""

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
    """The amount of state to allocate, and its dtypes; the same for all layers of a model.

    Attributes:
        num_pages: pages of `contract.KV_BLOCK` tokens that requests share.
        dtype: the model's dtype.
        kv_quantization: the quantization of keys and values; None: they have the model's dtype.
        slots: the number of slots for per-request state; None: no such state.
    """

    num_pages: int
    dtype: DTypeLike
    kv_quantization: KVQuantization | None = None
    slots: int | None = None


@runtime_checkable
class StateDeclaration(Protocol):
    """A part's declaration of its state. Code that runs a model allocates the state and treats it as opaque."""

    def empty(self, size: StateSize) -> Any:
        """Returns the state without any tokens, as a pytree of arrays.

        Raises:
            ValueError: the part does not support such a state.
        """
        ...

    def shared_by(self, devices: int) -> "StateDeclaration":
        """Returns the declaration for one of `devices` devices that share the part."""
        ...

    def spec(self, devices: int) -> Any:
        """Returns the state's partition specs on a mesh of `devices` devices: a tree of specs or a prefix of one."""
        ...


@dataclasses.dataclass(frozen=True)
class PagedKeysAndValues:
    """Keys and values of every token, in pages.

    Attributes:
        kv_heads: heads of keys, and of values.
        head_dim: columns of a head.
        heads: heads of queries, which decide how many devices have their own keys.
    """

    kv_heads: int
    head_dim: int
    heads: int

    def empty(self, size: StateSize) -> KVPages:
        """Returns pages of zeros.

        Raises:
            ValueError: the quantization does not exist, or does not support the head size.
        """
        if size.kv_quantization is not None:
            check_kind("KVCache", size.kv_quantization, self.head_dim)
        return KVPages.empty(size.num_pages, self.kv_heads, self.head_dim, size.dtype, size.kv_quantization)

    def shared_by(self, devices: int) -> "PagedKeysAndValues":
        """Returns the declaration for a device's heads."""
        queries, keys = head_shards(self.heads, self.kv_heads, devices)
        return dataclasses.replace(self, kv_heads=self.kv_heads // keys, heads=self.heads // queries)

    def spec(self, devices: int) -> P:
        """Returns the pages' partition spec: by heads."""
        return P(None, AXES) if head_shards(self.heads, self.kv_heads, devices)[1] > 1 else P()


@dataclasses.dataclass(frozen=True)
class PagedLatents:
    """One key of every token in pages, whose first columns are the token's latent, which is also its value.

    Attributes:
        key_width: columns of a key.
        value_width: columns of a latent.
    """

    key_width: int
    value_width: int

    def empty(self, size: StateSize) -> KVPages:
        """Returns pages of zeros.

        Raises:
            ValueError: a quantization is requested.
        """
        if size.kv_quantization is not None:
            raise ValueError(
                f"KVCache: the quantization is {size.kv_quantization!r} and the model has latent attention; accepted: "
                "None. Leave out the quantization."
            )
        shape = (size.num_pages, 1, KV_BLOCK, self.key_width)
        return KVPages(jnp.zeros(shape, size.dtype), KeyColumns(self.value_width))

    def shared_by(self, devices: int) -> "PagedLatents":
        """Returns the same declaration: every device has all latents."""
        del devices
        return self

    def spec(self, devices: int) -> P:
        """Returns the spec of replicated pages."""
        del devices
        return P()


@dataclasses.dataclass(frozen=True)
class PagesOfLayer:
    """No state: the layer reads the pages of an earlier one, which has them with the new tokens.

    Attributes:
        layer: the index of that layer.
    """

    layer: int

    def empty(self, size: StateSize) -> tuple[()]:
        """Returns no arrays."""
        del size
        return ()

    def shared_by(self, devices: int) -> "PagesOfLayer":
        """Returns the same declaration: a device reads its own heads."""
        del devices
        return self

    def spec(self, devices: int) -> P:
        """Returns a spec for no arrays."""
        del devices
        return P()


class InSlots:
    """A declaration of state that every request keeps in a slot (see `Queries.slots`), not in pages.

    It is the state after the request's last token, so a request cannot continue from a page of another one, but it can
    continue from a copy of the slot's state at the page's end. Slots are the first axis of every array.
    """


@dataclasses.dataclass(frozen=True)
class DeltaNetInSlots(InSlots):
    """The state of the gated delta rule, and the last inputs of the convolution before it.

    Attributes:
        key_heads: heads of queries, and of keys.
        value_heads: heads of values, a multiple of `key_heads`.
        key_dim: columns of a query, and of a key.
        value_dim: columns of a value.
        taps: inputs that each output of the convolution depends on.
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
            ValueError: the number of requests is not given.
        """
        if size.slots is None:
            raise ValueError(
                "empty_state: slots is None and the model keeps a state for each request; accepted: the number of "
                "requests"
            )
        shape = self.key_heads, self.value_heads, self.key_dim, self.value_dim
        rule = DeltaState.empty(size.slots, *shape, size.dtype)
        return DeltaNetState(empty_inputs(size.slots, self.taps, self.channels, size.dtype), rule)

    def shared_by(self, devices: int) -> "DeltaNetInSlots":
        """Returns the declaration for a device's heads."""
        values, keys = head_shards(self.value_heads, self.key_heads, devices)
        return dataclasses.replace(self, key_heads=self.key_heads // keys, value_heads=self.value_heads // values)

    def spec(self, devices: int) -> Any:
        """Returns the state's partition specs: by heads."""
        values, keys = head_shards(self.value_heads, self.key_heads, devices)
        by_value = AXES if values > 1 else None
        by_key = AXES if keys > 1 else None
        third = P(None, None, by_value)
        rule = DeltaState(P(None, by_value), P(None, None, by_key), third, third, P())  # pyright: ignore
        return DeltaNetState(third, rule)  # pyright: ignore
