"""Runs of studies with `--small` on a CPU, and what their results must say."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jax
import pytest

import benchmarks
import detjax
from benchmarks.__main__ import main
from benchmarks.studies import adapters, batch_bits, decode, noise, quantized
from benchmarks.studies.draft_bits.models import kinds
from benchmarks.studies.draft_speed import PARTS
from benchmarks.studies.training import measures as training
from benchmarks.studies.true_on_policy import experiment as true_on_policy
from detjax.bench import presets
from detjax.operands.quantized_weight import widened
from detjax.pallas.hopper.quantized import codes
from tests.support import commands, towers


def run(*arguments: str, exit_code: int = 0) -> str:
    result = commands.run(main, *arguments, env={"COLUMNS": "200"})
    assert result.exit_code == exit_code, (result.output, result.exception)  # pyright: ignore[reportAttributeAccessIssue]
    return result.output


def run_small(name: str, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """The result of `--small`."""
    out = tmp_path / "results" / f"{name}.json"
    run(name, "--small", "--out", str(out), *arguments)
    content = json.loads(out.read_text())
    assert content["command"] == " ".join(("python -m benchmarks", name, "--small", *arguments))
    assert {"created", "commit", "versions", "fingerprint"} <= content.keys()
    return content


def run_on_devices(name: str, tmp_path: Path, *arguments: str, count: int = 2) -> dict[str, Any]:
    """The result of `--small` in a process with simulated devices."""
    out = tmp_path / "result.json"
    flags = f"--xla_force_host_platform_device_count={count} --xla_backend_optimization_level=0"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "benchmarks", name, "--small", "--out", str(out), *arguments]
    subprocess.run(command, env=environment, cwd=Path(benchmarks.__file__).parents[1], check=True)
    return json.loads(out.read_text())


def runs_delta_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run_small("delta_rule", tmp_path)
    bits, *times = content["results"]
    assert set(bits["same_bits"].values()) == {True} and bits["error"] < 4e-3
    assert [(result["part"], result.get("requests", result.get("tokens"))) for result in times] == [
        ("decode", 1),
        ("decode", 3),
        ("prefill", 100),
    ]
    assert all(len(result["seconds"]) == 2 and "missing" not in result for result in times)
    # Chunks from the call's start have the bits of their cuts, and the script says so.
    with detjax.use_backend("stock"):
        output = run("delta_rule", "--small", "--limit", "0", exit_code=1)
    assert "bits differ" in output and "the limit of 0.0 seconds has passed" in output


def runs_data_parallel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run_small("data_parallel", tmp_path, "--rounds", "1")
    assert [server["engines"] for server in content["servers"]] == [1, 2]
    assert len({server["digest"] for server in content["servers"]}) == 1


def runs_training_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run_on_devices("training_devices", tmp_path)
    assert set(content["equal"].values()) == {True} and content["control_differs"]


def runs_mesh_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run_on_devices("mesh_bits", tmp_path, "--preset", "Qwen3-30B-A3B")
    assert list(content["meshes"]) == ["tensor 2, expert 1", "tensor 1, expert 2"]
    assert all(arm["digests"] == content["one"]["digests"] for arm in content["meshes"].values())
    assert content["usual_cut_differs"]


def runs_mesh_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run_on_devices("mesh_speed", tmp_path)
    steps = [(row["step"], row["devices"]) for row in content["steps"]]
    assert steps == [(f"{step}", count) for count in (1, 2) for step in content["digests"]]
    assert all(row["time_over_usual"] > 0 for row in content["steps"])
    assert all(len(by_count) == 2 and len(set(by_count.values())) == 1 for by_count in content["digests"].values())


def runs_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run_small("processes", tmp_path)
    assert len(content["training"]) == len(content["answers"]) == 2 and content["lost"]["survivors"][0]["says"]


def runs_expert_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run_small("expert_launches", tmp_path)
    assert [(row["batch"], row["same_bits"]) for row in content["results"]] == [(1, True), (3, True)]
    assert all(row["parts"] == dict.fromkeys(("choice", "places", "layer"), "") for row in content["results"])


def runs_usual_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run_on_devices("usual_cut", tmp_path, "--devices", "4", "--rounds", "2", count=4)
    assert list(content["seconds"]) == ["decode of 3", "decode of 1", "prefill of 24"]
    assert all([*map(len, by_count.values())] == [2, 2, 2] for by_count in content["seconds"].values())
    assert all(set(by_count) == {"1", "2", "4"} for by_count in content["time_over_one"].values())


def runs_batch_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(run_small("batch_bits", tmp_path)["digests"]) == {"last", "mean", "cls"}
    sizes = dataclasses.replace(batch_bits.SMALL, sides=((16, 24), (24, 16)))
    results = batch_bits.digests(towers.model(towers.NAMES[0]), sizes)
    assert len(results["images"]["alone"]) == 4 and batch_bits.problem(results) == ""
    with pytest.raises(ValueError, match="neither pools nor takes images"):
        batch_bits.digests(presets.decoder("tiny", 1), sizes)


def runs_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run_small("noise", tmp_path)
    assert (content["words"]["different"], content["tokens"]["different"]) == (0, 0)
    assert len(content["deviations"]) == 8 and min(content["controls"].values()) > noise.LARGEST
    assert noise.problem(content) == ""
    assert "not NumPy's" in noise.problem(content | {"words": {"compared": 2, "different": 1}})
    assert "the deviation is" in noise.problem(content | {"deviations": {"prompt": -6.0}})
    assert "was not found" in noise.problem(content | {"controls": {"equal pairs": 1.0}})


def runs_matmul(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run_small("matmul", tmp_path)
    assert [(cell["linears"], cell["m"]) for cell in content["cells"]] == [
        ([f"small {name}"], m) for name in ("qkv", "down") for m in (1, 17)
    ]
    assert all(set(cell["seconds"]) == {"detjax", "xla"} for cell in content["cells"])
    assert len(content["epilogues"]) == 3
    assert content["bits"]["differences"] == [] and content["bits"]["anchor_rows"] == 2 * 2 * (1 + 5 * 3)
    assert "portable" in content["note"] and content["fingerprint"]["backend"] == "portable"
    names = {file.name for file in (tmp_path / "results").iterdir()}
    assert names == {"matmul.json", "matmul-over-tokens.png", "matmul-cells.png"}


def runs_attention_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sections = ("prefill", "decode", "quantized", "backward", "accuracy")
    content = run_small("attention", tmp_path, *(word for name in sections for word in ("--only", name)))
    for section in sections[:4]:
        for cell in content[section]:
            assert "detjax" in cell["seconds"]["forward" if section == "backward" else "kernels"]
    (cell, *_) = content["prefill"]
    assert "cudnn" in cell["missing"]["kernels"]  # on a CPU
    assert 0 < content["accuracy"]["relative_error"]["detjax"] < 5e-3
    assert "bits" not in content


def runs_attention_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bits = run_small("attention", tmp_path, "--only", "bits")["bits"]
    assert bits["differences"] == [] and not bits["failed"] and not bits["refused"]
    assert bits["options"] == 6 and bits["processes"] == 1


def runs_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = run_small("norms", tmp_path)["results"]
    assert len(results) == 18
    for result in results:
        kept = [value for name, value in result.items() if name.startswith("same_bits")]
        assert kept and all(kept)


def runs_quantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run_small("quantized", tmp_path)
    results = content["results"]
    assert len(content["same_bits"]) == 14 and all(content["same_bits"].values())
    assert list(results) == ["int4", "int4, widened", "fp8"] and results["int4"]["bits_of_widened"]
    assert results["int4"]["weight_bytes"] < results["int4, widened"]["weight_bytes"]
    with monkeypatch.context() as patch:
        patch.setattr(quantized, "widened", lambda weight: 2 * widened(weight))
        output = run("quantized", "--small", exit_code=1)
    assert "int4: bits differ" in output and "bits of products differ" in output


def runs_quantized_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run_small("quantized_plans", tmp_path)
    seconds = content["seconds"]["fp8"]["a tiny product"]["3"]
    assert content["different"] == [] and len(seconds) == 2 and {*seconds.values()} == {None}
    product, calls = codes.codes_product, itertools.count()
    with monkeypatch.context() as patch:
        patch.setattr(codes, "codes_product", lambda *given, **options: product(*given, **options) + next(calls))
        output = run("quantized_plans", "--small", exit_code=1)
    assert f"without the first one's bits: fp8, a tiny product, 3 rows: {[*seconds][1]}" in " ".join(output.split())


def runs_fp8_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sums = run_small("fp8_products", tmp_path)["sums"]
    assert list(sums) == ["normal", "of all exponents", "cancelling"]
    assert all(one["different"] == 0 and one["error"] < 1e-6 for case in sums.values() for one in case.values())


def runs_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = run_small("decode", tmp_path)["results"]["tiny"]["batches"]
    assert [one["experts_a_layer"] for one in dense] == [0, 0]
    assert dense[0]["bytes"]["weights"] == dense[1]["bytes"]["weights"]
    assert 2 * dense[0]["bytes"]["cache"] == dense[1]["bytes"]["cache"]
    widths = {"hidden_size": 64, "moe_intermediate_size": 32, "vocab_size": 96, "num_experts": 16}
    monkeypatch.setitem(presets.MODELS, "Qwen3-30B-A3B", presets.MODELS["Qwen3-30B-A3B"] | widths)
    few, many = decode.bandwidths("Qwen3-30B-A3B", 1, dataclasses.replace(decode.SMALL, batches=(1, 5)))
    assert few["experts_a_layer"] == 8 < many["experts_a_layer"] <= 16
    an_expert, an_embedding = 3 * 64 * 32 * 2, 64 * 2
    more = (many["experts_a_layer"] - 8) * an_expert + 4 * an_embedding
    assert many["bytes"]["weights"] - few["bytes"]["weights"] == more


def runs_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run_small("loading", tmp_path)["rows"]
    assert [row["kept"] for row in rows] == [True, False]
    for row in rows:
        assert 0 < row["bytes"]["layer"] < row["bytes"]["checkpoint"]
        assert 0 <= row["peak"]["beyond_shards"] and 0 <= row["peak"]["mapped_files"]


def runs_portable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = run_small("portable", tmp_path)["results"]
    assert len({result["case"] for result in results}) == 7
    assert all(result["other_bits"]["portable"] == 0 for result in results)


def runs_softmax_schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run_small("softmax_schedules", tmp_path)
    assert "interpreter" in content["note"] and len(content["bits"]) == 3
    assert all("one set of bits" in line for line in content["bits"][:2])


def runs_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run_small("ready", tmp_path)
    for seconds in content["seconds"].values():
        assert 0 < seconds["model"] < seconds["ready"] <= seconds["complete"]
    assert content["cache_bytes"] > 0
    purposes = [program["purpose"] for program in content["programs"]]
    assert len(set(purposes)) == len(purposes) > 10
    assert {program["before_ready"] for program in content["programs"]} == {True, False}


def runs_sleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run_small("sleep", tmp_path)
    in_use = {name: one["in use"] - content["bytes"]["before"]["in use"] for name, one in content["bytes"].items()}
    assert in_use["asleep"] < in_use["awake"] / 100
    assert in_use["awake again"] == pytest.approx(in_use["awake"], rel=0.01)
    assert content["has_the_same_bits"]


def runs_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run_small("update", tmp_path, "--directory", str(tmp_path))
    assert content["has_the_same_bits"] and content["control_differs"]
    assert set(content["seconds"]) == set(content["update_over_read"]) == {"disk", "memory"}
    assert content["bytes"] > 0 and not list(tmp_path.glob("*/checkpoint"))


def runs_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run_small("verify", tmp_path, "--kv-cache-dtype", "int8", "--requests", "7")
    assert content["same_bits_of_all_runs"]
    assert (content["verified"]["transcripts"], content["verified"]["refused"]) == (7, 0)
    assert content["altered"] == {"refused": {"token": 7, "logprob bit": 7, "prompt": 7}, "accepted": {}}
    assert set(content["generated"]) == {"4", "2"}


def runs_structured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run_small("structured", tmp_path)
    assert content["answers"]["valid"] == content["answers"]["schemas"] == 12
    assert content["answers"]["differing"] == []
    assert [speed["requests"] for speed in content["speeds"]] == [1, 4]


def runs_invariant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # Flax' layers promote
        content = run_small("invariant", tmp_path)
    assert content["results"]["tiny"]["batches_with_other_bits"]["invariant"] == []
    assert [speed["batch"] for speed in content["results"]["tiny"]["speeds"]] == [1, 2]
    assert set(content["tracing_seconds"]) == {"stock", "invariant"}


def runs_aggregation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run_small("aggregation", tmp_path)
    unequal = {one["aggregation"]: one["unequal_tokens"] for one in content["results"]}
    assert unequal.pop("contract") == 0
    assert all(unequal[name] for name in ("hf_eager", "hf_eager_float32", "hf_grouped", "deepep"))


def runs_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run_small("experts", tmp_path)
    assert all(result["same_bits_alone"] for result in content["results"])
    assert {*content["results"][0]["seconds"]} == {"detjax", "ragged dot", "dense"}
    assert content["summary"]["tiny"].keys() == {"geometric_mean", "largest"}
    assert all(result["same_bits_in_microbatches"] for result in content["gradients"])
    assert {*content["gradients"][0]["seconds"]} == {"detjax", "ragged dot", "balanced dense"}


def runs_expert_schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run_small("expert_schedules", tmp_path)
    trials = content["trials"]
    assert {(trial["schedule"]["tile_m"], trial["schedule"]["lines"]) for trial in trials} == {
        (unit, lines) for unit in (8, 16) for lines in (1, 2)
    }
    assert all(trial["has_first_bits"] for trial in trials) and content["fastest"] == []


def runs_true_on_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run_small("true_on_policy", tmp_path)
    assert [run["arm"] for run in content["runs"]] == [arm.name for arm in true_on_policy.ARMS]
    zeros = {"k1": 0.0, "k2": 0.0, "k3": 0.0, "unequal_tokens": 0}
    for run in content["runs"]:
        steps = run["steps"]
        assert {len(values) for values in steps.values()} == {3}
        for step in range(3):
            assert ({key: steps[key][step] for key in zeros} == zeros) == (run["arm"] == "detjax"), run["arm"]
        assert min(steps["entropy"]) > 0 and min(steps["gradient_norm"]) >= 0
    # All arms begin with one policy and draw with the same seeds, so they are paired.
    assert len({run["greedy_scores"][0][1] for run in content["runs"]}) == 1
    assert [[step for step, _ in run["greedy_scores"]] for run in content["runs"]] == [[0, 2, 3]] * 5
    assert (tmp_path / "results" / "true_on_policy.png").read_bytes().startswith(b"\x89PNG")


def runs_true_on_policy_in_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(true_on_policy, "ARMS", true_on_policy.ARMS[2:3])
    # The schedules of a GPU, in this process alone: neither they nor the processes are to change a bit.
    monkeypatch.setattr(true_on_policy, "_is_gpu", lambda: True)
    sizes = true_on_policy.Sizes(seeds=2, steps=2, samples=4, group=2, pool=2, learning_rate=1e-2)
    one, two = (true_on_policy.measured(sizes, processes=count) for count in (1, 2))
    for run in (*one["runs"], *two["runs"]):
        del run["seconds"], run["steps"]["seconds"]
    assert one["runs"] == two["runs"]
    assert [run["seed"] for run in one["runs"]] == [0, 1]
    assert one["runs"][0]["steps"] != one["runs"][1]["steps"]


def runs_true_on_policy_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = true_on_policy.Sizes(steps=3, samples=4, group=2, pool=2)
    with monkeypatch.context() as patch:
        patch.setattr(true_on_policy, "ARMS", true_on_policy.ARMS[2:3])
        result = true_on_policy.measured(sizes, seconds=0)
    (run,) = result["runs"]
    assert {len(values) for values in run["steps"].values()} == {1}
    assert [step for step, _ in run["greedy_scores"]] == [0, 1]
    # Runs of unequal lengths are drawn up to the shortest.
    longer = {"steps": {name: 2 * values for name, values in run["steps"].items()}}
    longer["greedy_scores"] = [*run["greedy_scores"], [2, 1.0]]
    runs = [run | {"arm": arm.name} | more for arm in true_on_policy.ARMS for more in (longer, {})]
    true_on_policy.draw(result | {"runs": runs}, tmp_path / "runs.png")
    assert (tmp_path / "runs.png").is_file()


def runs_true_on_policy_failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        true_on_policy.measured(true_on_policy.Sizes(max_tokens=1000), processes=5)


def runs_on_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run_small("on_policy", tmp_path)
    assert len(content["results"]) == 9  # 4 temperatures with and without filters, and the model's own logprobs
    assert {result["unequal_tokens"] for result in content["results"].values()} == {0}
    assert content["results"]["model"]["tokens"] == 384


def runs_on_policy_stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with detjax.use_backend("stock"):
        output = run("on_policy", "--small", exit_code=1)
    assert "sampler and trainer have unequal bits" in output


def runs_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with jax.numpy_dtype_promotion("standard"):  # JAX's own attention needs it
        content = run_small("training", tmp_path, "--part", "steps", "--part", "gradients", "--part", "carried")
    assert content["steps"]["missing"] == {}
    assert content["steps"]["seconds"].keys() == {"detjax", "stock", "stock, head in chunks of 64"}
    separate = training.step_of(training.SMALL, training.DETJAX)
    assert len(separate["seconds"]) == training.SMALL.rounds
    assert separate["first"] > 0
    assert content["carried"].keys() == {"carried", "fresh"}
    assert all(case["missing"] == {} for case in content["gradients"])


def runs_training_schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = "microbatches of 1", "packed into 128 tokens", training.ANOTHER_ORDER
    one, packed, reversed_order = (training.digest(training.SMALL, name) for name in names)
    assert one == packed != reversed_order
    assert max(training.relative_errors(training.SMALL).values()) < 0.03


def runs_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run_small("decoder", tmp_path)
    assert content["batches"]["requests alone that differ"] == []
    assert content["batches"]["requests compared"] == [0, 2]
    assert all(seconds > 0 for seconds in content["step seconds"].values())
    assert sum(content["kernels of a decode step"].values()) > 0


def runs_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # Flax' layers promote
        results = run_small("digests", tmp_path)["results"]
    assert [result["batch"] for result in results] == [1, 2]
    for result in results:
        assert result["layers_over_plain"] == pytest.approx(result["layers_ms"] / result["plain_ms"])


def runs_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = run_small("drafts", tmp_path)["results"]
    assert [(result["temperature"], result["kind"]) for result in results] == [
        (temperature, kind) for temperature in (0, 0.7, 1) for kind in ("ngram", "draft_model", "eagle3")
    ]
    assert all(result["answers_with_other_bits"] == 0 for result in results)
    assert all(result["share_counted"][0] > 0 for result in results if result["kind"] == "eagle3")


def runs_every_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run_small("every_gpu", tmp_path)
    assert set(content["bits"].values()) == {True} and len(content["bits"]) == 5
    assert content["comparisons"] == {"products": 64 * (1 + 2 + 17 + 5 + 6 + 17 + 17)}
    assert [row["batch"] for row in content["steps"]] == [1, 2]
    assert all(row["portable_flops"] > 0 for row in content["products"])


def runs_draft_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [argument for part in PARTS for argument in ("--part", part)]
    content = run_small("draft_speed", tmp_path, *parts)
    rows = [(row["part"], row["requests"], row["length"]) for row in content["results"]]
    assert rows == [
        ("tokens", 1, None),
        ("tokens", 2, None),
        ("lengths", 2, 3),
        ("lookup", 1, None),
        ("serve", 4, None),
    ]
    *drawn, lookup, served = content["results"]
    assert all(row["same_bits"] for row in content["results"])
    assert all(row["guesses"] > row["right_guesses"] > 0 for row in (*drawn, served))
    assert lookup["guesses"] == lookup["right_guesses"] > 0
    assert [row["requests"] for row in content["head"]] == [1, 2]


def runs_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run_small("adapters", tmp_path)
    assert [(row["requests"], list(row["speed_over_base"])) for row in content["steps"]] == [
        (1, ["1"]),
        (3, ["1", "2"]),
    ]
    assert set(content["bits"].values()) == {True} and len(content["bits"]) == 3
    assert content["loading"]["compiled"] == [] and len(content["loading"]["seconds"]) == 1
    assert content["training"]["time_over_full"] > 0
    assert adapters.problem(content) == ""
    assert "bits: alone: no" in adapters.problem(content | {"bits": {"alone": False}})
    assert "compiled put" in adapters.problem(content | {"loading": {"compiled": ["put"]}})


def runs_draft_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run_small("draft_bits", tmp_path)
    assert content["rounds"] == 1 and content["tokens_compared"] == sum(x["tokens"] for x in content["drafts"].values())
    assert [name.removeprefix("demo, ") for name in content["drafts"]] == [*kinds("demo")]
    assert all(one["guesses"] and not one["answers_with_other_bits"] for one in content["drafts"].values())
    right = content["drafts"]["demo, right"]
    assert right["guesses"] == right["right_guesses"]


QUICK: Final = ("expert_schedules", "loading", "matmul", "sleep", "update", "usual_cut")
"""Runs of a few seconds."""
RUNS: Final[dict[str, Callable[[Path, pytest.MonkeyPatch], None]]] = {
    "adapters": runs_adapters,
    "aggregation": runs_aggregation,
    "attention, bits": runs_attention_bits,
    "attention, times": runs_attention_times,
    "batch_bits": runs_batch_bits,
    "data_parallel": runs_data_parallel,
    "decode": runs_decode,
    "decoder": runs_decoder,
    "delta_rule": runs_delta_rule,
    "digests": runs_digests,
    "draft_bits": runs_draft_bits,
    "draft_speed": runs_draft_speed,
    "drafts": runs_drafts,
    "every_gpu": runs_every_gpu,
    "expert_schedules": runs_expert_schedules,
    "expert_launches": runs_expert_launches,
    "experts": runs_experts,
    "fp8_products": runs_fp8_products,
    "quantized_plans": runs_quantized_plans,
    "invariant": runs_invariant,
    "loading": runs_loading,
    "matmul": runs_matmul,
    "mesh_bits": runs_mesh_bits,
    "mesh_speed": runs_mesh_speed,
    "noise": runs_noise,
    "norms": runs_norms,
    "on_policy": runs_on_policy,
    "on_policy, stock": runs_on_policy_stock,
    "portable": runs_portable,
    "processes": runs_processes,
    "quantized": runs_quantized,
    "ready": runs_ready,
    "sleep": runs_sleep,
    "softmax_schedules": runs_softmax_schedules,
    "structured": runs_structured,
    "training": runs_training,
    "training, schedules": runs_training_schedules,
    "training_devices": runs_training_devices,
    "true_on_policy": runs_true_on_policy,
    "true_on_policy, cut short": runs_true_on_policy_cut_short,
    "true_on_policy, failing": runs_true_on_policy_failing,
    "true_on_policy, in processes": runs_true_on_policy_in_processes,
    "update": runs_update,
    "usual_cut": runs_usual_cut,
    "verify": runs_verify,
}
