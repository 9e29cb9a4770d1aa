"""Programs for CUDA's compiler, which a process of its own compiles for an H200, on a machine that has none.

    PYTHONPATH=<folder of the compiler>:<repository> python tests/pallas/hopper/compiler.py [NAME ...]

compiles the programs of these names, or all of them. `compiled` runs this, or another such script, from a test. The
compiler is installed by `make test`, in the folder that the environment variable `DETJAX_PTXAS` names.
"""

import dataclasses
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.studies.experts import projections as experts_bench
from detjax import ops
from detjax.bench import presets
from detjax.contract import KV_BLOCK
from detjax.engine import step_programs
from detjax.engine.batch import BatchShape
from detjax.engine.packed_batch import PackedBatch
from detjax.engine.program import Parameters
from detjax.engine.scheduler import ScheduledStep
from detjax.engine.slot_table import SlotTable
from detjax.engine.step_programs import BeforeBlock
from detjax.models import Decoder, KVCache
from detjax.models.adapters.pool import SlotArrays
from detjax.models.adapters.targets import HEAD_PATH, Targets
from detjax.models.blocks import equal_blocks
from detjax.models.cache import declarations
from detjax.models.configuration.config import DecoderConfig
from detjax.models.network import split
from detjax.models.parts.experts import Experts
from detjax.models.parts.state import StateSize
from detjax.models.parts.vision import VisionOptions
from detjax.models.vision.images import ImagePatches, packed
from detjax.operands.adapted_weight import AdaptedWeight
from detjax.operands.attention import AttentionOperands
from detjax.operands.kv_pages import KeyColumns, KVPages, QuantizedPages, Queries
from detjax.operands.linear_attention_state import (
    DELTA_ROWS,
    DeltaState,
    DeltaTokens,
    RequestRows,
    TokenLimits,
    empty_inputs,
)
from detjax.operands.numerics import ceil_div, round_up
from detjax.operands.options import Clamp, Epilogue, KVQuantization, Masking, WeightLayout
from detjax.operands.products import AdapterOperands, GroupedOperands, MatmulOperands
from detjax.operands.quantized_pages import quantized_layout
from detjax.operands.sampling_arrays import SamplingArrays
from detjax.ops import AccumulatedWeight
from detjax.pallas.hopper import attention as hopper_attention
from detjax.pallas.hopper import (
    convolution,
    delta_rule,
    elements,
    embedding,
    exchange,
    grouped_matmul,
    norm_gradient,
    row_functions,
    row_gather,
    sampling,
    softmax,
)
from detjax.pallas.hopper import norm as hopper_norm
from detjax.pallas.hopper import rope as hopper_rope
from detjax.pallas.hopper.matmul.adapters import forward_with_adapter
from detjax.pallas.hopper.matmul.kernel import Operands, product, shared_product
from detjax.pallas.hopper.matmul.plan import Problem, Schedule
from detjax.pallas.hopper.matmul.tuning import default_schedule
from detjax.pallas.hopper.mosaic import peers
from detjax.rl.runs.policy import small_policy
from detjax.rl.trainer.gradients import empty_sums, next_sums
from detjax.rl.trainer.losses import LogLikelihood
from detjax.rl.trainer.microbatches import Layout, Packed, Rows, Sample
from detjax.rl.trainer.optimizers import AdamState, adamw
from detjax.rl.trainer.train_state import next_leaf
from detjax.runtime import backends, compilation
from tests.support.integer_signs import signs_checked
from tests.support.towers import KIMI_K2_5, QWEN2_5_VL, QWEN3_5

FOLDER_VARIABLE = "DETJAX_PTXAS"
WITHOUT_A_DEVICE = {**compilation.PINNED_OPTIONS["gpu"], "xla_gpu_enable_triton_gemm": False}
"""Compiler options. XLA's own dots are left to a library: Triton's would be timed on the device."""
DONATED = {
    "adamw": range(3),
    "decode step": range(2),
    "block of layers": range(2),
    "a layer with adapters": range(2),
    "two layers with adapters": range(4),
    "delta rule decode": range(5),
    "delta rule prefill": range(5),
    "convolution decode": [0],
    "convolution prefill": [0],
    "matmul of carried gradients": [2],
    "embedding gradient": [3],
    "head gradient": [2],
    "gradients of a decoder": range(19),
    "gradients of experts": [0],
    "gradients of few experts": [0],
    "gradients of a decoder, packed": range(19),
}
"""The operands that a program may overwrite, by its name: pools of pages, sums of gradients, an optimizer's state."""
ROOT = Path(__file__).parents[3]

type Program = tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]
"""A function and the types of its operands."""


def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    """The type of an operand."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def shared_matmul(m: int, n: int, k: int, *, bias: bool = False, residual: bool = False, **options: Any) -> Program:
    """A product whose columns two GPUs compute, half of them each."""
    epilogue = Epilogue(**options)
    parts = (2,) if epilogue.gated else ()
    shapes = [array(m, k), array(*parts, n, k)]
    shapes += [array(*parts, n)] if bias else []
    shapes += [array(m, 2 * n)] if residual else []

    def fn(x: Any, w: Any, *rest: Any) -> Any:
        rest = list(rest)
        peers = exchange.Peers(*rest[-2:], devices=2, first=0)
        operands = Operands(x, w, rest.pop(0) if bias else None, rest.pop(0) if residual else None, peers=peers)  # pyright: ignore[reportAttributeAccessIssue]
        y = shared_product(operands, layout="nk", epilogue=epilogue, out_dtype=jnp.bfloat16)
        assert y is not None
        return y

    return fn, [*shapes, array(2, 2, dtype="int32"), array(1, dtype="int32")]


def matmul(
    m: int,
    n: int,
    k: int,
    schedule: Schedule | None = None,
    *,
    layout: str = "nk",
    token_layout: str = "mk",
    dtype: str = "bfloat16",
    out_dtype: str = "bfloat16",
    bias: bool = False,
    residual: bool = False,
    **epilogue: Any,
) -> Program:
    """A product by the schedule given, or by the default schedule of an H200."""
    parts = (2,) if epilogue.get("gated") else ()
    problem = Problem(
        m,
        n,
        k,
        2 if parts else 1,
        jnp.dtype(dtype),
        jnp.dtype(out_dtype),
        jnp.dtype(dtype) if residual else None,
        jnp.dtype(dtype) if bias else None,
        token_layout,  # pyright: ignore
        layout,  # pyright: ignore
    )

    def fn(x: jax.Array, w: jax.Array, *rest: jax.Array) -> jax.Array:
        optional = list(rest)
        operands = Operands(x, w, optional.pop(0) if bias else None, optional.pop(0) if residual else None)
        return product(
            operands,
            token_layout=token_layout,  # pyright: ignore
            layout=layout,  # pyright: ignore
            epilogue=Epilogue(**epilogue),
            out_dtype=out_dtype,
            schedule=schedule or default_schedule(problem, "NVIDIA H200"),
        )

    operands = [
        array(*((m, k) if token_layout == "mk" else (k, m)), dtype=dtype),
        array(*parts, *((n, k) if layout == "nk" else (k, n)), dtype=dtype),
    ]
    operands += [array(*parts, n, dtype=dtype)] * bias + [array(m, n, dtype=dtype)] * residual
    return fn, operands


def sampler(rows: int, width: int, filtered: bool) -> Program:
    """Sampling of float32 logits."""
    shapes = {
        "logits": array(rows, width, dtype="float32"),
        "noise_key": array(rows, 4, dtype="uint32"),
        "position": array(rows, dtype="int32"),
        "temperature": array(rows, dtype="float32"),
        "top_k": array(rows, dtype="int32"),
        "top_p": array(rows, dtype="float32"),
        "min_p": array(rows, dtype="float32"),
    }

    def fn(*arrays: jax.Array) -> Any:
        logits, *rows = arrays
        return sampling.sample(logits, SamplingArrays(*rows), filtered=filtered)

    return fn, list(shapes.values())


def attention(
    tokens: int, width: int, *, kind: str | None = None, sinks: bool = False, alibi: bool = False, **options: Any
) -> Program:
    """Attention of 4 requests with 32 heads, 4 to a key head, as it runs if no gradient is taken."""
    slopes = tuple(2.0 ** -(1 + head % 8) for head in range(32)) if alibi else None
    masking = Masking(width**-0.5, alibi_slopes=slopes, **options)
    shape = (64, 8, KV_BLOCK, width)
    pool = [array(*shape)] if kind is None else list(quantized_layout(shape, kind))  # pyright: ignore

    def fn(q: jax.Array, *operands: jax.Array) -> jax.Array:
        pools, operands = operands[: 2 * len(pool)], operands[2 * len(pool) :]
        if kind is not None:
            pools = [QuantizedPages(*pools[i : i + 2], kind) for i in (0, 2)]  # pyright: ignore
        *integers, given = operands if sinks else (*operands, None)
        pages = KVPages(*pools), Queries(*integers)
        given = AttentionOperands(q, *pages, given)  # pyright: ignore
        return hopper_attention.forward(given, masking=masking, with_normalizers=False)[0]

    indices = [array(4, 16, dtype="int32"), array(4, dtype="int32"), array(4, dtype="int32")]
    return fn, [array(4, tokens, 32, width), *pool, *pool, *indices, *[array(32)] * sinks]


def latent_attention(batch: int, tokens: int, heads: int) -> Program:
    """Attention over latents of 576 columns, as it runs if no gradient is taken."""
    masking = Masking(192**-0.5)

    def fn(q: jax.Array, pages: jax.Array, *integers: jax.Array) -> jax.Array:
        kv, queries = KVPages(pages, KeyColumns(512)), Queries(*integers)
        operands = AttentionOperands(q, kv, queries)
        return hopper_attention.forward(operands, masking=masking, with_normalizers=False)[0]

    indices = [array(batch, 33, dtype="int32"), array(batch, dtype="int32"), array(batch, dtype="int32")]
    return fn, [array(batch, tokens, heads, 576), array(33 * batch, 1, KV_BLOCK, 576), *indices]


def gated_delta_rule(requests: int, tokens: int, dtype: str = "bfloat16") -> Program:
    """The delta rule of Qwen3-Next's layers. The first operands are the state."""
    heads, width = (16, 32), 128
    state = DeltaState(
        array(requests, heads[1], width, width, dtype="float32"),
        array(requests, DELTA_ROWS, heads[0], width, dtype=dtype),
        array(requests, DELTA_ROWS, heads[1], width, dtype=dtype),
        array(requests, DELTA_ROWS, heads[1], dtype="float32"),
        array(requests, dtype="int32"),
    )

    def fn(*operands: jax.Array) -> Any:
        state, x, integers = DeltaState(*operands[:5]), operands[5:10], operands[10:]
        most = TokenLimits(requests if tokens == 1 else 0, tokens)
        return delta_rule.forward(DeltaTokens(*x), state, RequestRows(*integers, most))  # pyright: ignore[reportCallIssue]

    count = requests * tokens
    x = [array(count, heads[0], width, dtype=dtype)] * 2 + [array(count, heads[1], width, dtype=dtype)]
    gates = [array(count, heads[1], dtype="float32")] * 2
    return fn, [*state, *x, *gates, *[array(requests, dtype="int32")] * 4]


def causal_convolution(requests: int, tokens: int, dtype: str = "bfloat16") -> Program:
    """The convolution of Qwen3-Next's layers. The first operand is the last inputs."""
    channels = 8192

    def fn(inputs: jax.Array, x: jax.Array, weight: jax.Array, *integers: jax.Array) -> Any:
        most = TokenLimits(requests if tokens == 1 else 0, tokens)
        return convolution.forward(x, weight, inputs, RequestRows(*integers, most))  # pyright: ignore[reportCallIssue]

    inputs = jax.eval_shape(lambda: empty_inputs(requests, convolution.TAPS, channels, dtype))
    x, weight = (array(*shape, dtype=dtype) for shape in ((requests * tokens, channels), (channels, 1, 4)))
    return fn, [inputs, x, weight, *[array(requests, dtype="int32")] * 4]


def row_function(
    name: str, rows: int, *widths: int, weights: int = 0, dtype: str = "bfloat16", **options: Any
) -> Program:
    """A function of arrays of rows of these widths, and of vectors of the first width."""

    def fn(*operands: jax.Array) -> Any:
        return row_functions.forward(operands[: len(widths)], operands[len(widths) :], function=name, **options)

    return fn, [*(array(rows, width, dtype=dtype) for width in widths), *[array(widths[0])] * weights]


def combination_of_experts(tokens: int, count: int, width: int) -> Program:
    """The weighted sums of what experts gave tokens."""

    def fn(y: jax.Array, weights: jax.Array, place: jax.Array, residual: jax.Array) -> jax.Array:
        rows = ops.ExpertRows(jnp.zeros(128, jnp.int32), jnp.zeros(len(y), jnp.int32), place, 8)
        with backends.tracing_for("gpu"), backends.use_backend("hopper"):
            return ops.combine_experts(y, weights, rows, residual=residual)

    weights = [array(tokens, count, dtype=dtype) for dtype in ("float32", "int32")]
    return fn, [array(tokens * count, width), *weights, array(tokens, width)]


def _config(layers: int = 2) -> DecoderConfig:
    """A small decoder."""
    return DecoderConfig.from_hugging_face(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": layers,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "hidden_act": "silu",
            "max_position_embeddings": 40960,
        },
        "test",
    )


def experts_of_tokens(tokens: int) -> Program:
    """The experts of a layer of Qwen3-30B-A3B in a decode step, from the normalized hidden states to their sum."""
    config = presets.config("Qwen3-30B-A3B", 1)
    assert config.experts is not None

    def module() -> Experts:
        return Experts(config.hidden_size, config.experts, "silu", rngs=nnx.Rngs(0), dtype=jnp.bfloat16)  # pyright: ignore

    graph, state = nnx.split(nnx.eval_shape(module))
    integers = array(tokens, 2, dtype="int32"), array(tokens, dtype="int32"), array(tokens, dtype="int32")
    rows = array(tokens, 1, config.hidden_size)
    leaves, tree = jax.tree.flatten((state, rows, jax.eval_shape(Queries, *integers), rows))

    def fn(*leaves: Any) -> Any:
        state, x, queries, residual = jax.tree.unflatten(tree, leaves)
        with backends.tracing_for("gpu"), backends.use_backend("hopper"):
            return nnx.merge(graph, state)(x, queries, residual=residual)

    return fn, [array(*leaf.shape, dtype=str(leaf.dtype)) for leaf in leaves]


def choice_of_experts(tokens: int, known: int, count: int, *, normalized: bool = False) -> Program:
    """The choice of experts by the softmax of logits, and the places of rows, on a device with a quarter of them."""

    def fn(logits: jax.Array, present: jax.Array, first: jax.Array) -> Any:
        with backends.tracing_for("gpu"), backends.use_backend("hopper"):
            place: dict[str, Any] = {"present": present, "first": first, "experts": known // 4}
            ids, weights, rows = ops.route(logits, count, normalized=normalized, **place)
            return ids, weights, rows.group_sizes, rows.token, rows.place, rows.tiles

    shapes = [array(tokens, known, dtype="float32"), array(tokens, dtype="bool"), array(dtype="int32")]
    return fn, shapes


def rows_of_experts(tokens: int, count: int, known: int) -> Program:
    """The places of rows for choices that are given."""

    def fn(ids: jax.Array, present: jax.Array) -> Any:
        with backends.tracing_for("gpu"), backends.use_backend("hopper"):
            rows = ops.expert_rows(ids, known, present)
            return rows.group_sizes, rows.token, rows.place, rows.tiles

    return fn, [array(tokens, count, dtype="int32"), array(tokens, dtype="bool")]


def decode_step(batch: int, config: DecoderConfig) -> Program:
    """A step of a decoder: logits and the cache. Its first operands are the pools of pages."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)))
    cache = KVCache.empty(config, batch, 256, jnp.bfloat16)
    leaves, tree = jax.tree.flatten((cache, state, array(batch, 1, dtype="int32")))

    def fn(*leaves: Any) -> Any:
        cache, state, tokens = jax.tree.unflatten(tree, leaves)
        with backends.use_backend("hopper"):
            return nnx.merge(graph, state)(tokens, cache)

    return fn, [array(*leaf.shape, dtype=str(leaf.dtype)) for leaf in leaves]


def block_of_layers(sequences: int, queries: int, config: DecoderConfig) -> Program:
    """A block of a layer, for sequences with guesses. Its first operands are the pools of pages."""
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    blocks = equal_blocks(model, 1)
    assert blocks is not None
    rows = sequences * queries
    table = SlotTable(sequences, 2, drafts=queries - 1)
    batch = PackedBatch.on_host(table.batch(ScheduledStep(), BatchShape(rows, 0, 0, rows, queries))).for_layers()
    state = jax.eval_shape(lambda: (declarations(config)[0].empty(StateSize(2 * sequences, jnp.bfloat16)),))
    weights = tuple(split(model)[1][number] for number in blocks.blocks[0].weights)
    before = BeforeBlock(array(rows, config.hidden_size), array(dtype="bool"))
    leaves, tree = jax.tree.flatten((state, weights, array(sequences, dtype="int32"), batch, before))

    def fn(*leaves: Any) -> Any:
        state, weights, last, batch, before = jax.tree.unflatten(tree, leaves)
        program = step_programs._forward_block.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
        with backends.use_backend("hopper"):
            x, state, *results = program(blocks.network, Parameters(weights), state, last, batch, before, depths=None)
            return state, x, results

    return fn, [array(*leaf.shape, dtype=str(leaf.dtype)) for leaf in leaves]


def layers_with_adapters(decodes: int, slots: int, layers: int) -> Program:
    """A decode step of layers of Qwen3-8B whose rows have adapters. Its first operands are the pools of pages."""
    config = presets.config("Qwen3-8B", layers)
    network, weights = split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)))
    targets = Targets(config, np.dtype(jnp.bfloat16))
    numbers = [number for number in targets.adaptable if targets.paths[number] != HEAD_PATH]
    shapes = [targets.adaptable[number].shapes(slots, 16) for number in numbers]
    pool = SlotArrays(
        tuple((array(*a), array(*b), array(*scales, dtype="float32")) for a, b, scales in shapes), tuple(numbers)
    )
    batch = SlotTable(decodes, 2).batch(ScheduledStep(), BatchShape(decodes, 0, 0, decodes))
    batch = batch._replace(adapters=np.zeros(decodes, np.int32), pool=pool)
    size = StateSize(2 * decodes, jnp.bfloat16)
    state = jax.eval_shape(lambda: tuple(layer.empty(size) for layer in declarations(config)))
    last = array(decodes, dtype="int32")
    leaves, tree = jax.tree.flatten((state, weights, last, PackedBatch.on_host(batch).for_layers()))

    def fn(*leaves: Any) -> Any:
        state, weights, *rest = jax.tree.unflatten(tree, leaves)
        program = step_programs._forward.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
        with backends.use_backend("hopper"):
            return program(network, Parameters(weights), state, *rest)

    return fn, [array(*leaf.shape, dtype=str(leaf.dtype)) for leaf in leaves]


def vision_tower(tower: VisionOptions, rows: int, columns: int) -> Program:
    """Two blocks of a tower and its mergers; with windows, only one block sees whole images."""
    full_blocks = (1,) if tower.window_size else (0, 1)
    options = dataclasses.replace(tower, blocks=2, full_blocks=full_blocks, output_width=2048)
    graph, state = nnx.split(nnx.eval_shape(lambda: options.tower(options, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)))
    frames = options.clip_frames
    pixels = np.zeros((frames * rows * columns, math.prod(options.patch_shape)), np.float32)
    image = ImagePatches(pixels, rows, columns, frames)
    patches, _ = packed([image, image], options, 128)
    leaves, tree = jax.tree.flatten((state, patches))

    def fn(*leaves: Any) -> Any:
        state, patches = jax.tree.unflatten(tree, leaves)
        with backends.use_backend("hopper"):
            return nnx.merge(graph, state)(patches)

    return fn, [array(*leaf.shape, dtype=str(leaf.dtype)) for leaf in leaves]


def carried(m: int, n: int, tokens: int) -> Program:
    """The next sums `[m, n]` of the gradients of a weight."""

    def fn(dz: jax.Array, x: jax.Array, sums: jax.Array) -> jax.Array:
        operands = Operands(dz, x, start=sums)
        return product(operands, token_layout="km", layout="kn", epilogue=Epilogue(), out_dtype="float32")

    return fn, [array(tokens, m), array(tokens, n), array(m, n, dtype="float32")]


def norm_gradients(rows: int, width: int, dtype: str = "bfloat16", *, residual: bool) -> Program:
    """The gradients of normalized rows, and the next sum of the weight's."""

    def fn(h: jax.Array, weight: jax.Array, dy: jax.Array, total: jax.Array, *dh: jax.Array) -> Any:
        return norm_gradient.backward(h, weight, dy, *(dh or (None,)), total, eps=1e-6, weight_offset=0.0)  # pyright: ignore[reportCallIssue]

    total = array(width, dtype="float32")
    given = array(rows, width, dtype=dtype)
    return fn, [given, array(width, dtype=dtype), given, total, *[given] * residual]


def embedding_gradient(tokens: int, width: int, vocabulary: int) -> Program:
    """The next sums of a table's rows."""
    shapes = [array(tokens, dtype="int32"), array(vocabulary, width), array(tokens, width)]
    return embedding.backward, [*shapes, array(vocabulary, width, dtype="float32")]


def head_gradient(tokens: int, width: int, vocabulary: int) -> Program:
    """The gradient of hidden states through the logprobs of tokens, and the next sums of a head."""

    def fn(hidden: jax.Array, head: jax.Array, sums: jax.Array, ids: jax.Array, gradients: jax.Array) -> Any:
        def logprobs(hidden: jax.Array, sums: jax.Array) -> jax.Array:
            return ops.token_logprobs(hidden, ops.AccumulatedWeight(head, sums), ids)

        with backends.use_backend("hopper"):
            return jax.vjp(logprobs, hidden, sums)[1](gradients)

    head = array(vocabulary, width)
    arrays = array(tokens, dtype="int32"), array(tokens, dtype="float32")
    return fn, [array(tokens, width), head, array(vocabulary, width, dtype="float32"), *arrays]


def experts(rows: int, unit: int, count: int, *, gated: bool = True) -> Program:
    """A projection of rows sorted by expert, in units of `unit` rows."""

    def fn(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        epilogue = Epilogue("silu", gated=True) if gated else Epilogue()
        options = {"layout": "nk", "epilogue": epilogue, "out_dtype": jnp.dtype("bfloat16")}
        return grouped_matmul.forward(GroupedOperands(x, w, None, sizes), unit=unit, **options)  # pyright: ignore

    w = (count, 2, 768, 2048) if gated else (count, 2048, 768)
    return fn, [array(rows, w[-1]), array(*w), array(count, dtype="int32")]


def shared_experts(rows: int, unit: int, count: int) -> Program:
    """The first projection of rows sorted by expert, whose columns two GPUs compute, half of them each."""

    def fn(x: Any, w: Any, tiles: Any, addresses: Any, number: Any) -> Any:
        operands = Operands(x, w, experts=tiles, peers=exchange.Peers(addresses, number, devices=2, first=0))
        schedule = grouped_matmul._schedule(unit, w.shape[-2], "nk")
        epilogue = Epilogue("silu", gated=True)
        y = shared_product(operands, layout="nk", epilogue=epilogue, out_dtype=jnp.bfloat16, schedule=schedule)
        assert y is not None
        return y

    shapes = [array(rows, 2048), array(count, 2, 384, 2048), array(rows // unit + 1, dtype="int32")]
    return fn, [*shapes, array(2, 2, dtype="int32"), array(1, dtype="int32")]


def clamped_experts(rows: int, unit: int, count: int, width: int) -> Program:
    """The first projection of gpt-oss's experts, with biases."""

    def fn(x: jax.Array, w: jax.Array, bias: jax.Array, sizes: jax.Array) -> jax.Array:
        epilogue = Epilogue("silu", gated=True, clamp=Clamp(limit=7.0, slope=1.702))
        options = {"layout": "nk", "epilogue": epilogue, "out_dtype": jnp.dtype("bfloat16")}
        return grouped_matmul.forward(GroupedOperands(x, w, bias, sizes), unit=unit, **options)  # pyright: ignore

    return fn, [array(rows, width), array(count, 2, width, width), array(count, 2, width), array(count, dtype="int32")]


def experts_gradients(widths: experts_bench.Widths, tokens: int, *, bias: bool = False) -> Program:
    """The gradients of rows through a mixture's first projection, and the next sums of its weights and biases."""
    chosen, count = widths.chosen * tokens, widths.experts
    unit = grouped_matmul.group_unit(chosen, count)
    rows = round_up(chosen + count * (unit - 1), unit)
    clamp = Clamp(limit=7.0, slope=1.702) if bias else None

    def fn(w_sum: jax.Array, bias_sum: jax.Array | None, *operands: jax.Array) -> Any:
        x, w, b, sizes, sequences, dy = operands if bias else (*operands[:2], None, *operands[2:])

        def projection(x: jax.Array, *sums: Any) -> jax.Array:
            weight, biases = AccumulatedWeight(w, sums[0]), None if b is None else AccumulatedWeight(b, sums[1])
            options: dict[str, Any] = {"layout": "nk", "activation": "silu", "gated": True, "clamp": clamp}
            return ops.grouped_matmul(x, weight, sizes, bias=biases, sequences=sequences, unit=unit, **options)

        with backends.use_backend("hopper"):
            return jax.vjp(projection, x, w_sum, bias_sum)[1](dy)

    shape = count, 2, widths.inner, widths.width
    integers = array(count, dtype="int32"), array(rows, dtype="int32")
    operands = [array(rows, widths.width), array(*shape), *[array(*shape[:-1])] * bias, *integers]
    sums = [array(*shape, dtype="float32"), *[array(*shape[:-1], dtype="float32")] * bias]
    return fn if bias else lambda w_sum, *rest: fn(w_sum, None, *rest), [*sums, *operands, array(rows, widths.inner)]


def adamw_update(size: int) -> Program:
    """The next master and optimizer state of one leaf, which are the first operands, and the rounded master."""
    optimizer = adamw(1e-3, weight_decay=0.1)

    def fn(
        master: jax.Array, mean: jax.Array, square: jax.Array, count: jax.Array, gradient: jax.Array, scale: jax.Array
    ) -> Any:
        with backends.use_backend("hopper"):
            return next_leaf(optimizer, master, AdamState(count, mean, square), gradient, scale, jnp.bfloat16)

    leaf = array(size, dtype="float32")
    return fn, [leaf, leaf, leaf, array(dtype="int32"), leaf, array(dtype="float32")]


def decoder_gradients(layout: Layout, config: DecoderConfig | None = None) -> Program:
    """The next sums of the gradients of a decoder, which are its first operands, and the logprobs of a microbatch."""
    model = nnx.eval_shape(lambda: Decoder(config or _config(), rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    network, weights = split(model)
    sums = jax.eval_shape(lambda weights: empty_sums(network, weights), weights)
    one = Sample(np.zeros(2, np.int32), np.zeros(1, np.float32), np.zeros(1, np.float32))
    leaves, tree = jax.tree.flatten((sums, weights, next(iter(layout.microbatches([one]))).arrays))

    def fn(*leaves: Any) -> Any:
        sums, weights, microbatch = jax.tree.unflatten(tree, leaves)
        with backends.use_backend("hopper"):
            return next_sums(network, weights, sums, microbatch, LogLikelihood())

    return fn, [array(*leaf.shape, dtype=str(leaf.dtype)) for leaf in leaves]


def adapted_matmul(
    tokens: int,
    outputs: int,
    inputs: int,
    rank: int,
    layout: WeightLayout = "nk",
    *,
    residual: bool = False,
    **epilogue: Any,
) -> Program:
    """A product with an adapter; with an activation, the sums are kept, and with the layout "kn", nothing is scaled."""
    parts = (2,) if epilogue.get("gated") else ()

    def stored(inner: int) -> tuple[int, ...]:
        return (*parts, *((outputs, inner) if layout == "nk" else (inner, outputs)))

    shapes = [array(tokens, inputs), array(*stored(inputs)), array(tokens, rank), array(*stored(rank))]
    shapes.append(array(*parts, outputs, dtype="float32"))
    if residual:
        shapes.append(array(tokens, outputs))

    def fn(x: Any, w: Any, u: Any, b: Any, scales: Any, residual: Any = None) -> Any:
        adapter = AdapterOperands(u, b, scales if layout == "nk" else None)
        options: dict[str, Any] = {"layout": layout, "epilogue": Epilogue(**epilogue), "out_dtype": x.dtype}
        return forward_with_adapter(MatmulOperands(x, w, None, residual), adapter, keeps=bool(epilogue), **options)

    return fn, shapes


def rows_with_adapters(tokens: int, outputs: int, inputs: int, rank: int, slots: int) -> Program:
    """A product in which each row has an adapter, for a residual."""

    def fn(x: Any, w: Any, a: Any, b: Any, scales: Any, rows: Any, residual: Any) -> jax.Array:
        with backends.use_backend("hopper"):
            return ops.matmul(x, AdaptedWeight(w, a, b, scales, rows), residual=residual, layout="nk")

    factors = [array(slots, rank, inputs), array(slots, outputs, rank), array(slots, outputs, dtype="float32")]
    shapes = [array(tokens, inputs), array(outputs, inputs), *factors, array(tokens, dtype="int32")]
    return fn, [*shapes, array(tokens, outputs)]


def sliced(program: Program) -> Program:
    """The program on slices of its operands, from the second element of the first axis on."""
    fn, shapes = program
    longer = [jax.ShapeDtypeStruct((1 + shape.shape[0], *shape.shape[1:]), shape.dtype) for shape in shapes]
    return lambda *operands: fn(*(operand[1:] for operand in operands)), longer


def append(batch: int, tokens: int, width: int = 128) -> Program:
    """RoPE and the append to the KV cache, for 32 query heads, 4 to a key head."""
    turns = [array(batch, tokens, width // 2, dtype="float32")] * 2
    indices = [array(batch, 16, dtype="int32"), array(batch, dtype="int32"), array(batch, dtype="int32")]
    pools = [array(64, 8, KV_BLOCK, width)] * 2

    def fn(*operands: jax.Array) -> Any:
        k_pages, v_pages, page_table, start, count = operands[5:]
        pages = {"kv": KVPages(k_pages, v_pages), "queries": Queries(page_table, start, count, count)}
        return hopper_rope.append_kv(operands[0], operands[1:3], *operands[3:5], **pages, eps=1e-6)

    return fn, [array(batch, tokens, 48, width), *turns, array(width), array(width), *pools, *indices]


def programs() -> dict[str, Program]:
    """Kernels of every kind, by name."""
    S = Schedule
    angles = array(64, 64, dtype="float32")
    norm = partial(hopper_norm.forward, eps=1e-5, weight_offset=0.0)

    def rope(x: jax.Array, cos: jax.Array, sin: jax.Array, *weights: jax.Array) -> Any:
        return hopper_rope.forward(x, (cos, sin), *weights, heads=(32, 8), eps=1e-5)

    return {
        "matmul of one token": matmul(1, 4096, 4096),
        "matmul of 16 tokens": matmul(16, 6144, 4096, residual=True),
        "matmul of 64 tokens": matmul(64, 4096, 12288, bias=True, residual=True),
        "matmul of 192 tokens": matmul(192, 10240, 5120),
        "matmul of 4096 tokens": matmul(4096, 6144, 4096, residual=True),
        "matmul to float32": matmul(64, 151936, 4096, out_dtype="float32"),
        "matmul to float32, soft cap": matmul(1024, 128256, 4096, out_dtype="float32", soft_cap=30.0),
        "matmul gated, 16 tokens": matmul(16, 12288, 4096, activation="silu", gated=True),
        "matmul gated, 4096 tokens": matmul(4096, 12288, 4096, activation="silu", gated=True, bias=True),
        "matmul gelu, most columns": matmul(
            4096, 12288, 4096, S(128, 256, "tokens", 2, cluster_m=2, panel=8), activation="gelu", bias=True
        ),
        "matmul gelu_tanh, odd tiles": matmul(
            4096, 12288, 4096, S(128, 168, "tokens", 2, panel=8), activation="gelu_tanh", residual=True
        ),
        "matmul of half-empty tiles": matmul(16, 4096, 4096, S(16, 40, lines=2, cluster_n=2), dtype="float16"),
        "matmul of two half-empty tiles": matmul(96, 4096, 4096, S(96, 96, warpgroups=2), residual=True),
        "matmul, kn": matmul(512, 4096, 12288, layout="kn"),
        "matmul of gradients": matmul(4096, 6144, 512, layout="kn", token_layout="km", out_dtype="float32"),
        "norm of wide rows": (norm, [array(4096, 4096), array(4096), array(4096, 4096)]),
        "norm of narrow rows": (lambda x, w: norm(x, w, None), [array(1000, 896), array(896)]),
        "norm in float32": (norm, [array(3, 12288, dtype="float32"), array(12288), array(3, 12288, dtype="float32")]),
        "rope": (rope, [array(64, 48, 128), angles, angles]),
        "norm and rope": (rope, [array(64, 48, 128), angles, angles, array(128), array(128)]),
        "append to a KV cache": append(64, 1),
        **{f"append of long prompts, head size {width}": append(4, 1024, width) for width in (64, 128, 256)},
        "softmax": (softmax.softmax, [array(64, 151936)]),
        "log-softmax": (softmax.log_softmax, [array(64, 151936, dtype="float32")]),
        "log-softmax, read twice": (softmax.log_softmax, [array(64, 2_000_000, dtype="float32")]),
        "logsumexp": (softmax.logsumexp, [array(1024, 128256, dtype="float32")]),
        "sampling": sampler(64, 151936, filtered=False),
        "sampling with filters": sampler(16, 128256, filtered=True),
        "sampling logprobs": (
            sampling.sampling_logprobs,
            [array(64, 151936, dtype="float32"), array(64, dtype="int32"), array(64, dtype="float32")],
        ),
        **{f"attention prefill, head size {width}": attention(1024, width) for width in (64, 96, 128, 192, 256)},
        **{f"attention decode, head size {width}": attention(1, width) for width in (64, 96, 128)},
        **{f"attention decode, {kind}": attention(1, 128, kind=kind) for kind in get_args(KVQuantization)},
        "attention prefill, q4_0": attention(1024, 128, kind="q4_0"),
        "attention decode of slices": sliced(attention(1, 128)),
        "latent attention decode": latent_attention(16, 1, 128),
        "latent attention decode of few heads": latent_attention(16, 4, 16),
        "latent attention prefill": latent_attention(1, 4096, 128),
        "delta rule decode": gated_delta_rule(64, 1),
        "delta rule prefill": gated_delta_rule(1, 8192),
        "delta rule verify steps": gated_delta_rule(16, 5, "float16"),
        "convolution decode": causal_convolution(64, 1),
        "convolution prefill": causal_convolution(1, 8192),
        "convolution verify steps": causal_convolution(16, 5, "float32"),
        "l2 norm": row_function("l2_norm", 64 * 32, 128, eps=1e-6),
        "l2 norm of many rows": row_function("l2_norm", 8192 * 32, 128, eps=1e-6),
        "gated norm": row_function("gated_rms_norm", 64 * 32, 128, 128, weights=1, eps=1e-6),
        "gated norm of many rows": row_function("gated_rms_norm", 8192 * 32, 128, 128, weights=1, eps=1e-6),
        "decays and rates": row_function("decay_and_rate", 64, 32, 32, weights=2, dtype="float32"),
        "sigmoid gate": row_function("sigmoid_gated", 64, 4096, 4096),
        "sigmoid gate of one column": row_function("sigmoid_gated", 64, 2048, 1),
        "layer norm": row_function("layer_norm", 4096, 1152, weights=2, eps=1e-6),
        "weighted sum": (
            lambda x, factors: row_functions.forward((x, factors), (), function="weighted_sum"),
            [array(4096, 4, 1152), array(4096, 4, dtype="float32")],
        ),
        "combination of experts": combination_of_experts(64, 8, 2048),
        "choice of some experts": choice_of_experts(33, 128, 8, normalized=True),
        "choice of most experts": choice_of_experts(64, 512, 16),
        "choice of more tokens' experts": choice_of_experts(150, 128, 8, normalized=True),
        "choice of many tokens' experts": choice_of_experts(8192, 128, 8, normalized=True),
        "rows of chosen experts": rows_of_experts(64, 8, 256),
        "rows of many tokens' experts": rows_of_experts(8192, 8, 128),
        "gathered rows": (row_gather.rows_at, [array(8192, 2048), array(81792, dtype="int32")]),
        "gathered wide rows": (row_gather.rows_at, [array(1000, 7168), array(2048, dtype="int32")]),
        "experts of 8 tokens": experts_of_tokens(8),
        "decode step": decode_step(4, _config(1)),
        "block of layers": block_of_layers(4, 8, _config(2)),
        "a layer with adapters": layers_with_adapters(64, 8, 1),
        "two layers with adapters": layers_with_adapters(64, 8, 2),
        "vision tower": vision_tower(QWEN2_5_VL, 36, 52),
        "vision tower of clips": vision_tower(KIMI_K2_5, 36, 52),
        "vision tower with learned positions": vision_tower(
            dataclasses.replace(QWEN3_5, deepstack_blocks=(0,)), 36, 52
        ),
        "decode step with experts": decode_step(4, presets.config("Qwen3-30B-A3B", 1)),
        "adapted matmul": adapted_matmul(8192, 4096, 1024, 64),
        "adapted matmul with a residual": adapted_matmul(8192, 1024, 3072, 64, residual=True),
        "adapted gate and up": adapted_matmul(8192, 3072, 1024, 64, activation="silu", gated=True),
        "adapted gate and up of few tokens": adapted_matmul(33, 12288, 4096, 192, activation="silu", gated=True),
        "rows with adapters": rows_with_adapters(64, 4096, 12288, 16, 8),
        "a row with an adapter": rows_with_adapters(1, 4096, 4096, 48, 64),
        "adapted gradient": adapted_matmul(8192, 1024, 4096, 64, layout="kn"),
        "matmul of carried gradients": carried(6144, 1024, 8192),
        "matmul of a head's carried gradients": carried(151936, 1024, 1024),
        "norm gradient": norm_gradients(8192, 1024, residual=True),
        "norm gradient of wide rows": norm_gradients(8192, 4096, residual=True),
        "norm gradient of the widest rows": norm_gradients(1000, 6144, residual=True),
        "norm gradient of narrow rows": norm_gradients(1000, 896, residual=False),
        "norm gradient of heads": norm_gradients(131072, 128, residual=False),
        "norm gradient in float32": norm_gradients(100, 2560, "float32", residual=True),
        "embedding gradient": embedding_gradient(8192, 1024, 151936),
        "head gradient": head_gradient(2048, 1024, 151936),
        "gradients of a decoder": decoder_gradients(Rows(4, 256)),
        "gradients of a decoder, packed": decoder_gradients(Packed(1024)),
        "gradients of the small policy": decoder_gradients(Rows(64, 48), small_policy(2, 128)[0].config),
        "adamw": adamw_update(1024 * 3072),
        "experts of few rows": experts(1408, 8, 128),
        "experts of some rows": experts(8192, 32, 64),
        "experts of many rows": experts(81792, 128, 128),
        "projection of experts of many rows": experts(81792, 128, 128, gated=False),
        "clamped experts of few rows": clamped_experts(480, 8, 32, 2880),
        "clamped experts of many rows": clamped_experts(20480, 128, 32, 2880),
        "gradients of experts": experts_gradients(experts_bench.MODELS["Qwen3-30B-A3B"], 8192),
        "gradients of few experts": experts_gradients(experts_bench.MODELS["gpt-oss-20b"], 8192, bias=True),
        **{
            f"columns of {rows} rows of two GPUs": (
                partial(gather, devices=2, first=0),
                [array(rows, 2048), array(2, 2, dtype="int32"), array(1, dtype="int32")],
            )
            for rows, gather in ((64, exchange._sent_in_pairs), (8192, exchange._copied))
        },
        "experts of some rows of two GPUs": shared_experts(8192, 32, 64),
        "experts of many rows of two GPUs": shared_experts(81792, 128, 128),
        "pieces of a device's columns": (pieces, [array(500, 24), array(1, dtype="int32")]),
        **{
            f"matmul {name} of two GPUs": shared_matmul(tokens, outputs, inputs, **options)
            for name, tokens, outputs, inputs, options in (
                ("of 256 tokens", 256, 2048, 4096, {"residual": True, "bias": True}),
                ("gated, 1024 tokens", 1024, 6144, 4096, {"activation": "silu", "gated": True}),
                ("of 8192 tokens", 8192, 2048, 12288, {"residual": True}),
            )
        },
        "squares of a leaf": (partial(elements.row_squares, slices=8), [array(1024 * 3072, dtype="float32")]),
        "sums of runs": (
            lambda *x: elements.sums_in_order(x),
            [array(8, 6144, dtype="float32"), array(1, 100, dtype="float32")],
        ),
    }


def pieces(x: jax.Array, device: jax.Array) -> jax.Array:
    """The columns of two GPUs. This one copies its own, in pieces."""

    def body(x: jax.Array, device: jax.Array, y: jax.Array) -> None:
        nowhere = [jnp.int32(0)] * 4
        peers.copy_piece(x, y, device, jax.lax.axis_index("cta"), *nowhere, devices=2)

    return exchange._kernel(body, x, ceil_div(x.nbytes, peers.PIECE_BYTES), 2)(x, device)


def compile_programs(programs: Mapping[str, Program]) -> None:
    """Compiles programs for an H200. The compiler's output about a program follows a line with the program's name."""
    from jax.experimental import topologies
    from jax.sharding import Mesh, SingleDeviceSharding

    config = (Path(__file__).parent / "h200.txtpb").read_text()
    device = topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x1x1").devices[0]
    sharding = SingleDeviceSharding(device)
    # Kernels that ask for the number of multiprocessors get the target's.
    with jax.sharding.use_abstract_mesh(Mesh(np.array([device]), ("_",)).abstract_mesh):
        for name, (fn, shapes) in programs.items():
            print(f"# {name}", flush=True)
            operands = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in shapes]
            program = jax.jit(
                fn, donate_argnums=DONATED.get(name, ()), out_shardings=sharding, compiler_options=WITHOUT_A_DEVICE
            )
            with signs_checked():
                kernels = program.trace(*operands).lower(lowering_platforms=("cuda",))
            compiled = kernels.compile()
            print("kernels:", len(re.findall(r" fusion\(| custom-call\(", entry(compiled.as_text()))), flush=True)
            print("seals:", *seals(compiled.as_text()), flush=True)
            print("fused:", *re.findall(r"dynamic[-_]slice[-_]fusion", compiled.as_text()), flush=True)  # pyright: ignore[reportCallIssue]
            if name in DONATED:
                print("copied:", *copied(compiled.as_text()), flush=True)
                memory: Any = compiled.memory_analysis()
                new = memory.output_size_in_bytes - memory.alias_size_in_bytes
                print("memory:", new, memory.temp_size_in_bytes, flush=True)


def entry(hlo: str) -> str:
    """The part of a compiled program that starts its kernels."""
    return hlo[hlo.index("ENTRY ") :]


def seals(hlo: str) -> set[str]:
    """Returns the kinds of scalars by which a compiled program's kernels seal numbers: "parameter" or "constant"."""
    kinds = set()
    for kernel in hlo.split("\n}"):
        made = {name: (kind, read) for name, kind, read in re.findall(r"%(\S+) = u32\[\S* (\S+?)\(%?([^,)]*)", kernel)}
        for zero in re.findall(r" xor\(%\S+, %([^,)]+)\)", kernel):
            while zero in made and made[zero][0] in ("broadcast", "bitcast", "reshape"):
                zero = made[zero][1]
            if zero in made:  # otherwise these are not the bits of numbers
                kinds.add(made[zero][0])
    return kinds


def copied(hlo: str) -> list[str]:
    """Dtypes and shapes of the arrays that a compiled program copies."""
    return re.findall(r"= \(?(\w+\[[\d,]*\])\S*.* copy(?:-start)?\(", hlo)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The resources of one kernel, as ptxas reports them."""

    name: str
    target: str
    registers: int
    spilled_bytes: int


def reported_kernels(text: str) -> Iterator[Kernel]:
    """The kernels in ptxas' output."""
    spills = r"(\d+) bytes spill stores, (\d+) bytes spill loads"
    entry = rf"Compiling entry function '(\w+)' for '(\w+)'.*?{spills}.*?Used (\d+) registers"
    for name, target, stores, loads, registers in re.findall(entry, text, re.DOTALL):
        yield Kernel(name, target, int(registers), int(stores) + int(loads))


def compiled(script: Path, names: Sequence[str] = (), *, dump: str) -> dict[str, str]:
    """The compiler's output for each program of a script that calls `compile_programs`, by the program's name.

    Args:
        script: a Python file, as this one.
        names: its arguments.
        dump: the environment variable that has Mosaic GPU print its output.
    """
    if sys.platform != "linux":
        pytest.skip(f"CUDA's compiler has no packages for {sys.platform}")
    named = os.environ.get(FOLDER_VARIABLE)
    folder = ROOT / (named or ".ptxas")
    ptxas = folder / "nvidia" / "cu13" / "bin" / "ptxas"
    if not named and not ptxas.is_file():
        pytest.skip(f"CUDA's compiler is not in {folder}: `make test` installs it")
    assert ptxas.is_file(), f"{FOLDER_VARIABLE} is {named}, which has no {ptxas}; run `make test`, which installs it"
    environment = {
        **os.environ,
        "CUDA_ROOT": str(ptxas.parents[1]),
        "JAX_PLATFORMS": "cpu",
        dump: "1",
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
    }
    run = subprocess.run([sys.executable, script, *names], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
    _, *sections = re.split(r"^# (.*)\n", run.stdout, flags=re.MULTILINE)
    return dict(zip(sections[::2], sections[1::2], strict=True))


if __name__ == "__main__":
    compile_programs({name: program for name, program in programs().items() if name in (sys.argv[1:] or programs())})
