"""Tiny models, with random weights, of the classes that others published: no operation of detjax is in them."""

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FLAX_EXAMPLES = Path(sys.prefix) / "flax" / "examples"
"""The folder `examples` of Flax' source archive; its wheel has none."""

type Inputs = Callable[[int, int], tuple[Any, ...]]
type Built = tuple[Callable[..., Any], Any, Inputs]
"""A function of weights and inputs, its weights, and its inputs by the number of rows and a seed."""


@dataclasses.dataclass(frozen=True)
class Published:
    """A model that others published.

    Attributes:
        title: its name in tables.
        package: the distribution that it comes with.
        build: gives its function, weights and inputs in a dtype.
    """

    title: str
    package: str
    build: Callable[[Any], Built]


def _tokens(length: int = 24, vocabulary: int = 500) -> Inputs:
    return lambda rows, seed: (
        jnp.asarray(np.random.default_rng(seed).integers(1, vocabulary, (rows, length)), jnp.int32),
    )


def _numbers(*shape: int) -> Inputs:
    return lambda rows, seed: (jnp.asarray(np.random.default_rng(seed).standard_normal((rows, *shape)), jnp.float32),)


def _weights(tree: Any, dtype: Any) -> Any:
    """A model's weights in a dtype; matrices and scales that begin as zeros are random, or layers would do nothing."""
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [x for _, x in paths]
    for place, (path, x) in enumerate(paths):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            continue
        if (x.ndim > 1 or "scale" in jax.tree_util.keystr(path)) and not jnp.any(x):
            x = 0.05 * jax.random.normal(jax.random.fold_in(jax.random.key(1), place), x.shape)
        leaves[place] = x.astype(dtype)
    return jax.tree.unflatten(structure, leaves)


# --- transformers -----------------------------------------------------------------------------------------------------

_SMALL = {"vocab_size": 500, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_GPT2 = {"vocab_size": 500, "n_positions": 64, "n_embd": 128, "n_layer": 2, "n_head": 4}
_LLAMA = _SMALL | {"intermediate_size": 352, "num_key_value_heads": 2, "max_position_embeddings": 64}
_VIT = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
_T5 = {"vocab_size": 500, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4}


def _hugging_face(name: str, config: str, result: str, inputs: Inputs, dtype: Any, **sizes: Any) -> Built:
    transformers: Any = importlib.import_module("transformers")
    model = getattr(transformers, name)(getattr(transformers, config)(**sizes), seed=0, dtype=dtype)
    return lambda params, x: getattr(model(x, params=params), result), _weights(model.params, dtype), inputs


def _bert(dtype: Any) -> Built:
    transformers: Any = importlib.import_module("transformers")
    model = transformers.FlaxBertModel(transformers.BertConfig(**_SMALL, intermediate_size=512), seed=0, dtype=dtype)

    def inputs(rows: int, seed: int) -> tuple[Any, ...]:
        lengths = np.random.default_rng(seed).integers(5, 25, (rows, 1))
        return *_tokens()(rows, seed), jnp.asarray(np.arange(24) < lengths, jnp.int32)

    return lambda p, x, mask: model(x, mask, params=p).last_hidden_state, _weights(model.params, dtype), inputs


def _t5(dtype: Any) -> Built:
    transformers: Any = importlib.import_module("transformers")
    clip = jnp.clip  # transformers names an argument of clip that JAX has no more
    setattr(jnp, "clip", lambda x, *a, a_max=None, **k: clip(x, *a, **(k if a_max is None else k | {"max": a_max})))  # noqa: B010
    config = transformers.T5Config(**_T5, feed_forward_proj="gated-gelu")
    model = transformers.FlaxT5ForConditionalGeneration(config, seed=0, dtype=dtype)

    def inputs(rows: int, seed: int) -> tuple[Any, ...]:
        return *_tokens()(rows, seed), *_tokens(12)(rows, seed + 1)

    return lambda p, x, y: model(x, decoder_input_ids=y, params=p).logits, _weights(model.params, dtype), inputs


# --- Flax' examples ---------------------------------------------------------------------------------------------------


def _flax_example(folder: str, *names: str) -> list[Any]:
    """Modules of an example, which import one another by their bare names; other examples have the same names."""
    before = set(sys.modules)
    sys.path.insert(0, str(FLAX_EXAMPLES / folder))
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path.pop(0)
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(FLAX_EXAMPLES)):
                del sys.modules[name]


def _lm1b(dtype: Any) -> Built:
    (module,) = _flax_example("lm1b", "models")
    sizes = {"emb_dim": 128, "num_heads": 4, "num_layers": 2, "qkv_dim": 128, "mlp_dim": 512, "max_len": 64}
    config = module.TransformerConfig(vocab_size=500, output_vocab_size=500, dtype=dtype, deterministic=True, **sizes)
    model, inputs = module.TransformerLM(config), _tokens()
    return model.apply, _weights(model.init(jax.random.key(0), *inputs(1, 0)), dtype), inputs


def _flax_resnet(dtype: Any) -> Built:
    (module,) = _flax_example("imagenet", "models")
    model, inputs = module.ResNet18(num_classes=100, dtype=dtype, num_filters=16), _numbers(64, 64, 3)
    apply = functools.partial(model.apply, train=False)
    return apply, _weights(model.init(jax.random.key(0), *inputs(1, 0), train=False), dtype), inputs


def _flax_gemma(dtype: Any) -> Built:
    module, configs = _flax_example("gemma", "transformer", "transformer_cfg")
    kinds = configs.AttentionType
    sizes = {"num_layers": 2, "num_embed": 500, "embed_dim": 128, "hidden_dim": 256, "num_heads": 4, "head_dim": 32}
    config = configs.TransformerConfig(
        **sizes,
        num_kv_heads=2,
        final_logit_softcap=30.0,
        attn_logits_soft_cap=50.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        use_qk_norm=True,
        sliding_window_size=8,
        attention_types=[kinds.LOCAL_SLIDING, kinds.GLOBAL],
        dtype=dtype,
        weight_dtype=dtype,
    )

    def call(model: Any, tokens: Any) -> Any:
        mask = tokens > 0
        return model(tokens, module.build_positions_from_mask(mask), None, module.make_causal_attn_mask(mask))[0]

    return _nnx(module.Transformer(config, rngs=_rngs()), call, _tokens(), dtype)


# --- NNX --------------------------------------------------------------------------------------------------------------


def _rngs() -> Any:
    return importlib.import_module("flax.nnx").Rngs(0)


def _nnx(model: Any, call: Callable[..., Any], inputs: Inputs, dtype: Any) -> Built:
    nnx: Any = importlib.import_module("flax.nnx")
    model.eval()
    graph, state = nnx.split(model)
    return lambda s, *x: call(nnx.merge(graph, s), *x), _weights(state, dtype), inputs


def _bonsai(folder: str) -> Any:
    return importlib.import_module(f"bonsai.models.{folder}.modeling")


def _bonsai_qwen3(dtype: Any) -> Built:
    m = _bonsai("qwen3")
    sizes = {"num_layers": 2, "vocab_size": 500, "emb_dim": 128, "mlp_dim": 352, "num_heads": 4, "head_dim": 32}
    rope = {"rope_theta": 10000, "rope_scaling_factor": 1.0, "local_rope_theta": 1e4}
    config = m.ModelConfig(**sizes, **rope, num_kv_heads=2, norm_eps=1e-6, tie_word_embeddings=True)

    def call(model: Any, tokens: Any) -> Any:
        cache = [m.LayerCache(config, tokens.shape[0], 32, dtype) for _ in range(config.num_layers)]
        return model(tokens, cache=cache, segment_ids=jnp.ones_like(tokens))

    return _nnx(m.Qwen3(config, rngs=_rngs()), call, _tokens(), dtype)


def _bonsai_vit(dtype: Any) -> Built:
    m = _bonsai("vit")
    sizes = {"hidden_dim": 128, "num_heads": 4, "mlp_dim": 256, "num_layers": 2, "num_labels": 100, "num_channels": 3}
    rates = {"attn_dropout_prob": 0.0, "dropout_prob": 0.0, "eps": 1e-12}
    model = m.ViTClassificationModel(
        m.ModelConfig(image_size=(48, 48), patch_size=(8, 8), **sizes, **rates), rngs=_rngs()
    )
    return _nnx(model, lambda model, x: model(x.astype(dtype), rngs=None), _numbers(48, 48, 3), dtype)


def _bonsai_resnet(dtype: Any) -> Built:
    m = _bonsai("resnet")
    model = m.ResNet(m.ModelConfig([1, 1, 1, 1], 100), rngs=_rngs())
    return _nnx(model, lambda model, x: model(x.astype(dtype)), _numbers(64, 64, 3), dtype)


def _bonsai_mamba2(dtype: Any) -> Built:
    m = _bonsai("mamba2")
    model = m.Mamba2ForCausalLM(m.ModelConfig.tiny(), rngs=_rngs())
    return _nnx(model, lambda model, x: model(x)["logits"], _tokens(40, 1000), dtype)


def _bonsai_whisper(dtype: Any) -> Built:
    m = _bonsai("whisper")
    sizes = {"d_model": 128, "encoder_attention_heads": 4, "encoder_ffn_dim": 256, "encoder_layers": 2}
    config = dataclasses.replace(m.ModelConfig.whisper_tiny(), **sizes, max_source_positions=32, num_mel_bins=40)
    model = m.WhisperEncoder(config, rngs=_rngs())
    return _nnx(model, lambda model, x: model(x.astype(dtype)), _numbers(64, 40), dtype)


def _bonsai_efficientnet(dtype: Any) -> Built:
    m = _bonsai("efficientnet")
    model = m.EfficientNet(m.ModelConfig.b0(), rngs=_rngs())
    return _nnx(model, lambda model, x: model(x.astype(dtype)), _numbers(64, 64, 3), dtype)


# --- Tunix and Gemma --------------------------------------------------------------------------------------------------


def _causal(tokens: Any) -> Any:
    rows, length = tokens.shape
    return jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))


_TUNIX = {"num_layers": 2, "embed_dim": 128, "hidden_dim": 256, "num_heads": 4, "head_dim": 32, "num_kv_heads": 2}
_TUNIX_LM = _TUNIX | {"vocab_size": 500, "rope_theta": 10000, "norm_eps": 1e-6}


def _tunix(folder: str, name: str, **sizes: Any) -> Callable[[Any], Built]:
    def build(dtype: Any) -> Built:
        m = importlib.import_module(f"tunix.models.{folder}.model")
        # Llama takes its dtype from its weights.
        dtypes = {"dtype", "param_dtype"} & {field.name for field in dataclasses.fields(m.ModelConfig)}
        config = m.ModelConfig(**_TUNIX_LM, **sizes, **dict.fromkeys(dtypes, dtype))

        def call(model: Any, tokens: Any) -> Any:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            return model(tokens, positions, None, _causal(tokens))[0]

        return _nnx(getattr(m, name)(config, rngs=_rngs()), call, _tokens(), dtype)

    return build


def _tunix_gemma4(dtype: Any) -> Built:
    m = importlib.import_module("tunix.models.gemma4.model")
    experts = {"enable_moe": True, "num_experts": 8, "num_experts_per_tok": 2, "expert_dim": 64}
    config = m.ModelConfig(
        **_TUNIX,
        **experts,
        num_embed=500,
        moe_dense_hidden_dim=128,
        global_key_size=32,
        sliding_window_size=8,
        attention_pattern=(m.AttentionType.LOCAL_SLIDING, m.AttentionType.GLOBAL),
        dtype=dtype,
        param_dtype=dtype,
    )
    model = m.Gemma4(config, rngs=_rngs())
    return _nnx(model, lambda model, x: model(x, None, None, _causal(x))[0], _tokens(), dtype)


def _gemma(dtype: Any) -> Built:
    gm: Any = importlib.import_module("gemma.gm")
    original = gm.nn.Gemma3_1B.config
    sizes = {"num_embed": 500, "embed_dim": 128, "hidden_dim": 256, "num_heads": 4, "head_dim": 32, "num_kv_heads": 2}
    # The fifth to seventh layers: two with a window, and one without.
    layers = original.attention_types[4:7]
    config = dataclasses.replace(original, **sizes, attention_types=layers, sliding_window_size=8)
    model, inputs = gm.nn.Transformer(config=config, tokens="tokens", dtype=dtype), _tokens()
    weights = _weights(model.init(jax.random.key(0), *inputs(1, 0)), dtype)
    return lambda p, x: model.apply(p, x).logits, weights, inputs


# --- equinox ----------------------------------------------------------------------------------------------------------


def _equinox(dtype: Any) -> Built:
    """One example a call, under `jax.vmap`, as equinox' programs are written."""
    eqx: Any = importlib.import_module("equinox")
    keys = jax.random.split(jax.random.key(0), 6)
    model = (
        eqx.nn.Embedding(500, 128, key=keys[0]),
        eqx.nn.MultiheadAttention(4, 128, key=keys[1]),
        eqx.nn.MLP(128, 128, 256, 1, jax.nn.gelu, key=keys[2]),
        (eqx.nn.LayerNorm(128), eqx.nn.RMSNorm(128)),
        eqx.nn.Linear(128, 500, key=keys[3]),
    )
    arrays, static = eqx.partition(model, eqx.is_array)

    def fn(arrays: Any, tokens: Any) -> Any:
        embed, attention, mlp, norms, head = eqx.combine(arrays, static)

        def example(tokens: Any) -> Any:
            x = jax.vmap(embed)(tokens)
            h = jax.vmap(norms[0])(x)
            x = x + attention(h, h, h, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)))
            return jax.vmap(head)(x + jax.vmap(mlp)(jax.vmap(norms[1])(x)))

        return jax.vmap(example)(tokens)

    return fn, _weights(arrays, dtype), _tokens()


# --- all of them ------------------------------------------------------------------------------------------------------

MODELS: dict[str, Published] = {
    "gpt2": Published(
        "GPT-2",
        "transformers",
        lambda d: _hugging_face("FlaxGPT2LMHeadModel", "GPT2Config", "logits", _tokens(), d, **_GPT2),
    ),
    "llama": Published(
        "Llama",
        "transformers",
        lambda d: _hugging_face("FlaxLlamaForCausalLM", "LlamaConfig", "logits", _tokens(), d, **_LLAMA),
    ),
    "bert": Published("BERT", "transformers", _bert),
    "t5": Published("T5", "transformers", _t5),
    "vit": Published(
        "ViT",
        "transformers",
        lambda d: _hugging_face(
            "FlaxViTModel",
            "ViTConfig",
            "last_hidden_state",
            _numbers(3, 48, 48),
            d,
            **_VIT,
            image_size=48,
            patch_size=8,
        ),
    ),
    "flax-lm1b": Published("lm1b", "flax", _lm1b),
    "flax-gemma": Published("Gemma", "flax", _flax_gemma),
    "flax-resnet": Published("ResNet", "flax", _flax_resnet),
    "bonsai-qwen3": Published("Qwen3, with its cache", "jax-bonsai", _bonsai_qwen3),
    "bonsai-vit": Published("ViT", "jax-bonsai", _bonsai_vit),
    "bonsai-resnet": Published("ResNet", "jax-bonsai", _bonsai_resnet),
    "bonsai-mamba2": Published("Mamba2", "jax-bonsai", _bonsai_mamba2),
    "bonsai-whisper": Published("Whisper's encoder", "jax-bonsai", _bonsai_whisper),
    "bonsai-efficientnet": Published("EfficientNet", "jax-bonsai", _bonsai_efficientnet),
    "equinox": Published("a transformer under `jax.vmap`", "equinox", _equinox),
    "tunix-qwen3": Published("Qwen3", "google-tunix", _tunix("qwen3", "Qwen3")),
    "tunix-llama3": Published("Llama 3", "google-tunix", _tunix("llama3", "Llama3")),
    "tunix-qwen3-moe": Published(
        "Qwen3-MoE", "google-tunix", _tunix("qwen3", "Qwen3", num_experts=8, num_experts_per_tok=2)
    ),
    "tunix-gemma4-moe": Published("Gemma 4, with experts", "google-tunix", _tunix_gemma4),
    "gemma": Published("Gemma 3", "gemma", _gemma),
}
