"""Compiling for TPUs that are not there."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from detjax.bench import compare, deviceless
from detjax.bench import compile as compiling
from detjax.bench.__main__ import main
from detjax.bench.cases import OPERATIONS, SMALL, cases
from tests.support import commands


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Stands for libtpu, and refuses softmax; the calls that it saw."""
    seen: list[tuple[Any, ...]] = []
    client = SimpleNamespace(platform_version="libtpu of a test\n")
    devices = [SimpleNamespace(platform="tpu", device_kind="TPU v5 lite", client=client)]

    def compiled_for(chip: str, fn: Any, *args: Any, backend: str, donate: Any) -> Any:
        jax.eval_shape(fn, *args)
        seen.append((chip, backend, donate))
        if len(jax.tree.leaves(args)) == 1:
            raise RuntimeError("scoped vmem limit exceeded\nat length")
        sizes = {f"{name}_size_in_bytes": 1000 for name in ("argument", "output", "alias", "temp", "generated_code")}
        return SimpleNamespace(
            memory_analysis=lambda: SimpleNamespace(**sizes), cost_analysis=lambda: {"flops": 5.0, "utilization": 1.0}
        )

    monkeypatch.setattr(deviceless, "topology", lambda _: SimpleNamespace(devices=devices))
    monkeypatch.setattr(deviceless, "compiled_for", compiled_for)
    return seen


def test_what_the_compiler_says_is_kept(compiler: list[tuple[Any, ...]], tmp_path: Path) -> None:
    out = tmp_path / "v5e.json"
    only = ["rms_norm", "decode_step"]
    content = compiling.compile_for("v5e", small=True, only=only, backend="portable", out=out)
    assert json.loads(out.read_text()) == content
    assert compiler == [("v5e", "portable", donate) for donate in ((), (), (0, 1))]
    row = content["rows"][0]
    assert row["memory"]["temp"] == 1000 and row["cost"] == {"flops": 5.0} and row["compile_seconds"] >= 0
    assert (content["kind"], content["fingerprint"]["backend"]) == ("compiled", "portable")
    assert content["fingerprint"]["plugin"] == "libtpu of a test" and content["peak"]["chip"] == "TPU v5e"
    comparison = compare.compare([out, out])
    assert not comparison.pairs and not comparison.measured


def test_a_program_that_the_compiler_refuses_fails_the_command(compiler: list[tuple[Any, ...]]) -> None:
    arguments = ["compile", "--chip", "v5e", "--small", "--only", "softmax", "--only", "rms_norm"]
    result = commands.run(main, *arguments, env={"COLUMNS": "250"})
    assert result.exit_code == 1
    assert "FAILED: RuntimeError: scoped vmem limit exceeded" in result.output
    assert "compiled, not measured" in result.output
    assert {backend for _, backend, _ in compiler} == {"tpu"}


def test_every_case_has_arguments_without_a_device_that_makes_them() -> None:
    assert {case.operation for case in cases(SMALL)} == set(OPERATIONS)
    names = [(case.operation, case.name) for case in cases(SMALL)]
    assert len(set(names)) == len(names)
    for case in cases(SMALL):
        assert case.arguments and all("[" in text for text in case.arguments)


def test_without_libtpu_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    deviceless.topology.cache_clear()
    monkeypatch.setitem(sys.modules, "libtpu", None)
    result = commands.run(main, "compile", "--chip", "v5e", env={"COLUMNS": "250"})
    assert result.exit_code == 2
    assert "libtpu, which is not installed" in result.output and "pip install 'detjax[tpu]'" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chip", "v9"], "chip is 'v9'; accepted: v5e, v5p, v6e, tpu7x"),
        (["--chip", "v5e", "--only", "sort"], "--only is 'sort'; accepted: matmul"),
        ([], "--chip requires an argument"),
    ],
)
def test_what_cannot_be_compiled_is_refused(arguments: list[str], message: str) -> None:
    result = commands.run(main, "compile", *arguments, env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert message in result.output
