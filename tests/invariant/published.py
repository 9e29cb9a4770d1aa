"""Models that others published, tiny and random: `python -m tests.invariant.published NAME [--dtype bfloat16]`.

It runs in an environment of its own, which `make test-models` makes, and prints a line of JSON: the batches among which
a row has other bits than alone, under stock XLA and under `batch_invariant`, what `detjax.certify` says of both, how
far numbers are from the original, and the versions of the packages. `--table` prints the lines of such a file as
Markdown.
`--source FOLDER`, repeatable, makes packages importable that are not in an index, such as bonsai's.
"""

import argparse
import dataclasses
import functools
import importlib
import importlib.metadata
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import detjax

BATCHES = (2, 3, 8, 17, 64)
CERTIFIED = (1, 2, 3, 8, 17)
"""The batches that certificates run, at most."""
PACKAGES = ("jax", "flax", "transformers", "equinox")

type Inputs = Callable[[int, int], tuple[Any, ...]]
type Built = tuple[Callable[..., Any], Any, Inputs]
"""A function of weights and inputs, its weights, and its inputs by the number of rows and a seed."""


def _tokens(length: int = 24, vocabulary: int = 500) -> Inputs:
    return lambda rows, seed: (
        jnp.asarray(np.random.default_rng(seed).integers(1, vocabulary, (rows, length)), jnp.int32),
    )


def _images(*shape: int) -> Inputs:
    return lambda rows, seed: (jnp.asarray(np.random.default_rng(seed).standard_normal((rows, *shape)), jnp.float32),)


def _in_dtype(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def _hugging_face(name: str, config: str, result: str, inputs: Inputs, dtype: Any, **sizes: Any) -> Built:
    transformers: Any = importlib.import_module("transformers")
    model = getattr(transformers, name)(getattr(transformers, config)(**sizes), seed=0, dtype=dtype)
    return lambda params, x: getattr(model(x, params=params), result), _in_dtype(model.params, dtype), inputs


_SMALL = {"vocab_size": 500, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_GPT2 = {"vocab_size": 500, "n_positions": 64, "n_embd": 128, "n_layer": 2, "n_head": 4}
_LLAMA = _SMALL | {"intermediate_size": 352, "num_key_value_heads": 2, "max_position_embeddings": 64}
_VIT = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}


def _t5(dtype: Any) -> Built:
    transformers: Any = importlib.import_module("transformers")
    clip = jnp.clip  # transformers names an argument of clip that JAX has no more
    setattr(jnp, "clip", lambda x, *a, a_max=None, **k: clip(x, *a, **(k if a_max is None else k | {"max": a_max})))  # noqa: B010
    sizes = {"vocab_size": 500, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**sizes, feed_forward_proj="gated-gelu")
    model = transformers.FlaxT5ForConditionalGeneration(config, seed=0, dtype=dtype)

    def inputs(rows: int, seed: int) -> tuple[Any, ...]:
        return *_tokens()(rows, seed), *_tokens(12)(rows, seed + 1)

    return lambda p, x, y: model(x, decoder_input_ids=y, params=p).logits, _in_dtype(model.params, dtype), inputs


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

    return fn, _in_dtype(arrays, dtype), _tokens()


def _bonsai(folder: str, build: Callable[[Any], Any], call: Callable[..., Any], inputs: Inputs, dtype: Any) -> Built:
    nnx: Any = importlib.import_module("flax.nnx")
    modeling = importlib.import_module(f"bonsai.models.{folder}.modeling")
    graph, state = nnx.split(build(modeling))
    return lambda s, x: call(modeling, nnx.merge(graph, s), x, dtype), _in_dtype(state, dtype), inputs


def _rngs() -> Any:
    return importlib.import_module("flax.nnx").Rngs(0)


def _qwen3_config(modeling: Any) -> Any:
    sizes = {"num_layers": 2, "vocab_size": 500, "emb_dim": 128, "mlp_dim": 352, "num_heads": 4, "head_dim": 32}
    rope = {"rope_theta": 10000, "rope_scaling_factor": 1.0, "local_rope_theta": 1e4}
    return modeling.ModelConfig(**sizes, **rope, num_kv_heads=2, norm_eps=1e-6, tie_word_embeddings=True)


def _call_qwen3(modeling: Any, model: Any, tokens: Any, dtype: Any) -> Any:
    config = _qwen3_config(modeling)
    cache = [modeling.LayerCache(config, tokens.shape[0], 32, dtype) for _ in range(config.num_layers)]
    return model(tokens, cache=cache, segment_ids=jnp.ones_like(tokens))


MODELS: dict[str, Callable[[Any], Built]] = {
    "gpt2": lambda d: _hugging_face("FlaxGPT2LMHeadModel", "GPT2Config", "logits", _tokens(), d, **_GPT2),
    "llama": lambda d: _hugging_face("FlaxLlamaForCausalLM", "LlamaConfig", "logits", _tokens(), d, **_LLAMA),
    "bert": lambda d: _hugging_face(
        "FlaxBertModel", "BertConfig", "last_hidden_state", _tokens(), d, **_SMALL, intermediate_size=512
    ),
    "vit": lambda d: _hugging_face(
        "FlaxViTModel", "ViTConfig", "last_hidden_state", _images(3, 48, 48), d, **_VIT, image_size=48, patch_size=8
    ),
    "t5": _t5,
    "equinox": _equinox,
}
BONSAI: dict[str, Callable[[Any], Built]] = {
    "bonsai-qwen3": lambda d: _bonsai(
        "qwen3", lambda m: m.Qwen3(_qwen3_config(m), rngs=_rngs()), _call_qwen3, _tokens(), d
    ),
    "bonsai-resnet": lambda d: _bonsai(
        "resnet",
        lambda m: m.ResNet(m.ModelConfig([1, 1, 1, 1], 100), rngs=_rngs()),
        lambda m, model, x, dtype: model(x.astype(dtype)),
        _images(64, 64, 3),
        d,
    ),
    "bonsai-mamba2": lambda d: _bonsai(
        "mamba2",
        lambda m: m.Mamba2ForCausalLM(m.ModelConfig.tiny(), rngs=_rngs()),
        lambda m, model, x, dtype: model(x)["logits"],
        _tokens(40, 1000),
        d,
    ),
}
"""Models that `--source` makes importable."""


@dataclasses.dataclass
class Result:
    """What was seen of a model.

    Attributes:
        model: its name.
        dtype: that of its weights.
        stock: the batches among which a row has other bits than alone under stock XLA.
        invariant: likewise under `batch_invariant`.
        distance: the largest difference from the original, over its largest result.
        gradients: whether the gradient of the weights is finite; None if it was not asked for.
        stock_outcome: what `detjax.certify` says of the model under `jax.jit`.
        stock_risks: the primitives that it names there.
        invariant_outcome: what it says under `batch_invariant`.
        versions: of the packages that are installed.
    """

    model: str
    dtype: str
    stock: list[int]
    invariant: list[int]
    distance: float
    gradients: bool | None
    stock_outcome: str
    stock_risks: list[str]
    invariant_outcome: str
    versions: dict[str, str]


def changed(fn: Callable[..., Any], weights: Any, inputs: Inputs, batches: Sequence[int]) -> list[int]:
    """The batches among which a row has other bits than alone, wherever it stands."""
    alone, among = inputs(1, 0), []
    expected = np.asarray(fn(weights, *alone))[0].tobytes()
    for batch in batches:
        others = inputs(batch, 100 + batch)
        for place in sorted({0, batch - 1}):
            rows = tuple(x.at[place].set(y[0]) for x, y in zip(others, alone, strict=True))
            if np.asarray(fn(weights, *rows))[place].tobytes() != expected:
                among.append(batch)
    return sorted(set(among))


def result(name: str, dtype: str, batches: Sequence[int], with_gradients: bool) -> Result:
    """What is seen of a model."""
    fn, weights, inputs = (MODELS | BONSAI)[name](jnp.dtype(dtype))
    stock = jax.jit(fn)
    invariant = detjax.batch_invariant(fn, (None, *[0] * len(inputs(1, 0))))
    original = np.asarray(stock(weights, *inputs(3, 0)), np.float64)
    distance = np.abs(np.asarray(invariant(weights, *inputs(3, 0)), np.float64) - original).max()
    gradients = None
    if with_gradients:
        total = functools.partial(lambda w, *x: jnp.sum(jnp.square(invariant(w, *x).astype(jnp.float32))))
        made = jax.jit(jax.grad(total, allow_int=True))(weights, *inputs(2, 0))
        gradients = all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(made) if x.dtype != jax.dtypes.float0)
    among = changed(stock, weights, inputs, batches), changed(invariant, weights, inputs, batches)
    # No larger batches than those that were compared above, so that both ought to see the same.
    sizes = [size for size in CERTIFIED if size <= max(batches)]
    arguments, axes = (weights, *inputs(2, 0)), (None, *[0] * len(inputs(1, 0)))
    certificates = [detjax.certify(f, arguments, axes, batch_sizes=sizes) for f in (stock, invariant)]
    return Result(
        model=name,
        dtype=dtype,
        stock=among[0],
        invariant=among[1],
        distance=float(distance / np.abs(original).max()),
        gradients=gradients,
        stock_outcome=certificates[0].outcome.value,
        stock_risks=sorted({risk.primitive for risk in certificates[0].risks}),
        invariant_outcome=certificates[1].outcome.value,
        versions=_versions(),
    )


def _versions() -> dict[str, str]:
    installed = {one.name: one.version for one in importlib.metadata.distributions()}
    return {name: installed[name] for name in PACKAGES if name in installed}


def table(lines: Sequence[str]) -> str:
    """Results, each a line of JSON, as a table in Markdown."""
    rows = [
        "| model | dtype | stock: batches that change bits | `certify` | `batch_invariant` | `certify` | distance |"
    ]
    rows.append("|---|---|---|---|---|---|---|")
    for one in map(json.loads, lines):
        batches = [", ".join(map(str, one[name])) or "none" for name in ("stock", "invariant")]
        cells = one["model"], one["dtype"], batches[0], one["stock_outcome"], batches[1], one["invariant_outcome"]
        rows.append(f"| {' | '.join(cells)} | {one['distance']:.1e} |")
    return "\n".join(rows)


def main() -> None:
    """Prints what is seen of the models that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--batch", type=int, action="append", default=[])
    parser.add_argument("--source", action="append", default=[])
    parser.add_argument("--gradients", action="store_true")
    parser.add_argument("--table", type=argparse.FileType(), help="a file of what this program printed")
    given = parser.parse_args()
    if given.table is not None:
        print(table(given.table.readlines()))
        return
    sys.path[:0] = given.source
    warnings.filterwarnings("ignore")
    for name in given.models:
        print(
            json.dumps(dataclasses.asdict(result(name, given.dtype, given.batch or BATCHES, given.gradients))),
            flush=True,
        )


if __name__ == "__main__":
    main()
