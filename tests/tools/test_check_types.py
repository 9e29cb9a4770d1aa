"""Types are checked in each file that has changed, and in each that imports one, directly or not."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools import check_types

FILES = {
    "a/__init__.py": "",
    "a/base.py": "x = 1",
    "a/middle.py": "from .base import x",
    "a/top.py": "def f():\n    import a.middle",
    "a/other.py": "from a import missing",
    "b.py": "from a import top",
}


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[set[str], int]]:
    """The files that each run of pyright was given, every file if none, and its exit code."""
    for name, text in {**FILES, "pyproject.toml": '[tool.pyright]\ninclude = ["a", "b.py"]'}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    runs: list[tuple[set[str], int]] = []

    def run(command: list[object], check: bool) -> SimpleNamespace:
        named = {str(part) for part in command if str(part).endswith(".py")} or {*FILES}
        bad = any("bad" in Path(name).read_text() for name in named)
        runs.append((named, int(bad)))
        return SimpleNamespace(returncode=int(bad))

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.chdir(tmp_path)
    return runs


def changed(name: str, text: str) -> None:
    Path(name).write_text(text)


def test_a_file_is_checked_again_where_it_or_an_import_of_it_has_changed(checked: list[tuple[set[str], int]]) -> None:
    assert check_types.main([]) == check_types.main([]) == 0
    assert checked == [({*FILES}, 0)]
    changed("a/base.py", "x = 2")
    assert check_types.main([]) == 0
    assert checked.pop() == ({"a/base.py", "a/middle.py", "a/top.py", "b.py"}, 0)
    changed("b.py", "")
    changed("a/missing.py", "")  # a module that an import names from now on
    assert check_types.main([]) == 0
    assert checked.pop() == ({"b.py", "a/missing.py", "a/other.py"}, 0)
    changed("a/__init__.py", "y = 1")
    assert check_types.main([]) == 0
    assert checked.pop() == ({"a/__init__.py", "a/top.py", "a/other.py"}, 0)


def test_a_file_with_an_error_is_checked_until_it_has_none(checked: list[tuple[set[str], int]]) -> None:
    check_types.main([])
    changed("b.py", "bad")
    assert check_types.main([]) == check_types.main([]) == 1
    assert checked[1:] == [({"b.py"}, 1)] * 2
    changed("b.py", FILES["b.py"])
    assert check_types.main([]) == 0 and len(checked) == 3


def test_other_settings_and_packages_have_every_file_checked(
    checked: list[tuple[set[str], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_types.main([])
    with Path("pyproject.toml").open("a") as file:
        file.write('\ntypeCheckingMode = "strict"')
    check_types.main([])
    monkeypatch.setattr(check_types, "distributions", lambda: [SimpleNamespace(name="numpy", version="0")])
    check_types.main([])
    assert checked == [({*FILES}, 0)] * 3
