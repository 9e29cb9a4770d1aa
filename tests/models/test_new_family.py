"""A family of existing parts is one file: an imaginary one is read, run, saved, and served by the engine."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import detjax
from detjax import SamplingParams
from detjax.bench import presets
from detjax.models import CheckpointError, Decoder, DecoderConfig, KVCache, load, save
from detjax.models.configuration.family import Family, families
from detjax.models.configuration.keys import Key
from detjax.models.parts.attention import Attention, AttentionOptions
from detjax.models.parts.mlp import GatedMLP, MLPOptions
from detjax.models.parts.norm import RMSNorm
from detjax.models.parts.state import PagedKeysAndValues
from detjax.operands.kv_pages import KVPages, Queries
from tests.support.bits import assert_same_bits


class ParallelLayer(nnx.Module):
    """Attention and MLP of one norm, side by side (as in GPT-J), with names of their own in the checkpoint."""

    CHECKPOINT_NAMES = {"norm": "ln", "attention": "attn", "mlp": "ffn"}  # noqa: RUF012

    def __init__(self, config: DecoderConfig, index: int, *, rngs: nnx.Rngs, dtype: Any) -> None:
        width, mlp = config.hidden_size, MLPOptions(inner_width=48, activation="gelu", bias=config.mlp_bias)
        self.norm = RMSNorm(width, eps=config.norm_eps, dtype=dtype)
        self.attention = Attention(width, attention_options(config), rngs=rngs, dtype=dtype)
        self.mlp = GatedMLP(width, mlp, rngs=rngs, dtype=dtype)

    @staticmethod
    def state(config: DecoderConfig, index: int) -> PagedKeysAndValues:
        return attention_options(config).state

    def __call__(self, x: jax.Array, queries: Queries, kv: KVPages) -> tuple[jax.Array, KVPages]:
        y = self.norm(x)
        x, kv = self.attention(y, queries, kv, residual=x)
        return self.mlp(y, residual=x), kv


def attention_options(config: DecoderConfig) -> AttentionOptions:
    sizes: dict[str, Any] = {"heads": config.heads, "kv_heads": config.kv_heads, "head_dim": config.head_dim}
    return AttentionOptions(**sizes, rope=config.rope, window=3, qkv_bias=True, qk_norm_eps=1e-5)


FAMILY = Family(
    architecture="ParallelForCausalLM",
    model_type="parallel",
    layer=ParallelLayer,
    max_positions=256,
    keys=(Key("ffn_bias", "mlp_bias", default=False),),
    read_options=lambda file, layers: {"windows": (None,) * layers},
)
RAW: dict[str, Any] = {
    "architectures": ["ParallelForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "ffn_bias": True,
}


@pytest.fixture(autouse=True)
def family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families(), FAMILY.architecture, FAMILY)


@functools.cache
def model(layers: int) -> Decoder:
    config = DecoderConfig.from_hugging_face(RAW | {"num_hidden_layers": layers}, "config.json")
    return Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.float32)


def test_its_checkpoint_has_the_names_of_its_parts(tmp_path: Path) -> None:
    save(model(2), tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["ffn_bias"] is True
    again, _ = load(tmp_path / "saved", progress=False)
    assert_same_bits(nnx.state(again), nnx.state(model(2)))
    names = load_file(tmp_path / "saved" / "model.safetensors").keys()
    assert {"model.layers.1.attn.k_proj.weight", "model.layers.0.ffn.up_proj.bias", "model.layers.0.ln.weight"} <= names


@pytest.mark.parametrize("in_engine", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_its_decode_gives_the_bits_of_prefill(in_engine: bool) -> None:
    decoder = model(1)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 40, (2, 6)), jnp.int32)
    whole = detjax.jit(lambda tokens: decoder(tokens))(tokens)
    step = detjax.jit(lambda tokens, cache: decoder(tokens, cache))
    cache = KVCache.empty(decoder.config, 2, 6, jnp.float32)
    for index in range(6):
        logits, cache = step(tokens[:, index : index + 1], cache)
        assert_same_bits(logits[:, 0], whole[:, index])
    if in_engine:
        (generation,) = detjax.generate(decoder, [[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))
        answer = generation.completions[0].tokens
        likeliest = decoder(jnp.asarray([[1, 2, 3, *answer[:-1]]]))[0, 2:].argmax(axis=-1)
        assert answer == tuple(likeliest.tolist())


def test_it_is_unknown_without_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(families(), FAMILY.architecture)
    message = r"ParallelForCausalLM.*; accepted: .*LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM, "
    with pytest.raises(CheckpointError, match=message):
        DecoderConfig.from_hugging_face(RAW, "config.json")
    config = dataclasses.replace(presets.config("tiny"), architecture="ParallelForCausalLM")
    with pytest.raises(ValueError, match=f"Decoder: architecture is .{message}"):
        Decoder(config, rngs=nnx.Rngs(0))
