"""gpt-oss (OpenAI 2025): attention with sinks and alternating windows, and experts with biases and bounded activations.

Published checkpoints hold the experts in MXFP4. They are loaded, and saved, as the plain numbers that these encode.
"""

import dataclasses
from typing import Any, ClassVar, Final

from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Float32, Int32

from detjax import ops
from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import Family
from detjax.models.configuration.json_object import MAX_EXPERTS, JsonObject
from detjax.models.configuration.keys import Key, read_keys, write_keys
from detjax.models.configuration.rope_config import read_rope
from detjax.models.configuration.windows import first_window, read_alternating_windows, write_alternating_windows
from detjax.models.families import llama, mixture
from detjax.models.parts.attention import AttentionOptions
from detjax.models.parts.experts import Experts, ExpertsOptions, Router
from detjax.models.parts.parameters import Tensors, optional, random_weight, zero_bias
from detjax.operands.options import Clamp
from detjax.ops.rotary import RotaryEmbedding, YarnScaling

_THETA: Final = 150_000.0
_SCALING: Final = YarnScaling(32.0, 4096, truncate=False)
"""The default scaling of frequencies."""
_WINDOW: Final = 128


class LogitRouter(Router):
    """Chooses the experts with the highest logits. The weights are the softmax of only the chosen logits.

    Logits are float32 and not rounded. The softmax takes them in ascending order of experts.
    """

    def __init__(self, width: int, options: ExpertsOptions, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.options = options
        self.weight = random_weight(rngs, (options.experts, width), dtype)
        self.bias = zero_bias(True, (options.experts,), dtype)

    def __call__(self, x: Float[Array, "N D"]) -> tuple[Int32[Array, "N k"], Float32[Array, "N k"]]:
        """Returns the experts of each token in ascending order, and their weights."""
        logits = ops.matmul(x, self.weight[...], layout="nk", bias=optional(self.bias), out_dtype="float32")
        ids, chosen = ops.choose_experts(logits, self.options.chosen)
        return ids, ops.softmax(chosen)

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        return {"weight": Tensors(("weight",)), "bias": Tensors(("bias",))}


class _Experts(Experts):
    """Experts whose weights are in one tensor, with inputs as rows, and gate and up interleaved."""

    CHECKPOINT_NAMES = {"router": "router"}  # noqa: RUF012
    ROUTER: ClassVar[Any] = LogitRouter

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        return {
            "gate_up": Tensors(("experts.gate_up_proj",), transposed=True, pairs="interleaved"),
            "gate_up_bias": Tensors(("experts.gate_up_proj_bias",), pairs="interleaved"),
            "down": Tensors(("experts.down_proj",), transposed=True),
            "down_bias": Tensors(("experts.down_proj_bias",)),
        }


def _attention_options(config: DecoderConfig, index: int) -> AttentionOptions:
    return dataclasses.replace(llama.attention_options(config, index), sinks=True)


class Layer(mixture.Layer):
    """The layer of decoders with experts, with attention sinks."""

    EXPERTS = _Experts
    attention_options = staticmethod(_attention_options)


def _read_rope(file: JsonObject, head_dim: int, max_positions: int) -> RotaryEmbedding:
    if file.object("rope_parameters") is None and file.object("rope_scaling") is None:
        return RotaryEmbedding(head_dim, file.number("rope_theta", _THETA), _SCALING)
    return read_rope(file, head_dim, max_positions, theta=_THETA)


_EXPERTS: Final = (
    Key("num_experts_per_tok", "chosen", 4),
    Key("num_local_experts", "experts", 128, maximum=MAX_EXPERTS),
    Key("intermediate_size", "inner_width"),
)
_CLAMP: Final = (Key("swiglu_limit", "limit", 7.0), Key("swiglu_alpha", "slope", 1.702))


def _read_options(file: JsonObject, layers: int) -> dict[str, Any]:
    file.choice("hidden_act", "silu", ("silu",))
    shape = read_keys(file, _EXPERTS)
    if shape["chosen"] > shape["experts"]:
        raise file.error("num_experts_per_tok", f"1 to {shape['experts']}, which is num_local_experts")
    clamp = Clamp(**read_keys(file, _CLAMP))
    return {
        "windows": read_alternating_windows(file, layers, pattern=2, window=_WINDOW),
        "experts": ExpertsOptions(**shape, normalized=True, layers=(True,) * layers, bias=True, clamp=clamp),
    }


def _write_options(config: DecoderConfig) -> dict[str, Any]:
    experts = config.experts
    assert experts is not None and experts.clamp is not None
    return {
        **write_alternating_windows(config.windows),
        "sliding_window": first_window(config.windows) or _WINDOW,
        **write_keys(experts, _EXPERTS),
        **write_keys(experts.clamp, _CLAMP),
        "output_router_logits": False,
    }


FAMILY: Final = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    layer=Layer,
    max_positions=131072,
    norm_eps=1e-5,
    head_dim=64,
    kv_heads=8,
    reads=("num_local_experts",),
    read_rope=_read_rope,
    keys=(Key("attention_bias", "output_bias", default=True), Key("attention_bias", "qkv_bias", default=True)),
    read_options=_read_options,
    write_options=_write_options,
)
