"""Results record the code that made them."""

import subprocess
from pathlib import Path

import pytest

from detjax.bench import provenance
from detjax.runtime.fingerprints import fingerprint


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(provenance.COMMIT_VARIABLE, raising=False)
    for name in ("detjax/version.py", "benchmarks/results/a.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    return tmp_path


def commit_all(checkout: Path) -> str:
    git(checkout, "init", "-q")
    git(checkout, "add", "-A")
    git(checkout, "commit", "-q", "-m", "all")
    return git(checkout, "rev-parse", "HEAD")


def commit_now(checkout: Path) -> str | None:
    """The commit, as a process that starts now sees it."""
    provenance._commit_by_git.cache_clear()
    return provenance.commit(checkout)


def test_results_name_the_commit_and_whether_code_has_changed(checkout: Path) -> None:
    name = commit_all(checkout)
    assert commit_now(checkout) == name
    (checkout / "benchmarks/results/a.json").write_text("2\n")
    assert commit_now(checkout) == name  # a result is not code
    (checkout / "detjax/version.py").write_text("2\n")
    assert commit_now(checkout) == f"{name}+changes"


def test_without_history_an_environment_variable_names_the_commit(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert commit_now(checkout) is None
    monkeypatch.setenv(provenance.COMMIT_VARIABLE, "abc")
    assert commit_now(checkout) == "abc"
    name = commit_all(checkout)
    assert commit_now(checkout) == name  # history knows better


def test_a_package_within_another_repository_has_no_commit(checkout: Path) -> None:
    (checkout / ".gitignore").write_text("detjax\n")
    commit_all(checkout)
    assert commit_now(checkout) is None


def test_every_result_begins_with_its_origin() -> None:
    heading = provenance.heading("python -m benchmarks x")
    assert list(heading) == ["command", "created", "commit", "versions", "fingerprint"]
    assert heading["fingerprint"]["device_kind"] == fingerprint().device_kind
    assert {"python", "jax", "numpy"} <= heading["versions"].keys()
