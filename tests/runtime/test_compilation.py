"""Pinned compiler options, programs compiled with them, and environments that are refused."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import detjax
from detjax import ops
from detjax.runtime import compilation, fingerprints
from tests.support.bits import assert_same_bits
from tests.support.kept_programs import no_kept_programs


@pytest.fixture(autouse=True)
def no_choice_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DETJAX_BACKEND", raising=False)


# Written out a second time: bits depend on every one of these options, so none may come or go unnoticed.
PINNED_OPTIONS = {
    "cpu": {
        "xla_allow_excess_precision": False,
        "xla_cpu_enable_fast_math": False,
        "xla_cpu_enable_fast_min_max": False,
    },
    "gpu": {
        "xla_allow_excess_precision": False,
        "xla_gpu_deterministic_ops": True,
        "xla_gpu_exclude_nondeterministic_ops": True,
        "xla_gpu_autotune_level": 0,
        "xla_gpu_enable_dynamic_slice_fusion": False,
    },
    "tpu": {
        "xla_allow_excess_precision": False,
        "xla_jf_accumulation_reassociation": False,
        "xla_tpu_force_excess_precision_bf16": False,
        "xla_tpu_auto_reduce_precision": False,
        "xla_tpu_enable_mixed_precision_add_transform": False,
    },
}


@pytest.mark.parametrize("device_platform", PINNED_OPTIONS)
def test_the_pinned_options_are_exactly_these(device_platform: str) -> None:
    assert compilation.compiler_options(device_platform) == PINNED_OPTIONS[device_platform]
    for backend in ("hopper", "tpu", "portable"):
        assert compilation.options_of(backend, device_platform) == PINNED_OPTIONS[device_platform]
    assert compilation.options_of("stock", device_platform) == {}


@pytest.mark.parametrize("device_platform", ["cpu", "gpu"])
def test_the_pinned_options_are_known_to_this_release_of_xla(device_platform: str) -> None:
    # The CPU compiler knows the names of both; only libtpu knows the TPU names.
    options = compilation.compiler_options(device_platform)
    assert jax.jit(lambda x: x + 1, compiler_options=options)(jnp.ones(3))[0] == 2


def test_chains_alone_get_the_options_of_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**compilation.CHAIN_OPTIONS["gpu"], "xla_no_such_option": "seen"}
    monkeypatch.setattr(compilation, "CHAIN_OPTIONS", {"cpu": options})
    assert detjax.jit(lambda x: x + 1)(jnp.ones(3))[0] == 2
    for fn in (nnx.Linear(3, 2, rngs=nnx.Rngs(0)), jnp.sin):
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
            detjax.jit(detjax.batch_invariant(fn))(jnp.ones((2, 3)))


def test_the_options_of_chains_are_known_to_this_release_of_xla() -> None:
    assert jax.jit(lambda x: x + 1, compiler_options=dict(compilation.CHAIN_OPTIONS["gpu"]))(jnp.ones(3))[0] == 2


def test_an_unknown_platform_is_refused() -> None:
    with pytest.raises(ValueError, match="platform 'npu' is unknown; accepted: cpu, gpu, tpu"):
        compilation.compiler_options("npu")


def test_programs_are_compiled_with_the_pinned_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that is unknown to XLA shows that the options do reach the compiler."""
    strange = {"cpu": compilation.compiler_options("cpu") | {"xla_no_such_option": True}}
    monkeypatch.setattr(compilation, "PINNED_OPTIONS", strange)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        detjax.jit(lambda x: x + 1)(jnp.ones(3))
    with detjax.use_backend("stock"):  # Stock programs have XLA's own options.
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
        ("XLA_FLAGS", "--xla_gpu_autotune_level=4"),  # an option of a different platform
        ("NVIDIA_TF32_OVERRIDE", "0"),
    ],
)
def test_other_flags_are_let_through(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    compilation.check_environment()


def test_a_contradiction_on_a_gpu_is_noticed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=4")
    with pytest.raises(detjax.EnvironmentContradiction, match="needs 0 on gpu"):
        compilation.check_environment()


def test_a_program_without_the_pinned_options_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(RuntimeError, match=r"softmax: traced for the portable backend .* Use detjax.jit instead"):
        jax.jit(ops.softmax).trace(jnp.ones((7, 5)))  # a shape that no other test has traced


def test_a_program_is_serialized_with_its_code_or_not_at_all() -> None:
    x = jnp.arange(30.0)

    def program() -> Any:
        jax.clear_caches()
        return compilation.compiled(compilation.jit(lambda x: jnp.tanh(jnp.pad(x[3:20], 5))), x)

    with no_kept_programs():
        compiled = program()
    assert_same_bits(compilation.loaded(compilation.serialized(compiled))(x), compiled(x))
    program()
    with pytest.raises(compilation.NotSerializable, match="no code; programs loaded from JAX's compilation cache"):
        compilation.serialized(program())
