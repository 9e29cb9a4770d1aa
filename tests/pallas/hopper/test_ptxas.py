"""Kernels of every kind compile for an H200 on a machine that has none: ptxas accepts them, and nothing spills.

A compilation proves that a kernel is accepted and what it costs, never its bits.
"""

import functools
import re
from pathlib import Path

import pytest

from tests.pallas.hopper import compiler
from tests.pallas.hopper.compiler import Kernel, compiled, copied, programs, reported_kernels, seals

COMBINATION = "combination of experts"
"""A program of XLA's kernels alone."""
EXPERTS = "experts of 8 tokens"
EXAMINED = (
    COMBINATION,
    EXPERTS,
    "choice of most experts",
    "choice of more tokens' experts",
    "rows of chosen experts",
    "gathered rows",
    "attention decode of slices",
    "delta rule decode",
    "delta rule prefill",
    "convolution decode",
    "convolution prefill",
    "decode step",
    "block of layers",
    "head gradient",
    "adamw",
    "gradients of experts",
)
"""The programs that tests look at in every run."""
DECODER = "gradients of a decoder"
"""Tests look at this one, too, but it takes as long as half of the others."""
SPILLED = {"attention_backward_kv": 400, "attention_prefill": 8}
"""The bytes that kernels of a decoder's gradients may spill, by the beginnings of their names."""
SPILLED_BY_LATENTS = 450
"""The bytes that attention over latents may spill: what a thread needs once a tile, and a few addresses a block."""


@pytest.fixture(scope="module")
def reports() -> dict[str, str]:
    """The compiler's output about programs that tests look at, by the program's name."""
    return compiled(Path(compiler.__file__), EXAMINED, dump="MOSAIC_GPU_DUMP_PTXAS")


@pytest.mark.parametrize("every_kind", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_kernels_compile_for_an_h200_and_nothing_spills(reports: dict[str, str], every_kind: bool) -> None:
    others = [*({*programs()} - {*EXAMINED})] if every_kind else []
    if every_kind:
        reports = reports | compiled(Path(compiler.__file__), others, dump="MOSAIC_GPU_DUMP_PTXAS")
    assert {*reports} == {*EXAMINED, *others}
    kernels = {name: list(reported_kernels(text)) for name, text in reports.items()}
    assert [name for name, reported in kernels.items() if not reported] == [COMBINATION]
    assert {kernel.target for reported in kernels.values() for kernel in reported} == {"sm_90a"}
    spilling = {
        name: [kernel for kernel in reported if kernel.spilled_bytes > spilled_by(name, kernel)]
        for name, reported in kernels.items()
    }
    assert {name: reported for name, reported in spilling.items() if reported} == {}


def spilled_by(program: str, kernel: Kernel) -> int:
    """The bytes that a kernel of a program may spill."""
    if kernel.name.startswith("attention_latent"):
        return SPILLED_BY_LATENTS
    if not program.startswith("gradients of a decoder"):
        return 0
    return next((most for name, most in SPILLED.items() if kernel.name.startswith(name)), 0)


@functools.cache
def report_on_a_decoder() -> str:
    return compiled(Path(compiler.__file__), [DECODER], dump="MOSAIC_GPU_DUMP_PTXAS")[DECODER]


@pytest.mark.parametrize("name", ["head gradient", pytest.param(DECODER, marks=pytest.mark.nightly)])
def test_gradients_continue_sums_where_they_lie(name: str, reports: dict[str, str]) -> None:
    report = report_on_a_decoder() if name == DECODER else reports[name]
    (copies,) = re.findall(r"^copied:(.*)$", report, re.MULTILINE)
    assert copies.split() or name != DECODER
    # Sums of norms' weights, of one axis, are small. Sums of matrices are written in place.
    assert not {shape for shape in copies.split() if shape.startswith("f32") and "," in shape}


def test_gradients_of_experts_continue_sums_where_they_lie(reports: dict[str, str]) -> None:
    (copies,) = re.findall(r"^copied:(.*)$", reports["gradients of experts"], re.MULTILINE)
    assert not {shape for shape in copies.split() if shape.startswith("f32")}
    (memory,) = re.findall(r"^memory: (\d+) (\d+)$", reports["gradients of experts"], re.MULTILINE)
    results, temporary = map(int, memory)
    # The sums take 1.6 GB. Rows have 2048 numbers outside and 2 x 768 inside, both for gradients and by steps.
    rows = 81792 * 2 * (2048 + 2 * 768)
    assert results < rows
    assert temporary < 1.1 * rows


@pytest.mark.parametrize(
    ("name", "tokens", "most"),
    [("head gradient", 2048, 2048 * 1024 * 2 + 2**10), pytest.param(DECODER, 1024, 2**16, marks=pytest.mark.nightly)],
)
def test_a_microbatch_takes_memory_for_a_chunk_of_logits_and_for_activations_alone(
    name: str, tokens: int, most: int, reports: dict[str, str]
) -> None:
    """The sums of a decoder of two layers take 1.4 GB and lie where they are; a head's gradient has hidden states."""
    report = report_on_a_decoder() if name == DECODER else reports[name]
    (memory,) = re.findall(r"^memory: (\d+) (\d+)$", report, re.MULTILINE)
    results, temporary = map(int, memory)
    assert results < most
    logits = tokens * 151936 * (4 + 2)  # float32, and their gradients in bfloat16
    assert temporary < 1.15 * logits


def test_an_optimizer_updates_a_leaf_in_one_kernel_and_writes_its_state_where_it_lies(reports: dict[str, str]) -> None:
    (copies,) = re.findall(r"^copied:(.*)$", reports["adamw"], re.MULTILINE)
    assert copies.split() == []
    assert [kernel.name for kernel in reported_kernels(reports["adamw"])] == ["map_elements_mosaic_gpu_kernel"]


@pytest.mark.parametrize("name", ["decode step", "block of layers"])
def test_a_decode_step_writes_its_cache_where_it_lies(reports: dict[str, str], name: str) -> None:
    (copies,) = re.findall(r"^copied:(.*)$", reports[name], re.MULTILINE)
    # A step without prefills has no rows of theirs.
    assert not {shape for shape in copies.split() if shape.startswith("bf16") and not shape.startswith("bf16[0,")}


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_the_delta_rule_writes_its_state_where_it_lies(reports: dict[str, str], phase: str) -> None:
    (copies,) = re.findall(r"^copied:(.*)$", reports[f"delta rule {phase}"], re.MULTILINE)
    assert copies.split() == []


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_the_convolution_writes_its_last_inputs_where_they_lie(reports: dict[str, str], phase: str) -> None:
    (copies,) = re.findall(r"^copied:(.*)$", reports[f"convolution {phase}"], re.MULTILINE)
    assert copies.split() == []


def test_kernels_are_given_copies_of_slices(reports: dict[str, str]) -> None:
    """Kernels refuse addresses that 256 does not divide, so a slice must not be fused into their operand."""
    assert re.findall(r"^fused:(.*)$", reports["attention decode of slices"], re.MULTILINE) == [""]


def test_results_of_experts_are_gathered_weighted_and_added_in_one_kernel(reports: dict[str, str]) -> None:
    """Its products are rounded before they are added: the compiler does not know what their bits are combined with."""
    assert re.findall(r"^kernels: (.*)$", reports[COMBINATION], re.MULTILINE) == ["1"]
    assert re.findall(r"^seals: (.*)$", reports[COMBINATION], re.MULTILINE) == ["parameter"]


def test_experts_of_few_tokens_take_six_kernels(reports: dict[str, str]) -> None:
    """Router, choice and places, gather, two products, and combination; and one that says that no token is absent."""
    assert re.findall(r"^kernels: (.*)$", reports[EXPERTS], re.MULTILINE) == ["7"]
    names = [kernel.name.removesuffix("_mosaic_gpu_kernel") for kernel in reported_kernels(reports[EXPERTS])]
    assert names == ["matmul", "expert_choice", "matmul", "matmul"]


def test_a_product_with_adapters_adds_one_kernel_to_its_weights() -> None:
    """Four products, two norms, keys and values, and attention in two kernels. Nothing is padded, cast or copied."""
    names = "a layer with adapters", "two layers with adapters"
    reports = compiled(Path(compiler.__file__), names, dump="MOSAIC_GPU_DUMP_PTXAS")
    one, two = (int(re.findall(r"^kernels: (.*)$", reports[name], re.MULTILINE)[0]) for name in names)
    assert two - one == 4 * 2 + 2 + 1 + 2
    kernels = [kernel for name in names for kernel in reported_kernels(reports[name])]
    assert any(kernel.name.startswith("matmul_and_first_products") for kernel in kernels)
    assert [kernel for kernel in kernels if kernel.spilled_bytes] == []


def test_a_seal_by_a_known_number_is_seen() -> None:
    kernel = "a (p: f32[2]) {\n %p = f32[2]{0} parameter(0)\n %b = u32[2]{0} bitcast(%p)\n"
    zero = "%z = u32[] constant(0)\n %y = u32[2]{0} broadcast(%z)\n %x = u32[2]{0} xor(%b, %y)\n}"
    assert seals(kernel + zero) == {"constant"}
    assert seals(kernel + zero.replace("constant(0)", "parameter(1)")) == {"parameter"}


def test_a_copy_is_seen() -> None:
    text = """
  %copy.7 = bf16[8,8,128,128]{3,2,1,0} copy(%pool), metadata={}
  ROOT %fused = s32[4]{0} fusion(%copy.7), kind=kLoop, calls=%copy_computation
  %copy-start.1 = (f32[64]{0}, f32[64]{0}, u32[]) copy-start(%x)
"""
    assert copied(text) == ["bf16[8,8,128,128]", "f32[64]"]


def test_a_spill_is_seen() -> None:
    text = """
ptxas info    : Compiling entry function 'one' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
ptxas info    : Compiling entry function 'two' for 'sm_90a'
    64 bytes stack frame, 24 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 255 registers
"""
    assert list(reported_kernels(text)) == [Kernel("one", "sm_90a", 168, 0), Kernel("two", "sm_90a", 255, 64)]
