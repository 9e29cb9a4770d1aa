"""The engine under load: what is asked, what is measured, and that answers do not depend on their order."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import detjax
from detjax import models
from detjax.bench import presets, serve
from detjax.bench.__main__ import main
from detjax.bench.serve import Workload, digest, percentiles
from detjax.engine import Compilers, Completion, EngineConfig, Generation, Request, Token
from tests.support import commands
from tests.support.waits import HANGS_AFTER

LOAD = ["--requests", "9", "--prompt", "3", "70", "--output", "2", "5", "--orders", "2", "--background", "12"]
TINY = ["--preset", "tiny", "--layers", "1", "--max-samples", "1", "--token-budget", "16", "--max-length", "64"]
TINY += ["--requests", "1", "--prompt", "1", "2", "--output", "1", "1"]
SMALL = ["--preset", "tiny", "--max-samples", "4", "--token-budget", "64", "--max-length", "128"]


class Answering:
    """An engine that answers each request at once, by its tokens, seed and length.

    Attributes:
        submitted: the requests, in the order in which they came.
        cancelled: the number of requests whose listener cancelled them.
        calls: other calls.
    """

    made: ClassVar[list["Answering"]] = []

    def __init__(self, decoder: Any, *, config: EngineConfig) -> None:
        self.decoder, self.config, self.backend = decoder, config, detjax.backend()
        self.submitted: list[Request] = []
        self.cancelled, self.calls = 0, list[str]()
        Answering.made.append(self)

    def __enter__(self) -> "Answering":
        return self

    def __exit__(self, *_: object) -> None:
        self.calls.append("close")

    def warm_up(self, *, progress: bool, compilers: Compilers) -> None:
        self.calls.append("warm up")

    def forget_prefixes(self) -> None:
        self.calls.append("forget")

    def stats(self) -> Any:
        return SimpleNamespace(preemptions=3)

    def submit(self, request: Request, listener: Callable[[Token], None]) -> Future[Generation]:
        self.submitted.append(request)
        future: Future[Generation] = Future()
        count = request.sampling.max_tokens
        first = hash((tuple(request.prompt), request.sampling.seed)) % 97
        tokens = tuple(first + index for index in range(count))
        logprobs = tuple(-(token / 7) for token in tokens)
        if self.is_wrong(request):
            logprobs = (*logprobs[:-1], logprobs[-1] - 2**-20)
        for token, logprob in zip(tokens, logprobs, strict=True):
            try:
                listener(Token(0, token, logprob, (), None, None, 1, 0))
            except Exception:
                self.cancelled += 1
                future.cancel()
                return future
        completion = Completion(tokens, logprobs, ((),) * count, None, "length")
        future.set_result(Generation(tuple(request.prompt), (completion,)))
        return future

    def is_wrong(self, request: Request) -> bool:
        """Says whether an answer has another bit."""
        return False


class Batched(Answering):
    """An engine whose answers depend on the requests before them."""

    def is_wrong(self, request: Request) -> bool:
        return len(self.submitted) == 12


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> list[Answering]:
    """The engines that the command makes, which answer at once."""
    monkeypatch.setattr(serve, "Engine", Answering)
    monkeypatch.setattr(Answering, "made", [])
    return Answering.made


def test_runs_are_of_the_same_requests_in_other_orders_and_among_others(answering: list[Answering]) -> None:
    workload = Workload(9, (3, 70), (2, 5), temperature=0.5, seed=4)
    model: Any = SimpleNamespace(mesh=None, config=SimpleNamespace(vocab_size=50, layers=7))
    config = EngineConfig(max_samples=4, token_budget=64, max_length=128)
    result = serve.Experiment(workload, config, orders=3, background=12).run(lambda: model, "a model")
    (engine,) = answering
    assert (engine.decoder, engine.config, engine.calls[0], engine.calls[-1]) == (model, config, "warm up", "close")
    drawn = workload.draw(50)
    orders = [engine.submitted[9 * number : 9 * number + 9] for number in range(3)]
    assert orders[0] == drawn and all(sorted(map(drawn.index, one)) == list(range(9)) for one in orders)
    assert len({tuple(map(drawn.index, one)) for one in orders}) == 3
    # Background requests differ from the workload's and come among them; a third of them is cancelled midway.
    last = engine.submitted[27:]
    others = [one for one in last if one not in drawn]
    assert [one for one in last if one in drawn] == drawn and 6 <= len(others) <= 12 and engine.cancelled >= 2
    assert last[0] not in drawn or last[1] not in drawn
    assert all(one.sampling.temperature == 0.9 and len(one.prompt) <= 70 for one in others)
    # Before each run, and after the background's end.
    assert engine.calls.count("forget") == 2 * 4
    assert result["same_bits"] and (result["model"], result["layers"], result["devices"]) == ("a model", 7, 1)
    assert list(result["runs"]) == ["order 1", "order 2", "order 3", "among 12 others"]
    for run_result in result["runs"].values():
        assert run_result["digest"] == result["runs"]["order 1"]["digest"] and run_result["preemptions"] == 3
        assert len(run_result["requests"]["latency"]) == 9
        assert run_result["prompt_tokens"] == sum(len(one.prompt) for one in drawn)
        assert run_result["generated_tokens"] == sum(one.sampling.max_tokens for one in drawn)
    assert result["workload"]["seed"] == 4 and result["engine"]["token_budget"] == 64


def test_statistics_are_of_the_times_of_each_requests_tokens() -> None:
    def generation(prompt: int, tokens: int) -> Generation:
        return Generation((1,) * prompt, (Completion((5,) * tokens, (-1.0,) * tokens, ((),) * tokens, None, "length"),))

    watched = [serve._Watch(1.0, [3.0, 4.0, 6.0]), serve._Watch(2.0, [2.5])]
    result = serve._statistics(watched, [generation(4, 3), generation(2, 1)], 5.0)
    assert (result["prompt_tokens"], result["generated_tokens"], result["seconds"]) == (6, 4, 5.0)
    assert (result["generated_tokens_per_second"], result["tokens_per_second"]) == (0.8, 2.0)
    requests = {"time_to_first_token": [2.0, 0.5], "time_per_token": [1.5], "latency": [5.0, 0.5]}
    assert result["requests"] == requests
    assert result["percentiles"]["time_between_tokens"]["p50"] == 1.5
    assert result["percentiles"]["latency"]["p50"] == 2.75


@pytest.mark.parametrize(
    ("engine", "numerics", "code"), [(Answering, "detjax", 0), (Batched, "detjax", 1), (Batched, "stock", 0)]
)
def test_answers_that_depend_on_their_order_fail_the_command_unless_nothing_is_promised(
    engine: type[Answering], numerics: str, code: int, answering: list[Answering], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "Engine", engine)
    run = commands.run(main, "serve", *SMALL, "--layers", "1", *LOAD, "--numerics", numerics)
    assert run.exit_code == code, run.output
    assert ("DIFFERENT BITS" in run.output) == (engine is Batched)
    # The twelfth request is the third one of the second order.
    assert ("order 2: 1 answers differ from the first run's; request" in run.output) == (engine is Batched)
    assert [one.backend for one in answering] == ["portable" if numerics == "detjax" else "stock"]


@pytest.mark.parametrize("is_real", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_requests_in_another_order_are_answered_with_the_same_bits(
    is_real: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_real:
        monkeypatch.setattr(serve, "Engine", Answering)
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


@pytest.mark.parametrize("is_real", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_devices_that_share_the_model_give_the_answers_of_one(
    is_real: bool, answering: list[Answering], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = ["--requests", "3", "--prompt", "3", "20", "--output", "2", "4", "--max-samples", "2", "--layers", "1"]
    size = ["--preset", "tiny", "--token-budget", "16", "--max-length", "64"]
    simulated = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    if not is_real:
        asked: list[int] = []
        mesh = SimpleNamespace(size=2)
        monkeypatch.setattr(models, "mesh_of", lambda devices: asked.append(devices) or (mesh if devices > 1 else None))
        config = SimpleNamespace(vocab_size=50, layers=1)
        made = lambda name, layers, mesh, weights: SimpleNamespace(mesh=mesh, config=config)  # noqa: E731
        monkeypatch.setattr(presets, "decoder", made)
    results = []
    for devices in (1, 2):
        out = tmp_path / f"{devices}.json"
        options = ["--tensor-parallel", str(devices), "--out", str(out)]
        if not is_real:
            run = commands.run(main, "serve", *size, *load, *options)
            assert run.exit_code == 0 and asked[-1] == devices, run.output
        else:
            done = subprocess.run(
                [sys.executable, "-m", "detjax.bench", "serve", *size, *load, *options],
                env={**os.environ, "XLA_FLAGS": simulated},
                capture_output=True,
                text=True,
                check=False,
                timeout=HANGS_AFTER,
            )
            assert done.returncode == 0, done.stdout + done.stderr
        results.append(json.loads(out.read_text()))
    assert [result["devices"] for result in results] == [1, 2]
    assert results[1]["runs"]["order 1"]["digest"] == results[0]["runs"]["order 1"]["digest"]


@pytest.mark.parametrize(("options", "expected"), [([], "bfloat16"), (["--weights", "fp8"], "fp8")])
def test_the_weights_of_a_preset_can_be_codes(
    options: list[str], expected: str, answering: list[Answering], tmp_path: Path
) -> None:
    run = commands.run(main, "serve", *TINY, *options, "--out", str(tmp_path / "out.json"))
    assert run.exit_code == 0, run.output
    assert json.loads((tmp_path / "out.json").read_text())["weights"] == expected
    down = answering[-1].decoder.layers[0].mlp.down[...]
    assert getattr(down, "is_computed", False) == (expected == "fp8")


def test_a_checkpoint_has_weights_of_its_own() -> None:
    run = commands.run(main, "serve", "--model", "here", "--weights", "int4")
    assert run.exit_code == 2
    assert "--weights int4 with --model" in run.output


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


def answers_of(*completions: tuple[tuple[int, ...], tuple[float, ...]], batch: int = 1) -> serve.Answers:
    generations = [
        Generation((7,) * number, (Completion(tokens, logprobs, ((),) * len(tokens), None, "length"),))
        for number, (tokens, logprobs) in enumerate(completions, start=1)
    ]
    return serve.Answers(generations, [[batch] * len(tokens) for tokens, _ in completions])


def test_differences_name_where_answers_begin_to_differ() -> None:
    nan = float("nan")
    first = answers_of(((1, 2), (-0.5, -1.0)), ((3,), (-2.0,)), ((4, 5), (nan, -0.0)), batch=9)
    assert serve.differences(first, first) == {}
    other = answers_of(((1, 2), (-0.5, -1.5)), ((3,), (-2.0,)), ((4, 5), (nan, 0.0)), batch=4)
    different = serve.differences(first, other)
    assert different["answers"] == 2
    assert different["places"][0] == {
        "request": 0,
        "prompt_tokens": 1,
        "token": 1,
        "tokens": [2, 2],
        "logprobs": [-1.0, -1.5],
        "batches": [9, 4],
    }
    assert (different["places"][1]["request"], different["places"][1]["token"]) == (2, 1)
    assert serve.differences(answers_of(((1,), (nan,))), answers_of(((1,), (nan,)))) == {}
    shorter = serve.differences(answers_of(((1, 2), (0.0, 0.0))), answers_of(((1,), (0.0,))))
    assert (shorter["places"][0]["token"], shorter["places"][0]["tokens"]) == (1, [2, None])
    many = [answers_of(*[((token,), (0.0,))] * (serve.NAMED + 5)) for token in (1, 2)]
    different = serve.differences(*many)
    assert (different["answers"], len(different["places"])) == (serve.NAMED + 5, serve.NAMED)


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
