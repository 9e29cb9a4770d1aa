"""The product on `tcgen05`: refused by default, right in the interpreter, and compiled for compute capability 10."""

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.pallas import nvidia
from detjax.pallas.mma.matmul import tcgen05
from tests.pallas.hopper.interpreter import interpreted, normal
from tests.pallas.mma.compiler import Program, compile_programs, compiled


def product(dtype: str, m: int, n: int, k: int) -> Program:
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, k), (n, k))]
    return lambda x, w: tcgen05.product(x, w, out_dtype=dtype), shapes


PROGRAMS = {"4096 tokens": product("bfloat16", 4096, 4096, 4096), "odd sizes": product("float32", 100, 72, 48)}


def test_the_product_compiles_and_nothing_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tcgen05.SWITCH, "1")
    kernels = compiled(Path(__file__), "sm_100a", ())
    assert {*kernels} == {*PROGRAMS} and all(kernels.values())
    for reported in kernels.values():
        assert [(kernel.target, kernel.spilled_bytes) for kernel in reported] == [("sm_100a", 0)]


def test_the_product_is_refused_where_nothing_shows_that_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    x: Any = jnp.zeros((4, 32), jnp.bfloat16)
    monkeypatch.delenv(tcgen05.SWITCH, raising=False)
    with pytest.raises(NotImplementedError, match=r"no GPU has shown its bits; accepted: DETJAX_TCGEN05=1"):
        tcgen05.product(x, x, out_dtype="float32")
    monkeypatch.setenv(tcgen05.SWITCH, "1")
    with (
        nvidia.tracing_for((9, 0)),
        pytest.raises(NotImplementedError, match=r"capability 9\.0; accepted: .* on 10\.0"),
    ):
        tcgen05.product(x, x, out_dtype="float32")
    x = x.astype(jnp.float32)
    with nvidia.tracing_for((10, 0)), pytest.raises(NotImplementedError, match="x has dtype float32 and w float32"):
        tcgen05.product(x, x, out_dtype="float32")


def test_the_product_has_the_right_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tcgen05.SWITCH, "1")
    x, w = normal(130, 600, dtype="bfloat16"), normal(40, 600, dtype="bfloat16", seed=1)
    with nvidia.tracing_for((10, 0)):
        y = interpreted(lambda x, w: tcgen05.product(x, w, out_dtype="float32"), x, w)
    np.testing.assert_allclose(y, x.astype(np.float64) @ w.astype(np.float64).T, atol=1e-3)


if __name__ == "__main__":
    assert os.environ[tcgen05.SWITCH] == "1"
    compile_programs(PROGRAMS)
