"""Files that commands write, the ends of commands, and the loading of models."""

import contextlib
import datetime
import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from detjax import models
from detjax.cli import main
from detjax.cli.files import opened, write_json, written_at_the_end
from detjax.cli.loading import Loading
from detjax.cli.serve import Programs
from tests.support import commands


def test_a_file_appears_at_the_end_and_only_then(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("the last one")
    with written_at_the_end("--out", path) as part:
        assert part == tmp_path / ".out.json.partial"
        write_json(part, {"a": [1]})
        assert path.read_text() == "the last one"
    assert path.read_text() == '{\n  "a": [\n    1\n  ]\n}\n'
    with contextlib.suppress(KeyError), written_at_the_end("--out", path) as part:
        part.write_text("half")
        raise KeyError
    assert json.loads(path.read_text()) == {"a": [1]}
    assert [*tmp_path.iterdir()] == [path]
    with contextlib.ExitStack() as files:
        assert opened(files, "--out", None) is None
        assert opened(files, "--out", path) == part
    assert path.read_text() == ""


@pytest.mark.parametrize(
    ("name", "reason"), [("folder", "Is a directory"), ("missing/file", "No such file or directory")]
)
def test_a_file_that_cannot_be_written_is_named_before_the_work(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "folder").mkdir()
    path = tmp_path / name
    accepted = "accepted: a file in a directory that exists and is writable"
    expected = f"--out is {str(path)!r}, which cannot be written ({reason}); {accepted}"
    with pytest.raises(ValueError) as raised, written_at_the_end("--out", path):
        raise AssertionError("the work has begun")
    assert str(raised.value) == expected


def test_a_model_is_loaded_as_its_options_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    dated = SimpleNamespace(with_chat_template=lambda text: ("templated", text))
    tokenizer = SimpleNamespace(with_template_date=lambda date: given.append(date) or dated)
    monkeypatch.setattr(models, "mesh_of", lambda *sizes: ("a mesh", *sizes))
    monkeypatch.setattr(
        models, "load", lambda *paths, **options: given.append((*paths, options)) or ("a model", tokenizer)
    )
    plain: Any = Loading.load
    load = getattr(plain, "__wrapped__", plain)
    assert load(Loading(model=tmp_path)) == ("a model", tokenizer)
    options = {"dtype": None, "mesh": ("a mesh", 1, 1), "overrides": {}, "quantized": "computed", "adapters": {}}
    assert given == [(tmp_path, options)]
    day = datetime.date(2026, 1, 31)
    sizes: Any = {"tensor_parallel": 2, "expert_parallel": 3}
    loading = Loading(model=tmp_path, dtype="float16", template_date=day, hf_overrides='{"a": [1]}', **sizes)
    assert load(loading) == ("a model", dated)
    options |= {"dtype": "float16", "mesh": ("a mesh", 2, 3), "overrides": {"a": [1]}}
    assert given[1:] == [(tmp_path, options), day]
    assert load(loading, "a template") == ("a model", ("templated", "a template"))
    monkeypatch.setattr(models, "load", lambda *_, **__: ("a model", None))
    with pytest.raises(ValueError, match=r"has no tokenizer.json; accepted: a checkpoint with one"):
        load(loading)
    for text, message in (("[1]", "--hf-overrides holds a list; accepted: a JSON object. An"), ("{", "is not JSON")):
        with pytest.raises(ValueError, match=message):
            load(Loading(model=tmp_path, hf_overrides=text))


def test_a_chat_template_is_read_as_text(tmp_path: Path) -> None:
    file = tmp_path / "template"
    file.write_text("{{ 'é' }}", encoding="utf-8")
    assert Loading(model=tmp_path, chat_template=file).template() == "{{ 'é' }}"
    assert Loading(model=tmp_path).template() is None
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"which cannot be read \(it is not UTF-8\); accepted: a file with a Jinja"):
        Loading(model=tmp_path, chat_template=file).template()
    with pytest.raises(ValueError, match=r"which cannot be read \(No such file or directory\)"):
        Loading(model=tmp_path, chat_template=tmp_path / "missing").template()


def test_a_command_that_does_not_exist_and_none_at_all_are_usage_errors() -> None:
    result = commands.run(main, "sevre")
    assert (result.exit_code, result.stdout) == (2, "")
    accepted = "demo, generate, train, serve, verify, certify, divergence, trace, bisect, fingerprint"
    accepted += ", quantize, merge"
    assert result.stderr == f"error: 'sevre' is not a command; accepted: {accepted}\n"
    nothing = commands.run(main)
    assert nothing.exit_code == 2
    assert "generate" in nothing.stdout


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyError("a bug")])
def test_a_bug_has_a_traceback(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def load(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(models, "load", load)
    with pytest.raises(type(error), match="a bug"):
        commands.run(main, "generate", "--model", "x", "--prompt", "y")


@pytest.mark.parametrize("error", [ValueError("not\n this"), NotImplementedError("not this"), OSError("not this")])
def test_an_error_of_the_user_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def load(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(models, "load", load)
    result = commands.run(main, "generate", "--model", "x", "--prompt", "y")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "error: not this\n")


def test_the_cache_of_serve_is_its_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    directory = Programs().prepared_cache()
    assert directory == tmp_path / "xdg" / "detjax"
    assert not stat.S_IMODE(directory.stat().st_mode) & 0o022
    assert Programs(cache_dir=tmp_path / "other").prepared_cache() == tmp_path / "other"
    assert Programs(compilation_cache=False, cache_dir=tmp_path / "none").prepared_cache() is None
    assert not (tmp_path / "none").exists()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Programs().prepared_cache() == tmp_path / ".cache" / "detjax"
    assert os.listdir(tmp_path / ".cache") == ["detjax"]
