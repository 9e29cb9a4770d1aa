"""Every kernel at the sizes of real models compiles for every chip, and fits into its memory."""

import importlib
import importlib.util

import pytest

from detjax.bench.deviceless import TPU_CHIPS, compiled_for

CASES = [
    pytest.param(fn, args, id=f"{module.removesuffix('_cases').removeprefix('tpu_')} {name}")
    for module in ("tpu_matmul_cases", "tpu_rows_cases", "tpu_attention_cases")
    for name, (fn, args) in importlib.import_module(module).cases().items()
]
MEMORY = {"v5e": 16 << 30, "v5p": 95 << 30, "v6e": 32 << 30, "tpu7x": 96 << 30}
"""Bytes of a device; of a v7x, which has two, half the chip's."""


@pytest.mark.sampled(30)
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: see make test-tpu")
@pytest.mark.parametrize("chip", TPU_CHIPS)
@pytest.mark.parametrize(("fn", "args"), CASES)
def test_kernels_compile(fn, args, chip: str) -> None:
    memory = compiled_for(chip, fn, *args).memory_analysis()
    assert memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes < MEMORY[chip]
