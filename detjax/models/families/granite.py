"""Granite 3 (IBM 2024): Llama's layer with constant factors, also on the embedding and on logits."""

from typing import Any, Final

from jaxtyping import Array, Float

from detjax import ops
from detjax.models.configuration.config import DecoderConfig, Multipliers
from detjax.models.configuration.family import Family
from detjax.models.configuration.json_object import JsonObject
from detjax.models.configuration.keys import Key, read_keys, write_keys
from detjax.models.configuration.windows import read_uniform_windows
from detjax.models.families import llama
from detjax.operands.kv_pages import KVPages, Queries

_MULTIPLIERS: Final = (
    Key("embedding_multiplier", "embedding", 1.0),
    Key("attention_multiplier", "scores", 1.0),
    Key("residual_multiplier", "residual", 1.0),
    Key("logits_scaling", "logits_divisor", 1.0),
)


class Layer(llama.Layer):
    """Llama's layer, in which a factor multiplies what is added to the residual stream."""

    def __init__(self, config: DecoderConfig, index: int, **options: Any) -> None:
        super().__init__(config, index, **options)
        assert config.multipliers is not None
        self.residual_factor = config.multipliers.residual

    def __call__(self, x: Float[Array, "*N D"], queries: Queries, kv: KVPages) -> tuple[Float[Array, "*N D"], KVPages]:
        """Returns the residual stream after this layer, and the layer's pages with the new keys and values in them."""
        y, kv = self.attention(self.attention_norm.for_product(x, self.attention.input_weight), queries, kv)
        x = self._added(y, x)
        return self._added(self.mlp(self.mlp_norm.for_product(x, self.mlp.input_weight)), x), kv

    def _added(self, x: Float[Array, "*N D"], residual: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
        return ops.add(ops.scale(x, self.residual_factor, factor_dtype="float32"), residual)


def _read_options(file: JsonObject, layers: int) -> dict[str, Any]:
    multipliers = Multipliers(**read_keys(file, _MULTIPLIERS))
    return {"windows": read_uniform_windows(file, layers, "granite"), "multipliers": multipliers}


FAMILY: Final = Family(
    architecture="GraniteForCausalLM",
    model_type="granite",
    layer=Layer,
    max_positions=2048,
    bos=1,
    eos=2,
    keys=llama.FAMILY.keys,
    read_options=_read_options,
    write_options=lambda config: write_keys(config.multipliers, _MULTIPLIERS),
)
