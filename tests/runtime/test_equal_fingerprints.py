"""Equal fingerprints promise equal bits: processes under different environments answer, and their bits are compared."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import pytest

from detjax.runtime import jax_options
from tests.support.answer import Answer, answers
from tests.support.jax_option_values import other_value

EVERYTHING_IS_AN_ERROR = {"jax_no_execution", "jax_no_tracing"}
HOSTS_AND_DEVICES = {
    "jax_cpu_collectives_implementation",
    "jax_cuda_visible_devices",
    "jax_default_device",
    "jax_enable_preemption_service",
    "jax_enable_recoverability",
    "jax_num_cpu_devices",
    "jax_oneapi_visible_devices",
    "jax_platform_name",
    "jax_platforms",
    "jax_rocm_visible_devices",
    *(name for name in jax.config.values if "mtls" in name or "cross_host" in name or "timeout_minutes" in name),
}
"""The options that need other hosts or devices, or that JAX reads before it looks for devices."""

HARMLESS = sorted(
    {name for names in jax_options.HARMLESS.values() for name in names if name in jax.config.values}
    - EVERYTHING_IS_AN_ERROR
    - HOSTS_AND_DEVICES
)

# name: variables, and what becomes of the fingerprint
ENVIRONMENTS: Mapping[str, tuple[Mapping[str, str], str]] = {
    "a file of flags": ({"XLA_FLAGS": "FILE"}, "another"),
    "threads, devices and generators": (
        {
            "PJRT_NPROC": "1",
            "OMP_NUM_THREADS": "1",
            "JAX_NUM_CPU_DEVICES": "3",
            "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0",
            "JAX_DEFAULT_PRNG_IMPL": "rbg",
            "JAX_ENABLE_CUSTOM_PRNG": "1",
            "PYTHONHASHSEED": "7",
            "TZ": "Asia/Tokyo",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        },
        "the same",
    ),
    "the fewest optimizations": ({"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}, "refused"),
    "flags": ({"XLA_FLAGS": "--xla_backend_optimization_level=0"}, "another"),
    "narrower vectors": ({"XLA_FLAGS": "--xla_cpu_max_isa=AVX2"}, "another"),
    "no optimization": ({"JAX_OPTIMIZATION_LEVEL": "O0"}, "refused"),
    "64 bits": ({"JAX_ENABLE_X64": "1"}, "another"),
    "precision": ({"JAX_DEFAULT_MATMUL_PRECISION": "bfloat16"}, "another"),
    "seeds": ({"JAX_RANDOM_SEED_OFFSET": "3"}, "another"),
    "constants": ({"JAX_EMBEDDED_CONSTANTS_MAX_BYTES": "0"}, "another"),
    "host libraries": ({"NPY_DISABLE_CPU_FEATURES": "AVX2"}, "another"),
    "partitioner": ({"JAX_USE_SHARDY_PARTITIONER": "0"}, "another"),
    "no JAX cache": ({"JAX_ENABLE_COMPILATION_CACHE": "0", "JAX_CHECK_TRACER_LEAKS": "1"}, "the same"),
    "excess precision": ({"XLA_FLAGS": "--xla_allow_excess_precision=true"}, "refused"),
}


def options_to_change(directory: Path) -> dict[str, Any]:
    """Another value for every harmless option that a process can change."""
    paths = {"jax_compilation_cache_dir": directory / "cache", "jax_dump_ir_to": directory / "dump"}
    return {name: str(paths[name]) if name in paths else other_value(name) for name in HARMLESS}


SUSPECT = "jax_default_prng_impl"
"""The option that is changed alone in every run of the tests."""


@pytest.fixture(scope="module")
def plain_and_changed() -> list[Answer]:
    """The answers of one process: as JAX comes, and with one harmless option changed."""
    return answers([{}, {SUSPECT: other_value(SUSPECT)}])


@pytest.fixture(scope="module")
def plain(plain_and_changed: list[Answer]) -> Answer:
    return plain_and_changed[0]


def test_all_harmless_options_and_variables_together_change_no_bit(plain: Answer, tmp_path: Path) -> None:
    assert plain.error is None
    variables, fingerprint = ENVIRONMENTS["threads, devices and generators"]
    assert fingerprint == "the same"
    assert answers([options_to_change(tmp_path)], variables) == [plain]


PARTS = [pytest.param(part, marks=pytest.mark.nightly) for part in range(8)]


@pytest.mark.parametrize("part", [None, *PARTS])
def test_each_harmless_option_changes_no_bit(part: int | None, plain_and_changed: list[Answer], tmp_path: Path) -> None:
    plain, changed = plain_and_changed
    if part is None:
        assert SUSPECT in HARMLESS and changed == plain
        return
    options = [{name: value} for name, value in options_to_change(tmp_path).items()][part::8]
    answered = answers(options)
    different = [change for change, answer in zip(options, answered, strict=True) if answer != plain]
    assert different == []


NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in ENVIRONMENTS if name != "a file of flags"]


@pytest.mark.parametrize("name", ["a file of flags", *NIGHTLY])
def test_processes_with_equal_fingerprints_have_equal_bits(name: str, plain: Answer, tmp_path: Path) -> None:
    variables, fingerprint = ENVIRONMENTS[name]
    flags = tmp_path / "flags"
    flags.write_text("--xla_backend_optimization_level=0\n")
    (answer,) = answers(environment={key: value.replace("FILE", str(flags)) for key, value in variables.items()})
    if fingerprint == "refused":
        assert answer.bits is None and answer.error is not None
        assert answer.error.startswith("EnvironmentContradiction")
        return
    assert answer.error is None
    assert (answer.digest == plain.digest) == (fingerprint == "the same")
    assert answer.bits == plain.bits or answer.digest != plain.digest
    if name in ("a file of flags", "flags"):
        assert answer.bits != plain.bits, "the answer is too simple to show what flags change"
