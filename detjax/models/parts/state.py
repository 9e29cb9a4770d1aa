"""Declarations of the state that parts need: what a layer keeps of the tokens that it has seen."""

import dataclasses
from typing import Any, Protocol

import jax.numpy as jnp
from jaxtyping import DTypeLike

from detjax.contract import KV_BLOCK
from detjax.kv_pages import KeyColumns, KVPages
from detjax.ops.quantized_kv import check_kind
from detjax.options import KVQuantization


@dataclasses.dataclass(frozen=True)
class StateSize:
    """How much state there is to be, and of which dtypes; the same for all layers of a model.

    Attributes:
        num_pages: pages of `contract.KV_BLOCK` tokens that requests share.
        dtype: the model's dtype.
        kv_quantization: how keys and values are quantized; None: they are numbers of the model's dtype.
    """

    num_pages: int
    dtype: DTypeLike
    kv_quantization: KVQuantization | None = None


class StateDeclaration(Protocol):
    """What a part says of its state. Whoever runs a model allocates the state, and does not look into it."""

    def empty(self, size: StateSize) -> Any:
        """Returns the state without any tokens, as a pytree of arrays.

        Raises:
            ValueError: the part cannot have a state like this.
        """
        ...


@dataclasses.dataclass(frozen=True)
class PagedKeysAndValues:
    """Keys and values of every token, in pages.

    Attributes:
        kv_heads: heads of keys, and of values.
        head_dim: columns of a head.
    """

    kv_heads: int
    head_dim: int

    def empty(self, size: StateSize) -> KVPages:
        """Returns pages of zeros.

        Raises:
            ValueError: the quantization does not exist, or does not take the head size.
        """
        if size.kv_quantization is not None:
            check_kind("KVCache", size.kv_quantization, self.head_dim)
        return KVPages.empty(size.num_pages, self.kv_heads, self.head_dim, size.dtype, size.kv_quantization)


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
