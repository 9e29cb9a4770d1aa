"""`detjax certify`: what it prints, what it writes, and its exit codes."""

import json
from pathlib import Path

import pytest

from detjax.cli import main
from tests.support import commands
from tests.support.commands import Result

MODULE = """
import jax.numpy as jnp

rows = (jnp.arange(12.0).reshape(3, 4),)
both = lambda: (jnp.ones(4), rows[0])

def reversed_rows(x):
    return x[:, ::-1]

def exponential(x):
    return jnp.exp(x)

def centred(x):
    return x - x.mean(axis=0, keepdims=True)

def chosen(limit, x):
    return jnp.minimum(x, limit[None])
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working directory."""
    name = f"certified_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def run(*arguments: object) -> Result:
    return commands.run(main, "certify", *arguments, "--batch-sizes", "1,3")


def test_the_exit_code_says_whether_enough_is_certified(module: str) -> None:
    rows = ("--args", f"{module}:rows")
    for function, codes in {"reversed_rows": (0, 0), "exponential": (0, 1), "centred": (1, 1)}.items():
        for require, code in zip(("observed", "proven"), codes, strict=True):
            assert run(f"{module}:{function}", *rows, "--require", require).exit_code == code


def test_it_prints_the_line_and_writes_json(module: str, tmp_path: Path) -> None:
    result = run(f"{module}:centred", "--args", f"{module}:rows", "--json", tmp_path / "certificate.json")
    printed = "".join(result.stdout.split())
    written = json.loads((tmp_path / "certificate.json").read_text(encoding="utf-8"))
    assert "centredisrefuted:row0atposition0ofabatchof2" in printed
    assert written["outcome"] == "refuted"
    assert written["risks"][0]["line"] == f"{tmp_path / module}.py:14"


def test_axes_are_json(module: str) -> None:
    both = (f"{module}:chosen", "--args", f"{module}:both")
    assert run(*both, "--batch-axes", "[null, 0]", "--require", "proven").exit_code == 0
    assert run(*both, "--batch-axes", "0").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{module}", "--args", "{module}:rows"), "accepted: module:name"),
        (("no_module:f", "--args", "{module}:rows"), "cannot be imported: ModuleNotFoundError"),
        (("{module}:nothing", "--args", "{module}:rows"), "cannot be imported: AttributeError"),
        (("{module}:rows", "--args", "{module}:rows"), "which is tuple; accepted: functions"),
        (("{module}:centred", "--args", "{module}:__name__"), "which is str; accepted: a tuple"),
        (("{module}:centred", "--args", "{module}:rows", "--require", "refuted"), "accepted: proven, observed"),
        (("{module}:centred", "--args", "{module}:rows", "--batch-axes", "first"), "--batch-axes is 'first'"),
        (("{module}:centred", "--args", "{module}:rows", "--batch-axes", "0.5"), "--batch-axes is '0.5'"),
        (("{module}:centred", "--args", "{module}:rows", "--batch-axes", "true"), "--batch-axes is 'true'"),
        (("{module}:centred", "--args", "{module}:rows", "--batch-axes", "[[0, false]]"), "accepted: an integer, null"),
        (("{module}:centred", "--args", "{module}:both", "--batch-axes", "0"), "batches have 3, 4 rows"),
    ],
)
def test_bad_input_ends_in_one_line(module: str, arguments: tuple[str, ...], message: str) -> None:
    result = run(*(argument.format(module=module) for argument in arguments))
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
