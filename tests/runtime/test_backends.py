"""The choice of the backend that serves."""

import os
import pathlib
import platform
from types import SimpleNamespace
from typing import Any

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
        ValueError, match="use_backend: 'hoper' is not a backend; accepted: hopper, mma, tpu, portable, stock"
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
            match=r"softmax: no kernels for backend 'new' on cpu:0 .*accepted: hopper, mma, tpu, portable, stock",
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


def device(platform: str, capability: str | None = None) -> Any:
    return SimpleNamespace(platform=platform, compute_capability=capability, id=3, device_kind="kind")


@pytest.mark.parametrize(
    ("here", "serving"),
    [
        (device("gpu", "9.0"), ["hopper", "mma"]),
        *((device("gpu", capability), ["mma"]) for capability in ("8.0", "8.6", "8.9", "10.0", "12.0", "12.1")),
        *((device("gpu", capability), []) for capability in ("7.5", "gfx942", None)),
        (device("tpu"), ["tpu"]),
        (device("cpu", "9.0"), []),
    ],
)
def test_a_device_is_served_by_the_best_backend_that_runs_on_it(
    here: Any, serving: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [here, device("gpu", "9.0")])
    monkeypatch.setattr(backends, "runs_here", backends.runs_here.__wrapped__)
    serving = [*serving, "portable"]
    assert [name for name in backends.BACKENDS if backends.runs_here(name)] == serving
    assert detjax.backend() == serving[0]
    monkeypatch.setenv("DETJAX_BACKEND", "")  # as if it was not set
    assert detjax.backend() == serving[0]
    for name in serving:  # on an H100, the kernels of every GPU run where they are asked for
        monkeypatch.setenv("DETJAX_BACKEND", name)
        backends.check_device()
        assert detjax.backend() == name


def test_devices_have_names_and_processors_their_model_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backends.device_name() == f"cpu:0 ({backends.device_kind()})"
    assert backends.device_kind().endswith(f", {os.cpu_count()} cores")
    monkeypatch.setattr(jax, "devices", lambda: [device("gpu")])
    assert backends.device_name() == "gpu:3 (kind)"
    assert backends.device_kind(device("tpu")) == "kind"
    cpuinfo = "model name : A\nmodel : 7\ncpu family : 6\n"
    monkeypatch.setattr(pathlib.Path, "read_text", lambda *_, **__: cpuinfo)
    assert backends._processor.__wrapped__() == f"A family 6 model 7, {os.cpu_count()} cores"
    monkeypatch.setattr(pathlib.Path, "read_text", lambda *_, **__: "model name : A\n")
    monkeypatch.setattr(platform, "processor", lambda: "B")
    assert backends._processor.__wrapped__() == f"B, {os.cpu_count()} cores"


def test_a_device_that_cannot_serve_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    backends.check_device()
    for name in ("portable", "stock"):
        with detjax.use_backend(name):
            backends.check_device()
    for name in ("hopper", "mma", "tpu"):
        with detjax.use_backend(name), pytest.raises(ValueError, match=f"backend is '{name}', which serves .*cpu:0"):
            backends.check_device()
    guards = ("", "_host_to_device", "_device_to_host", "_device_to_device")
    for name in guards:
        for value in ("disallow", "disallow_explicit", "log", "allow"):
            with monkeypatch.context() as patch:
                patch.setattr(jax, "config", SimpleNamespace(**{f"jax_transfer_guard{name}": value}))
                if value.startswith("disallow"):
                    with pytest.raises(ValueError, match=f"JAX_TRANSFER_GUARD{name.upper()} is '{value}'"):
                        backends.check_device()
                else:
                    backends.check_device()

    def none() -> Any:
        raise RuntimeError("no such platform")

    monkeypatch.setattr(jax, "devices", none)
    monkeypatch.setenv("JAX_PLATFORMS", "abacus")
    with pytest.raises(ValueError, match=r"finds no device for JAX_PLATFORMS='abacus' \(no such platform\)"):
        backends.check_device()


def test_programs_are_traced_for_the_devices_platform_or_for_a_given_one() -> None:
    assert backends.target() == "cpu"
    with backends.tracing_for("tpu"):
        assert backends.target() == "tpu"
        with backends.tracing_for("gpu"):
            assert backends.target() == "gpu"
        assert backends.target() == "tpu"
    assert backends.target() == "cpu"
