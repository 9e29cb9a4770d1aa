"""A whole decoder with random weights: which kernels serve it, and whether a request's bits depend on its batch.

    python benchmarks/decoder.py --out results/decoder-h200.json

Generates greedily for 64 requests of mixed lengths together and for three of them alone, and compares tokens and
logprobs bit by bit. Counts the kernels that a decode step is made of, and times it.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import argparse
import collections
import dataclasses
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console
from rich.table import Table

import detjax
from detjax import platform
from detjax.models import Decoder, KVCache
from detjax.models.config import DecoderConfig

BATCH = 64
CONSOLE = Console()

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "tiny": {
        **_QWEN3,
        "head_dim": 32,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "tie_word_embeddings": True,
    },
}


def decoder(name: str, layers: int | None) -> Decoder:
    """A decoder of the shape named, with random bfloat16 weights."""
    raw = {**MODELS[name], **({} if layers is None else {"num_hidden_layers": layers})}
    config = DecoderConfig.from_hugging_face(raw, name)
    make = jax.jit(lambda: nnx.split(Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))[1])
    graph = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)))[0]
    return nnx.merge(graph, make())


def compare_batches(model: Decoder, tokens: int, batch: int) -> dict[str, Any]:
    """Tokens and logprobs of requests alone against the same requests in a batch."""
    draw = random.Random(0)
    vocabulary = model.config.vocab_size
    prompts = [[draw.randrange(vocabulary) for _ in range(draw.randint(1, 48))] for _ in range(batch)]
    sampling = detjax.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    together = detjax.generate(model, prompts, sampling)
    seconds = time.perf_counter() - start
    differing = []
    for index in sorted({0, batch // 2, batch - 1}):
        (alone,) = detjax.generate(model, [prompts[index]], sampling)
        a, b = alone.completions[0], together[index].completions[0]
        if (a.tokens, a.logprobs) != (b.tokens, b.logprobs):
            differing.append(index)
    distinct = len({g.completions[0].tokens for g in together})
    return {
        "requests": batch,
        "tokens each": tokens,
        "distinct completions": distinct,
        "requests alone that differ": differing,
        "seconds together": seconds,
    }


def decode_step(model: Decoder, batch: int) -> tuple[Any, tuple[Any, ...]]:
    """A function of one decode step and arguments for it."""
    graph, state = nnx.split(model)
    cache = KVCache.empty(model.config, batch, 256, model.dtype)
    cache = dataclasses.replace(cache, lengths=jnp.full(batch, 100, jnp.int32))
    tokens = jnp.arange(batch, dtype=jnp.int32)[:, None]

    def step(state: Any, tokens: jax.Array, cache: KVCache) -> jax.Array:
        logits, _ = nnx.merge(graph, state)(tokens, cache)
        return logits

    return step, (state, tokens, cache)


def kernels_of(model: Decoder, batch: int) -> dict[str, int]:
    """How often each kernel, and each dot of XLA's, occurs in a decode step."""
    step, arguments = decode_step(model, batch)
    counts: collections.Counter[str] = collections.Counter()

    @detjax.jit
    def traced() -> int:
        # Within a program of detjax.jit, as the backends under contract ask for on a GPU.
        _count(jax.make_jaxpr(step)(*arguments).jaxpr, counts, 1)
        return 0

    traced()
    return dict(counts)


def _count(jaxpr: Any, counts: collections.Counter[str], times: int) -> None:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if "pallas" in name or "mpmd" in name:
            counts[_kernel_name(equation)] += times
            continue
        if name == "dot_general":
            counts["XLA dot"] += times
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    _count(inner, counts, times)


def _kernel_name(equation: Any) -> str:
    for mesh in equation.params.get("meshes", ()):
        if getattr(mesh, "kernel_name", None):
            return mesh.kernel_name
    return str(equation.params.get("name") or "kernel")


def step_seconds(model: Decoder, batch: int, backend: str) -> float:
    """Median wall time of a decode step."""
    with detjax.use_backend(backend):
        step, arguments = decode_step(model, batch)
        program = detjax.jit(step)
        jax.block_until_ready(program(*arguments))
        times = []
        for _ in range(10):
            start = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="Qwen3-0.6B")
    parser.add_argument("--layers", type=int, help="fewer than the model's own")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "decoder-h200.json")
    arguments = parser.parse_args()
    model = decoder(arguments.model, arguments.layers)
    result: dict[str, Any] = {
        "model": arguments.model,
        "layers": model.config.layers,
        "fingerprint": dataclasses.asdict(platform.fingerprint()),
        "kernels of a decode step": kernels_of(model, arguments.batch),
    }
    CONSOLE.print(f"{arguments.model}, {model.config.layers} layers, {platform.device_name()}, {platform.backend()}")
    CONSOLE.print(result["kernels of a decode step"])
    result["batches"] = compare_batches(model, arguments.tokens, arguments.batch)
    CONSOLE.print(result["batches"])
    table = Table("batch", "backend", "ms a step")
    result["step seconds"] = {}
    for batch in (1, arguments.batch):
        for backend in (platform.backend(), platform.STOCK):
            seconds = step_seconds(model, batch, backend)
            result["step seconds"][f"{backend}, batch {batch}"] = seconds
            table.add_row(str(batch), backend, f"{seconds * 1e3:.2f}")
    CONSOLE.print(table)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["batches"]["requests alone that differ"] else 0


if __name__ == "__main__":
    sys.exit(main())
