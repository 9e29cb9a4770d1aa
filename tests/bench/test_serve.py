"""The engine under load: what is asked, what is measured, and that answers do not depend on their order."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from detjax.bench.__main__ import main
from detjax.bench.serve import Workload, digest, percentiles
from detjax.engine import Completion, Generation
from tests.support import commands
from tests.support.waits import HANGS_AFTER

LOAD = ["--requests", "9", "--prompt", "3", "70", "--output", "2", "5", "--orders", "2", "--background", "12"]
TINY = ["--preset", "tiny", "--layers", "1", "--max-samples", "1", "--token-budget", "16", "--max-length", "64"]
TINY += ["--requests", "1", "--prompt", "1", "2", "--output", "1", "1"]
SMALL = ["--preset", "tiny", "--max-samples", "4", "--token-budget", "64", "--max-length", "128"]


@pytest.mark.sampled(0)
def test_requests_in_another_order_are_answered_with_the_same_bits(tmp_path: Path) -> None:
    out, chart = tmp_path / "serve.json", tmp_path / "serve.png"
    options = "--runs-of", "4", "--out", str(out), "--plot", str(chart)
    run = commands.run(main, "serve", *SMALL, *LOAD, *options)
    assert run.exit_code == 0, run.output
    assert "answers of 3 runs: the same bits" in run.output
    result = json.loads(out.read_text())
    assert result["same_bits"] and (result["model"], result["layers"]) == ("tiny", 2)
    assert result["engine"]["runs_of"] == 4
    assert list(result["runs"]) == ["order 1", "order 2", "among 12 others"]
    for run_result in result["runs"].values():
        assert run_result["digest"] == result["runs"]["order 1"]["digest"]
        assert len(run_result["requests"]["latency"]) == 9
        assert 9 * 3 <= run_result["prompt_tokens"] <= 9 * 70
        assert 9 * 2 <= run_result["generated_tokens"] <= 9 * 5
        times = run_result["percentiles"]
        assert 0 < times["time_to_first_token"]["p50"] <= times["latency"]["p50"] <= run_result["seconds"]
    assert chart.read_bytes().startswith(b"\x89PNG")


@pytest.mark.sampled(0)
def test_devices_that_share_the_model_give_the_answers_of_one(tmp_path: Path) -> None:
    load = ["--requests", "3", "--prompt", "3", "20", "--output", "2", "4", "--max-samples", "2", "--layers", "1"]
    size = ["--preset", "tiny", "--token-budget", "16", "--max-length", "64"]
    simulated = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    results = []
    for devices in (1, 2):
        out = tmp_path / f"{devices}.json"
        options = ["--tensor-parallel", str(devices), "--out", str(out)]
        run = subprocess.run(
            [sys.executable, "-m", "detjax.bench", "serve", *size, *load, *options],
            env={**os.environ, "XLA_FLAGS": simulated},
            capture_output=True,
            text=True,
            check=False,
            timeout=HANGS_AFTER,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        results.append(json.loads(out.read_text()))
    assert [result["devices"] for result in results] == [1, 2]
    assert results[1]["runs"]["order 1"]["digest"] == results[0]["runs"]["order 1"]["digest"]


def test_a_workload_is_what_it_says() -> None:
    workload = Workload(50, (3, 9), (2, 2), rate=10.0, temperature=0.5)
    requests = workload.draw(100)
    assert requests == workload.draw(100)
    assert {len(request.prompt) for request in requests} == set(range(3, 10))
    assert all(0 <= token < 100 for request in requests for token in request.prompt)
    assert {request.sampling.max_tokens for request in requests} == {2}
    assert len({request.sampling.seed for request in requests}) == 50
    arrivals = workload.arrivals()
    assert arrivals == sorted(arrivals) and 2 < arrivals[-1] < 12
    assert Workload(3).arrivals() == [0.0] * 3


def test_a_digest_is_that_of_tokens_and_logprobs_in_order() -> None:
    def answer(token: int, logprob: float) -> Generation:
        return Generation((1,), (Completion((token,), (logprob,), ((),), None, "length"),))

    one, other = answer(5, -1.5), answer(6, -1.5)
    assert digest([one, other]) == digest([one, other])
    assert (
        len({digest(answers) for answers in ([one, other], [other, one], [one, one], [answer(5, -1.25), other])}) == 4
    )


def test_percentiles_of_nothing_are_none() -> None:
    assert percentiles([]) == {}
    assert percentiles([2.0] * 5) == {"p50": 2.0, "p95": 2.0, "p99": 2.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "exactly one of --preset and --model"),
        (["--preset", "tiny", "--model", "x"], "exactly one of --preset and --model"),
        (["--preset", "huge"], "--preset is 'huge'; accepted: Qwen3-0.6B"),
        (["--preset", "tiny", "--numerics", "other"], "--numerics is 'other'; accepted: detjax, stock"),
        (["--preset", "tiny", "--prompt", "9", "3"], r"prompt is (9, 3); accepted: two numbers of at least 1"),
        (["--preset", "tiny", "--rate", "0"], "rate is 0.0; accepted: above 0, or none"),
        ([*TINY, "--tensor-parallel", "1000"], "tensor is 1000"),
    ],
)
def test_a_load_that_cannot_be_is_refused(arguments: list[str], message: str) -> None:
    run = commands.run(main, "serve", *arguments, env={"COLUMNS": "300"})
    assert run.exit_code == 2
    assert message in run.output
