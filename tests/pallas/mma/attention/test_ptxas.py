"""CUDA's compiler accepts the kernels of attention for every architecture, and they spill nothing that costs time."""

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from detjax.contract import KV_BLOCK
from detjax.operands.attention import AttentionOperands
from detjax.operands.kv_pages import KVPages, QuantizedPages, Queries
from detjax.operands.options import Masking
from detjax.operands.quantized_pages import quantized_layout
from detjax.pallas import nvidia
from detjax.pallas.hopper.mosaic.layouts import ROWS
from detjax.pallas.mma import attention as mma_attention
from detjax.pallas.mma.attention.kernel import Problem
from detjax.pallas.mma.attention.rows import ROW_BYTES
from detjax.pallas.mma.attention.schedule import default_schedule
from tests.pallas.hopper.attention.test_attention import products_in_sums
from tests.pallas.hopper.compiler import compiled, reported_kernels
from tests.pallas.mma.compiler import GPUS, Program, compile_programs

EVERYTHING: dict[str, Any] = {"window": 150, "soft_cap": 5.0, "sinks": True, "alibi": True}
SPILLED_BY_WIDE_ROWS = 900
"""Bytes that kernels of more than 128 columns of values may spill: numbers that a thread needs once a block or less,
next to 128 running sums and 64 scores. Stores and loads are 880 bytes on compute capability 8.0, 304 on 12.0."""


def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def attention(
    batch: int,
    tokens: int,
    width: int,
    *,
    kind: str | None = None,
    sinks: bool = False,
    alibi: bool = False,
    dtype: str = "bfloat16",
    **options: Any,
) -> Program:
    """Attention with 32 heads, 4 to a key head, as it runs if no gradient is taken."""
    slopes = tuple(2.0 ** -(1 + head % 8) for head in range(32)) if alibi else None
    masking = Masking(width**-0.5, alibi_slopes=slopes, **options)
    shape = (64, 8, KV_BLOCK, width)
    pool = [array(*shape, dtype=dtype)] if kind is None else list(quantized_layout(shape, kind))  # pyright: ignore

    def fn(q: jax.Array, *operands: jax.Array) -> jax.Array:
        pools, operands = operands[: 2 * len(pool)], operands[2 * len(pool) :]
        if kind is not None:
            pools = [QuantizedPages(*pools[i : i + 2], kind) for i in (0, 2)]  # pyright: ignore
        *integers, given = operands if sinks else (*operands, None)
        operands = AttentionOperands(q, KVPages(*pools), Queries(*integers), given)  # pyright: ignore
        return mma_attention.forward(operands, masking=masking, with_normalizers=False)[0]

    integers = [array(batch, 16, dtype="int32"), *[array(batch, dtype="int32")] * 2]
    return fn, [array(batch, tokens, 32, width, dtype=dtype), *pool, *pool, *integers, *[array(32)] * sinks]


def programs() -> dict[str, Program]:
    return {
        "prefill": attention(4, 1024, 128),
        "prefill, everything": attention(4, 1024, 128, dtype="float16", **EVERYTHING),
        "decode": attention(4, 1, 128),
        "decode, everything": attention(4, 8, 128, dtype="float16", **EVERYTHING),
        "decode of many": attention(400, 1, 64),
        "prefill, 80 columns": attention(4, 1024, 80),
        "prefill, 256 columns": attention(4, 1024, 256, **EVERYTHING),
        "decode, 256 columns": attention(4, 1, 256),
        "decode, int8": attention(4, 1, 128, kind="int8"),
        "decode, fp8": attention(4, 8, 80, kind="fp8_e4m3", dtype="float16", **EVERYTHING),
        "decode, q4": attention(4, 1, 96, kind="q4_0"),
    }


SOME = "sm_80", "prefill, everything", "decode, everything"
"""The architecture and programs that tests compile in every run."""


@functools.cache
def texts(architecture: str, *names: str) -> dict[str, str]:
    """The PTX of each program, and what ptxas says of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
        return compiled(Path(__file__), [architecture, *names], dump="MOSAIC_GPU_DUMP_PTX")


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        (SOME[0], SOME[1:]),
        *(pytest.param(name, (), marks=pytest.mark.nightly) for name in GPUS),
    ],
    ids=["some", *GPUS],
)
def test_kernels_compile_and_nothing_spills(architecture: str, names: Sequence[str]) -> None:
    reports = texts(architecture, *names)
    assert {*reports} == {*(names or programs())}
    for name, text in reports.items():
        kernels = [*reported_kernels(text)]
        most = SPILLED_BY_WIDE_ROWS if "256" in name else 0
        split = name.startswith("decode") and "many" not in name
        assert [kernel.name.startswith("attention_merge_blocks") for kernel in kernels] == [False, True][: 1 + split]
        assert {kernel.target for kernel in kernels} == {architecture}
        assert [kernel for kernel in kernels if kernel.spilled_bytes > most] == [], name


@pytest.mark.parametrize("name", GPUS)
def test_shared_memory_holds_queries_and_parts_of_pages(name: str) -> None:
    for width in mma_attention.WIDTHS:
        problem = Problem(
            tiles=1, tile_rows=8, heads=1, heads_per_key_head=1, group=1, blocks=1, width=width, value_width=width,
            dtype=jnp.bfloat16,
        )  # fmt: skip
        with nvidia.tracing_for(GPUS[name].capability):
            schedule = default_schedule(problem, may_split=False)
            slots = len(problem.key_parts) * ROWS + schedule.stages * KV_BLOCK
            assert slots * ROW_BYTES <= nvidia.shared_memory()
        assert schedule.stages == 4


def test_no_product_meets_a_sum_in_the_kernels() -> None:
    for name, text in texts(*SOME).items():
        kernels = re.findall(r"^\.visible \.entry attention_([a-z]+)", text, re.MULTILINE)
        assert kernels == (["mosaic", "merge"] if name.startswith("decode") else ["mosaic"]), name
        assert text.count("fma.rn.f32") > 50 * len(kernels) and "add.rn.f32" in text, name
        assert products_in_sums(text) == [], name


if __name__ == "__main__":
    compile_programs(programs())
