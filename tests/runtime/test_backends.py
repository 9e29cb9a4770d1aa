"""The choice of the backend that serves."""

import jax
import jax.numpy as jnp
import pytest

import detjax
from detjax import ops
from detjax.runtime import backends


@pytest.fixture(autouse=True)
def no_choice_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DETJAX_BACKEND", raising=False)


def test_the_portable_backend_serves_by_default() -> None:
    assert detjax.backend() == "portable"


def test_a_context_chooses_the_backend_and_gives_it_back() -> None:
    with detjax.use_backend("stock"):
        assert detjax.backend() == "stock"
        with detjax.use_backend(None):
            assert detjax.backend() == "stock"
        with detjax.use_backend("portable"):
            assert detjax.backend() == "portable"
        assert detjax.backend() == "stock"
    assert detjax.backend() == "portable"


def test_the_environment_variable_chooses_the_backend_and_a_context_beats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DETJAX_BACKEND", "stock")
    assert detjax.backend() == "stock"
    with detjax.use_backend("portable"):
        assert detjax.backend() == "portable"


def test_an_unknown_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match="use_backend: 'hoper' is not a backend; accepted: hopper, tpu, portable, stock"
    ):
        with detjax.use_backend("hoper"):
            pass
    monkeypatch.setenv("DETJAX_BACKEND", "hoper")
    with pytest.raises(ValueError, match="environment variable DETJAX_BACKEND: 'hoper' is not a backend"):
        detjax.backend()


def _is_portable(text: str) -> bool:
    """Returns whether this is a program of the portable backend, which has loops that XLA's own do not have."""
    return "while" in text


@pytest.mark.parametrize("choose", ["context", "variable"])
def test_the_backend_is_part_of_the_compilation_caches_key(choose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []

    @detjax.jit
    def program(x: jax.Array) -> jax.Array:
        traced.append(detjax.backend())
        return ops.softmax(x)

    x = jnp.ones((2, 3))
    program(x)
    if choose == "context":
        with detjax.use_backend("stock"):
            program(x)
    else:
        monkeypatch.setenv("DETJAX_BACKEND", "stock")
        program(x)
        monkeypatch.delenv("DETJAX_BACKEND")
    program(x)
    assert traced == ["portable", "stock"]


def test_stock_serves_only_where_it_is_asked_for() -> None:
    x = jnp.ones((2, 3))
    assert _is_portable(jax.jit(ops.softmax).lower(x).as_text())
    with detjax.use_backend("stock"):
        assert not _is_portable(jax.jit(ops.softmax).lower(x).as_text())


def test_an_operation_without_kernels_on_a_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "BACKENDS", ("new", "portable"))
    with (
        pytest.raises(
            NotImplementedError,
            match=r"softmax: no kernels for backend 'new' on cpu:0 .*accepted: hopper, tpu, portable, stock",
        ),
        detjax.use_backend("new"),
    ):
        ops.softmax(jnp.ones((2, 3)))


def test_the_hopper_backend_is_refused_without_a_hopper_gpu() -> None:
    x = jnp.ones((2, 16), jnp.bfloat16)
    with (
        pytest.raises(RuntimeError, match=r"backend 'hopper' is chosen on cpu:0 .*accepted: .*H100, H200.*'portable'"),
        detjax.use_backend("hopper"),
    ):
        ops.matmul(x, x, layout="nk")
