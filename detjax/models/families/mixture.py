"""The layer of decoders with mixtures of experts: Llama's, with experts in place of some layers' MLPs."""

from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from detjax.models.configuration.config import DecoderConfig
from detjax.models.families import llama
from detjax.models.parts.attention import Attention
from detjax.models.parts.experts import Experts
from detjax.models.parts.mlp import GatedMLP, MLPOptions
from detjax.models.parts.norm import RMSNorm
from detjax.models.parts.state import StateDeclaration
from detjax.operands.kv_pages import KVPages, Queries


class Layer(nnx.Module):
    """Attention, and experts or an MLP, each after an RMS norm and added to the residual stream."""

    CHECKPOINT_NAMES: Mapping[str, str] = llama.Layer.CHECKPOINT_NAMES
    ATTENTION: ClassVar[Any] = Attention
    EXPERTS: ClassVar[Any] = Experts
    attention_options = staticmethod(llama.attention_options)
    """Returns the options of a layer's attention, given the configuration and the layer's index."""

    def __init__(self, config: DecoderConfig, index: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        width, eps, experts = config.hidden_size, config.norm_eps, config.experts
        self.attention_norm = RMSNorm(width, eps=eps, dtype=dtype)
        self.attention = self.ATTENTION(width, self.attention_options(config, index), rngs=rngs, dtype=dtype)
        self.mlp_norm = RMSNorm(width, eps=eps, dtype=dtype)
        if experts is not None and experts.layers[index]:
            self.mlp = self.EXPERTS(width, experts, config.activation, rngs=rngs, dtype=dtype)
        else:
            mlp = MLPOptions(inner_width=config.intermediate_size, activation=config.activation, bias=config.mlp_bias)
            self.mlp = GatedMLP(width, mlp, rngs=rngs, dtype=dtype)

    def __call__(self, x: Float[Array, "*N D"], queries: Queries, kv: KVPages) -> tuple[Float[Array, "*N D"], KVPages]:
        """Returns the residual stream after this layer, and the layer's pages with the new keys and values in them."""
        x, kv = self.attention(self.attention_norm.for_product(x, self.attention.input_weight), queries, kv, residual=x)
        if isinstance(self.mlp, Experts):
            return self.mlp(self.mlp_norm(x), queries, residual=x), kv
        return self.mlp(self.mlp_norm.for_product(x, self.mlp.input_weight), residual=x), kv

    @classmethod
    def state(cls, config: DecoderConfig, index: int) -> StateDeclaration:
        """Returns the declaration of a layer's state, which is the attention's."""
        return cls.attention_options(config, index).state
