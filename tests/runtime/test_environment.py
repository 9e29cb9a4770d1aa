"""Environment variables and files of flags: what of them is hashed, and what is refused."""

import itertools
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import detjax
from detjax.runtime import compilation, environment, fingerprints


@pytest.fixture(autouse=True)
def no_flags_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in environment.variables("gpu") | environment.variables("tpu"):
        monkeypatch.delenv(variable)


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("", {}),
        ("  --a=1\t--b \n--c=x=y", {"a": "1", "b": "true", "c": "x=y"}),
        ("""--a="b c" --d='e f'--g=2""", {"a": "b c", "d": "e f", "g": "2"}),
        (r"""--a="b \" c\\" --d="open""", {"a": 'b " c\\', "d": "open"}),
        ("--a=1 word --b=2", {"a": "1"}),
        ("-a=1 --a=2", {"a": "2"}),
        ("--a=it's", {"a": "it's"}),
    ],
)
def test_flags_are_read_as_xla_reads_them(text: str, flags: dict[str, str]) -> None:
    assert environment.flags("XLA_FLAGS", text) == flags


def test_a_file_of_flags_counts_as_its_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(value: str) -> str:
        monkeypatch.setenv("XLA_FLAGS", value)
        return fingerprints.fingerprint().digest

    texts = {"a": "--xla_cpu_max_isa=AVX2", "b": "--xla_cpu_max_isa=AVX", "c c": "--xla_cpu_max_isa=AVX2"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    digests = {name: digest(str(tmp_path / name)) for name in texts}
    assert digests["a"] == digests["c c"] == digest(texts["a"])
    assert digests["b"] != digests["a"]


def test_a_contradiction_in_a_file_of_flags_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flags").write_text("\n--xla_dump_to=/x\n--xla_allow_excess_precision=true\n")
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags"))
    with pytest.raises(detjax.EnvironmentContradiction, match="--xla_allow_excess_precision=true; the contract needs"):
        detjax.jit(lambda x: x + 1)(jnp.ones(3))


def test_a_file_of_flags_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "absent"))
    for check in (compilation.check_environment, fingerprints.fingerprint):
        with pytest.raises(detjax.EnvironmentContradiction, match=r"the file cannot be read \(No such file"):
            check()


@pytest.mark.parametrize("flag", ["flagfile=/x", "fromenv=xla_a", "tryfromenv=xla_a"])
def test_flags_that_libtpu_would_read_from_another_place_are_refused(
    flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--xla_tpu_a=1 --{flag}")
    with pytest.raises(detjax.EnvironmentContradiction, match=f"--{flag}, which reads flags from elsewhere"):
        compilation.check_environment()


@pytest.mark.parametrize(
    ("variable", "platform", "is_hashed"),
    [
        ("XLA_FLAGS", "cpu", True),
        ("XLA_NEW_IN_THE_NEXT_RELEASE", "cpu", True),
        ("LIBTPU_INIT_ARGS", "cpu", True),
        ("JAX_NEW_IN_THE_NEXT_RELEASE", "cpu", True),
        ("ONEDNN_MAX_CPU_ISA", "cpu", True),
        ("NPY_DISABLE_CPU_FEATURES", "cpu", True),
        ("GLIBC_TUNABLES", "cpu", True),
        ("TF_XLA_FLAGS", "cpu", True),
        ("NVIDIA_TF32_OVERRIDE", "gpu", True),
        ("CUBLAS_WORKSPACE_CONFIG", "gpu", True),
        ("CUBLASLT_HEURISTICS_CACHE_CAPACITY", "gpu", True),
        ("CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT", "gpu", True),
        ("CUDA_FORCE_PTX_JIT", "gpu", True),
        ("DISABLE_PTXAS_OPT", "gpu", True),
        ("LIBTPU_INIT_ARGS", "tpu", True),
        ("TPU_NEW_IN_THE_NEXT_RELEASE", "tpu", True),
        ("CUDA_FORCE_PTX_JIT", "cpu", False),  # a variable of a different platform
        ("CUDA_VISIBLE_DEVICES", "gpu", False),
        ("JAX_ENABLE_X64", "cpu", False),  # an option of JAX, which the fingerprint has already
        ("JAX_COORDINATOR_ADDRESS", "cpu", False),
        ("MOSAIC_GPU_CUDA_ROOT", "gpu", False),
        ("PJRT_NPROC", "cpu", False),
        ("TF_VAR_region", "cpu", False),
        ("TPU_WORKER_ID", "tpu", False),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "gpu", False),
    ],
)
def test_variables_that_bits_may_depend_on_are_hashed(
    variable: str, platform: str, is_hashed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "--a=1")
    assert environment.variables(platform) == ({variable: "--a=1"} if is_hashed else {})
    if platform == jax.default_backend():
        assert json.loads(fingerprints.fingerprint().flags) == environment.variables(platform)
    monkeypatch.setenv(variable, "")
    assert environment.variables(platform) == {}


EXAMPLES = {
    "cpu": """
        XLA_A LIBTPU_INIT_ARGS JAX_A TF_CUBLAS_A TF_CUDA_A TF_CUDNN_A TF_DETERMINISTIC_OPS TF_DISABLE_A TF_ENABLE_A
        TF_GPU_A TF_XLA_A PJRT_A LLVM_A MLIR_A TRITON_A DNNL_A ONEDNN_A MKL_A NPY_A GLIBC_TUNABLES LD_PRELOAD
    """.split(),
    "gpu": """
        CUDA_A CUBLAS_A CUDNN_A NVIDIA_A NVCC_A NVPTX_A MOSAIC_A DISABLE_LLVM_OPT DISABLE_PTXAS_OPT LD_LIBRARY_PATH
    """.split(),
    "tpu": "LIBTPU_A TPU_A MEGASCALE_A MOSAIC_A".split(),
}
"""A variable for each pattern, written out a second time: none may go unnoticed."""
HARMLESS = """
    JAX_TRACEBACK_FILTERING MLIR_ENABLE_DIAGNOSTICS MLIR_ENABLE_DUMP MLIR_ENABLE_TIMING MOSAIC_GPU_DUMP_A
    NVPTX_ENABLE_DUMP TF_DISABLE_PROFILING TPU_MIN_LOG_LEVEL TPU_STDERR_LOG_LEVEL TPU_VMODULE CUDA_CACHE_DISABLE
    CUDA_CACHE_MAXSIZE CUDA_CACHE_PATH TF_GPU_ALLOCATOR XLA_CLIENT_MEM_FRACTION XLA_PYTHON_CLIENT_A PJRT_NPROC
    CUDA_DEVICE_MAX_CONNECTIONS CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING CUDA_DEVICE_ORDER CUDA_VISIBLE_DEVICES
    JAX_COORDINATOR_A JAX_FORCE_TPU_INIT JAX_LOCAL_DEVICE_IDS JAX_PARTITION_INDEX JAX_SLICE_INDEX NVIDIA_VISIBLE_DEVICES
    TPU_ACCELERATOR_TYPE TPU_CHIPS_A TPU_HOST_BOUNDS TPU_NAME TPU_PROCESS_A TPU_SKIP_MDS_QUERY TPU_TOPOLOGY_A
    TPU_VISIBLE_A TPU_WORKER_A XLA_DISTRIBUTED_TOPOLOGY_NETWORK_NODES CUDA_VERSION NVIDIA_DRIVER_CAPABILITIES
    NVIDIA_PRODUCT_NAME NVIDIA_REQUIRE_A TPU_ML_PLATFORM_A MOSAIC_GPU_CUDA_ROOT MOSAIC_GPU_NVSHMEM_A
    MOSAIC_GPU_RUNTIME_LIB_PATH
""".split()


@pytest.mark.parametrize("device_platform", EXAMPLES)
def test_exactly_these_variables_are_hashed_on_a_platform(
    device_platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = ["PATH_A", "CUDNN", "TF_A", "AXLA_A", "NPY", "LD_PRELOAD_A"]
    for name in (*itertools.chain(*EXAMPLES.values()), *HARMLESS, *others):
        monkeypatch.setenv(name, "--a=1")
    hashed = {*EXAMPLES["cpu"], *EXAMPLES[device_platform]}
    # Another platform's patterns may fit as well.
    fitting = {"LIBTPU_INIT_ARGS"}
    assert {*environment.variables(device_platform)} - fitting == hashed - fitting
    assert [*environment.variables(device_platform)] == sorted(environment.variables(device_platform))


@pytest.mark.parametrize(
    ("value", "is_refused"),
    [
        ("false", False),
        ("False", False),
        ("0", False),
        ("true", True),
        ("TRUE", True),
        ("1", True),
        ("2", True),
        ("no", True),
        ("-1", True),
    ],
)
def test_a_pinned_option_may_be_given_its_own_value_in_any_spelling(value: str, is_refused: bool) -> None:
    pinned = {"xla_allow_excess_precision": False, "xla_gpu_autotune_level": 0}
    for name in pinned:
        text = f"--xla_dump_to=/x --{name}={value}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XLA_FLAGS", text)
            problems = [*environment.contradictions(pinned)]
        assert len(problems) == is_refused
        assert not problems or f"XLA_FLAGS has --{name}={value}; the contract needs" in problems[0]


def test_flags_from_elsewhere_are_refused_for_libtpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--flagfile=/x --fromenv=a")
    assert [*environment.contradictions({})] == []


def test_flags_that_were_removed_after_xla_read_them_are_in_the_fingerprint() -> None:
    """XLA reads its flags once. Its options have their values, even if the environment has changed since."""
    from tests.support.answer import digest_after_flags_were_removed

    # This process has read other flags, if any.
    assert "XLA_FLAGS" not in os.environ
    assert digest_after_flags_were_removed("--xla_cpu_max_isa=AVX2") != fingerprints.fingerprint().digest
