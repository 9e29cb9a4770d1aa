"""Parts of studies, without models: what is counted, what is compared, and which results are a failure.

Each failure is planted in a stand-in of what would be measured.
"""

import asyncio
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import benchmarks.study as study_module
import benchmarks.timing as study_timing
import detjax
from benchmarks import devices
from benchmarks.bits import anchor_positions
from benchmarks.studies import (
    aggregation,
    batch_bits,
    data_parallel,
    decode,
    decoder,
    delta_rule,
    expert_launches,
    expert_schedules,
    invariant,
    mesh_bits,
    mesh_speed,
    on_policy,
    portable,
    ready,
    softmax_schedules,
    training_devices,
    usual_cut,
    verify,
)
from benchmarks.studies.attention import study as attention
from benchmarks.studies.attention.summary import geometric_means
from benchmarks.studies.experts import gradients, projections
from benchmarks.studies.experts import study as experts
from benchmarks.studies.matmul.summary import summarized
from benchmarks.studies.norms import cache_writes, suite
from benchmarks.studies.norms import study as norms
from benchmarks.studies.processes import study as processes
from benchmarks.studies.processes.worker import SMALL as SMALL_PROCESSES
from benchmarks.studies.structured import measures as structured
from benchmarks.studies.training import measures as training
from benchmarks.studies.training import study as training_study
from benchmarks.studies.true_on_policy import experiment
from benchmarks.studies.true_on_policy import study as true_on_policy_study
from benchmarks.study import SMALL_ENGINE, Result, Run
from detjax.bench import presets, timing
from detjax.bench.serve import Workload
from detjax.engine import Completion, Generation, SamplingParams
from detjax.models import Decoder
from detjax.models.network import abstract
from detjax.operands.options import Distribution
from detjax.rl.tasks import Example, Task
from tests.support.unchecked import unchecked

SMALL = Run("the command", small=True)


def study(fn: Callable[..., Result], **options: Any) -> Result:
    return unchecked(fn)(SMALL, **options)


# Servers of several engines.


def answered(body: dict[str, Any], *, chunked: bool, status: int = 200) -> bytes:
    """An HTTP answer that closes the connection."""
    content = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nConnection: close\r\n"
    if not chunked:
        return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
    parts = [content[:5], content[5:]]
    pieces = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return f"{head}Transfer-Encoding: Chunked\r\n\r\n".encode() + pieces + b"0\r\n\r\n"


def digest_of(answers: Sequence[bytes]) -> str:
    """The digest of what a server answers to requests, one after the other."""
    waiting = iter(answers)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
        await reader.readexactly(int(length.split()[1]))
        writer.write(next(waiting))
        await writer.drain()
        writer.close()

    async def run() -> str:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return (await data_parallel._answers(port, [b"{}"] * len(answers)))[1]

    return asyncio.run(run())


def test_a_digest_of_answers_has_their_texts_and_logprobs() -> None:
    def choice(text: str, logprobs: str | None) -> dict[str, Any]:
        return {"choices": [{"text": text} | ({} if logprobs is None else {"receipt": {"logprobs": logprobs}})]}

    one = choice("a", "AAAA")
    digests = {digest_of([answered(one, chunked=False)]), digest_of([answered(one, chunked=True)])}
    assert len(digests) == 1
    for other in (choice("b", "AAAA"), choice("a", "AAAB"), choice("a", None)):
        digests.add(digest_of([answered(other, chunked=False)]))
    assert len(digests) == 4
    with pytest.raises(RuntimeError, match=r"data_parallel: .*429"):
        digest_of([answered(one, chunked=False, status=429)])


@pytest.mark.parametrize(("digests", "problem"), [("aa", ""), ("ab", "2 different sets of answers")])
def test_servers_with_different_answers_fail_the_study(
    digests: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(sizes: Any, checkpoint: Path, cache: Path, engines: int, rounds: int) -> dict[str, Any]:
        return {
            "engines": engines,
            "seconds": [8.0, 6.0, 7.0] if engines == 1 else [2.0, 2.0],
            "digest": digests[engines // 3],
        }

    monkeypatch.setattr(data_parallel, "_measured", measured)
    monkeypatch.setattr(data_parallel, "_python", lambda *_: None)
    result = study(data_parallel.study, engines=3)
    assert result.problem == problem
    assert result.content["speed_over_one"] == {"1": 1.0, "3": 3.5}


def test_the_bodies_of_a_run_are_its_requests() -> None:
    def bodies(with_receipts: bool) -> list[dict[str, Any]]:
        made = data_parallel._bodies(data_parallel.SMALL, 100, with_receipts=with_receipts)
        return [json.loads(body) for body in made]

    drawn = data_parallel.SMALL.workload.draw(100)
    assert [(body["prompt"], body["max_tokens"], body["seed"]) for body in bodies(True)] == [
        (list(one.prompt), one.sampling.max_tokens, one.sampling.seed) for one in drawn
    ]
    assert all(body["receipt"] and body["ignore_eos"] for body in bodies(True))
    assert not any(body["receipt"] for body in bodies(False))


# Several devices.

ARRAYS = [jnp.arange(7, dtype=jnp.float32), jnp.ones((2, 3), jnp.bfloat16)]


def test_a_digest_of_arrays_changes_with_bits_places_and_order() -> None:
    x, y = ARRAYS
    flipped = (np.asarray(x).view(np.uint32) ^ np.array([0, 0, 0, 0, 0, 0, 1], np.uint32)).view(np.float32)
    others = [[jnp.asarray(flipped), y], [x[::-1], y], [y, x], [x, y.at[1, 2].set(2)], [x, -y]]
    assert len({training_devices._digest(arrays) for arrays in ([x, y], *others)}) == 1 + len(others)
    assert training_devices._digest([x, y]) == training_devices._digest([jnp.copy(x), jnp.copy(y)])


@pytest.mark.parametrize(
    ("several", "control", "problem"),
    [
        ({}, {"gradients": "z"}, ""),
        ({"weights": "z"}, {"gradients": "z"}, "bits differ between one device and 4: weights"),
        ({"state": "z", "gradients": "z"}, {}, "bits differ between one device and 4: gradients, state"),
        ({}, {}, "the control has the same bits"),
        ({}, {"logprobs": "z"}, "the control has the same bits"),
    ],
)
def test_devices_with_other_bits_or_a_control_with_the_same_fail_the_study(
    several: dict[str, str], control: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = {"gradients": "a", "logprobs": "b", "weights": "c", "state": "d"}
    calls: list[tuple[int, bool, bool]] = []
    first: list[Any] = []

    def trained(sizes: Any, devices: int, batch: Sequence[Any], *, timed: bool) -> dict[str, Any]:
        first[:] = first or [batch[0]]
        calls.append((devices, batch[0] is first[0], timed))
        arm = {} if devices == 1 else several if batch[0] is first[0] else several | control
        return {"digests": digests | arm, "seconds": 6.0 if devices == 1 else 2.0}

    monkeypatch.setattr(training_devices, "trained", trained)
    result = study(training_devices.study, devices=4)
    assert result.problem == problem and result.content["speed_over_one"] == 3
    assert calls == [(1, True, True), (4, True, True), (4, False, False)]


ARM = {"digests": {"1": ["a"], "4": ["b", "b"]}, "preemptions": 1, "cached_tokens": 1}


@pytest.mark.parametrize(
    ("one", "several", "control", "problem"),
    [
        ({}, {}, True, ""),
        ({}, {"digests": {"1": ["a"], "4": ["b", "c"]}}, True, "bits differ"),
        ({}, {"digests": {"1": ["x"], "4": ["b", "b"]}}, True, "bits differ"),
        ({"digests": {"1": ["a"], "4": ["b", "c"]}}, {"digests": {"1": ["a"], "4": ["b", "c"]}}, True, "bits differ"),
        ({}, {"preemptions": 0}, True, "no request was preempted"),
        ({"cached_tokens": 0}, {}, True, "no request was preempted, or no prefix was reused"),
        ({}, {}, False, "the control has the same bits"),
    ],
)
def test_answers_of_a_mesh_are_compared_in_every_order_and_with_a_control(
    one: dict[str, Any], several: dict[str, Any], control: bool, problem: str
) -> None:
    meshes = {"tensor 2": ARM, "tensor 4": ARM | several}
    content = {"one": ARM | one, "meshes": meshes, "usual_cut_differs": control}
    assert mesh_bits._problem(content).startswith(problem) and bool(mesh_bits._problem(content)) == bool(problem)


def test_a_model_is_shared_by_more_and_more_devices_and_its_experts_by_any_number_of_them() -> None:
    assert mesh_bits.shapes(8, has_experts=False) == [(8, 1), (4, 1), (2, 1)]
    assert mesh_bits.shapes(8, has_experts=True) == [(8, 1), (4, 2), (2, 4), (1, 8)]
    assert mesh_bits.shapes(2, has_experts=True) == [(2, 1), (1, 2)]
    assert mesh_bits.shapes(6, has_experts=False) == [(6, 1), (4, 1), (2, 1)]
    assert mesh_bits.shapes(6, has_experts=True) == [(6, 1), (3, 2), (1, 6)]


@pytest.mark.parametrize(
    ("memory", "extra", "layers"), [(None, 0, 36), (200e9, 0, 36), (80e9, 0, 36), (10e9, 0, 19), (10e9, 1 << 28, 11)]
)
def test_layers_are_chosen_by_the_devices_memory(
    monkeypatch: pytest.MonkeyPatch, memory: float | None, extra: int, layers: int
) -> None:
    """A layer of Qwen3-8B has 193 million weights, and its embedding and head have 1.24 thousand million."""
    device = SimpleNamespace(memory_stats=lambda: memory and {"bytes_limit": memory})
    monkeypatch.setattr(study_module.jax, "local_devices", lambda: [device])
    assert study_module.layers_that_fit("Qwen3-8B", 1.0, extra) == layers


def test_a_step_of_all_requests_is_timed_from_the_last_first_token_to_the_first_last_one() -> None:
    # The second request joins at 3 s, and the first one leaves at 7 s; two tokens arrive at a time.
    first, second = [0.0, 1, 1, 3, 3, 5, 5, 7, 7], [3.0, 5, 5, 7, 7, 9, 9]
    assert mesh_speed.step_seconds([first, second]) == 1.0
    with pytest.raises(RuntimeError, match="no step in which all requests decode"):
        mesh_speed.step_seconds([[0.0, 1.0], [2.0, 3.0]])


def test_predictions_are_scaled_by_layers_and_the_head_counts_as_its_weights_do() -> None:
    whole = mesh_speed.predicted("Qwen3-32B", None, "decode of 1", 4)
    assert whole == pytest.approx({"detjax": 13.42e-3, "usual": 9.41e-3}, rel=1e-2)
    half = mesh_speed.predicted("Qwen3-32B", 32, "decode of 1", 4)
    assert 0.5 < half["detjax"] / whole["detjax"] < 0.52
    assert mesh_speed.predicted("Qwen3-8B", None, "decode of 1", 4) == {}


def test_speeds_of_meshes_with_other_bits_are_refused() -> None:
    assert mesh_speed.problem({"decode of 1": {"1": "a", "4": "a"}, "prefill of 9": {"1": "b"}}) == ""
    text = mesh_speed.problem({"decode of 1": {"1": "a", "4": "a"}, "decode of 8": {"1": "a", "4": "b"}})
    assert text.startswith("decode of 8: bits differ between numbers of devices")


def test_the_usual_cut_prefills_what_it_decodes() -> None:
    """Token by token and all at once, a prompt has the same likeliest next token; so has another request's copy."""
    config = usual_cut.shape_of(usual_cut.SMALL, 1)
    mesh = Mesh(jax.devices()[:1], (usual_cut.AXIS,))
    model, prompt = unchecked(usual_cut._random)(config, 2, 8, mesh), jnp.asarray([5, 250, 3, 77], jnp.int32)

    def decode(model: Any, prompt: jax.Array) -> jax.Array:
        token = jnp.zeros(2, jnp.int32)
        for position, given in enumerate(prompt):
            both = jnp.stack([given, given])
            token, model = usual_cut.step(config, model, both, jnp.asarray(position, jnp.int32))
        return token

    def prefill(model: Any, prompt: jax.Array) -> jax.Array:
        return usual_cut.prefill_step(config, model, prompt)

    options: Any = {"mesh": mesh, "in_specs": P(), "out_specs": P(), "check_vma": False}
    tokens = [jax.jit(jax.shard_map(fn, **options))(model, prompt).tolist() for fn in (decode, prefill)]
    assert tokens[0] == tokens[1] * 2


def test_the_usual_cut_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match="preset is Qwen3-30B-A3B; accepted: dense models of Qwen3's form"):
        usual_cut.shape_of(usual_cut.Sizes("Qwen3-30B-A3B"), 2)
    with pytest.raises(ValueError, match="devices is 16; accepted: divisors of 8, the key heads"):
        usual_cut.shape_of(usual_cut.Sizes("Qwen3-32B"), 16)


@pytest.mark.parametrize(
    ("on", "off", "choice", "kernels", "problem"),
    [
        ("a", "a", "", ("80 kernels", "99 kernels"), ""),
        ("a", "b", "", ("80 kernels", "99 kernels"), "bits differ with the kernels: tiny, batch 3"),
        (
            "a",
            "a",
            "ids[0] is 7",
            ("80 kernels", "99 kernels"),
            "bits differ with the kernels: tiny, batch 3, choice: ids[0] is 7",
        ),
        ("a", "a", "", ("99 kernels", "99 kernels"), "both arms launch as many kernels"),
        ("a", "a", "", ("out of memory", "out of memory"), ""),
    ],
)
def test_kernels_of_experts_are_compared_in_bits_and_have_to_be_launched(
    on: str, off: str, choice: str, kernels: tuple[str, str], problem: str
) -> None:
    rounds = {
        arm: [[{"batch": 3, "digest": digest, "seconds": seconds, "kernels": count, "parts": {"choice": choice}}]] * 2
        for arm, digest, seconds, count in (("on", on, 2.0, kernels[0]), ("off", off, 3.0, kernels[1]))
    }
    (row,) = rows = expert_launches.joined("tiny", 1, rounds)
    assert (row["speed"], row["same_bits"]) == (1.5, on == off)
    assert expert_launches.problem(rows, has_kernels=True) == problem
    assert not problem.endswith("as many kernels") or not expert_launches.problem(rows, has_kernels=False)


def test_the_first_number_that_kernels_of_experts_change_is_named() -> None:
    expected = {"weights": np.float32([[0.0, 1.0]]), "ids": np.int32([[3, 5], [2, 4]])}
    changed = expected | {"ids": np.int32([[3, 5], [2, 2]])}
    assert expert_launches.first_difference(expected, expected) == ""
    named = "ids[1, 1] is 2 with the kernels, 4 without; 1 of 4 numbers differ"
    assert expert_launches.first_difference(changed, expected) == named
    negative = expected | {"weights": -expected["weights"]}
    assert expert_launches.first_difference(negative, expected).startswith("weights[0, 0] is -0.0")


def test_processes_have_a_device_each_and_no_simulated_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4 --xla_other=1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    environment = devices.environment(1)
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["XLA_FLAGS"]) == ("7", "--xla_other=1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert devices.environment(1)["CUDA_VISIBLE_DEVICES"] == "1"


def test_processes_that_outlive_a_lost_one_or_have_other_bits_fail_the_study() -> None:
    def problem(part: str, content: Any) -> str:
        return processes.problem(part, content, SMALL_PROCESSES)

    ended = {"exit_code": 70, "seconds": 9.0, "says": "StepTimeout: the devices have not finished a step"}
    assert problem("lost", {"survivors": [ended]}) == ""
    for wrong in ({"exit_code": None}, {"exit_code": 0}, {"seconds": 60.0}, {"says": ""}):
        assert problem("lost", {"survivors": [ended, ended | wrong]}).startswith("processes outlived the lost one")
    same = {"one": "a", "several": "a"}
    assert problem("answers", [same, same]) == ""
    assert problem("answers", [same, {"one": "b", "several": "b"}]).startswith("bits differ")

    def trained(gradients: str, control: str) -> dict[str, Any]:
        arms = {"one": "a", "several": gradients, "several, another order": control}
        return {arm: {"digests": {"gradients": digest, "state": "s"}} for arm, digest in arms.items()}

    assert problem("training", [trained("a", "c")] * 2) == ""
    assert problem("training", [trained("a", "c"), trained("b", "c")]) == "bits differ: gradients"
    assert problem("training", [trained("a", "a")] * 2) == "another order of the batch has the same bits"


@pytest.mark.parametrize(
    ("together", "reverse", "problem"),
    [
        ("ab", "ab", ""),
        ("ab", "ba", "cls: bits differ between ways"),
        ("aa", "ab", "cls: bits differ between ways"),
        ("aa", "aa", "cls: different requests have equal bits"),
    ],
)
def test_digests_of_a_batch_are_compared_in_both_orders_and_with_a_control(
    together: str, reverse: str, problem: str
) -> None:
    alone = "aa" if together == reverse == "aa" else "ab"
    ways = {"alone": list(alone), "together": list(together), "in reverse": list(reverse)}
    text = batch_bits.problem({"last": {name: ["a", "b"] for name in ways}, "cls": ways})
    assert text.startswith(problem) and bool(text) == bool(problem)


def test_every_other_prompt_begins_alike_and_answers_come_in_the_order_of_requests() -> None:
    requests = mesh_bits._requests(mesh_bits.SMALL, 6, 50)
    prompts = [list(one.prompt) for one in requests]
    assert [prompt[:128] == prompts[0][:128] for prompt in prompts] == [True, False] * 3
    assert {one.sampling.temperature for one in requests} == {0.8}
    submitted: list[int] = []

    def submit(request: Any) -> Any:
        submitted.append(requests.index(request))
        return SimpleNamespace(result=lambda: request)

    engine = SimpleNamespace(submit=submit)
    for order in (0, 1, 2):
        assert unchecked(mesh_bits._in_order)(engine, requests, order) == requests
    orders = list(itertools.batched(submitted, 6))
    assert orders[0] == tuple(range(6)) and len(set(orders)) == 3


# Operations.


def test_a_way_of_cutting_a_request_that_changes_bits_fails_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(name: str, widths: Any, sizes: Any, calls: int) -> Iterator[dict[str, Any]]:
        yield {"part": "bits", "same_bits": {"decode": True, "cuts": False, "refused drafts": False}}
        yield {"part": "decode"}

    monkeypatch.setattr(delta_rule, "measure", measure)
    result = study(delta_rule.study)
    assert result.problem == "bits differ from one call: ['cuts', 'refused drafts']"
    assert len(result.content["results"]) == 2
    assert len(study(delta_rule.study, limit=0.0).content["results"]) == 1


def test_every_way_of_cutting_a_request_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule whose outputs are its values, except for one way, stands for the operation."""
    widths, seen = delta_rule.SMALL_MODELS["tiny"], []
    change: Callable[..., Any]

    def call(x: delta_rule.Tokens, state: Any, queries: Any) -> tuple[Any, Any]:
        start, end = int(queries.start[0]), int(queries.length[0])
        seen.append((x.v.shape[:2], start, end))
        return x.v + jnp.asarray(change(x, start, end), x.v.dtype), state

    monkeypatch.setattr(delta_rule, "_call", call)
    for changes, wrong in (
        (lambda x, start, end: 0, set()),
        (lambda x, start, end: end - start == 1, {"decode"}),
        (lambda x, start, end: len(x.v) == 4, {"among others"}),
    ):
        change = changes
        seen.clear()
        same = delta_rule.cut_bits(widths, 70)["same_bits"]
        assert set(same) == {"decode", "cuts", "verify steps", "among others", "refused drafts"}
        assert {way for way, is_same in same.items() if not is_same} >= wrong
        assert all(same.values()) or wrong
    # A whole call; decoded from the middle on; each refused draft is computed before its tokens.
    assert seen[0] == ((1, 70), 0, 70) and ((1, 1), 69, 70) in seen and ((4, 70), 0, 35) in seen
    again = [call for call in seen if call[1:] == (65, 70)]
    assert len(again) == 4


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"same_bits_over_rows": True, "same_bits_over_runs": True, "same_bits_as_in_steps": True}, ""),
        ({"same_bits_over_rows": False}, "gave different bits for other numbers of rows, or in other runs"),
        ({"same_bits_over_runs": False}, "gave different bits for other numbers of rows, or in other runs"),
        ({"same_bits_as_in_steps": False}, "wrote different bits in one step than in two"),
    ],
)
def test_an_operation_on_rows_with_different_bits_fails_the_study(
    row: dict[str, bool], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "measure", lambda sizes: [{"case": "x"}])
    monkeypatch.setattr(cache_writes, "measure", lambda sizes: iter([row]))
    result = study(norms.study)
    assert result.problem == (f"backend portable {problem}" if problem else "")
    assert result.content["results"] == [{"case": "x"}, row]


def test_a_batch_size_with_other_bits_fails_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    for changed, problem in ((0, ""), (1, "the portable backend gave different bits at some batch size")):
        other = {"stock": 1, "portable": changed}
        rows = [{"ratio": 4.0, "other_bits": other | {"portable": 0}}, {"ratio": 1.0, "other_bits": other}]
        monkeypatch.setattr(portable, "small_cases", lambda dtype: ["case"])
        monkeypatch.setattr(portable, "measure", lambda case, rounds, rows=rows: rows)
        result = study(portable.study)
        assert result.problem == problem
        assert result.content["geometric_mean"] == pytest.approx(2)


@pytest.mark.parametrize("row", [None, 0, 3, 4])
def test_schedules_of_softmax_with_different_bits_are_named_with_their_rows(row: int | None) -> None:
    def fn(x: jax.Array, schedule: Any) -> jax.Array:
        return x + (0 if row is None or schedule == "first" else (jnp.arange(len(x)) == row)[:, None].astype(x.dtype))

    x = jnp.ones((5, 2), jnp.float32)
    compare = unchecked(softmax_schedules._compare_schedules)
    different = pytest.raises(softmax_schedules.DifferentBits, match=rf"x, other: rows \[{row}\]")
    with nullcontext() if row is None else different:
        compare("x", fn, x, ["first", "first", "other"])


def test_different_bits_of_softmax_fail_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(sizes: Any) -> Iterator[str]:
        yield "so far"
        raise softmax_schedules.DifferentBits("log_softmax: row 3 alone")

    monkeypatch.setattr(softmax_schedules, "compare_softmax", raising)
    result = study(softmax_schedules.study)
    assert result.problem == "different bits: log_softmax: row 3 alone" and result.content["bits"] == ["so far"]


def test_errors_of_softmax_are_from_float64() -> None:
    x = jnp.asarray([[0.0, math.log(3)]], jnp.float32)
    np.testing.assert_allclose(softmax_schedules._exact("softmax", x), [[0.25, 0.75]], rtol=1e-7)
    np.testing.assert_allclose(softmax_schedules._exact("log_softmax", x), np.log([[0.25, 0.75]]), rtol=1e-7)


def test_sections_of_attention_that_were_asked_for_are_measured_and_a_failure_is_a_cell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure(sizes: Any, case: Any, torch: bool) -> dict[str, Any]:
        assert not torch  # with small sizes
        if case.name == failing:
            raise RuntimeError("no room\nat all")
        return {"ratios": {"kernels": {"cuDNN": 2.0}}}

    failing = attention.prefill_cases(attention.SMALL)[0].name
    monkeypatch.setattr(attention.cells, "measure_prefill", measure)
    monkeypatch.setattr(attention.cells, "measure_decode", measure)
    monkeypatch.setattr(attention, "measure_accuracy", lambda sizes: {"relative_error": 1})
    result = study(attention.study, only=["prefill", "decode", "accuracy"])
    assert result.content["prefill"][0]["missing"]["kernels"] == {"all": "RuntimeError: no room"}
    assert set(result.content["summary"]) == {"prefill", "decode"} and "bits" not in result.content
    assert result.content["accuracy"] == {"relative_error": 1} and result.problem == ""

    def compare(sizes: Any, comparison: Any) -> None:
        comparison.differences += [f"difference {number}" for number in range(30)]

    monkeypatch.setattr(attention, "compare_requests", compare)
    monkeypatch.setattr(attention, "compare_options", lambda sizes, backend, comparison, processes: None)
    problem = study(attention.study, only=["bits"]).problem.splitlines()
    assert problem == ["different bits", *(f"difference {number}" for number in range(20))]


def test_geometric_means_are_of_the_cells_that_have_the_rival() -> None:
    cells = [
        {"ratios": {"kernels": {"copy": 4.0}}},
        {"ratios": {"kernels": {"copy": 1.0, "int8": 3.0}}},
        {"ratios": {}},
    ]
    assert geometric_means(cells, ("kernels", "step")) == {"kernels": {"int8": 3.0, "copy": 2.0}, "step": {}}


def test_the_summary_of_matmuls_names_the_slowest_and_the_slow_ones() -> None:
    def cell(name: str, ratio: float, torch: float | None = None) -> dict[str, Any]:
        ratios = {"xla": ratio} | ({} if torch is None else {"torch": torch})
        return {
            "linears": [f"m {name}"],
            "n": 1,
            "k": 2,
            "m": 3,
            "ratios": ratios,
            "gigabytes_per_second": 1.0,
            "teraflops": 2.0,
        }

    result = summarized([cell("a", 4.0, 2.0), cell("b", 0.25, 8.0), cell("c", 0.93), cell("d", 0.929)])
    assert result["cells"] == 4 and result["geometric_means"]["torch"] == pytest.approx(4)
    assert result["geometric_means"]["xla"] == pytest.approx((0.25 * 4 * 0.93 * 0.929) ** 0.25)
    assert result["lowest"].startswith("b 1×2, 3 tokens: 0.250 of xla, 8.000 of torch")
    assert [line[0] for line in result["short"]] == ["b", "d"]


@pytest.mark.parametrize("part", ["projections", "gradients"])
def test_experts_with_other_bits_fail_the_study(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(promise: str) -> Any:
        def yielded(shapes: Any, tokens: Any) -> Iterator[dict[str, Any]]:
            for count, ratio in ((1, 4.0), (40, None), (41, 1.0)):
                yield {"model": "tiny", "tokens": count, "over_the_best_rival": ratio, promise: count != 40}

        return yielded

    monkeypatch.setattr(projections, "measure", measure("same_bits_alone"))
    monkeypatch.setattr(gradients, "measure", measure("same_bits_in_microbatches"))
    result = study(experts.study, model=[], part=[part])
    assert result.problem.endswith(f"[('{part}', 'tiny', 40)]")
    if part == "projections":
        assert result.content["summary"] == {"tiny": {"geometric_mean": pytest.approx(2), "largest": 4.0}}


def test_a_token_chooses_different_experts_in_order() -> None:
    widths = projections.Widths(7, 3, 8, 8)
    ids = np.asarray(projections.chosen_experts(widths, 50))
    assert ids.shape == (50, 3) and (np.diff(ids, axis=1) > 0).all() and set(ids.flat) == set(range(7))


def test_rows_are_grouped_by_expert_in_multiples_of_the_unit() -> None:
    x, given = jnp.arange(6, dtype=jnp.float32)[:, None] + 1, np.array([0, 0, 0, 2, 2, 3])
    rows, sizes, place = expert_schedules._grouped(x, given, 5, 2)
    assert sizes.tolist() == [4, 0, 2, 2, 0] and place.tolist() == [0, 1, 2, 4, 5, 6]
    assert rows[:, 0].tolist() == [1, 2, 3, 0, 4, 5, 6, *[0] * (len(rows) - 7)] and len(rows) == 12


def test_a_schedule_of_experts_with_other_bits_fails_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    job = expert_schedules.Job(projections.MODELS["gpt-oss-20b"], 64, "down")

    def small(is_first: bool) -> list[Any]:
        plain = unchecked(expert_schedules.Schedule)(8, 64)
        return [expert_schedules.Trial(job, plain, None, same) for same in (True, None, is_first)]

    for is_first in (True, False):
        monkeypatch.setattr(expert_schedules, "small", lambda is_first=is_first: iter(small(is_first)))
        problem = study(expert_schedules.study, model=[]).problem
        assert bool(problem) != is_first and "Trial(" * (not is_first) in problem


# Models.


def test_a_decode_step_reads_the_weights_of_chosen_experts_and_of_its_tokens_embeddings() -> None:
    def sizes_of(name: str, batch: int, chosen: float, **widths: Any) -> tuple[Any, int]:
        config = dataclasses.replace(presets.config(name, 1), **widths)
        model = abstract(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype="bfloat16"))
        return model, unchecked(decode._bytes_of_weights)(model, batch, chosen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.ShapeDtypeStruct, "nbytes", property(lambda x: x.size * x.dtype.itemsize), raising=False)
        tied, one = sizes_of("tiny", 1, 0.0)
        _, two = sizes_of("tiny", 2, 0.0)
        assert tied.config.tied_embeddings and one == two  # the head is read whole
        untied, first = sizes_of("tiny", 1, 0.0, tied_embeddings=False)
        _, third = sizes_of("tiny", 3, 0.0, tied_embeddings=False)
        assert third - first == 2 * untied.config.hidden_size * 2
        assert first - one == untied.config.hidden_size * 2
        small = {"hidden_size": 64, "vocab_size": 96}
        moe, few = sizes_of("Qwen3-30B-A3B", 1, 8.0, **small)
        _, more = sizes_of("Qwen3-30B-A3B", 1, 10.5, **small)
        assert more - few == 2.5 * 3 * 64 * moe.config.experts.inner_width * 2


def test_the_names_of_kernels_are_read_from_calls_that_no_trace_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that moves on a state of its own, as a decode step's does, is called with arrays and not traced."""
    step = unchecked(decode.DecodeStep.drawn)(presets.decoder("tiny", 1), 1, 3)
    program, given = step.program(), list[Any]()

    def called(tokens: Any) -> Any:
        given.append(tokens)
        return program(tokens)

    def kernel_times(fn: Callable[..., Any], argument_sets: Any) -> list[tuple[str, float]]:
        return [(f"kernel {fn(*arguments).shape[-1]}(int)", 0.1) for arguments in argument_sets]

    monkeypatch.setattr(study_timing, "kernel_times", kernel_times)
    device = SimpleNamespace(default_backend=lambda: "gpu", block_until_ready=jax.block_until_ready)
    monkeypatch.setattr(study_timing, "jax", device)
    assert study_timing.kernel_names(called, (step.tokens,)) == "kernel 256"
    assert len(given) == 2 and all(tokens is step.tokens for tokens in given)
    assert not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(step.state))
    with pytest.raises(TypeError, match=r"while another one is traced.*accepted: calls outside of jit"):
        jax.jit(program)(step.tokens)


def test_bandwidths_are_bytes_over_seconds_as_a_share_of_a_copys(monkeypatch: pytest.MonkeyPatch) -> None:
    step = SimpleNamespace(experts=lambda: 2.5, seconds=lambda steps: 4.0)
    drawn: list[tuple[int, int]] = []
    monkeypatch.setattr(decode, "copy_time", lambda size, calls: size / 100)
    monkeypatch.setattr(decode.presets, "decoder", lambda preset, layers: "model")
    monkeypatch.setattr(
        decode.DecodeStep, "drawn", lambda model, batch, context: drawn.append((batch, context)) or step
    )
    monkeypatch.setattr(decode, "_bytes_of_weights", lambda model, batch, chosen: 100 * batch)
    monkeypatch.setattr(decode, "_bytes_of_cache", lambda model, step: 60)
    first, second = unchecked(decode.bandwidths)("tiny", None, decode.SMALL)
    assert drawn == [(1, 70), (2, 70)] and second["bytes"] == {"weights": 200, "cache": 60}
    assert first["bytes_a_second"] == 40 and first["share_of_copy"] == 0.4 and first["experts_a_layer"] == 2.5


def test_kernels_of_a_step_are_counted_with_xlas_dots_through_nested_programs() -> None:
    def inner(x: jax.Array) -> jax.Array:
        return jnp.dot(x, x)

    def fn(x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, _: (jax.jit(inner)(x), None), inner(x), length=3)
        return jax.lax.cond(x[0, 0] > 0, inner, lambda x: x, x)

    counts: Any = decoder.collections.Counter()
    decoder._count_kernels(jax.make_jaxpr(fn)(jnp.ones((2, 2))).jaxpr, counts)
    assert counts == {"XLA dot": 3}


def test_requests_alone_with_other_bits_fail_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "kernels_of_step", lambda *_: {})
    monkeypatch.setattr(decoder, "step_seconds", lambda *_: 1.0)
    monkeypatch.setattr(decoder.presets, "decoder", lambda *_: SimpleNamespace(config=SimpleNamespace(layers=3)))
    for differing in ([], [2]):
        monkeypatch.setattr(decoder, "compare_batches", lambda *_, one=differing: {"requests alone that differ": one})
        result = study(decoder.study)
        assert result.problem == ("requests alone have different bits: [2]" if differing else "")
        assert set(result.content["step seconds"]) == {
            f"{name}, batch {n}" for name in ("portable", "stock") for n in (1, 3)
        }


def test_a_batch_in_which_a_row_has_other_bits_is_named_wherever_the_row_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(wrong: set[tuple[int, int]]) -> Any:
        def call(model: Any, tokens: jax.Array) -> np.ndarray:
            rows = np.asarray(tokens).sum(axis=1).astype(np.float32)
            return rows + [(len(rows), place) in wrong for place in range(len(rows))]

        return call

    programs = {"stock": program({(2, 1), (5, 2), (9, 8)}), "invariant": program({(3, 2), (1, 0)})}
    monkeypatch.setattr(invariant, "_programs", lambda: programs)
    monkeypatch.setattr(invariant, "Transformer", lambda *_: "model")
    changed = invariant.bits(invariant.TINY, 8, (2, 3, 5, 9))
    # The row alone is the reference, so all batches differ from one that is wrong alone.
    assert changed == {"stock": [2, 5, 9], "invariant": [2, 3, 5, 9]}
    assert anchor_positions(9) == [0, 4, 8]


def test_the_speed_of_a_transformation_is_over_the_stock_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant, "Transformer", lambda *_: "model")
    monkeypatch.setattr(invariant, "_programs", lambda: {"stock": 0.002, "invariant": 0.004})
    monkeypatch.setattr(timing, "step_time", lambda program, arguments, steps: program)
    (one,) = unchecked(invariant.speeds)(invariant.TINY, 8, (3,), 2)
    assert one == {"batch": 3, "length": 8, "stock_ms": 2.0, "invariant_ms": 4.0, "speed_over_stock": 0.5}


def test_each_aggregation_is_compared_with_the_contracts(monkeypatch: pytest.MonkeyPatch) -> None:
    def logprobs(config: Any, name: str, weights: Any, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        off = np.float32(0 if name in ("contract", "hf_eager") else 1)
        return np.full((2, 3), -1 - off, np.float32), np.array([[1, 2], [3, 4 + (name == "deepep")]])

    monkeypatch.setattr(aggregation, "_logprobs", logprobs)
    monkeypatch.setattr(aggregation, "split", lambda model: (None, ()))
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=9))
    results = {one["aggregation"]: one for one in unchecked(aggregation.measure)(model, 2, 4)}
    assert [name for name, one in results.items() if not one["unequal_tokens"]] == ["contract", "hf_eager"]
    assert {name: one["top_1_agreement"] for name, one in results.items() if one["top_1_agreement"] < 1} == {
        "deepep": 0.75
    }
    with pytest.raises(ValueError, match=r"preset 'tiny' has no experts; accepted: .*Qwen3-30B-A3B"):
        aggregation.random_decoder("tiny", 1)


# Sampler and trainer.


def test_requests_have_every_distribution_and_share_prefixes() -> None:
    given = on_policy.requests(on_policy.SMALL, 100)
    kinds = [on_policy._distribution_of(one.sampling) for one in given]
    assert kinds == 2 * list(on_policy.DISTRIBUTIONS) and len(set(kinds)) == 8
    filters = [(kind.top_k, kind.top_p, kind.min_p) for kind in on_policy.DISTRIBUTIONS]
    assert filters == [(0, 1.0, 0.0), (50, 0.9, 0.02)] * 4
    assert all(one.sampling.n == 2 and one.sampling.sampling_logprobs and one.sampling.ignore_eos for one in given)
    assert len({one.sampling.seed for one in given}) == len(given)
    plain = [list(one.prompt) for one in given[:8]]
    longest = max(plain, key=len)
    assert all(longest[: len(prompt)] == prompt for prompt in plain)


def test_unequal_bits_of_a_distribution_fail_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def compared(sizes: Any) -> dict[str, Any]:
        seen.append(sizes)
        return {"model": {"unequal_tokens": 0}, str(Distribution(0.6)): {"unequal_tokens": wrong}}

    monkeypatch.setattr(on_policy, "compared", compared)
    for wrong in (0, 3):
        problem = study(on_policy.study, packed=bool(wrong)).problem
        assert problem == (f"sampler and trainer have unequal bits: {{{str(Distribution(0.6))!r}: 3}}" if wrong else "")
    assert [sizes.is_packed for sizes in seen] == [False, True]


def _draw(number: int) -> Any:
    return verify.random.Random(number)


def test_an_alteration_changes_one_token_one_bit_or_one_token_of_the_prompt() -> None:
    one = transcript_of(4)
    for number in range(20):
        token, bit, prompt = (
            alter(_draw(number), one) for alter in (verify._other_token, verify._other_bit, verify._other_prompt)
        )
        assert (token.logprobs, token.prompt) == (one.logprobs, one.prompt)
        assert sum(a != b for a, b in zip(token.tokens, one.tokens, strict=True)) == 1 and min(token.tokens) >= 0
        assert (bit.tokens, bit.prompt) == (one.tokens, one.prompt)
        words = [np.array(x.logprobs, np.float32).view(np.uint32) for x in (bit, one)]
        assert sorted((words[0] ^ words[1]).tolist()) == [0, 0, 0, 1]
        assert (prompt.tokens, prompt.logprobs) == (one.tokens, one.logprobs)
        assert sum(a != b for a, b in zip(prompt.prompt, one.prompt, strict=True)) == 1 and min(prompt.prompt) >= 0


@dataclasses.dataclass(frozen=True)
class FakeTranscript:
    """The fields of a transcript that are altered."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


def transcript_of(tokens: int) -> Any:
    logprobs = tuple(float(np.float32(-0.1 - index)) for index in range(tokens))
    return FakeTranscript((3, 0, 5), tuple(range(tokens)), logprobs)


def test_transcripts_that_are_refused_or_accepted_are_counted() -> None:
    class Lenient:
        """Accepts what has other prompts."""

        def verify(self, transcripts: Sequence[Any]) -> list[Any]:
            honest = transcript_of(4)
            right = [(one.tokens, one.logprobs) == (honest.tokens, honest.logprobs) for one in transcripts]
            return [SimpleNamespace(is_verified=is_right) for is_right in right]

    given = [transcript_of(4)] * 3
    counts = unchecked(verify._refused)(Lenient(), given)
    assert counts == {"refused": {"token": 3, "logprob bit": 3, "prompt": 0}, "accepted": {"prompt": 3}}
    verified = unchecked(verify._verified)(Lenient(), [*given, transcript_of(5)])
    assert (verified["transcripts"], verified["refused"]) == (4, 1) and verified["first_refusal"] is not None


RIGHT = {
    "same_bits_of_all_runs": True,
    "verified": {"refused": 0, "first_refusal": None},
    "altered": {"accepted": {}},
}


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({}, []),
        ({"same_bits_of_all_runs": False}, ["bits differ between runs"]),
        ({"verified": {"refused": 2, "first_refusal": "x"}}, ["2 honest transcripts are refused: x"]),
        ({"altered": {"accepted": {"prompt": 3}}}, ["3 transcripts with another prompt are accepted"]),
    ],
)
def test_verdicts_that_are_wrong_are_problems(changes: dict[str, Any], messages: list[str]) -> None:
    assert verify.problems(RIGHT | changes) == messages


def test_requests_of_a_mixed_workload_cycle_through_the_styles() -> None:
    sizes = dataclasses.replace(verify.SMALL, requests=7, mixed=True)
    given = verify._requests(sizes, 100)
    drawn = Workload(7, sizes.prompt, sizes.output).draw(100)
    for number, (one, other) in enumerate(zip(given, drawn, strict=True)):
        assert one.prompt == other.prompt
        assert one.sampling == dataclasses.replace(other.sampling, **verify.STYLES[number % 5])
    assert verify._requests(verify.SMALL, 100) == Workload(12, (4, 40), (5, 9)).draw(100)


# Structured output.


@pytest.mark.parametrize(
    ("answers", "messages"),
    [
        ({"valid": 4, "differing": []}, []),
        ({"valid": 3, "differing": []}, ["1 of 4 answers are not valid"]),
        ({"valid": 4, "differing": [1, 2]}, ["2 answers have other bits in a crowd than alone"]),
    ],
)
def test_answers_that_are_not_valid_or_differ_are_problems(answers: dict[str, Any], messages: list[str]) -> None:
    assert structured.problems({"schemas": 4} | answers) == messages


def test_answers_are_validated_and_compared_alone_and_in_a_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        def __init__(self, decoder: Any, tokenizer: Any, config: Any) -> None:
            self.samples = config.max_samples

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def generate(self, requests: Sequence[Any]) -> list[Generation]:
            texts = ["yes", "no", "yes", "cut"]
            ends: Any = ["stop", "stop", "stop", "length"]
            logprobs = [-1.0, -1.0, -2.0 if self.samples > 1 else -1.0, -1.0]
            return [
                Generation((1,), (Completion((index, 5), (-1.0, logprobs[index]), ((), ()), text, end),))
                for index, (text, end) in enumerate(zip(texts, ends, strict=True))
            ]

    schema = SimpleNamespace(schema={}, accepts_text=lambda text: text == "yes")
    monkeypatch.setattr(structured, "Engine", Engine)
    monkeypatch.setattr(structured, "random_schema", lambda draw: schema)
    monkeypatch.setattr(structured, "_decoder", lambda config: "model")
    monkeypatch.setattr(structured, "made_up_tokenizer", lambda size: "tokenizer")
    content = unchecked(structured.answers_to_schemas)(dataclasses.replace(structured.SMALL, schemas=4))
    assert (content["schemas"], content["ended"], content["valid"], content["valid_or_unfinished"]) == (4, 3, 2, 3)
    assert content["differing"] == [2] and content["tokens"] == 8
    assert [one["text"] for one in content["invalid"]] == ["no", "cut"]


def test_a_tokenizer_that_is_made_up_has_every_byte_and_the_size() -> None:
    tokenizer = structured.made_up_tokenizer(600)
    assert len(tokenizer) == 600
    tokens = {tokenizer.token_bytes(token) for token in range(599)}
    assert {bytes([byte]) for byte in range(256)} <= tokens and len(tokens) == 599


# Training.


@pytest.mark.parametrize(
    ("bits", "problem"),
    [
        (None, ""),
        ({"equal": {"a": True}, "controls_differ": {"b": True}}, ""),
        ({"equal": {"a": False, "c": True}, "controls_differ": {"b": True}}, "['a']"),
        ({"equal": {"a": True}, "controls_differ": {"b": False}}, "['b']"),
    ],
)
def test_schedules_of_training_with_other_bits_fail_the_study(
    bits: dict[str, Any] | None, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "bits", lambda sizes, processes: bits)
    monkeypatch.setattr(training, "carried_sums", lambda sizes: {"carried": 1.0})
    result = study(training_study.study, part=["carried"] if bits is None else ["bits", "carried"])
    assert result.problem.endswith(problem) and bool(result.problem) == bool(problem)
    assert set(result.content) == {"sizes", "carried"} | (set() if bits is None else {"bits"})


def test_plans_have_one_number_of_shards_and_controls_another_or_another_order() -> None:
    batch, length = training.ragged_samples(training.SMALL)
    assert length % 16 == 0 and length - 16 < max(len(one.tokens) for one in batch) <= length
    equal, controls = training.plans(training.SMALL, length)
    assert {plan.shards for plan in equal.values()} == {2} and controls["4 shards"].shards == 4
    assert controls[training.ANOTHER_ORDER] == equal["microbatches of 4"]
    assert any(plan.rematerialized for plan in equal.values())
    assert len(set(map(str, equal.values()))) >= 8


# The run that is compared with itself.

POOL = [
    (Task("x", lambda *_: Example("", None), lambda *_: True), Example(f"{index}=", str(index))) for index in range(3)
]


def answers(shares: Sequence[int], asked: list[Any]) -> Callable[..., Any]:
    """`rollouts` whose first samples of each prompt are right, as many as `shares` says in turn."""
    waiting = itertools.cycle(shares)

    def rollouts(engine: Any, prompts: Sequence[str], sampling: SamplingParams, seeds: Sequence[int]) -> Any:
        asked.append((list(prompts), sampling, list(seeds)))
        counts = [next(waiting) for _ in prompts]
        return [
            [SimpleNamespace(text="right" if n < count else "wrong") for n in range(sampling.n)] for count in counts
        ]

    return rollouts


def test_prompts_of_the_pool_are_solved_sometimes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(Task, "reward", lambda task, example, text: float(text == "right"))
    monkeypatch.setattr(experiment, "rollouts", answers([0, 1, 2, 5, 8, 9, 10], asked))
    sizes = dataclasses.replace(experiment.SMALL, pool=5, samples=20, group=4)
    pool = unchecked(experiment.perfectible_prompts)("engine", sizes)
    prompts = [prompt for some, _, _ in asked for prompt in some]
    seeds = [seed for _, _, some in asked for seed in some]
    assert len(prompts) == 8 * 5 and seeds == experiment.prompt_seeds(2, 40)
    assert all(len(some) <= 2 and sampling.n == 10 and sampling.temperature == 1 for some, sampling, _ in asked)
    # Of 10 answers, 2 to 8 are right.
    assert [example.prompt for _, example in pool] == [prompts[index] for index in (2, 3, 4, 9, 10)]
    names = [task.name for task, _ in pool]
    assert names == [list(experiment.DIFFICULTIES)[index % 5] for index in (2, 3, 4, 9, 10)]
    monkeypatch.setattr(experiment, "rollouts", answers([1, 9], []))
    with pytest.raises(ValueError, match="0 prompts are solved sometimes; accepted: a policy with at least 5"):
        unchecked(experiment.perfectible_prompts)("engine", sizes)


def test_a_greedy_score_is_the_share_of_the_pool_that_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    weights: list[Any] = []
    monkeypatch.setattr(Task, "reward", lambda task, example, text: float(text == "right"))
    monkeypatch.setattr(experiment, "rollouts", answers([1, 0, 1], asked))
    engine = SimpleNamespace(update_weights=weights.append)
    score = unchecked(experiment._greedy_score)(engine, "params", POOL, experiment.SMALL)
    assert score == pytest.approx(2 / 3) and weights == ["params"]
    ((prompts, sampling, seeds),) = asked
    assert (prompts, seeds) == (["0=", "1=", "2="], [0, 0, 0]) and (sampling.temperature, sampling.n) == (0, 1)


@pytest.fixture
def stepping(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces a run's steps and scores; returns what each run is made of."""
    made: list[Any] = []

    class Stepping:
        def __init__(self, pool: Any, config: Any, *rest: Any) -> None:
            made.append((pool, config, *rest))
            self.config = config

        def steps(self) -> Iterator[tuple[int, dict[str, Any]]]:
            for step in range(self.config.steps):
                yield step, {"reward": step / 3, "unequal_tokens": step, "first": (1, 2), "entropy": 1.0}

    monkeypatch.setattr(experiment, "_PooledRun", Stepping)
    trainer = SimpleNamespace(params="params")
    monkeypatch.setattr(experiment, "trainer_for", lambda config, model, plan: trainer)
    monkeypatch.setattr(experiment, "_greedy_score", lambda engine, params, pool, sizes: 0.5)
    monkeypatch.setattr(experiment.gc, "freeze", lambda: None)
    return made


def arm_run(sizes: Any, *, deadline: float = math.inf, arm: int = 4) -> dict[str, Any]:
    watch = experiment._Watch(deadline, lambda line: None)
    policy = ("model", _Characters())
    return unchecked(experiment._run)(experiment.ARMS[arm], 3, sizes, policy, POOL, "engine", "exact", watch)


class _Characters:
    """A tokenizer of nine characters."""

    def encode(self, text: str) -> list[int]:
        return [0] * len(text)

    def __len__(self) -> int:
        return 9


def test_a_run_keeps_the_numbers_of_its_steps_and_scores_before_between_and_at_the_end(stepping: list[Any]) -> None:
    sizes = dataclasses.replace(experiment.SMALL, steps=5, score_every=2)
    run = arm_run(sizes)
    assert (run["arm"], run["seed"]) == (experiment.ARMS[4].name, 3)
    assert run["steps"]["reward"] == [0.0, 0.3333333, 0.6666667, 1.0, 1.333333]
    assert run["steps"]["unequal_tokens"] == [0, 1, 2, 3, 4] and "first" not in run["steps"]
    assert run["greedy_scores"] == [[0, 0.5], [2, 0.5], [4, 0.5], [5, 0.5]]
    ((pool, config, _, _, end, engine),) = stepping
    assert pool is POOL and end == 8 and engine == "engine"
    assert (config.seed, config.prompts, config.samples, config.steps) == (3, 2, 4, 5)
    assert config.kv_cache_dtype == "q4_0" and config.policy_gradient.correction == "token_truncated"
    assert config.learning_rate == sizes.learning_rate and config.max_tokens == sizes.max_tokens


def test_a_run_past_its_deadline_ends_after_the_step_with_a_score(stepping: list[Any]) -> None:
    run = arm_run(dataclasses.replace(experiment.SMALL, steps=5), deadline=0.0)
    assert run["steps"]["reward"] == [0.0] and run["greedy_scores"] == [[0, 0.5], [1, 0.5]]


def test_a_pooled_run_cycles_through_the_pool_in_an_order_of_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = []
    for seed in range(4):
        config = SimpleNamespace(seed=seed, prompts=2)
        monkeypatch.setattr(experiment.Run, "__init__", lambda run, config: setattr(run, "config", config))
        run = unchecked(experiment._PooledRun)(POOL, config)
        drawn = [pair[1].prompt for step in range(3) for pair in run.examples(step)]
        assert drawn[:3] == drawn[3:] and sorted(drawn[:3]) == ["0=", "1=", "2="]
        orders.append(tuple(drawn[:3]))
    assert len(set(orders)) > 1


def test_arms_run_in_order_with_engines_of_their_numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[tuple[str, Any]] = []
    seen: list[tuple[str, int, Any, str]] = []

    def engine(model: Any, tokenizer: Any, sizes: Any, kv_cache_dtype: Any = None) -> Any:
        engines.append((detjax.backend(), kv_cache_dtype))
        return nullcontext(len(engines))

    def run(arm: Any, seed: int, sizes: Any, policy: Any, pool: Any, engine: int, exact: int, watch: Any) -> Any:
        seen.append((arm.name, seed, engine, detjax.backend()))
        assert exact == 1
        return {"arm": arm.name, "seed": seed}

    monkeypatch.setattr(experiment.models, "load", lambda *_, **__: ("model", "tokenizer"))
    monkeypatch.setattr(experiment, "_engine", engine)
    monkeypatch.setattr(experiment, "perfectible_prompts", lambda *_: POOL)
    monkeypatch.setattr(experiment, "_run", run)
    monkeypatch.setattr(experiment, "summary_line", lambda run: "line")
    lines: list[str] = []
    sizes = dataclasses.replace(experiment.SMALL, seeds=2)
    runs = unchecked(experiment.measured)(sizes, report=lines.append)["runs"]
    assert runs == [{"arm": arm.name, "seed": seed} for arm in experiment.ARMS for seed in (0, 1)]
    assert engines == [("portable", None), ("stock", None), ("stock", None), ("portable", "q4_0"), ("portable", "q4_0")]
    assert [engine for _, _, engine, _ in seen] == [2, 2, 3, 3, 1, 1, 4, 4, 5, 5]
    assert [backend for *_, backend in seen] == 4 * ["stock"] + 6 * ["portable"] and lines == 10 * ["line"]


def test_a_summary_has_the_first_reward_and_the_mean_of_the_last_fifth() -> None:
    steps = {
        "reward": [float(n) for n in range(10)],
        "k3": [0.0, 2.0],
        "unequal_share": [0.5, 0.25],
        "seconds": [1.0, 9.0],
    }
    scores = [[0, 0.25], [5, 0.75], [10, 0.5]]
    line = experiment.summary_line({"arm": "a", "seed": 2, "steps": steps, "greedy_scores": scores, "seconds": 7.4})
    assert line == (
        "a, seed 2: reward 0.00 to 8.50, greedy 0.25 to 0.50 (best 0.75), k3 1.0e+00, unequal tokens 37.5%, 7 s, "
        "5.00 s a step"
    )


def test_the_study_says_what_contradicts_it_and_uses_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    module, seen = true_on_policy_study, list[Any]()
    monkeypatch.setattr(module, "measured", lambda sizes, **options: seen.append((sizes, options)) or {"runs": []})
    monkeypatch.setattr(module, "problems", lambda result: ["one", "other"])
    assert study(module.study).problem == "one; other" and seen[0][0] == experiment.SMALL
    unchecked(module.study)(Run("x"), seeds=2, steps=7, samples=16, learning_rate=0.5, processes=3, seconds=9.0)
    sizes, options = seen[1]
    assert sizes == experiment.Sizes(seeds=2, steps=7, samples=16, learning_rate=0.5)
    assert (options["processes"], options["seconds"]) == (3, 9.0)


def test_lines_are_smoothed_over_the_last_ten_steps() -> None:
    values = [float(n) for n in range(12)]
    assert experiment._smoothed(values) == [sum(values[max(0, n - 9) : n + 1]) / min(10, n + 1) for n in range(12)]


# Starts.


class Starting:
    """A process that prints lines."""

    def __init__(self, lines: Sequence[str], returncode: int = 0) -> None:
        self.stdout, self.returncode = iter(f"{line}\n" for line in lines), returncode

    def __enter__(self) -> "Starting":
        return self

    def __exit__(self, *_: object) -> None:
        pass


LINES = ("a warning", "model", "ready", "complete", 'programs [{"purpose": "step"}]')


def test_a_start_has_the_seconds_of_its_stages_and_its_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[Any] = []
    monkeypatch.setattr(ready.subprocess, "Popen", lambda command, **_: commands.append(command) or Starting(LINES))
    reached = ready._started(SMALL_ENGINE, "the cache")
    assert list(reached) == ["model", "ready", "complete", "programs"] and reached["programs"] == [{"purpose": "step"}]
    assert 0 < reached["model"] <= reached["ready"] <= reached["complete"]
    assert json.loads(commands[0][-2]) == dataclasses.asdict(SMALL_ENGINE) and commands[0][-1] == "the cache"
    result = study(ready.study)
    assert set(result.content["seconds"]) == {"from nothing", "with the cache"} and len(commands) == 3
    assert all("programs" not in seconds for seconds in result.content["seconds"].values())
    assert commands[1][-1] == commands[2][-1] != "the cache"


@pytest.mark.parametrize(
    ("lines", "code", "says"), [(LINES[:2], 0, "code 0 after model"), (LINES, 3, "code 3"), ((), 1, "after nothing")]
)
def test_a_start_that_fails_is_an_error(
    lines: Sequence[str], code: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready.subprocess, "Popen", lambda command, **_: Starting(lines, code))
    with pytest.raises(RuntimeError, match=says):
        ready._started(SMALL_ENGINE, "")
