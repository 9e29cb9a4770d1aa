"""Loads from shared memory end before the copy engine may overwrite what they read, in the PTX of kernels."""

import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.pallas.hopper import compiler, quantized_compiler
from tests.support.loads import queued_loads
from tests.support.ptx import Kernel, kernels

ATTENTION = "latent attention decode", "attention decode of slices"
PRODUCTS = (
    "codes, 1 token",
    "codes of a norm, gated, 1 token",
    "codes, 1 token of a long K",
    "codes, gated, 1024 tokens",
    "codes, 1024 tokens",
    "codes by rows, 300 tokens, K of 1104",
)
LOADED = {"codes_matmul", "attention_latent", "attention_decode"}
"""The kernels whose threads load from buffers that they then release."""
UNREAD = "matmul_with_adapter"
"""The kernels that arrive to release stages which only the matrix unit has read."""
QUEUED = """
.visible .entry queued(
) .maxntid 128, 1, 1
{
	ld.shared.b32 %r1, [%rd1];
	ld.shared.b32 %r2, [%rd1+4];
	add.s32 %r3, %r1, %r2;
	{}
	mbarrier.arrive.release.cta.shared::cta.b64 _, [%r9], 1;
	ret;
}
"""


def programs(names: tuple[str, ...], other_names: tuple[str, ...]) -> dict[str, str]:
    """The PTX of each program."""
    modules = (compiler, names), (quantized_compiler, other_names)
    dumps = [compiler.compiled(Path(module.__file__), some, dump="MOSAIC_GPU_DUMP_PTX") for module, some in modules]
    return dumps[0] | dumps[1]


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return programs(ATTENTION, PRODUCTS)


def queued(texts: Mapping[str, str]) -> dict[tuple[str, str], list[int]]:
    """The number of loads that may be queued at each arrival, by program and kernel."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for program, text in texts.items():
        for kernel in kernels(text):
            if not kernel.name.startswith(UNREAD):
                numbers[program, kernel.name] = [len(loads) for loads in queued_loads(kernel)]
    return numbers


@pytest.mark.parametrize("every_kind", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_no_load_is_queued_when_a_buffer_is_released(texts: dict[str, str], every_kind: bool) -> None:
    if every_kind:
        others = [tuple({*module.programs()} - {*texts}) for module in (compiler, quantized_compiler)]
        texts = texts | programs(*others)
    numbers = queued(texts)
    for begin in LOADED:
        assert any(arrivals for (_, name), arrivals in numbers.items() if name.startswith(begin)), begin
    assert {key: arrivals for key, arrivals in numbers.items() if any(arrivals)} == {}


def test_a_merge_awaits_its_loads_before_its_threads_meet(texts: dict[str, str]) -> None:
    (merge,) = (kernel for kernel in kernels(texts["attention decode of slices"]) if "merge" in kernel.name)
    assert awaits(merge)


def awaits(kernel: Kernel) -> bool:
    """True if the threads of a kernel meet right after they have awaited loads."""
    names = [instruction.name for instruction in kernel.code if not instruction.name.startswith("mov")]
    return any(pair == ("prefetch.L2", "bar.sync") for pair in itertools.pairwise(names))


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ("", [2]),
        ("fma.rn.f32 %f1, %r3, %r3, %r3;", [2]),
        ("st.shared.b32 [%rd2], %r1;", [1]),
        ("st.shared.b32 [%rd2], %r3;", [0]),
        ("setp.eq.u32 %p1, %r3, -1; @%p1 prefetch.L2 [%rd2];", [0]),
        ("setp.eq.u32 %p1, %r3, -1; prefetch.L2 [%rd2];", [2]),
    ],
)
def test_a_queued_load_is_found(after: str, expected: list[int]) -> None:
    (kernel,) = kernels(QUEUED.replace("{}", after))
    assert [len(loads) for loads in queued_loads(kernel)] == expected
