"""A whole decoder with random weights: which kernels serve it, and whether a request's bits depend on its batch.

    python benchmarks/decoder.py --out results/decoder-h200.json

Generates greedily for 64 requests of mixed lengths in one batch, which they enter one after the other, so that some are
prefilled, a piece at a time, in the very steps in which others decode; then for some of them alone. Compares tokens and
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
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

import detjax
from detjax import backends, fingerprints, ops
from detjax.bench.presets import MODELS, decoder
from detjax.models import Decoder, KVCache

CONSOLE = Console()


@dataclasses.dataclass(frozen=True)
class Load:
    """Requests for one batch.

    Attributes:
        tokens: that each request generates.
        requests: how many, each with a slot of the batch.
        longest: tokens of the longest prompt; the others have from 1 on.
        between: steps from one request's arrival to the next one's.
        piece: tokens of a prompt that a step takes at most.
        alone: how many of the requests are generated alone as well.
    """

    tokens: int = 512
    requests: int = 64
    longest: int = 1500
    between: int = 6
    piece: int = 64
    alone: int = 8

    def prompts(self, vocabulary: int) -> list[list[int]]:
        draw = random.Random(0)
        lengths = [draw.randint(1, self.longest) for _ in range(self.requests)]
        return [[draw.randrange(vocabulary) for _ in range(length)] for length in lengths]


class Batch:
    """Greedy generation for requests that enter at steps of their own."""

    def __init__(self, model: Decoder, load: Load, slots: int) -> None:
        graph, self.state = nnx.split(model)
        self.load, self.slots = load, slots
        self.cache = KVCache.empty(model.config, slots, load.longest + load.tokens, model.dtype)

        def step(state: Any, cache: KVCache, last: jax.Array, tokens: jax.Array, counts: jax.Array, decodes: jax.Array):
            model = nnx.merge(graph, state)
            tokens = tokens.at[:, 0].set(jnp.where(decodes, last, tokens[:, 0]))
            hidden, cache = model.hidden(tokens, cache, counts)
            hidden = jnp.take_along_axis(hidden, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
            logits = model.logits(hidden)
            chosen = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            logprobs = jnp.take_along_axis(ops.log_softmax(logits), chosen[:, None], axis=1)[:, 0]
            return cache, jnp.where(counts > 0, chosen, last), logprobs

        self.step = detjax.jit(step, donate_argnums=(1,))

    def run(self, prompts: list[list[int]]) -> tuple[list[tuple[bytes, bytes]], dict[str, int]]:
        """Bits of each request's tokens and logprobs, and how many steps there were of which kind."""
        load, slots = self.load, self.slots
        taken, left = [0] * len(prompts), [load.tokens] * len(prompts)
        found: list[list[tuple[int, int]]] = [[] for _ in prompts]
        cache = dataclasses.replace(self.cache, lengths=jnp.zeros(slots, jnp.int32))
        last, steps, kinds = jnp.zeros(slots, jnp.int32), [], collections.Counter[str]()
        while any(left):
            number = len(steps)
            present = [i for i in range(len(prompts)) if number >= i * load.between and left[i]]
            prefilled = [i for i in present if taken[i] < len(prompts[i])]
            decoding = [i for i in present if taken[i] == len(prompts[i])]
            tokens = np.zeros((slots, load.piece if prefilled else 1), np.int32)
            counts, decodes = np.zeros(slots, np.int32), np.zeros(slots, bool)
            for i in prefilled:
                piece = prompts[i][taken[i] : taken[i] + load.piece]
                tokens[i, : len(piece)], counts[i] = piece, len(piece)
                taken[i] += len(piece)
            for i in decoding:
                counts[i], decodes[i] = 1, True
            for i in present:
                if taken[i] == len(prompts[i]):
                    found[i].append((number, i))
                    left[i] -= 1
            inputs = (jnp.asarray(x) for x in (tokens, counts, decodes))
            cache, last, logprobs = self.step(self.state, cache, last, *inputs)
            steps.append((last, logprobs))
            kinds["both" if prefilled and decoding else "prefill" if prefilled else "decode"] += 1
        self.cache = cache
        all_tokens, all_logprobs = (np.stack(jax.device_get(x)) for x in zip(*steps, strict=True))
        places = [tuple(zip(*of, strict=True)) for of in found]
        return [(all_tokens[at].tobytes(), all_logprobs[at].tobytes()) for at in places], dict(kinds)


def compare_batches(model: Decoder, load: Load) -> dict[str, Any]:
    """Tokens and logprobs of requests alone against the same requests in a batch."""
    prompts = load.prompts(model.config.vocab_size)
    start = time.perf_counter()
    together, kinds = Batch(model, load, load.requests).run(prompts)
    seconds = time.perf_counter() - start
    one = Batch(model, load, 1)
    chosen = [round(i * (load.requests - 1) / max(load.alone - 1, 1)) for i in range(load.alone)]
    differing = [i for i in chosen if one.run([prompts[i]])[0][0] != together[i]]
    return {
        **dataclasses.asdict(load),
        "steps": kinds,
        "distinct completions": len(set(together)),
        "requests compared": chosen,
        "requests alone that differ": differing,
        "seconds together, compilation included": seconds,
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
    parser.add_argument("--tokens", type=int, default=Load.tokens, help="that each request generates")
    parser.add_argument("--batch", type=int, default=Load.requests, help="requests")
    parser.add_argument("--longest", type=int, default=Load.longest, help="tokens of the longest prompt")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "decoder-h200.json")
    arguments = parser.parse_args()
    model = decoder(arguments.model, arguments.layers)
    result: dict[str, Any] = {
        "model": arguments.model,
        "layers": model.config.layers,
        "fingerprint": dataclasses.asdict(fingerprints.fingerprint()),
        "kernels of a decode step": kernels_of(model, arguments.batch),
    }
    CONSOLE.print(f"{arguments.model}, {model.config.layers} layers, {backends.device_name()}, {backends.backend()}")
    CONSOLE.print(result["kernels of a decode step"])
    load = Load(arguments.tokens, arguments.batch, arguments.longest, alone=min(Load.alone, arguments.batch))
    result["batches"] = compare_batches(model, load)
    CONSOLE.print(result["batches"])
    table = Table("batch", "backend", "ms a step")
    result["step seconds"] = {}
    for batch in (1, arguments.batch):
        for backend in (backends.backend(), backends.STOCK):
            seconds = step_seconds(model, batch, backend)
            result["step seconds"][f"{backend}, batch {batch}"] = seconds
            table.add_row(str(batch), backend, f"{seconds * 1e3:.2f}")
    CONSOLE.print(table)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["batches"]["requests alone that differ"] else 0


if __name__ == "__main__":
    sys.exit(main())
