"""The TPU matmuls at the sizes of Qwen3-8B, Qwen3-30B-A3B and gpt-oss-20b, and at sizes that are not whole blocks."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from detjax.operands.options import Clamp, Epilogue
from detjax.pallas.tpu import grouped_matmul, matmul
from tests.pallas.tpu.interpreter import shape
from tests.support.products import grouped_matmul_call, matmul_call, matmul_gradients

HIDDEN, INTERMEDIATE, QKV, VOCABULARY = 4096, 12288, 6144, 151936
TOKENS = {"decode of 1": 1, "decode of 64": 64, "prefill of 512": 512, "prefill of 4096": 4096}


def cases() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Functions and the shapes of their arguments, by name of the case."""
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
    for name, m in TOKENS.items():
        x, wide = shape(m, HIDDEN), shape(m, INTERMEDIATE)
        calls[f"qkv, {name}"] = forward(), (x, shape(QKV, HIDDEN), shape(QKV), None)
        calls[f"o, {name}"] = forward(), (x, shape(HIDDEN, HIDDEN), None, x)
        gate_up = shape(2, INTERMEDIATE, HIDDEN)
        calls[f"gate and up, {name}"] = forward(Epilogue("silu", gated=True)), (x, gate_up, None, None)
        calls[f"down, {name}"] = forward(), (wide, shape(HIDDEN, INTERMEDIATE), None, x)
        calls[f"lm_head, {name}"] = forward(out_dtype="float32"), (x, shape(VOCABULARY, HIDDEN), None, None)
    for name in ("decode of 1", "prefill of 512"):
        f32 = functools.partial(shape, dtype="float32")
        x, wide = f32(TOKENS[name], HIDDEN), f32(TOKENS[name], INTERMEDIATE)
        fn = functools.partial(forward, layout="kn", out_dtype="float32")
        calls[f"qkv, {name}, float32"] = fn(), (x, f32(HIDDEN, QKV), f32(QKV), None)
        gate_up = f32(2, HIDDEN, INTERMEDIATE)
        calls[f"gate and up, {name}, float32"] = fn(Epilogue("silu", gated=True)), (x, gate_up, None, None)
        calls[f"down, {name}, float32"] = fn(), (wide, f32(INTERMEDIATE, HIDDEN), None, x)

    gelu = Epilogue("gelu", gated=True, soft_cap=30.0)
    calls["exact gelu, gated, capped"] = forward(gelu), (shape(64, 896), shape(2, 4864, 896), shape(2, 4864), None)
    calls["long K, float32"] = (
        forward(out_dtype="float32"),
        (
            shape(64, 53248, dtype="float32"),
            shape(HIDDEN, 53248, dtype="float32"),
            None,
            None,
        ),
    )
    for layout, sizes in (("kn", (515, 72)), ("nk", (72, 515))):
        calls[f"odd sizes, {layout}"] = forward(layout=layout), (shape(3, 515), shape(*sizes), shape(72), shape(3, 72))

    x, dy = shape(500, HIDDEN), shape(500, INTERMEDIATE)
    w, bias = shape(2, INTERMEDIATE, HIDDEN), shape(2, INTERMEDIATE)
    calls["gradients of gate and up"] = backward(Epilogue("silu", gated=True)), (x, w, bias, dy)
    sums = shape(2, INTERMEDIATE, HIDDEN, dtype="float32"), shape(2, INTERMEDIATE, dtype="float32")
    calls["carried gradients of gate and up"] = backward(Epilogue("silu", gated=True)), (x, w, bias, dy, *sums)
    dy = shape(64, VOCABULARY, dtype="float32")
    sums = shape(VOCABULARY, HIDDEN, dtype="float32"), None
    calls["carried gradients of lm_head"] = backward(), (shape(64, HIDDEN), shape(VOCABULARY, HIDDEN), None, dy, *sums)
    calls["gradients of lm_head"] = backward(), (shape(64, HIDDEN), shape(VOCABULARY, HIDDEN), None, dy)
    x, dy = shape(64, HIDDEN, dtype="float32"), shape(64, QKV, dtype="float32")
    calls["gradients of qkv, float32"] = backward(layout="kn"), (x, shape(HIDDEN, QKV, dtype="float32"), None, dy)

    experts, expert_hidden, expert_intermediate = 128, 2048, 768
    sizes = jax.ShapeDtypeStruct((experts,), jnp.int32)
    for name in ("decode of 1", "prefill of 4096"):
        m = 8 * TOKENS[name]
        fn = functools.partial(
            grouped_matmul_call, grouped_matmul.forward, layout="nk", out_dtype=jnp.dtype("bfloat16")
        )
        gate_up = fn(epilogue=Epilogue("silu", gated=True))
        w = shape(experts, 2, expert_intermediate, expert_hidden)
        calls[f"experts' gate and up, {name}"] = gate_up, (shape(m, expert_hidden), w, None, sizes)
        w = shape(experts, expert_hidden, expert_intermediate)
        down = fn(epilogue=Epilogue())
        calls[f"experts' down, {name}"] = down, (shape(m, expert_intermediate), w, None, sizes)

        m, width = 4 * TOKENS[name], 2880
        sizes_of_32 = jax.ShapeDtypeStruct((32,), jnp.int32)
        clamped = fn(epilogue=Epilogue("silu", gated=True, clamp=Clamp(limit=7.0, slope=1.702)))
        weights = shape(32, 2, width, width), shape(32, 2, width)
        calls[f"experts' biased gate and up, {name}"] = clamped, (shape(m, width), *weights, sizes_of_32)
        weights = shape(32, width, width), shape(32, width)
        calls[f"experts' biased down, {name}"] = down, (shape(m, width), *weights, sizes_of_32)
    return calls


def forward(epilogue: Epilogue | None = None, layout: str = "nk", out_dtype: str = "bfloat16") -> Callable[..., Any]:
    return matmul_call(matmul.forward, layout=layout, epilogue=epilogue or Epilogue(), out_dtype=jnp.dtype(out_dtype))


def backward(epilogue: Epilogue | None = None, layout: str = "nk") -> Callable[..., Any]:
    return matmul_gradients(matmul.backward, layout=layout, epilogue=epilogue or Epilogue())
