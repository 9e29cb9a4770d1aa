"""The small files of the project: citation, templates, container, spelling."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import detjax

ROOT = Path(__file__).parents[2]
LOCKS = ("requirements-serve-cpu.lock", "requirements-serve-cuda13.lock")


def test_the_citation_has_what_its_format_requires_and_the_packages_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["version"] == detjax.__version__
    assert all(author.keys() & {"name", "family-names"} for author in citation["authors"])


@pytest.mark.parametrize("name", ["bits_differ", "defect", "feature"])
def test_issue_templates_are_forms(name: str) -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    assert form["name"] and form["description"]
    assert all(field["type"] == "textarea" and field["attributes"]["label"] for field in form["body"])
    assert len({field["id"] for field in form["body"]}) == len(form["body"])


def versions(lock: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==([^ \\]+)", (ROOT / lock).read_text(), re.MULTILINE))


@pytest.mark.parametrize("lock", LOCKS)
def test_a_container_has_the_versions_that_are_tested(lock: str) -> None:
    tested, served = versions("requirements.lock"), versions(lock)
    assert {"jax", "jaxlib", "llguidance", "starlette", "uvicorn", "hatchling"} <= served.keys()
    assert {name: version for name, version in served.items() if tested.get(name, version) != version} == {}
    assert ("jax-cuda13-plugin" in served) == ("cuda13" in lock)


def test_a_container_copies_what_there_is_and_runs_without_privileges() -> None:
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", "").splitlines()
    steps = [line.split() for line in lines if line and not line.startswith("#")]
    sources = [name for step in steps if step[0] == "COPY" and "=" not in step[1] for name in step[1:-1]]
    assert {
        name.replace("${ACCELERATOR}", accelerator) for name in sources for accelerator in ("cpu", "cuda13")
    } >= set(LOCKS)
    sent = (ROOT / ".dockerignore").read_text()
    for name in sources:
        assert f"!{name.replace('${ACCELERATOR}', '*')}\n" in sent
        assert list(ROOT.glob(name.replace("${ACCELERATOR}", "*")))
    last = [step for step in steps if step[0] in ("USER", "HEALTHCHECK", "ENTRYPOINT")]
    assert [step[0] for step in last] == ["USER", "HEALTHCHECK", "ENTRYPOINT"]
    assert last[0][1] not in ("0", "root")


def test_the_spell_checker_reads_the_text_of_notebooks_and_not_what_they_print(tmp_path: Path) -> None:
    misspelled = "te" + "h"
    printed = {"output_type": "stream", "name": "stdout", "text": [misspelled]}
    cell = {"cell_type": "code", "execution_count": 1, "metadata": {}, "outputs": [printed], "source": ["1"]}
    book = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    command = [shutil.which("codespell", path=str(Path(sys.executable).parent)), "book.ipynb"]
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    results = []
    for source in ("the", misspelled):
        book["cells"] = [cell, {"cell_type": "markdown", "metadata": {}, "source": [source]}]
        (tmp_path / "book.ipynb").write_text(json.dumps(book, indent=1))
        results.append(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False))
    assert [result.returncode for result in results] == [0, 65]
    assert "book.ipynb" in results[1].stdout
