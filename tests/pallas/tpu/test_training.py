"""The gradients of a batch on the backend `tpu`, its kernels in Pallas' interpreter, and their order of addition."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from detjax.operands.options import Epilogue
from detjax.pallas.tpu import matmul
from detjax.rl.trainer.gradients import empty_sums, next_sums
from detjax.rl.trainer.losses import LogLikelihood
from detjax.rl.trainer.microbatches import Layout, Packed, Rows
from detjax.runtime import backends
from tests.pallas.tpu.interpreter import COMPILER_OPTIONS, interpreted, normal
from tests.rl.training_cases import network, samples
from tests.support.bits import assert_same_bits, same_bits
from tests.support.products import matmul_gradients

BATCH = samples(4, longest=40)


@functools.cache
def gradients(name: str, layout: Layout, backend: str = "tpu", dtype: Any = jnp.bfloat16) -> list[np.ndarray]:
    """The sums of all gradients of a batch, carried through its microbatches."""
    net, weights = network(name, dtype)

    def fn(weights: Any, sums: Any, microbatch: Any) -> Any:
        return next_sums(net, weights, sums, microbatch, LogLikelihood())[0]

    params = pltpu.InterpretParams(uninitialized_memory="nan")
    with backends.use_backend(backend), pltpu.force_tpu_interpret_mode(params):
        program = jax.jit(fn, compiler_options=COMPILER_OPTIONS)
        sums = empty_sums(net, weights)
        for placed in layout.microbatches(BATCH):
            sums = program(weights, sums, jax.tree.map(jnp.asarray, placed.arrays))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(sums)]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3, tied", Packed(64)),
        pytest.param("qwen3, tied", Rows(1, 48), marks=pytest.mark.nightly),
        *(
            pytest.param("qwen2", layout, marks=pytest.mark.nightly)
            for layout in (Rows(1, 48), Rows(2, 64), Packed(64))
        ),
    ],
    ids=str,
)
def test_microbatches_padding_and_packing_change_no_gradient(name: str, layout: Layout) -> None:
    assert_same_bits(gradients(name, layout), gradients(name, Rows(4, 48)))


@pytest.mark.parametrize("name", ["qwen3, tied", pytest.param("qwen2", marks=pytest.mark.nightly)])
def test_gradients_by_xla_have_nearly_the_same_numbers_but_different_bits(name: str) -> None:
    expected = gradients(name, Rows(4, 48))
    by_xla = gradients(name, Rows(4, 48), "stock", jnp.float32)
    for one, exact in zip(expected, by_xla, strict=True):
        np.testing.assert_allclose(one, exact, atol=0.06 * np.abs(exact).max())
    assert not same_bits(by_xla, expected)


@pytest.mark.parametrize(
    ("layout", "gated", "m", "k", "n"),
    [
        ("nk", True, 300, 72, 136),
        ("kn", True, 80, 72, 136),
        ("nk", False, 80, 512, 256),  # whole tiles, which are updated in place
        ("kn", False, 80, 256, 512),
    ],
)
def test_sums_of_a_products_gradients_continue(layout: Any, gated: bool, m: int, k: int, n: int) -> None:
    stacked = (2,) if gated else ()
    x, dy = normal(m, k, dtype="bfloat16"), normal(m, n, dtype="bfloat16")
    shape = (*stacked, n, k) if layout == "nk" else (*stacked, k, n)
    w, bias = normal(*shape, dtype="bfloat16"), normal(*stacked, n, dtype="bfloat16")
    starts = normal(*shape, seed=1), normal(*stacked, n, seed=1)
    epilogue = Epilogue("silu", gated=True) if gated else Epilogue()
    fn = interpreted(matmul_gradients(matmul.backward, layout=layout, epilogue=epilogue))
    dx, *expected = fn(x, w, bias, dy, *starts)
    assert [sums.dtype for sums in expected] == [np.float32, np.float32]
    sums: Any = starts
    for first, end in ((0, 16), (16, m)):
        part, *sums = fn(x[first:end], w, bias, dy[first:end], *sums)
        assert_same_bits(part, dx[first:end])
    assert_same_bits(sums, expected)
    # Fresh sums that are added afterwards are others.
    fresh = fn(x, w, bias, dy)[1:]
    added = [start + np.asarray(one, np.float32) for start, one in zip(starts, fresh, strict=True)]
    for one, other in zip(added, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=0.02 * np.abs(other).max())
    assert not same_bits(added, list(expected))
