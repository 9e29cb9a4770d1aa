"""Workflows run all tests, pin what they use, and ask for no more rights than they need."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import tiers

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def jobs(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())["jobs"]


def test_each_test_is_in_one_tier() -> None:
    places = [tiers.TESTS / part for parts in tiers.TIERS.values() for part in parts]
    for file in tiers.TESTS.rglob("test_*.py"):
        assert sum(file.is_relative_to(place) for place in places) == 1, file


@pytest.mark.parametrize(("workflow", "job"), [("ci", "test"), ("nightly", "cases")])
def test_each_tier_runs(workflow: str, job: str) -> None:
    assert set(jobs(workflow)[job]["strategy"]["matrix"]["tier"]) == set(tiers.TIERS) - {"tpu"}


def test_the_nights_parts_are_all_parts() -> None:
    for job in ("cases", "tpu"):
        entry = jobs("nightly")[job]
        parts = entry["strategy"]["matrix"]["part"]
        assert parts == list(range(len(parts)))
        assert f"/{len(parts)}" in entry["steps"][-1]["run"]


def test_the_night_plants_each_list_of_faults() -> None:
    lists = {path.stem for path in (ROOT / "tests" / "mutants").glob("*.toml")}
    assert set(jobs("nightly")["faults"]["strategy"]["matrix"]["list"]) == lists


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_and_rights_are_few(path: Path) -> None:
    text = path.read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    for action in re.findall(r"uses: (.*)", text):
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 330
        assert all("persist-credentials" in str(step) for step in job["steps"] if "checkout" in step.get("uses", ""))


def test_ci_ends_within_fifteen_minutes() -> None:
    assert all(job["timeout-minutes"] <= 15 for job in jobs("ci").values())
