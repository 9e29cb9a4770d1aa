"""Every study runs with `--small` on a CPU, and writes a result that says where it comes from."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors

import benchmarks
import detjax
from benchmarks.__main__ import main, studies
from benchmarks.studies import decode, delta_rule, expert_schedules, loading, tunix_learners
from benchmarks.studies.experts import projections
from benchmarks.studies.training import measures as training
from benchmarks.studies.true_on_policy import experiment as true_on_policy
from detjax.bench import deviceless, presets
from detjax.pallas.hopper.matmul.plan import Schedule
from tests.support import commands

STUDIES = (
    "aggregation",
    "attention",
    "data_parallel",
    "decode",
    "decoder",
    "delta_rule",
    "digests",
    "expert_schedules",
    "experts",
    "invariant",
    "loading",
    "matmul",
    "mesh_bits",
    "norms",
    "on_policy",
    "peer_vllm",
    "portable",
    "random_programs",
    "ready",
    "softmax_schedules",
    "structured",
    "tpu_dots",
    "training",
    "training_devices",
    "true_on_policy",
    "tunix_learners",
    "verify",
)


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


def test_every_study_is_tested_and_listed_with_a_line_of_help() -> None:
    assert tuple(studies()) == STUDIES
    listed = run("--help")
    for name in STUDIES:
        assert re.search(rf"^│ {name} +\w", listed, re.MULTILINE), name


def test_the_command_of_a_result_has_no_files(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    for out in (("--out", str(file)), (f"--out={file}",)):
        run("peer_vllm", *out, "--model", "a b", "--small")
        assert json.loads(file.read_text())["command"] == "python -m benchmarks peer_vllm --model 'a b' --small"


@pytest.mark.parametrize("arguments", [("decode", "--preset", "none"), ("on_policy", "--preset", "none"), ("none",)])
def test_an_unknown_name_is_refused_with_those_that_there_are(arguments: tuple[str, ...]) -> None:
    output = run(*arguments, exit_code=2)
    assert "'none'" in output
    assert len(arguments) == 1 or "accepted: Qwen3-" in output or "accepted: tiny, Qwen3-" in output


def test_peer_vllm_draws_the_requests_of_the_engine(tmp_path: Path) -> None:
    """vLLM is not installed here, so `--small` only draws the recorded measurement's requests."""
    content = run_small("peer_vllm", tmp_path)
    assert (content["requests"], content["prompt_tokens"], content["generated_tokens"]) == (1000, 132351, 100203)


@pytest.mark.sampled(0)
def test_delta_rule(tmp_path: Path) -> None:
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


def test_random_programs(tmp_path: Path) -> None:
    content = run_small("random_programs", tmp_path)
    assert content["false_proofs"] == []
    for counts in content["results"].values():
        assert sum(counts[outcome] for outcome in ("proven", "observed", "refuted", "unproven")) == content["programs"]
        assert counts["proven"] and counts["observed"] and not counts["false_proofs"]


@pytest.mark.sampled(0)
def test_servers_of_one_engine_and_of_two_have_the_same_answers(tmp_path: Path) -> None:
    content = run_small("data_parallel", tmp_path, "--rounds", "1")
    assert [server["engines"] for server in content["servers"]] == [1, 2]
    assert len({server["digest"] for server in content["servers"]}) == 1


def run_on_two_devices(name: str, tmp_path: Path) -> dict[str, Any]:
    """The result of `--small` in a process with two simulated devices."""
    out = tmp_path / "result.json"
    flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "benchmarks", name, "--small", "--out", str(out)]
    subprocess.run(command, env=environment, cwd=Path(benchmarks.__file__).parents[1], check=True)
    return json.loads(out.read_text())


@pytest.mark.sampled(0)
def test_training_on_two_devices_gives_the_bits_of_one(tmp_path: Path) -> None:
    content = run_on_two_devices("training_devices", tmp_path)
    assert set(content["equal"].values()) == {True} and content["control_differs"]


@pytest.mark.sampled(0)
def test_answers_of_two_devices_have_the_bits_of_one(tmp_path: Path) -> None:
    content = run_on_two_devices("mesh_bits", tmp_path)
    assert content["one"]["digests"] == content["several"]["digests"] and content["usual_cut_differs"]


def test_rivals_of_the_delta_rule_compute_the_rule() -> None:
    widths = delta_rule.SMALL_MODELS["tiny"]
    x = delta_rule.random_tokens(widths, (1, 150), 0)
    s, o = delta_rule.chunked(widths.state(1).s, x)
    assert delta_rule.error(widths, x, o) < 1e-2
    by_token = delta_rule.Tokens(*(jnp.swapaxes(y, 0, 1) for y in x))
    s_end, o_recurrent = jax.lax.scan(delta_rule.recurrence, widths.state(1).s, by_token)
    assert delta_rule.error(widths, x, jnp.swapaxes(o_recurrent, 0, 1)) < 3e-3
    np.testing.assert_allclose(s, s_end, atol=2e-2)


@pytest.mark.sampled(0)
def test_matmul(tmp_path: Path) -> None:
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


@pytest.mark.sampled(0)
def test_attention_times(tmp_path: Path) -> None:
    sections = ("prefill", "decode", "quantized", "backward", "accuracy")
    content = run_small("attention", tmp_path, *(word for name in sections for word in ("--only", name)))
    for section in sections[:4]:
        for cell in content[section]:
            assert "detjax" in cell["seconds"]["forward" if section == "backward" else "kernels"]
    (cell, *_) = content["prefill"]
    assert "cudnn" in cell["missing"]["kernels"]  # on a CPU
    assert 0 < content["accuracy"]["relative_error"]["detjax"] < 5e-3
    assert "bits" not in content


@pytest.mark.sampled(0)
def test_attention_bits(tmp_path: Path) -> None:
    bits = run_small("attention", tmp_path, "--only", "bits")["bits"]
    assert bits["differences"] == [] and not bits["failed"] and not bits["refused"]
    assert bits["options"] == 6 and bits["processes"] == 1


@pytest.mark.sampled(0)
def test_norms(tmp_path: Path) -> None:
    results = run_small("norms", tmp_path)["results"]
    assert len(results) == 18
    for result in results:
        kept = [value for name, value in result.items() if name.startswith("same_bits")]
        assert kept and all(kept)


def test_norms_sweeps_only_where_the_kernels_run() -> None:
    assert "accepted: an H100 or H200" in " ".join(run("norms", "--sweep", "--small", exit_code=2).split())


@pytest.mark.sampled(0)
def test_decode_counts_the_experts_that_tokens_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_decoder(tmp_path: Path) -> None:
    content = run_small("decoder", tmp_path)
    assert content["batches"]["requests alone that differ"] == []
    assert content["batches"]["requests compared"] == [0, 2]
    assert all(seconds > 0 for seconds in content["step seconds"].values())
    assert sum(content["kernels of a decode step"].values()) > 0


@pytest.mark.sampled(0)
def test_loading_counts_what_a_host_holds_beyond_the_shards(tmp_path: Path) -> None:
    rows = run_small("loading", tmp_path)["rows"]
    assert [row["kept"] for row in rows] == [True, False]
    for row in rows:
        assert 0 < row["bytes"]["layer"] < row["bytes"]["checkpoint"]
        assert 0 <= row["peak"]["beyond_shards"] and 0 <= row["peak"]["mapped_files"]


def test_a_sparse_checkpoint_is_one_of_zeros_that_takes_no_space(tmp_path: Path) -> None:
    sizes = loading.write_sparse(tmp_path, "Qwen3-8B", 1)
    file = tmp_path / "model.safetensors"
    assert file.stat().st_size > sum(sizes.values()) > 2e9 and 512 * file.stat().st_blocks < 1e6
    with safetensors.safe_open(file, framework="numpy") as tensors:
        assert tensors.get_slice("model.layers.0.mlp.down_proj.weight").get_shape() == [4096, 12288]
        assert not tensors.get_slice("lm_head.weight")[151_935:151_936].any()


@pytest.mark.sampled(0)
def test_portable(tmp_path: Path) -> None:
    results = run_small("portable", tmp_path)["results"]
    assert len({result["case"] for result in results}) == 7
    assert all(result["other_bits"]["portable"] == 0 for result in results)


@pytest.mark.sampled(0)
def test_softmax_schedules(tmp_path: Path) -> None:
    content = run_small("softmax_schedules", tmp_path)
    assert "interpreter" in content["note"] and len(content["bits"]) == 3
    assert all("one set of bits" in line for line in content["bits"][:2])


def test_tpu_dots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text as libtpu's stands for the compiler, which is not in this environment."""

    class Compiled:
        def __init__(self, tokens: int) -> None:
            self.tokens = tokens

        def as_text(self) -> str:
            bounds = '["1"]' if self.tokens > 1 else "[]"
            window = f'{{"kernel_window_bounds":{bounds},"iteration_bounds":["4","{self.tokens}","7"]}}'
            return f'backend_config={{"window_config":{window},"other":1}}'

    monkeypatch.setattr(deviceless, "compiled_for", lambda chip, fn, x, w: Compiled(x.shape[0]))
    assert run_small("tpu_dots", tmp_path)["steps"] == {"v5e": {"1": None, "8": 7}}
    assert (tmp_path / "results" / "tpu_dots.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.sampled(0)
def test_ready_names_every_program_and_starts_twice(tmp_path: Path) -> None:
    content = run_small("ready", tmp_path)
    for seconds in content["seconds"].values():
        assert 0 < seconds["model"] < seconds["ready"] <= seconds["complete"]
    assert content["cache_bytes"] > 0
    purposes = [program["purpose"] for program in content["programs"]]
    assert len(set(purposes)) == len(purposes) > 10
    assert {program["before_ready"] for program in content["programs"]} == {True, False}


@pytest.mark.sampled(0)
def test_verify_accepts_what_it_generated_and_refuses_what_was_altered(tmp_path: Path) -> None:
    content = run_small("verify", tmp_path, "--kv-cache-dtype", "int8", "--requests", "7")
    assert content["same_bits_of_all_runs"]
    assert (content["verified"]["transcripts"], content["verified"]["refused"]) == (7, 0)
    assert content["altered"] == {"refused": {"token": 7, "logprob bit": 7, "prompt": 7}, "accepted": {}}
    assert set(content["generated"]) == {"4", "2"}


@pytest.mark.sampled(0)
def test_structured_output_is_valid_and_has_equal_bits(tmp_path: Path) -> None:
    content = run_small("structured", tmp_path)
    assert content["answers"]["valid"] == content["answers"]["schemas"] == 12
    assert content["answers"]["differing"] == []
    assert [speed["requests"] for speed in content["speeds"]] == [1, 4]


@pytest.mark.sampled(0)
def test_models_under_batch_invariant_keep_their_bits(tmp_path: Path) -> None:
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # Flax' layers promote
        content = run_small("invariant", tmp_path)
    assert content["results"]["tiny"]["batches_with_other_bits"]["invariant"] == []
    assert [speed["batch"] for speed in content["results"]["tiny"]["speeds"]] == [1, 2]
    assert set(content["tracing_seconds"]) == {"stock", "invariant"}


@pytest.mark.sampled(0)
def test_other_aggregations_of_experts_have_other_bits_than_the_contract(tmp_path: Path) -> None:
    content = run_small("aggregation", tmp_path)
    unequal = {one["aggregation"]: one["unequal_tokens"] for one in content["results"]}
    assert unequal.pop("contract") == 0
    assert all(unequal[name] for name in ("hf_eager", "hf_eager_float32", "hf_grouped", "deepep"))


@pytest.mark.sampled(0)
def test_experts_give_tokens_by_themselves_the_bits_that_they_have_among_others(tmp_path: Path) -> None:
    content = run_small("experts", tmp_path)
    assert all(result["same_bits_alone"] for result in content["results"])
    assert {*content["results"][0]["seconds"]} == {"detjax", "ragged dot", "dense"}
    assert content["summary"]["tiny"].keys() == {"geometric_mean", "largest"}
    assert all(result["same_bits_in_microbatches"] for result in content["gradients"])
    assert {*content["gradients"][0]["seconds"]} == {"detjax", "ragged dot", "balanced dense"}


@pytest.mark.sampled(0)
def test_all_schedules_of_experts_have_the_same_bits(tmp_path: Path) -> None:
    content = run_small("expert_schedules", tmp_path)
    trials = content["trials"]
    assert {(trial["schedule"]["tile_m"], trial["schedule"]["lines"]) for trial in trials} == {
        (unit, lines) for unit in (8, 16) for lines in (1, 2)
    }
    assert all(trial["has_first_bits"] for trial in trials) and content["fastest"] == []


def test_the_fastest_unit_of_experts_is_that_of_least_time_for_both_projections() -> None:
    times: dict[tuple[expert_schedules.Projection, int], tuple[float, ...]] = {
        ("gate and up", 8): (3.0, 4.0),
        ("down", 8): (3.0,),
        ("gate and up", 16): (1.0,),
        ("down", 16): (4.0, 4.5),
    }
    trials = [
        expert_schedules.Trial(
            expert_schedules.Job(projections.MODELS["gpt-oss-20b"], 64, projection), Schedule(unit, 64), seconds, True
        )
        for (projection, unit), several in times.items()
        for seconds in several
    ]
    # A unit whose second projection was not measured in time is not the fastest.
    trials.append(dataclasses.replace(trials[0], schedule=Schedule(32, 64), seconds=0.5))
    (row,) = expert_schedules.fastest(trials)
    assert (row["model"], row["tokens"], row["unit"], row["seconds"]) == ("gpt-oss-20b", 64, 16, {8: 6.0, 16: 5.0})


@pytest.mark.sampled(0)
def test_true_on_policy_has_equal_bits_with_detjax_alone(tmp_path: Path) -> None:
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


def test_true_on_policy_says_what_contradicts_it() -> None:
    def run(arm: str, unequal: int) -> dict[str, Any]:
        zeros = [0.0, 0.0]
        return {"arm": arm, "seed": 0, "steps": {"unequal_tokens": [7, unequal], "k1": zeros, "k2": zeros, "k3": zeros}}

    exact = run("detjax", 0)
    exact["steps"]["unequal_tokens"] = [0, 0]
    right = {"runs": [run("stock", 3), exact, run("detjax, q4_0 sampler", 5)]}
    assert true_on_policy.problems(right) == []
    exact["steps"]["k2"] = [0.0, 1e-9]
    wrong = {"runs": [run("stock", 0), exact]}
    assert true_on_policy.problems(wrong) == [
        "stock, seed 0: sampler and trainer are equal at a step",
        "detjax, seed 0: sampler and trainer differ at steps [1]",
    ]
    with pytest.raises(ValueError, match="samples is 12; accepted: multiples of 8, the samples of a prompt"):
        true_on_policy.Sizes(samples=12)


@pytest.mark.sampled(0)
def test_true_on_policy_gives_the_same_runs_in_any_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.sampled(0)
def test_true_on_policy_ends_after_the_seconds_with_the_steps_of_that_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.sampled(0)
def test_true_on_policy_ends_when_a_process_fails() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        true_on_policy.measured(true_on_policy.Sizes(max_tokens=1000), processes=5)


@pytest.mark.sampled(0)
def test_on_policy_sees_equal_bits_of_every_distribution(tmp_path: Path) -> None:
    content = run_small("on_policy", tmp_path)
    assert len(content["results"]) == 9  # 4 temperatures with and without filters, and the model's own logprobs
    assert {result["unequal_tokens"] for result in content["results"].values()} == {0}
    assert content["results"]["model"]["tokens"] == 384


@pytest.mark.sampled(0)
def test_on_policy_sees_that_stock_numerics_differ() -> None:
    with detjax.use_backend("stock"):
        output = run("on_policy", "--small", exit_code=1)
    assert "sampler and trainer have unequal bits" in output


@pytest.mark.sampled(0)
def test_training_compares_steps_and_gradients(tmp_path: Path) -> None:
    with jax.numpy_dtype_promotion("standard"):  # JAX's own attention needs it
        content = run_small("training", tmp_path, "--part", "steps", "--part", "gradients", "--part", "carried")
    assert content["steps"]["missing"] == {}
    assert content["steps"]["seconds"].keys() == {"detjax", "stock", "stock, head in chunks of 64"}
    assert content["carried"].keys() == {"carried", "fresh"}
    assert all(case["missing"] == {} for case in content["gradients"])


@pytest.mark.sampled(0)
def test_training_tells_schedules_from_controls() -> None:
    names = "microbatches of 1", "packed into 128 tokens", training.ANOTHER_ORDER
    one, packed, reversed_order = (training.digest(training.SMALL, name) for name in names)
    assert one == packed != reversed_order
    assert max(training.relative_errors(training.SMALL).values()) < 0.03


def test_tunix_learners_compares_what_was_sampled_with_what_is_trained() -> None:
    """The runs themselves need Tunix: tests/rl/test_tunix.py."""
    compare = tunix_learners.Comparison(pad_id=9)
    prompts, completions = np.array([[9, 1], [2, 3], [9, 1]]), [np.array([4, 5]), np.array([6]), np.array([4, 5])]
    logprobs = [np.array([-1, -2], np.float32), np.array([-3], np.float32), np.array([-1.5, -2.5], np.float32)]
    compare.sampled(prompts, completions, logprobs)
    assert (compare.tokens, compare.rows_untrained) == (0, 3)

    rows, trained = np.full((2, 16), 9, np.int32), np.zeros((2, 16), np.float32)
    rows[0, 0], trained[0, 0] = 6, np.nextafter(np.float32(-3), np.float32(0))
    rows[1, :2], trained[1, :2] = (4, 5), (-1, -2)
    compare.trained(prompts[1::-1], rows, trained)
    assert (compare.tokens, compare.unequal, compare.rows_unknown, compare.rows_untrained) == (3, 1, 0, 1)

    compare.trained(prompts[1:2], rows[:1], trained[:1])
    assert (compare.tokens, compare.rows_unknown, compare.rows_left_out) == (3, 1, 2)

    compare.trained(prompts[2:], np.full((1, 16), 9, np.int32), trained[:1])
    assert (compare.tokens, compare.rows_empty, compare.rows_left_out) == (3, 1, 1)


@pytest.mark.parametrize(
    ("numerics", "changes", "is_wrong"),
    [
        ("detjax", {}, False),
        ("detjax", {"unequal_tokens": 1}, True),
        ("detjax", {"rollouts_not_compared": 1}, True),
        ("detjax", {"weights_moved": 0}, True),
        ("detjax", {"tokens": 0}, True),
        ("tunix", {}, True),
        ("tunix", {"unequal_tokens": 1}, False),
    ],
)
def test_tunix_learners_fails_where_bits_are_not_as_promised(
    numerics: str, changes: dict[str, int], is_wrong: bool
) -> None:
    result = {"numerics": numerics, "unequal_tokens": 0, "tokens": 5, "rollouts_not_compared": 0, "weights_moved": 3}
    assert tunix_learners.is_wrong(result | changes) == is_wrong
