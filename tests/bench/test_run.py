"""Measuring: the same inputs everywhere, bits that stay, errors against float64, and speeds that are what they say."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import detjax
from detjax.bench import results, run
from detjax.bench.__main__ import main
from detjax.bench.cases import OPERATIONS, SMALL, Case, Sizes, cases
from detjax.bench.inputs import checksum, hashed
from detjax.bench.peaks import PEAKS, Peak
from tests.support import commands
from tests.support.bits import assert_same_bits

QUICK = dataclasses.replace(SMALL, calls=2, rounds=2)
PEAK = Peak("chip", flops=1e9, bytes=1e8, source="nobody")


def small(operation: str) -> Case:
    return next(cases(SMALL, [operation]))


def numpy_hashed(seed: int, shape: tuple[int, ...], exponent: int) -> np.ndarray:
    """`hashed` in NumPy."""
    total = -2 * 0xFFFF * np.ones(shape, np.int64)
    for word in (2 * seed, 2 * seed + 1):
        x = np.arange(math.prod(shape), dtype=np.uint32).reshape(shape) + np.uint32((word + 1) * 0x9E3779B9 % 2**32)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            x = (x ^ (x >> shift)) * np.uint32(factor)
        x ^= x >> 16
        total += (x >> 16).astype(np.int64) + (x & 0xFFFF).astype(np.int64)
    return (total * 2.0 ** (exponent - 15)).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inputs_are_integer_arithmetic_that_any_device_does_alike(dtype: str) -> None:
    want = numpy_hashed(7, (65, 33), -2).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    assert_same_bits(hashed(7, (65, 33), dtype, -2), want)
    assert 0.25 * 1.1 < np.std(want.astype(np.float32)) < 0.25 * 1.2


def test_the_order_of_additions_shows_in_sums_of_products_of_inputs() -> None:
    x, w = (np.asarray(hashed(seed, (4096,), "bfloat16")).astype(np.float32) for seed in (0, 1))
    products = x * w
    sums = {float(np.cumsum(x, dtype=np.float32)[-1]) for x in (products, products[::-1], np.sort(products))}
    assert len(sums) > 1


def test_checksums_tell_inputs_apart() -> None:
    a, b = hashed(0, (9, 5), "bfloat16"), jnp.arange(6, dtype=jnp.int32)
    trees = [(a, b), (a, b + 1), (a, b[::-1]), (b, a), (hashed(1, (9, 5), "bfloat16"), b), (a.T, b)]
    assert len({int(checksum(tree)) for tree in trees}) == len(trees)
    assert int(checksum((a, b))) == int(checksum((jnp.copy(a), b)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("operation", [name for name in OPERATIONS if not name.endswith(("_step", "_prefill"))])
def test_operations_are_near_what_they_are_in_float64(operation: str) -> None:
    case = small(operation)
    arguments = case.draw(0)
    outputs = detjax.jit(case.run)(*arguments)
    assert case.exact is not None
    error = run.error(case.exact(arguments, outputs))
    tolerance = {"bfloat16": 5e-3, "float32": 2e-7}[outputs[-1 - case.carried].dtype.name]
    assert 0 < error["relative"] < tolerance
    # What the case says that it moves is what its arguments and results take.
    if operation not in ("qk_rope", "attention_decode", "delta_rule_decode", "sample"):
        assert case.bytes == sum(leaf.nbytes for leaf in jax.tree.leaves((arguments, outputs)))


def test_a_step_takes_its_cache_and_gives_it_back() -> None:
    for operation in ("decode_step", "prefill_step"):
        case = small(operation)
        results = jax.eval_shape(case.run, *case.shapes)
        assert jax.tree.map(jnp.shape, results[-case.carried :]) == jax.tree.map(jnp.shape, case.shapes[: case.carried])
        assert results[0].dtype == jnp.float32 and len(results[0].shape) == 2


def test_the_shapes_are_those_of_the_model_named() -> None:
    (step,) = cases(Sizes(models=("Qwen3-0.6B",), decode_steps=((64, 1024),)), ["decode_step"])
    assert step.name == "Qwen3-0.6B, 64 × 1024 tokens in the cache"
    parameters = sum(math.prod(leaf.shape) for leaf in step.shapes[2])
    assert 0.59e9 < parameters < 0.60e9
    assert step.shapes[0][0].shape == (64 * 9, 8, 128, 128)
    assert step.bytes > 2 * parameters + 2 * 64 * 28 * 1024 * 8 * 128 * 2


def test_errors_are_against_the_larger_norm() -> None:
    exact = np.array([3.0, -4.0])
    assert run.error([(exact, exact)]) == {"max_absolute": 0.0, "relative": 0.0, "elements": 2}
    error = run.error([(exact[:1] + 0.5, exact[:1]), (exact[1:], exact[1:])])
    assert error == {"max_absolute": 0.5, "relative": 0.1, "elements": 2}


def test_two_runs_have_the_same_bits_and_speeds_that_follow_from_their_times(tmp_path: Path) -> None:
    runs = [run.run(sizes=QUICK, only=["softmax"], out=tmp_path / f"{i}.json") for i in range(2)]
    assert json.loads((tmp_path / "1.json").read_text()) == runs[1]
    (first,), (second,) = (content["rows"] for content in runs)
    assert first["outputs"] == second["outputs"] and first["inputs"] == second["inputs"]
    assert first["same_bits_again"] and "failed" not in first
    assert runs[0]["fingerprint"] == dataclasses.asdict(detjax.fingerprint())
    median = first["seconds"]["median"]
    assert len(first["seconds"]["rounds"]) == len(first["stock_seconds"]["rounds"]) == 2
    assert first["bytes_per_second"] == first["bytes"] / median
    assert first["speed_over_stock"] == first["stock_seconds"]["median"] / median
    assert [len(output["sample"]) for output in first["outputs"]] == [64]


def test_a_share_needs_a_peak_that_is_known() -> None:
    row = results.row(small("logsumexp"), lambda case: run.measured(case, QUICK, PEAK))
    assert row["share_of_peak"] == pytest.approx(row["bytes"] / 1e8 / row["seconds"]["median"])
    assert PEAK.roofline_seconds(flops=2e9, size=1e8) == 2 and PEAK.roofline_seconds(flops=1e9, size=3e8) == 3
    assert jax.devices("cpu")[0].device_kind not in PEAKS


def failing(error: Exception | None, on_stock: Exception | None = None) -> Case:
    def fails(x: jax.Array) -> tuple[jax.Array]:
        failure = on_stock if detjax.backend() == "stock" else error
        if failure is not None:
            raise failure
        return (x + 1,)

    return Case("x", "softmax", fails, lambda seed: (hashed(seed, (4,), "float32"),), 32)


def test_what_fails_is_a_row_that_says_why() -> None:
    def row(case: Case) -> dict[str, Any]:
        return results.row(case, lambda case: run.measured(case, QUICK, None))

    refused = row(failing(NotImplementedError("no kernels\nfor this")))
    assert (refused["failed"], refused["refused"]) == ("NotImplementedError: no kernels", True)
    failed = row(failing(RuntimeError("out of memory")))
    assert (failed["failed"], failed["refused"]) == ("RuntimeError: out of memory", False)
    alone = row(failing(None, on_stock=RuntimeError("no cuDNN")))
    assert alone["speed_over_stock"] is None and alone["stock_failed"] == "RuntimeError: no cuDNN"
    assert "failed" not in alone and alone["seconds"]["median"] > 0


def test_the_command_prints_what_it_measured(tmp_path: Path) -> None:
    out = tmp_path / "stock.json"
    arguments = ["run", "--small", "--only", "softmax", "--backend", "stock", "--out", str(out)]
    result = commands.run(main, *arguments, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "stock on" in result.output and "unknown peak of this device" in result.output
    content: dict[str, Any] = json.loads(out.read_text())
    assert content["kind"] == "measured" and content["settings"]["only"] == ["softmax"]
    assert content["rows"][0]["stock_seconds"] is None  # stock is not compared with itself


def test_a_row_that_fails_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, code in ((NotImplementedError("no kernels"), 0), (RuntimeError("[red]out of memory"), 1)):
        monkeypatch.setattr(run, "cases", lambda *_, error=error: [failing(error)])
        result = commands.run(main, "run", "--small", env={"COLUMNS": "160"})
        assert result.exit_code == code and f"softmax x: {type(error).__name__}: {error}" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "sort"], "--only is 'sort'; accepted: matmul, rms_norm"),
        (["--small", "--backend", "fast"], "'fast' is not a backend; accepted: hopper"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], message: str) -> None:
    result = commands.run(main, "run", *arguments, env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert message in result.output


def unsteady() -> Case:
    """A case whose result changes from call to call, where programs are not compiled."""
    calls: list[None] = []

    def run(x: jax.Array) -> tuple[jax.Array]:
        calls.append(None)
        return (x + len(calls),)

    return Case("x", "softmax", run, lambda seed: (hashed(seed, (4,), "float32"),), 32)


def test_bits_that_change_from_call_to_call_fail_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.compilation, "jit", lambda fn, **_: fn)
    monkeypatch.setattr(run, "cases", lambda *_: [unsteady()])
    result = commands.run(main, "run", "--small", env={"COLUMNS": "160"})
    assert result.exit_code == 1 and "DIFFERENT BITS when called again: x" in result.output
    stock = commands.run(main, "run", "--small", "--backend", "stock", env={"COLUMNS": "160"})
    assert stock.exit_code == 0 and "CHANGED" in stock.output


def test_a_run_that_is_cut_short_keeps_its_rows(tmp_path: Path) -> None:
    rows = []

    def interrupt(row: dict[str, Any]) -> None:
        rows.append(row)
        if len(rows) == 2:
            raise KeyboardInterrupt

    out = tmp_path / "cut.json"
    with pytest.raises(KeyboardInterrupt):
        run.run(sizes=dataclasses.replace(QUICK, rows=(1, 2, 3)), only=["rms_norm"], out=out, report=interrupt)
    assert json.loads(out.read_text())["rows"] == rows[:1]


def test_carried_arguments_pass_from_call_to_call() -> None:
    def count(held: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return held + x, held + 1

    case = Case("x", "decode_step", count, lambda seed: (jnp.int32(0), jnp.int32(10)), 8, carried=1)
    arguments = case.draw(0)
    call = case.carrying(count, arguments)
    assert [int(call(arguments[1])[0]) for _ in range(3)] == [10, 11, 12]
    assert int(arguments[0]) == 0
