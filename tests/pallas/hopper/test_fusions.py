"""Fusions that are switched off on Hopper: by other kernels with the same bits, or in plain JAX with its own."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
import pytest

import detjax
from detjax.runtime.fusions import FUSIONS
from tests.ops.fusion_cases import CASES, PAIRS
from tests.pallas.hopper.interpreter import kernels_interpreted
from tests.support.attention_requests import INTERPRETER
from tests.support.bits import assert_same_bits

KEPT = [pair for pair in PAIRS if "hopper" not in FUSIONS[pair[0]].changes_bits_on]
CHANGED = [pair for pair in PAIRS if "hopper" in FUSIONS[pair[0]].changes_bits_on]


@pytest.fixture
def hopper_in_the_interpreter(
    matrix_unit_in_steps: None, attention_in_the_interpreter: None, two_multiprocessors: None
) -> Iterator[None]:
    """The matrix unit adds the products of 16 K in one step, as XLA's dots do not."""
    with detjax.use_backend("hopper"), kernels_interpreted(), plgpu.force_gpu_interpret_mode(INTERPRETER):
        yield


def results(name: str, case: str, *, gradients: bool = False) -> tuple[list[Any], list[Any]]:
    """Returns the results of a case with its fusion and without it."""
    fn, arrays, with_gradients = CASES[name][case]("bfloat16")
    fn = with_gradients if gradients and with_gradients is not None else fn
    fused = jax.jit(fn)(*arrays)
    with detjax.without_fusions(name):
        separated = jax.jit(fn)(*arrays)
    return [np.asarray(x) for x in jax.tree.leaves(fused)], [np.asarray(x) for x in jax.tree.leaves(separated)]


FEW = (
    ("matmul_epilogue", "soft cap"),
    ("rms_norm_codes", "a product of a row"),
    ("attention_dequantize", "q4_0"),
    ("sampling_logprobs", "temperatures"),
)
FEW_WITH_GRADIENTS = ("rms_norm_residual", "with an offset"), ("rms_norm_codes", "a product")


def chosen(few: Sequence[tuple[str, str]]) -> list[Any]:
    """All cases; a few run every time."""
    return [pair if pair in few else pytest.param(*pair, marks=pytest.mark.nightly) for pair in KEPT]


@pytest.mark.usefixtures("hopper_in_the_interpreter")
@pytest.mark.parametrize(("name", "case"), chosen(FEW))
def test_no_bit_changes_where_other_kernels_take_the_steps(name: str, case: str) -> None:
    for one, other in zip(*results(name, case), strict=True):
        assert_same_bits(one, other)


@pytest.mark.usefixtures("hopper_in_the_interpreter")
@pytest.mark.parametrize(("name", "case"), chosen(FEW_WITH_GRADIENTS))
def test_no_bit_of_gradients_changes(name: str, case: str) -> None:
    for one, other in zip(*results(name, case, gradients=True), strict=True):
        assert_same_bits(one, other)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("hopper_in_the_interpreter")
@pytest.mark.parametrize(("name", "case"), CHANGED)
def test_plain_jax_gives_the_same_numbers_but_for_roundings(name: str, case: str) -> None:
    for one, other in zip(*results(name, case), strict=True):
        np.testing.assert_allclose(one.astype(np.float64), other.astype(np.float64), atol=0.05, rtol=0.02)


@pytest.mark.usefixtures("hopper_in_the_interpreter")
def test_bits_of_attention_change_in_plain_jax() -> None:
    fused, separated = results("attention", "decode")
    assert any(one.tobytes() != other.tobytes() for one, other in zip(fused, separated, strict=True))


@pytest.mark.parametrize("name", FUSIONS)
def test_another_program_runs(name: str) -> None:
    fn, arrays, _ = next(iter(CASES[name].values()))("bfloat16")
    with detjax.use_backend("hopper"):
        fused = str(jax.make_jaxpr(fn)(*arrays))
        with detjax.without_fusions(name):
            separated = str(jax.make_jaxpr(fn)(*arrays))
    assert fused != separated


@pytest.mark.hopper
@pytest.mark.parametrize(("name", "case"), KEPT)
def test_no_bit_changes_on_the_device(name: str, case: str) -> None:
    fn, arrays, with_gradients = CASES[name][case]("bfloat16")
    fn = with_gradients or fn
    fused = detjax.jit(fn)(*arrays)
    with detjax.without_fusions(name):
        separated = detjax.jit(fn)(*arrays)
    for one, other in zip(jax.tree.leaves(fused), jax.tree.leaves(separated), strict=True):
        assert_same_bits(one, other)
