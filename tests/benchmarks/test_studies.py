"""Every study runs with `--small` on a CPU, and writes a result that says where it comes from."""

import contextlib
import dataclasses
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors

import detjax
from benchmarks.__main__ import studies
from benchmarks.studies import decode, delta_rule, every_gpu, expert_schedules, loading, tunix_learners
from benchmarks.studies.experts import projections
from benchmarks.studies.true_on_policy import experiment as true_on_policy
from detjax.bench import deviceless, presets
from detjax.pallas.hopper.matmul.plan import Schedule
from tests.benchmarks.study_runs import QUICK, RUNS, run, run_small

STUDIES = (
    "adapters",
    "aggregation",
    "attention",
    "batch_bits",
    "data_parallel",
    "decode",
    "decoder",
    "delta_rule",
    "digests",
    "draft_bits",
    "draft_speed",
    "drafts",
    "every_gpu",
    "expert_launches",
    "expert_schedules",
    "experts",
    "fp8_products",
    "invariant",
    "loading",
    "matmul",
    "mesh_bits",
    "mesh_speed",
    "noise",
    "norms",
    "on_policy",
    "peer_vllm",
    "portable",
    "processes",
    "quantized",
    "quantized_plans",
    "random_programs",
    "ready",
    "sleep",
    "softmax_schedules",
    "structured",
    "tpu_dots",
    "training",
    "training_devices",
    "true_on_policy",
    "tunix_learners",
    "update",
    "usual_cut",
    "verify",
)


CAPTURED = 1 << 15
"""Bytes that a program of `--small` may capture as constants: fewer than the embedding of the smallest model has."""


@contextlib.contextmanager
def programs_capture_no_weights() -> Iterator[None]:
    """A context that fails if programs captured arrays, such as weights, in this process or in those that it starts.

    A program that captures the weights of a large model takes minutes to compile.
    """
    messages = "A large amount of constants", "Closed-over constant"
    before = jax.config.jax_captured_constants_warn_bytes
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        patch.setenv("JAX_CAPTURED_CONSTANTS_WARN_BYTES", str(CAPTURED))
        patch.setenv("PYTHONWARNINGS", ",".join(f"error:{message}" for message in messages))
        # A study may catch an error, so warnings of this process are collected.
        for message in messages:
            warnings.filterwarnings("always", message)
        jax.config.update("jax_captured_constants_warn_bytes", CAPTURED)
        try:
            yield
        finally:
            jax.config.update("jax_captured_constants_warn_bytes", before)
    assert [str(one.message) for one in caught] == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.nightly) for name in RUNS]
)
def test_a_study_runs_with_small_sizes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their parts are tested without models in `test_study_parts.py`."""
    with programs_capture_no_weights():
        RUNS[name](tmp_path, monkeypatch)


def test_models_are_arguments_of_programs() -> None:
    model = presets.decoder("tiny", 1)
    with programs_capture_no_weights():
        step = decode.DecodeStep.drawn(model, 1, 3)
        program = step.program(decode.DecodeStep.compiled(model, 1, 3))
        assert np.isfinite(program(step.tokens)).all() and np.isfinite(program(step.tokens)).all()
        assert set(every_gpu.model_bits(model, every_gpu.SMALL, "portable").values()) == {True}
    # A closure over the model is noticed.
    with pytest.raises(AssertionError, match="constants"), programs_capture_no_weights():
        detjax.jit(lambda tokens: model(tokens))(jnp.zeros((1, 2), jnp.int32))


def test_every_study_is_tested_and_listed_with_a_line_of_help() -> None:
    assert tuple(studies()) == STUDIES
    elsewhere = {"peer_vllm", "random_programs", "tpu_dots", "tunix_learners"}
    assert {name.partition(",")[0] for name in RUNS} | elsewhere == set(STUDIES)
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


def test_random_programs(tmp_path: Path) -> None:
    content = run_small("random_programs", tmp_path)
    assert content["false_proofs"] == []
    for counts in content["results"].values():
        assert sum(counts[outcome] for outcome in ("proven", "observed", "refuted", "unproven")) == content["programs"]
        assert counts["proven"] and counts["observed"] and not counts["false_proofs"]


def test_rivals_of_the_delta_rule_compute_the_rule() -> None:
    widths = delta_rule.SMALL_MODELS["tiny"]
    x = delta_rule.random_tokens(widths, (1, 150), 0)
    s, o = delta_rule.chunked(widths.state(1).s, x)
    assert delta_rule.error(widths, x, o) < 1e-2
    by_token = delta_rule.Tokens(*(jnp.swapaxes(y, 0, 1) for y in x))
    s_end, o_recurrent = jax.lax.scan(delta_rule.recurrence, widths.state(1).s, by_token)
    assert delta_rule.error(widths, x, jnp.swapaxes(o_recurrent, 0, 1)) < 3e-3
    np.testing.assert_allclose(s, s_end, atol=2e-2)


def test_norms_sweeps_only_where_the_kernels_run() -> None:
    assert "accepted: an H100 or H200" in " ".join(run("norms", "--sweep", "--small", exit_code=2).split())


def test_a_sparse_checkpoint_is_one_of_zeros_that_takes_no_space(tmp_path: Path) -> None:
    sizes = loading.write_sparse(tmp_path, "Qwen3-8B", 1)
    file = tmp_path / "model.safetensors"
    assert file.stat().st_size > sum(sizes.values()) > 2e9 and 512 * file.stat().st_blocks < 1e6
    with safetensors.safe_open(file, framework="numpy") as tensors:
        assert tensors.get_slice("model.layers.0.mlp.down_proj.weight").get_shape() == [4096, 12288]
        assert not tensors.get_slice("lm_head.weight")[151_935:151_936].any()


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
