"""The fingerprint of the environment."""

import dataclasses
import importlib.metadata
import json
import pathlib
import platform
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import pytest

import detjax
from detjax.runtime import compilation, fingerprints


@pytest.fixture(autouse=True)
def no_choice_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DETJAX_BACKEND", raising=False)


def test_the_fingerprint_names_everything_bits_depend_on() -> None:
    fields = dataclasses.asdict(detjax.fingerprint())
    assert fields["contract_version"] == detjax.CONTRACT_VERSION
    assert (fields["detjax"], fields["jax"], fields["backend"]) == (detjax.__version__, jax.__version__, "portable")
    assert "cores" in fields["device_kind"]
    assert json.loads(fields["compiler_options"]) == compilation.compiler_options()
    assert all(value != "" for value in fields.values())


def _changed(value: Any) -> Any:
    return value + 1 if isinstance(value, int) else value + "x"


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(fingerprints.Fingerprint)])
def test_the_digest_changes_with_every_field(field: str) -> None:
    fingerprint = detjax.fingerprint()
    other = dataclasses.replace(fingerprint, **{field: _changed(getattr(fingerprint, field))})
    assert other.digest != fingerprint.digest


@pytest.mark.parametrize("variable", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_flags_are_part_of_the_fingerprint(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = detjax.fingerprint().digest
    monkeypatch.setenv(variable, "--xla_cpu_max_isa=AVX2")
    assert detjax.fingerprint().digest != before


def test_another_process_has_the_same_fingerprint() -> None:
    command = [sys.executable, "-c", "import detjax; print(detjax.fingerprint().digest)"]
    there = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert there == detjax.fingerprint().digest


def test_each_field_comes_from_its_own_source(monkeypatch: pytest.MonkeyPatch) -> None:
    device = jax.devices()[0]
    plain = detjax.fingerprint()
    assert plain == detjax.fingerprint(device)
    assert plain.jaxlib == importlib.metadata.version("jaxlib")
    assert plain.plugin == device.client.platform_version.strip()
    assert (plain.driver, plain.jax_options, plain.separated_fusions) == ("none", "{}", "[]")
    assert len(plain.xla_options) == len(plain.digest) == 16
    libraries = json.loads(plain.libraries)
    assert {*libraries} == {"python", "jinja2", "ml_dtypes", "numpy", "tokenizers", "llguidance"}
    assert libraries.pop("python") == platform.python_version()
    assert libraries == {name: importlib.metadata.version(name) for name in libraries}
    version = importlib.metadata.version
    changes: dict[str, tuple[Any, str, Any]] = {
        "contract_version": (fingerprints, "CONTRACT_VERSION", plain.contract_version + 1),
        "detjax": (fingerprints, "__version__", "x"),
        "backend": (fingerprints.backends, "backend", lambda: "hopper"),
        "device_kind": (fingerprints.backends, "device_kind", lambda device: "x"),
        "jax": (jax, "__version__", "x"),
        "jaxlib": (importlib.metadata, "version", lambda name: version(name) + "x" * (name == "jaxlib")),
        "flags": (fingerprints.environment, "variables", lambda platform: {"A": platform}),
        "compiler_options": (compilation, "options_of", lambda *names: {"x": names}),
        "jax_options": (fingerprints.jax_options, "values", lambda: {"x": 1}),
        "libraries": (fingerprints, "_libraries", lambda platform: {"x": platform}),
        "separated_fusions": (fingerprints.fusions, "unfused_with_other_bits", lambda: ["x"]),
    }
    for field, (place, name, value) in changes.items():
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            other = detjax.fingerprint()
        different = [
            one.name for one in dataclasses.fields(plain) if getattr(plain, one.name) != getattr(other, one.name)
        ]
        assert different == [field]
    assert detjax.fingerprint() == plain


def test_stock_programs_have_no_options_under_contract() -> None:
    with detjax.use_backend("stock"):
        stock = detjax.fingerprint()
    assert (stock.backend, stock.compiler_options) == ("stock", "{}")


def test_the_fingerprint_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    client = SimpleNamespace(platform_version=" release\n")
    device = SimpleNamespace(platform="gpu", device_kind="a GPU", client=client)
    read_text = pathlib.Path.read_text

    def read(path: pathlib.Path, *args: Any, **options: Any) -> str:
        is_driver = path == pathlib.Path("/proc/driver/nvidia/version")
        return "first line \nsecond\n" if is_driver else read_text(path, *args, **options)

    monkeypatch.setattr(pathlib.Path, "read_text", read)
    monkeypatch.setenv("CUDA_A", "1")
    taken = detjax.fingerprint(device)
    assert (taken.device_kind, taken.driver, taken.plugin) == ("a GPU", "first line", "release")
    assert json.loads(taken.flags)["CUDA_A"] == "1"
    assert json.loads(taken.compiler_options) == compilation.compiler_options("gpu")


@pytest.mark.parametrize(
    ("device_platform", "added"),
    [("cpu", []), ("gpu", ["jax-cuda13-plugin", "nvidia-cublas"]), ("tpu", ["libtpu", "libtpu-nightly"])],
)
def test_libraries_of_a_platform_are_those_that_are_installed_for_it(
    device_platform: str, added: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("JAX-cuda13-plugin", "nvidia-cublas", "libtpu", "libtpu-nightly", "xnvidia-x", "jax")
    installed = [SimpleNamespace(name=name, version=f"1.{name}") for name in names]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: installed)
    versions = fingerprints._libraries.__wrapped__(device_platform)
    assert sorted({*versions} - {*fingerprints._libraries("cpu")}) == added
    assert all(versions[name].lower() == f"1.{name}" for name in added)


def test_an_optional_library_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def without(name: str) -> str:
        if name == "llguidance":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    assert "llguidance" not in fingerprints._libraries.__wrapped__("cpu")
