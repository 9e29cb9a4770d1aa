"""Fusions that are switched off, on the portable backend: the same bits by other programs."""

import jax
import pytest

import detjax
from detjax.runtime.fusions import FUSIONS
from tests.ops.fusion_cases import CASES, PAIRS
from tests.support.bits import assert_same_bits


def test_every_fusion_has_a_case_and_an_operation() -> None:
    assert set(CASES) == set(FUSIONS)
    assert all(fusion.operations for fusion in FUSIONS.values())


ONLY_IN_KERNELS = ("rms_norm_codes",)
"""Fusions that do nothing on the portable backend, though their steps are operations of its own."""

SMALL = [(name, next(iter(CASES[name])), "bfloat16") for name, fusion in FUSIONS.items() if not fusion.in_plain_jax]
SMALL += [("matmul_epilogue", "clamp", "float32"), ("matmul_epilogue", "soft cap", "bfloat16")]
"""A case of each fusion whose steps are others on the portable backend, too."""


@pytest.mark.parametrize(
    ("name", "case", "dtype"),
    [
        (*pair, dtype) if (*pair, dtype) in SMALL else pytest.param(*pair, dtype, marks=pytest.mark.nightly)
        for pair in PAIRS
        for dtype in ("bfloat16", "float32")
    ],
)
def test_no_bit_of_results_and_gradients_changes(name: str, case: str, dtype: str) -> None:
    fn, arrays, with_gradients = CASES[name][case](dtype)
    fn = with_gradients or fn
    expected = detjax.jit(fn)(*arrays)
    with detjax.without_fusions(name):
        actual = detjax.jit(fn)(*arrays)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("name", FUSIONS)
def test_another_program_runs_where_the_portable_backend_fuses(name: str) -> None:
    fn, arrays, _ = next(iter(CASES[name].values()))("bfloat16")
    fused = str(jax.make_jaxpr(fn)(*arrays))
    with detjax.without_fusions(name):
        separated = str(jax.make_jaxpr(fn)(*arrays))
    assert (fused == separated) == (FUSIONS[name].in_plain_jax or name in ONLY_IN_KERNELS)
