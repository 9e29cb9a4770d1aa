"""Replicas on Ray Serve, in an environment of their own, which `make test-ray` makes."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / os.environ.get("DETJAX_RAY", "nothing") / "bin" / "python"

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="Ray has an environment of its own: make test-ray")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """A command of Python in Ray's environment."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [str(PYTHON), *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_no_client_notices_that_replicas_are_killed(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    done = run("-m", "tools.soak", "replicas", "--small", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert len(report["bars"]) == 4 and not report["missed"]
    figures = report["figures"]
    assert figures["streams"] >= 8 and figures["moves"] > 0 and len(figures["kills"]) == 2


def test_bad_arguments_are_refused_before_anything_starts() -> None:
    refused = {
        "replicas=0": "replicas",
        "engines={}": "engines",
        "engine={'slots': 3}": "slots",
        "settings={'max_body': 0}": "Settings: max_body is 0; accepted: at least 1",
    }
    code = """
import json, sys
from detjax.server.replicas.ray_serve import Arguments, application
for arguments in json.loads(sys.argv[1]):
    try:
        application(eval(f"Arguments(model='.', {arguments})"))
    except (TypeError, ValueError) as error:
        print(json.dumps(str(error)))
"""
    done = run("-c", code, json.dumps([*refused]))
    errors = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('"')]
    assert len(errors) == len(refused), done.stdout + done.stderr
    assert all(expected in error for expected, error in zip(refused.values(), errors, strict=True))
