"""Kernels of the backend `mma` compile for six architectures on a machine without a GPU, and nothing spills.

A compilation proves that a kernel is accepted and what it costs, never its bits. Attention has a file of its own.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from detjax.operands.options import Epilogue
from detjax.pallas.hopper import norm, softmax, token_sums
from detjax.pallas.hopper.group_stages import Stages
from detjax.pallas.hopper.matmul.kernel import Operands
from detjax.pallas.mma import grouped_matmul
from detjax.pallas.mma.group_sums import product_sums
from detjax.pallas.mma.matmul.kernel import product, product_keeping_sums
from detjax.pallas.mma.matmul.plan import Schedule
from tests.pallas.mma.compiler import GPUS, Program, compile_programs, compiled
from tests.support.loads import queued_loads
from tests.support.ptx import kernels as parsed


def array(*shape: int, dtype: Any = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def matmul(
    m: int,
    n: int,
    k: int,
    activation: Any = None,
    *,
    gated: bool = False,
    extra: dict[str, Any] | None = None,
    keeps: bool = False,
    dtype: str = "bfloat16",
    **options: Any,
) -> Program:
    """A product; `extra` has the shapes of its other operands by name."""
    options = {"layout": "nk", "epilogue": Epilogue(activation, gated)} | options
    multiply = product
    if keeps:
        multiply: Any = product_keeping_sums
    else:
        options = {"out_dtype": dtype} | options
    x = (m, k) if options.get("token_layout", "mk") == "mk" else (k, m)
    w = ((2,) if gated else ()) + ((n, k) if options["layout"] == "nk" else (k, n))
    extra = extra or {}
    experts = (32,) if "experts" in extra else ()

    def fn(x: Any, w: Any, *others: Any) -> Any:
        return multiply(Operands(x, w, **dict(zip(extra, others, strict=True))), **options)

    return fn, [array(*x, dtype=dtype), array(*experts, *w, dtype=dtype), *extra.values()]


def group_sums() -> Program:
    def fn(sums: Any, x: Any, w: Any, *stages: Any) -> Any:
        return product_sums(sums, x, w, Stages(*stages))

    integers = [array(8, dtype="int32")] * 3
    return fn, [array(8, 1536, 2048, dtype="float32"), array(4096, 1536), array(4096, 2048), *integers]


HALF_LINES = Schedule(256, 128, 2, panel=4, warpgroups=2)
PROGRAMS: dict[str, Program] = {
    "matmul of 8 tokens": matmul(8, 4096, 4096, extra={"residual": array(8, 4096)}),
    "matmul gated, 16 tokens": matmul(16, 12288, 4096, "silu", gated=True),
    "matmul of 32 tokens": matmul(32, 4096, 12288),
    "matmul to float32": matmul(64, 151936, 4096, out_dtype="float32"),
    "matmul of 256 tokens": matmul(
        256, 4096, 4096, "gelu_tanh", extra={"bias": array(4096), "residual": array(256, 4096)}
    ),
    "matmul gated, 4096 tokens": matmul(
        4096, 12288, 4096, "silu", gated=True, extra={"bias": array(2, 12288), "residual": array(4096, 12288)}
    ),
    "matmul of two warpgroups": matmul(
        4096, 4096, 4096, extra={"bias": array(4096), "residual": array(4096, 4096)}, schedule=HALF_LINES
    ),
    "matmul keeping sums": matmul(4096, 12288, 4096, "silu", gated=True, keeps=True),
    "matmul in float16": matmul(4096, 4096, 4096, "gelu", dtype="float16"),
    "gradient of tokens": matmul(4096, 4096, 12288, layout="kn"),
    "gradient of weights": matmul(
        12288,
        4096,
        8192,
        layout="kn",
        token_layout="km",
        out_dtype="float32",
        extra={"start": array(12288, 4096, dtype="float32")},
    ),
    **{
        f"experts in tiles of {tile}": matmul(
            1024,
            768,
            2048,
            "silu",
            gated=True,
            extra={"experts": array(1024 // tile + 1, dtype="int32")},
            schedule=grouped_matmul._KERNELS.schedule(tile, 768, "nk"),
        )
        for tile in (16, 32, 64, 128)
    },
    "gradients of experts": group_sums(),
    "log-softmax": (softmax.log_softmax, [array(64, 151936, dtype="float32")]),
    "token sums": (token_sums.token_sums, [array(4096, dtype="float32"), array(8192, 4096)]),
    "norm": (
        lambda x, w, h: norm.forward(x, w, h, eps=1e-6, weight_offset=0.0),
        [array(64, 4096), array(4096), array(64, 4096)],
    ),
}
SPILLED = {("sm_90a", "matmul in float16"): 12, ("sm_100a", "matmul in float16"): 16}
"""The bytes that kernels may spill: a few of a thread's 255 registers, where the epilogue computes the error function,
once a tile."""
EXAMINED = "matmul gated, 4096 tokens", "log-softmax", "matmul keeping sums", "gradient of weights", "token sums"
"""The programs that tests look at in every run: the kernels with the most registers, and of each kind of copy."""


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("sm_80", EXAMINED),
        ("sm_120a", EXAMINED[:2]),
        *(pytest.param(name, (), marks=pytest.mark.nightly) for name in GPUS),
    ],
)
def test_kernels_compile_for_every_architecture_and_nothing_spills(architecture: str, names: Sequence[str]) -> None:
    kernels = compiled(Path(__file__), architecture, names)
    assert {*kernels} == {*(names or PROGRAMS)} and all(kernels.values())
    assert {kernel.target for reported in kernels.values() for kernel in reported} == {architecture}
    spilling = {
        name: [kernel for kernel in reported if kernel.spilled_bytes > SPILLED.get((architecture, name), 0)]
        for name, reported in kernels.items()
    }
    assert {name: reported for name, reported in spilling.items() if reported} == {}
    # Two CTAs of 128 threads, or one of 256, have the registers of a multiprocessor.
    assert max(kernel.registers for reported in kernels.values() for kernel in reported) <= 255


@pytest.mark.parametrize("architecture", ["sm_90a", pytest.param("sm_120a", marks=pytest.mark.nightly)])
def test_no_load_is_queued_when_a_stage_is_released(architecture: str) -> None:
    from tests.pallas.hopper import compiler  # takes seconds, which the script does not need

    name = "matmul of two warpgroups"
    (kernel,) = parsed(compiler.compiled(Path(__file__), [architecture, name], dump="MOSAIC_GPU_DUMP_PTX")[name])
    assert [len(loads) for loads in queued_loads(kernel)] == [0]


if __name__ == "__main__":
    compile_programs(PROGRAMS)
