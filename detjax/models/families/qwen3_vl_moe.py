"""Qwen3-VL with mixtures of experts (Bai et al. 2025): experts in place of MLPs in all layers or in some.

The weights of a token's experts always add up to 1.
"""

import dataclasses
from typing import Any, Final

from detjax.models.configuration import experts_config
from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import Family
from detjax.models.configuration.json_object import JsonObject
from detjax.models.configuration.keys import ATTENTION_BIAS, Key, read_keys
from detjax.models.configuration.rope_config import write_rope
from detjax.models.configuration.windows import read_uniform_windows
from detjax.models.families import mixture, qwen3_vl, qwen_tower
from detjax.models.parts.experts import Experts, ExpertsOptions
from detjax.models.parts.parameters import Tensors

_EXPERTS: Final = (Key("num_experts_per_tok", "chosen", 4), Key("moe_intermediate_size", "inner_width", 1408))


class _Experts(Experts):
    """Experts that checkpoints hold in one tensor, whose rows are inputs. transformers writes outputs as rows."""

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter. If the shapes fit several forms, the first one counts."""
        by_expert = super().tensors
        rows_are_outputs = {
            "gate_up": Tensors(("experts.gate_up_proj",), pairs="halves", other_form=by_expert["gate_up"]),
            "down": Tensors(("experts.down_proj",), other_form=by_expert["down"]),
        }
        return {
            name: dataclasses.replace(form, transposed=True, other_form=form) for name, form in rows_are_outputs.items()
        }


class Layer(mixture.Layer):
    """The layer of Qwen3-MoE, with experts in one tensor."""

    EXPERTS = _Experts


def _read_options(file: JsonObject, layers: int) -> dict[str, Any]:
    experts = ExpertsOptions(
        experts=experts_config.read_count(file, 60),
        **read_keys(file, _EXPERTS),
        normalized=True,
        layers=experts_config.read_sparse_layers(file, layers),
    )
    return {"windows": read_uniform_windows(file, layers, "qwen3_vl_moe"), "qk_norm": True, "experts": experts}


def _write_options(config: DecoderConfig) -> dict[str, Any]:
    experts = config.experts
    assert experts is not None
    return {
        **write_rope(config.rope),
        **experts_config.write_experts(experts, _EXPERTS),
        **experts_config.write_sparse_layers(experts.layers),
        "norm_topk_prob": True,
    }


_TEXT: Final = Family(
    architecture="Qwen3VLMoeTextModel",
    model_type="qwen3_vl_moe_text",
    layer=Layer,
    ties_at_top=True,
    max_positions=128000,
    kv_heads=16,
    intermediate_size=("intermediate_size", 5632),
    reads=experts_config.COUNTS,
    read_rope=qwen3_vl.read_text_rope,
    keys=ATTENTION_BIAS,
    read_options=_read_options,
    write_options=_write_options,
)
FAMILY: Final = qwen_tower.with_tower(_TEXT, qwen3_vl.TOWER, "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe")
