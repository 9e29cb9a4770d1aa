"""The fingerprint of the environment."""

import dataclasses
import json
import subprocess
import sys
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
