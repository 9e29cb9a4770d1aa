"""The classification of JAX's options: complete, and true where a process can try it."""

import contextlib
import enum
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import detjax
from detjax.runtime import compilation, fingerprints, jax_options
from tests.support.jax_option_values import other_value

READ_AT_START = {"jax_backend_target", "jax_mock_gpu_topology", "jax_pjrt_client_create_options", "jax_xla_backend"}
READ_AT_START |= {"mock_num_gpu_processes"}
"""The options that JAX reads once, when it looks for devices."""


@contextlib.contextmanager
def changed(name: str, value: Any) -> Iterator[None]:
    before = jax.config.values[name]
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


def test_every_option_of_the_installed_jax_is_classified_once() -> None:
    harmless = [name for names in jax_options.HARMLESS.values() for name in names]
    classified = [*jax_options.REFUSED, *jax_options.HASHED, *harmless]
    assert len(classified) == len(set(classified))
    assert set(jax.config.values) <= set(classified), (
        "new options of JAX: classify them in detjax/runtime/jax_options.py"
    )
    assert "jax_enable_x64" in jax.config.values


def test_the_options_of_the_fingerprint_have_the_defaults_of_jax() -> None:
    assert jax_options.values() == {}
    assert fingerprints.fingerprint().jax_options == "{}"
    values = jax.config.values
    assert {name: values[name] for name in jax_options.REFUSED} == {
        name: refused.accepted for name, refused in jax_options.REFUSED.items()
    }


@pytest.mark.parametrize("name", jax_options.HASHED)
def test_every_hashed_option_changes_the_fingerprint(name: str) -> None:
    before = fingerprints.fingerprint().digest
    value = other_value(name)
    with changed(name, value):
        shown = value.name.lower() if isinstance(value, enum.Enum) else value
        assert jax_options.values() == {name: shown}
        assert fingerprints.fingerprint().digest != before
    assert fingerprints.fingerprint().digest == before


@pytest.mark.parametrize("name", sorted({*jax_options.HASHED} - READ_AT_START))
def test_jax_compiles_a_program_again_when_a_hashed_option_changes(name: str) -> None:
    """Otherwise a program that was compiled under one fingerprint would serve under another."""
    compiled = []

    def count(event: str, *_: object, **__: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    program, x = jax.jit(lambda x: x * 2), jnp.ones(3)
    program(x)
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        program(x)
        assert not compiled
        with changed(name, other_value(name)):
            program(x)
        assert compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(count)


@pytest.mark.parametrize("name", jax_options.REFUSED)
def test_every_refused_option_is_refused_by_every_program(name: str) -> None:
    program, x = detjax.jit(lambda x: x + 1), jnp.ones(3)
    assert program(x)[0] == 2
    with changed(name, other_value(name)):
        with pytest.raises(
            detjax.EnvironmentContradiction, match=rf"the JAX option {name} is .*; accepted: .*Call jax"
        ):
            program(x)
    assert program(x)[0] == 2


def test_an_option_in_no_table_is_part_of_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later JAX has new options, whose defaults nobody knows here."""
    before = fingerprints.fingerprint().digest
    known = {name: value for name, value in jax_options.HASHED.items() if name != "jax_enable_x64"}
    monkeypatch.setattr(jax_options, "HASHED", known)
    assert jax_options.values() == {"jax_enable_x64": False}
    assert fingerprints.fingerprint().digest != before
    with changed("jax_enable_x64", True):
        assert jax_options.values() == {"jax_enable_x64": True}


def test_options_are_those_of_the_thread_and_context() -> None:
    before = fingerprints.fingerprint().digest
    with jax.enable_x64(True):
        assert fingerprints.fingerprint().digest != before


def test_values_that_json_does_not_have_are_part_of_the_fingerprint() -> None:
    with changed("jax_pjrt_client_create_options", {"memory": 3, "b": True}):
        assert jax_options.values() == {"jax_pjrt_client_create_options": {"b": "True", "memory": "3"}}


def test_a_default_device_of_another_platform_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in (jax.devices()[0], "cpu"):
        with changed("jax_default_device", device):
            compilation.check_environment()
            monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
            with pytest.raises(detjax.EnvironmentContradiction, match=r"of platform 'cpu'; accepted: .*'gpu'"):
                compilation.check_environment()
            monkeypatch.undo()


def test_the_documentation_counts_the_options_of_this_jax() -> None:
    text = (Path(__file__).parents[2] / "docs" / "fingerprint.md").read_text(encoding="utf-8")
    counts = {"Refused": len(jax_options.REFUSED), "Hashed": len(jax_options.HASHED)}
    counts["Harmless"] = len(jax.config.values) - sum(counts.values())
    if "jax_test_dut" not in jax.config.values:  # JAX's own tests add options where something imports them
        assert f"JAX {jax.__version__} has {len(jax.config.values)} options" in text
        assert all(f"**{kind}** ({count})" in text for kind, count in counts.items())
