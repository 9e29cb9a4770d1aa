"""Backends, pinned options, and what is refused of the environment."""

import dataclasses
import json
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import detjax
from detjax import backends, compilation, fingerprints, ops
from tests.support.bits import assert_same_bits


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
        ValueError, match="use_backend: 'hoper' is no backend of this release; accepted: hopper, tpu, portable, stock"
    ):
        with detjax.use_backend("hoper"):
            pass
    monkeypatch.setenv("DETJAX_BACKEND", "hoper")
    with pytest.raises(ValueError, match="environment variable DETJAX_BACKEND: 'hoper' is no backend"):
        detjax.backend()


def _is_portable(text: str) -> bool:
    """The portable backend's loops are what tells its programs from XLA's own."""
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


def test_stock_is_served_only_where_it_is_asked_for() -> None:
    x = jnp.ones((2, 3))
    assert _is_portable(jax.jit(ops.softmax).lower(x).as_text())
    with detjax.use_backend("stock"):
        assert not _is_portable(jax.jit(ops.softmax).lower(x).as_text())


def test_an_operation_without_kernels_on_a_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "BACKENDS", ("new", "portable"))
    with (
        pytest.raises(
            NotImplementedError, match=r"softmax: no kernels for backend 'new' on cpu:0 .*accepted: portable"
        ),
        detjax.use_backend("new"),
    ):
        ops.softmax(jnp.ones((2, 3)))


def test_the_hopper_backend_says_so_where_there_is_no_hopper_gpu() -> None:
    x = jnp.ones((2, 16), jnp.bfloat16)
    with (
        pytest.raises(RuntimeError, match=r"backend 'hopper' is chosen on cpu:0 .*accepted: .*H100, H200.*'portable'"),
        detjax.use_backend("hopper"),
    ):
        ops.matmul(x, x, layout="nk")


@pytest.mark.parametrize("device_platform", ["cpu", "gpu", "tpu"])
def test_excess_precision_is_off_on_every_platform(device_platform: str) -> None:
    assert compilation.compiler_options(device_platform)["xla_allow_excess_precision"] is False


def test_the_gpus_choice_of_algorithms_is_pinned() -> None:
    options = compilation.compiler_options("gpu")
    assert (options["xla_gpu_autotune_level"], options["xla_gpu_deterministic_ops"]) == (0, True)


@pytest.mark.parametrize("device_platform", ["cpu", "gpu"])
def test_the_pinned_options_are_known_to_this_release_of_xla(device_platform: str) -> None:
    # The compiler for CPUs knows the names of both; those of TPUs are libtpu's own.
    options = compilation.compiler_options(device_platform)
    assert jax.jit(lambda x: x + 1, compiler_options=options)(jnp.ones(3))[0] == 2


def test_an_unknown_platform_is_refused() -> None:
    with pytest.raises(ValueError, match="platform 'npu' is unknown; accepted: cpu, gpu, tpu"):
        compilation.compiler_options("npu")


def test_programs_are_compiled_with_the_pinned_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that XLA does not know shows that the options do reach the compiler."""
    strange = {"cpu": compilation.compiler_options("cpu") | {"xla_no_such_option": True}}
    monkeypatch.setattr(compilation, "PINNED_OPTIONS", strange)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        detjax.jit(lambda x: x + 1)(jnp.ones(3))
    with detjax.use_backend("stock"):  # XLA's own are for what detjax is compared with
        assert detjax.jit(lambda x: x + 1)(jnp.ones(3))[0] == 2
        assert fingerprints.fingerprint().compiler_options == "{}"


def test_a_program_may_be_part_of_another() -> None:
    inner = detjax.jit(lambda x: ops.softmax(x) * 2)
    x = jnp.arange(6.0).reshape(2, 3)
    expected = inner(x)
    assert_same_bits(detjax.jit(lambda x: inner(x))(x), expected)
    assert_same_bits(jax.jit(lambda x: inner(x))(x), expected)
    assert_same_bits(jax.vmap(inner)(x[None])[0], expected)
    gradient = jax.grad(lambda x: inner(x)[0, 0])(x)
    assert_same_bits(detjax.jit(jax.grad(lambda x: inner(x)[0, 0]))(x), gradient)


def test_jit_takes_the_arguments_of_jax_jit() -> None:
    @detjax.jit(static_argnames="times")
    def scaled(x: jax.Array, times: int) -> jax.Array:
        assert isinstance(times, int)
        return x * times

    assert scaled(jnp.ones(2), times=3)[0] == 3
    donated = jnp.ones(2)
    detjax.jit(lambda x: x + 1, donate_argnums=0)(donated)
    assert donated.is_deleted()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "XLA_FLAGS",
            "--xla_allow_excess_precision=true",
            "--xla_allow_excess_precision=true; the contract needs false",
        ),
        ("XLA_FLAGS", "--xla_allow_excess_precision", "--xla_allow_excess_precision=true"),
        ("XLA_FLAGS", "--xla_dump_to=/x --xla_cpu_enable_fast_math=1", "--xla_cpu_enable_fast_math=1"),
        ("LIBTPU_INIT_ARGS", "--xla_allow_excess_precision=True", "LIBTPU_INIT_ARGS has"),
        ("NVIDIA_TF32_OVERRIDE", "1", "NVIDIA_TF32_OVERRIDE=1 is set and it makes cuBLAS round"),
    ],
)
def test_an_environment_that_contradicts_the_contract_is_refused(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(detjax.EnvironmentContradiction, match=message):
        ops.softmax(jnp.ones((2, 3)))


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("XLA_FLAGS", "--xla_allow_excess_precision=false --xla_force_host_platform_device_count=1"),
        ("XLA_FLAGS", "--xla_gpu_autotune_level=4"),  # of another platform
        ("NVIDIA_TF32_OVERRIDE", "0"),
    ],
)
def test_other_flags_are_let_through(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    compilation.check_environment()


def test_what_contradicts_on_a_gpu_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=4")
    with pytest.raises(detjax.EnvironmentContradiction, match="needs 0 on gpu"):
        compilation.check_environment()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("jax_disable_jit", True, "jax_disable_jit is on"),
        ("jax_threefry_partitionable", False, "jax_threefry_partitionable is off"),
    ],
)
def test_jax_options_that_contradict_the_contract_are_refused(option: str, value: bool, message: str) -> None:
    before = getattr(jax.config, option)
    jax.config.update(option, value)
    try:
        with pytest.raises(detjax.EnvironmentContradiction, match=message):
            compilation.check_environment()
    finally:
        jax.config.update(option, before)
    compilation.check_environment()


def test_a_program_without_the_pinned_options_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(RuntimeError, match=r"softmax: traced for the portable backend .* Put detjax.jit around"):
        jax.jit(ops.softmax).trace(jnp.ones((7, 5)))  # a shape that no other test has traced


def test_the_fingerprint_names_everything_bits_depend_on() -> None:
    found = dataclasses.asdict(detjax.fingerprint())
    assert found["contract_version"] == detjax.CONTRACT_VERSION
    assert (found["detjax"], found["jax"], found["backend"]) == (detjax.__version__, jax.__version__, "portable")
    assert "cores" in found["device_kind"]
    assert json.loads(found["compiler_options"]) == compilation.compiler_options()
    assert all(value != "" for value in found.values())


def _changed(value: Any) -> Any:
    return value + 1 if isinstance(value, int) else value + "x"


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(fingerprints.Fingerprint)])
def test_the_digest_changes_with_every_field(field: str) -> None:
    found = detjax.fingerprint()
    other = dataclasses.replace(found, **{field: _changed(getattr(found, field))})
    assert other.digest != found.digest


def test_flags_are_part_of_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    before = detjax.fingerprint().digest
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    assert detjax.fingerprint().digest != before


def test_another_process_has_the_same_fingerprint() -> None:
    command = [sys.executable, "-c", "import detjax; print(detjax.fingerprint().digest)"]
    there = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert there == detjax.fingerprint().digest
