"""Bisections name the layer, the line and the numbers of planted defects, and find nothing in sound functions."""

import dataclasses
import functools
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import detjax
from detjax.audit import Bisection, Trace
from detjax.audit.bisection import digests
from detjax.audit.bisection.bisect import _distances, drift_table
from detjax.cli import main
from detjax.invariant.places import Rows, Shared
from tests.audit import planted
from tests.support import commands
from tests.support.unchecked import unchecked

ROWS, PLACE = 6, 5
AXES = (None, 0)


NIGHTLY = pytest.mark.nightly


@functools.cache
def traced(defect: str | None, level: Any = "equations") -> Callable[..., tuple[Any, Trace]]:
    """The planted model's traced function, compiled once for all tests."""
    return detjax.trace_digests(functools.partial(planted.model, defect), AXES, level=level)


def trace(defect: str | None, tokens: jax.Array, level: Any = "equations") -> Trace:
    return traced(defect, level)(planted.weights(), tokens)[1]


@functools.cache
def sound() -> Trace:
    return trace(None, planted.tokens(ROWS, 0))


def from_file(trace: Trace, path: Path) -> Trace:
    trace.save(path / "trace")
    return Trace.load(path / "trace")


def layers_that_differ(result: Bisection) -> set[str]:
    assert result.isolated is not None
    return {one.layer.split("/")[0] for one in result.isolated if one.unequal}


@pytest.mark.parametrize(
    "defect",
    [name if name == "a step of a scan" else pytest.param(name, marks=NIGHTLY) for name in planted.IN_NUMBERS],
)
def test_a_defect_is_found_in_its_layer(defect: str) -> None:
    layer = planted.IN_NUMBERS[defect]
    result = detjax.bisect(sound(), trace(defect, planted.tokens(ROWS, 0)))
    assert result.first is not None
    assert result.first.layer.split("/")[0] == layer, str(result)
    assert result.first.primitive != "argument" and "planted.py:" in result.first.lines[0]
    assert result.first.values is not None and result.first.values[0] != result.first.values[1]
    assert result.first.ulps or defect == "a mask off by one"  # booleans have no ulps
    before = planted.LAYERS[: planted.LAYERS.index(layer)]
    drifts = {drift.layer: drift for drift in result.drifts}
    assert all(drifts[name].blocks == 0 and drifts[name].ulps == 0 for name in before if name in drifts)
    assert drifts["head"].relative or layer == "head"


@pytest.mark.parametrize(
    "defect",
    [name if name == "a mask by position" else pytest.param(name, marks=NIGHTLY) for name in planted.IN_ROWS],
)
def test_what_depends_on_the_batch_is_found_in_its_layer(defect: str) -> None:
    first, second = (trace(defect, planted.tokens(ROWS, at, neighbours=1 + at)) for at in (0, PLACE))
    result = detjax.bisect(first, second, (0, PLACE), isolate=True)
    assert result.first is not None
    assert result.first.layer.split("/")[0] == planted.IN_ROWS[defect], str(result)
    assert layers_that_differ(result) == {planted.IN_ROWS[defect]}


def test_a_sound_function_has_no_difference(tmp_path: Path) -> None:
    other = trace(None, planted.tokens(ROWS, PLACE, neighbours=3))
    result = detjax.bisect(sound(), other, (0, PLACE), isolate=True)
    assert result.first is None and not result.hidden and not layers_that_differ(result), str(result)
    assert result.compared > 50 and not result.environments
    again = detjax.bisect(from_file(sound(), tmp_path), sound())
    assert again.first is None and again.compared == len(sound().entries)


def test_numbers_of_the_whole_batch_are_not_compared_between_batches() -> None:
    """They differ by right, as their rows have other neighbours, and have the same shape in both batches."""

    def counted(tokens: jax.Array) -> jax.Array:
        loads = jnp.sum(tokens, axis=0)
        return jnp.where(loads >= 0, tokens + 1, tokens - 1)

    first, second = (
        detjax.trace_digests(counted, (0,))(planted.tokens(ROWS, at, neighbours=1 + at))[1] for at in (0, PLACE)
    )
    result = detjax.bisect(first, second, (0, PLACE))
    assert result.first is None and result.compared, str(result)
    assert detjax.bisect(first, second).first is not None


@pytest.mark.parametrize(
    "defect",
    [
        "a step of a scan",
        *(pytest.param(name, marks=NIGHTLY) for name in ("another epsilon", "weights of keys in bfloat16")),
    ],
)
def test_isolation_tells_a_defect_from_what_it_causes(defect: str) -> None:
    result = detjax.bisect(sound(), trace(defect, planted.tokens(ROWS, 0)), isolate=True)
    assert layers_that_differ(result) == {planted.IN_NUMBERS[defect]}
    after = planted.LAYERS[planted.LAYERS.index(planted.IN_NUMBERS[defect]) :]
    assert {drift.layer for drift in result.drifts if drift.ulps} >= set(after) - {"experts"}


def test_files_name_the_block_and_functions_the_element(tmp_path: Path) -> None:
    broken = trace("a step of a scan", planted.tokens(ROWS, 0))
    at_hand, kept = detjax.bisect(sound(), broken), detjax.bisect(sound(), from_file(broken, tmp_path))
    assert at_hand.first is not None and kept.first is not None
    assert at_hand.first.iterations == kept.first.iterations == (5,)
    assert kept.first == dataclasses.replace(at_hand.first, index=None, values=None, ulps=None)
    assert at_hand.first.index is not None and kept.first.elements == (0, planted.WIDTH - 1)
    assert all(drift.relative is None for drift in kept.drifts)


def test_a_scan_that_runs_backwards_differs_first_at_its_last_element() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, x: (c * 0.5 + x, c), jnp.float32(0), x, reverse=True)[1]

    traced, x = detjax.trace_digests(fn), jnp.ones(9)
    result = detjax.bisect(traced(x)[1], traced(x.at[jnp.array([2, 6])].set(3))[1])
    assert result.first is not None and result.first.primitive == "argument"
    assert result.first.index == (2,) and result.first.values == ("1.0", "3.0")
    entries = [entry for entry in traced(x)[1].entries if entry.primitive == "add"]
    assert entries[0].path[1] == -2
    doubled = lambda x: fn(jax.lax.optimization_barrier(x * jnp.where(jnp.arange(9) == 6, 2.0, 1.0)))  # noqa: E731
    late = lambda x: fn(jax.lax.optimization_barrier(x * jnp.where(jnp.arange(9) == 2, 2.0, 1.0)))  # noqa: E731
    runs = [detjax.trace_digests(f)(x)[1] for f in (doubled, late)]
    inside = [
        dataclasses.replace(
            run,
            entries=tuple(e for e in run.entries if -2 in e.path),
            digests=tuple(d for e, d in zip(run.entries, run.digests, strict=True) if -2 in e.path),
            run=None,
        )
        for run in runs
    ]
    difference = detjax.bisect(*inside).first
    assert difference is not None and difference.iterations == (6,)


def test_rows_of_batches_of_any_size_are_compared() -> None:
    x = jnp.arange(18.0).reshape(6, 3)
    alone, among = SMALL(x[:1], 3.0)[1], SMALL(x, 3.0)[1]
    result = detjax.bisect(alone, among, (0, 0))
    assert result.compared == len(among.entries) == 3 and result.first is None
    other = detjax.bisect(alone, among, (0, 4)).first
    assert other is not None and other.values == ("0.0", "12.0")
    with pytest.raises(ValueError, match=r"1 and 6 rows; accepted: .* rows=\(i, j\)"):
        detjax.bisect(alone, among)
    with pytest.raises(ValueError, match="rows contains 6; accepted: 0 to 5"):
        detjax.bisect(alone, among, (0, 6))
    with pytest.raises(ValueError, match="rows contains 1; accepted: 0 to 0"):
        detjax.bisect(alone, among, (1, 0))
    with pytest.raises(ValueError, match="rows contains -1; accepted: 0 to 5"):
        detjax.bisect(alone, among, (0, -1))


def test_layers_alone_have_digests_that_find_the_layer() -> None:
    def fn(x: jax.Array, factor: float) -> jax.Array:
        for layer in range(3):
            with jax.named_scope(f"layer_{layer}"):
                x = jnp.sin(jnp.cos(x) * jnp.float32(factor if layer == 1 else 2))
        return x

    runs = [detjax.trace_digests(fn, (0, None), level="layers")(jnp.ones((2, 3)), factor)[1] for factor in (2, 2.5)]
    result = detjax.bisect(*runs)
    assert [entry.primitive for entry in runs[0].entries] == ["argument", "sin", "sin", "sin"]
    assert result.first is not None and result.first.layer == "layer_1"


def test_arrays_of_numpy_may_have_other_contents_in_the_next_run() -> None:
    x = np.ones(3, np.float32)
    traced = detjax.trace_digests(lambda x: x + 1)
    first = [digest.copy() for digest in traced(x)[1].digests]
    x[1] = 2
    second = traced(x)[1].digests
    assert [bool((a == b).all()) for a, b in zip(first, second, strict=True)] == [False, False]


def test_weights_of_other_bits_are_an_argument_s_difference() -> None:
    weights = planted.weights()
    changed = weights | {"up": weights["up"].at[3, 5].set(7)}
    result = detjax.bisect(*(traced(None)(w, planted.tokens(ROWS, 0))[1] for w in (weights, changed)))
    assert result.first is not None
    assert (result.first.primitive, result.first.layer) == ("argument", "[0][0]['up']")
    assert result.first.index == (3, 5) and result.first.values is not None and result.first.values[1] == "7.0"


def test_nnx_modules_name_their_layers_and_keep_their_classes() -> None:
    class Block(nnx.Module):
        def __init__(self) -> None:
            self.parts = nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(k)) for k in range(2)])

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.parts[1](jnp.tanh(self.parts[0](x)))

    before = Block.__call__, nnx.Linear.__call__
    results, made = detjax.trace_digests(Block(), 0)(jnp.ones((3, 8)))
    assert (Block.__call__, nnx.Linear.__call__) == before
    assert results.shape == (3, 8) and made.batch == 3
    names = [entry.layer for entry in made.entries if entry.primitive in ("dot_general", "tanh")]
    assert names == ["Block/parts.0", "Block", "Block/parts.1"]


def test_results_are_those_of_the_function() -> None:
    tokens = planted.tokens(ROWS, 0)
    results, _ = traced(None)(planted.weights(), tokens)
    np.testing.assert_allclose(results, planted.model(None, planted.weights(), tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "uint32", "bool", "complex64", "int4"])
def test_a_digest_has_no_order_and_sees_every_element(dtype: str) -> None:
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.integers(0, 2, (3, 700))).astype(dtype)
    plain = np.asarray(digests.digest(x))
    assert plain.shape == (3, 3)
    assert np.array_equal(plain, np.asarray(jax.jit(digests.digest)(x)))
    for element in (0, 255, 256, 699):
        changed = np.asarray(
            digests.digest(x.at[1, element].set((x[1, element] == jnp.zeros((), dtype)).astype(dtype)))
        )
        assert np.argwhere(changed != plain).tolist() == [[1, element // 256]]
    swapped = x.at[0, 0].set(jnp.ones((), dtype)).at[0, 1].set(jnp.zeros((), dtype))
    other = x.at[0, 0].set(jnp.zeros((), dtype)).at[0, 1].set(jnp.ones((), dtype))
    assert digests.digest(swapped)[0, 0] != digests.digest(other)[0, 0]
    # Elements of one sum of row and column numbers, in the array of 128 columns that a block is added as.
    empty = x.at[0, :256].set(jnp.zeros((), dtype))
    distant = [empty.at[0, place].set(jnp.ones((), dtype)) for place in (1, 128)]
    assert digests.digest(distant[0])[0, 0] != digests.digest(distant[1])[0, 0]


def reference(words: np.ndarray) -> np.ndarray:
    """The digests of rows of 32-bit words `[B, elements, words]`, by NumPy."""
    batch, elements, parts = words.shape
    size = digests.block_size(elements)
    blocks = max(1, -(-elements // size))
    padded = np.zeros((batch, blocks, size * parts), np.uint32)
    flat = words.reshape(batch, -1)
    padded.reshape(batch, -1)[:, : flat.shape[1]] = flat
    with np.errstate(over="ignore"):
        mixed = padded + np.arange(size * parts, dtype=np.uint32) * np.uint32(0x9E3779B9)
        mixed = (mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x7FEB352D)
        return (mixed ^ (mixed >> np.uint32(15))).sum(axis=2, dtype=np.uint32)


def test_a_digest_is_the_same_number_in_every_version() -> None:
    """Files of other versions are compared with new traces."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((2, 3, 107)).astype(np.float32)
    expected = reference(x.view(np.uint32).reshape(2, 321, 1))
    assert expected.shape == (2, 2) and np.array_equal(digests.digest(jnp.asarray(x)), expected)
    narrow = x.astype(jnp.bfloat16)
    words = narrow.view(np.uint16).astype(np.uint32).reshape(2, 321, 1)
    assert np.array_equal(digests.digest(jnp.asarray(narrow)), reference(words))
    with jax.enable_x64(True):
        wide = x.astype(np.float64)
        assert np.array_equal(digests.digest(jnp.asarray(wide)), reference(wide.view(np.uint32).reshape(2, 321, 2)))
    assert digests.digest(jnp.zeros((3, 0))).shape == (3, 1)


def test_the_parts_of_complex_numbers_and_keys_are_in_their_digests() -> None:
    z = jax.lax.complex(jnp.ones((1, 3)), jnp.zeros((1, 3)))
    turned = jax.lax.complex(jnp.zeros((1, 3)), jnp.ones((1, 3)))
    assert digests.digest(z)[0, 0] != digests.digest(turned)[0, 0] != digests.digest(jnp.conj(turned))[0, 0]
    keys = jax.random.split(jax.random.key(0), 2)
    assert np.array_equal(digests.plain(keys), jax.random.key_data(keys))


def test_digests_are_added_along_lanes_before_across_them_on_a_cpu() -> None:
    program = jax.jit(digests.digest).lower(jnp.zeros((2, 4096))).compile().as_text()
    assert program is not None
    sums = re.findall(r"u32(\[[\d,]+\])\S* reduce\(", program)
    assert sums == ["[2,16,128]", "[2,16]"], program


def test_digests_that_share_a_kernel_are_those_of_each_array(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = jax.random.split(jax.random.key(0), 12)
    arrays = [jax.random.normal(key, (2, 300), jnp.bfloat16) for key in keys[:9]]
    arrays[3:3] = [jax.random.normal(keys[9], (2, 3, 100)), jax.random.normal(keys[10], (2, 700)), jnp.ones((1, 300))]
    alone = [np.asarray(digests.digest(x)) for x in arrays]
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args))
    together = digests.digests(arrays)
    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))


def test_an_einsum_is_no_layer() -> None:
    def fn(x: jax.Array) -> jax.Array:
        with jax.named_scope("attention"):
            return jnp.tanh(jnp.einsum("bi,ji->bj", jnp.sin(x), jnp.ones((4, 3))))

    made = {level: detjax.trace_digests(fn, 0, level=level)(jnp.ones((2, 3)))[1] for level in ("layers", "equations")}
    kept = [entry.primitive for entry in made["layers"].entries if entry.primitive != "argument"]
    assert kept == ["tanh"]
    assert {entry.layer for entry in made["equations"].entries if entry.primitive == "dot_general"} == {"attention"}


def test_a_process_can_end_before_its_traced_run() -> None:
    program = """
import detjax, jax, jax.numpy as jnp
traced = detjax.trace_digests(lambda x: jax.lax.fori_loop(0, 200, lambda i, y: jnp.tanh(y @ y), x))
x = jnp.ones((512, 512))
jax.block_until_ready(traced(x)[0])
traced(x)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_row_has_64_blocks_at_most() -> None:
    sizes = {0: 256, 1: 256, 64 * 256: 256, 64 * 256 + 1: 512, 64 * 512: 512, 10**6: 16384}
    assert {elements: digests.block_size(elements) for elements in sizes} == sizes


def test_digests_of_arguments_are_kept_for_arrays_that_cannot_change() -> None:
    x, traced = np.ones((2, 8), np.float32), detjax.trace_digests(jnp.sin, 0)
    before = traced(x)[1]
    x[1, 3] = 2.0
    result = detjax.bisect(before, traced(x)[1])
    assert result.first is not None and result.first.primitive == "argument" and result.first.row == 1


def test_two_signs_that_change_do_not_cancel() -> None:
    x = jnp.ones((1, 256), jnp.float32)
    all_pairs = [x.at[0, jnp.array([0, k])].set(-1.0) for k in range(1, 256)]
    assert all(digests.digest(y)[0, 0] != digests.digest(x)[0, 0] for y in all_pairs)


def test_a_row_has_the_digest_that_it_has_alone() -> None:
    x = jnp.arange(2 * 3 * 4 * 5.0).reshape(2, 12, 5)
    place = Rows(1, outer=2, inner=2)
    rows = digests.in_rows(x, place, 3)
    alone = x.reshape(2, 2, 3, 2, 5)[:, :, 1].reshape(2, 4, 5)
    expected = digests.digest(digests.in_rows(alone, Shared(), 1))
    assert np.array_equal(np.asarray(digests.digest(rows))[1], np.asarray(expected)[0])
    moved = digests.with_row(x, place, 3, 1, rows[2])
    assert np.array_equal(digests.in_rows(moved, place, 3), jnp.stack([rows[0], rows[2], rows[2]]))


def test_bad_input_is_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("{}")
    with pytest.raises(ValueError, match=r"text: not a trace \(it is not a NumPy archive\); accepted: files from"):
        Trace.load(tmp_path / "text")
    with pytest.raises(ValueError, match="level is 'all'; accepted: equations, layers"):
        unchecked(detjax.trace_digests)(jnp.sin, level="all")
    with pytest.raises(ValueError, match="batches have 2, 3 rows; accepted: one number"):
        detjax.trace_digests(jnp.add, 0)(jnp.ones((2, 4)), jnp.ones((3, 4)))
    with pytest.raises(TypeError, match="an argument with rows is float; accepted: arrays"):
        detjax.trace_digests(jnp.add, 0)(jnp.ones(2), 1.0)
    with pytest.raises(ValueError, match="isolate needs both functions"):
        detjax.bisect(sound(), from_file(sound(), tmp_path), isolate=True)
    with pytest.raises(ValueError, match="finds 'embed' in the first function where the second has ''"):
        detjax.bisect(sound(), detjax.trace_digests(jnp.sin, 0)(jnp.ones((ROWS, 2)))[1], isolate=True)


CASES = """
import functools, jax, jax.numpy as jnp

def model(factor, w, x):
    with jax.named_scope("embed"):
        x = jnp.tanh(x)
    with jax.named_scope("attention"):
        return x * jnp.float32(factor) + w[None]

def case(factor):
    return functools.partial(model, factor), (jnp.arange(3.0), jnp.ones((2, 3))), {"batch_axes": (None, 0)}

sound, split = functools.partial(case, 3), functools.partial(case, 3.001)
"""


def test_commands_trace_and_bisect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "planted_cases.py").write_text(CASES)
    for name in ("sound", "split"):
        made = commands.run(main, "trace", f"planted_cases:{name}", "--out", f"{name}.npz")
        assert made.exit_code == 0, made.output
    same = commands.run(main, "bisect", "sound.npz", "sound.npz")
    assert same.exit_code == 0 and "All have the same bits" in same.output
    files = commands.run(main, "bisect", "sound.npz", "split.npz", "--rows", "0", "0")
    assert files.exit_code == 1 and "in attention" in files.output and "among elements" in files.output
    options = ["--isolate", "--json", "result.json", "--plot", "drift.png"]
    both = commands.run(main, "bisect", "planted_cases:sound", "planted_cases:split", *options)
    assert both.exit_code == 1 and "ulps apart" in both.output and "the same bits" in both.output
    assert json.loads((tmp_path / "result.json").read_text())["first"]["layer"].startswith("attention")
    assert (tmp_path / "drift.png").read_bytes().startswith(b"\x89PNG")
    missing = commands.run(main, "bisect", "sound.npz", "nowhere:case")
    assert missing.exit_code == 2 and "accepted: module:function" in missing.output


# --- parts of a bisection ---------------------------------------------------------------------------------------------


def masked(x: jax.Array) -> jax.Array:
    with jax.named_scope("mask"):
        scores = jnp.where(jnp.arange(x.shape[1]) < 3, x + 1, -jnp.inf)
    with jax.named_scope("head"):
        return jnp.maximum(scores, -9.0)


def test_the_drift_of_equal_infinities_is_zero() -> None:
    """Masks are in both traces: only numbers that differ count."""
    run, x = detjax.trace_digests(masked, 0), jnp.arange(10.0).reshape(2, 5)
    result = detjax.bisect(run(x)[1], run(x.at[1, 2].add(0.5))[1])
    drifts = {drift.layer: drift for drift in result.drifts}
    assert [drifts[name].largest for name in ("mask", "head")] == [0.5, 0.5]
    assert drifts["mask"].relative == 0.0 and drifts["head"].relative == pytest.approx(0.5 / math.sqrt(487))
    assert drifts["mask"].ulps == drifts["head"].ulps == 2**19 and drifts["head"].blocks == 0.5


@pytest.mark.parametrize(
    ("first", "second", "largest", "relative", "ulps"),
    [
        ([-math.inf, math.inf, math.nan], [-math.inf, math.inf, math.nan], 0.0, 0.0, 0),
        ([0.0, 0.0], [0.0, 2.0], 2.0, math.inf, 2**30),
        ([3.0, 4.0], [3.0, 4.0 + 2**-20], 2**-20, 2**-20 / 5, 2),
        ([0.0], [-0.0], 0.0, 0.0, 1),
        ([], [], 0.0, 0.0, 0),
        ([1.0, -math.inf], [1.0, 0.0], math.inf, math.nan, 0x7F800001),
    ],
)
def test_distances_are_those_of_the_numbers_that_differ(
    first: list[float], second: list[float], largest: float, relative: float, ulps: int
) -> None:
    measured = _distances(np.float32(first), np.float32(second))
    assert measured["ulps"] == ulps
    np.testing.assert_equal((measured["largest"], measured["relative"]), (largest, relative))


def small(x: jax.Array, factor: float = 3.0) -> jax.Array:
    with jax.named_scope("first"):
        y = jnp.sin(x)
    with jax.named_scope("second"):
        return y * jnp.float32(factor)


SMALL = detjax.trace_digests(small, (0, None))


def test_a_file_has_all_of_a_trace_but_its_function(tmp_path: Path) -> None:
    made = SMALL(jnp.ones((2, 3)), 3.0)[1]
    read = from_file(made, tmp_path)
    assert read.run is None and read.level == made.level == "equations"
    assert (read.entries, read.batch, dict(read.fingerprint)) == (made.entries, 2, dict(made.fingerprint))
    assert all(np.array_equal(a, b) for a, b in zip(read.digests, made.digests, strict=True))
    layers = from_file(detjax.trace_digests(small, level="layers")(jnp.ones(3))[1], tmp_path)
    assert layers.level == "layers" and layers.batch is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content | {"format": 2}, "format 2 is not 1"),
        (lambda content: content | {"entries": content["entries"][1:]}, "its digests do not match its entries"),
        (lambda content: content | {"shapes": content["shapes"][1:]}, "its digests do not match its entries"),
        (lambda content: {name: content[name] for name in content if name != "batch"}, "'batch'"),
    ],
)
def test_a_file_that_is_no_whole_trace_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    file = tmp_path / "trace"
    SMALL(jnp.ones((2, 3)), 3.0)[1].save(file)
    with np.load(file) as arrays:
        flat, content = arrays["digests"], json.loads(arrays["description"].tobytes())
    description = np.frombuffer(json.dumps(change(content)).encode(), "u1")
    with file.open("wb") as out:
        np.savez_compressed(out, digests=flat, description=description)
    with pytest.raises(ValueError, match=rf"trace: not a trace \({message}\); accepted: files from Trace.save"):
        Trace.load(file)
    with file.open("wb") as out:
        np.savez_compressed(
            out, digests=np.append(flat, np.uint32(1)), description=np.frombuffer(json.dumps(content).encode(), "u1")
        )
    with pytest.raises(ValueError, match="its digests do not match its entries"):
        Trace.load(file)


def test_each_field_of_a_fingerprint_that_differs_is_named() -> None:
    made = SMALL(jnp.ones((2, 3)), 3.0)[1]
    for name, value in made.fingerprint.items():
        other = dataclasses.replace(made, fingerprint={**made.fingerprint, name: "another"})
        result = detjax.bisect(made, other)
        assert result.environments == {name: (value, "another")} and result.first is None
        assert f"fingerprints differ in {name}" in str(result)
    fewer = {name: value for name, value in made.fingerprint.items() if name != "jax"}
    assert detjax.bisect(dataclasses.replace(made, fingerprint=fewer), made).environments == {
        "jax": (None, made.fingerprint["jax"])
    }


def test_further_equations_of_a_function_have_no_counterpart() -> None:
    def longer(x: jax.Array, factor: float) -> jax.Array:
        with jax.named_scope("between"):
            x = jnp.cos(jnp.cos(x))
        return small(x, factor)

    x = jnp.ones((2, 3))
    result = detjax.bisect(SMALL(x, 3.0)[1], detjax.trace_digests(longer, (0, None))(x, 3.0)[1])
    assert result.alone == (0, 2) and result.compared == 3
    assert "0 and 2 have no counterpart" in str(result)
    assert result.first is not None and (result.first.primitive, result.first.layer) == ("sin", "first")


def test_results_that_differ_although_all_digests_agree_are_hidden() -> None:
    made = SMALL(jnp.ones((2, 3)), 3.0)[1]
    assert made.run is not None and not detjax.bisect(made, made).hidden

    class Fused:
        """The run of a program in which the compiler fused otherwise."""

        def __init__(self, changes: bool) -> None:
            assert made.run is not None
            self.run, self.results, self.changes = made.run, made.run.results, changes
            self.keys = made.run.keys

        def values(self, keys: Any, rows: Any, *, is_sealed: bool = True) -> Any:
            seen = self.run.values(keys, rows)
            return (
                seen
                if is_sealed or not self.changes
                else {key: np.nextafter(x, np.float32(9)) for key, x in seen.items()}
            )

    same, other = (dataclasses.replace(made, run=Fused(changes)) for changes in (False, True))
    assert not detjax.bisect(made, same).hidden
    result = detjax.bisect(made, other)
    assert result.hidden and result.first is None and "Without digests the results differ" in str(result)
    assert not detjax.bisect(made, dataclasses.replace(other, run=None)).hidden


def test_a_run_that_cannot_be_repeated_is_told() -> None:
    count = iter(range(1, 100))

    def counted(x: jax.Array) -> jax.Array:
        return x + jax.pure_callback(lambda: np.float32(next(count)), jax.ShapeDtypeStruct((), np.float32))

    run = detjax.trace_digests(counted)
    result = detjax.bisect(run(jnp.ones(3))[1], run(jnp.ones(3))[1])
    assert result.first is not None and not result.first.repeats and result.first.values is None
    assert "is not reproducible" in str(result)


def test_a_difference_is_described_by_its_place() -> None:
    x = jnp.ones((2, 3))
    moved = x.at[1, 2].set(jnp.nextafter(jnp.float32(1), jnp.float32(2)))
    runs = [SMALL(y, 3.0)[1] for y in (x, moved)]
    first = detjax.bisect(*runs).first
    assert first is not None
    assert (first.primitive, first.layer, first.row, first.elements) == ("argument", "[0][0]", 1, (0, 2))
    assert (first.index, first.values, first.ulps) == ((2,), ("1.0", "1.0000001"), 1)
    assert str(first).startswith("argument [0][0], which differs between the runs, row 1")
    chosen = detjax.bisect(*runs, rows=(1, 1)).first
    assert chosen is not None and chosen.row is None and chosen.index == (2,)
    assert detjax.bisect(*runs, rows=(0, 0)).first is None
    across = detjax.bisect(*runs, rows=(0, 1)).first
    assert across is not None and across.values == ("1.0", "1.0000001")


def test_a_large_row_names_the_block_that_differs() -> None:
    x = jnp.zeros((1, 700))
    run = detjax.trace_digests(lambda x: x + 1, 0)
    first = detjax.bisect(run(x)[1], run(x.at[0, 699].set(1))[1]).first
    assert first is not None and first.elements == (512, 699) and first.index == (699,)
    assert first.row is None, "a batch of one row has nothing to name"


def test_a_table_of_drifts_has_numbers_only_where_they_are_known(tmp_path: Path) -> None:
    x = jnp.ones((2, 3))
    runs = [SMALL(x, factor)[1] for factor in (3.0, 3.5)]
    measured = drift_table(detjax.bisect(*runs))
    assert [column.header for column in measured.columns] == [
        "layer",
        "iteration",
        "unequal blocks",
        "relative",
        "largest",
        "ulps",
    ]
    kept = drift_table(detjax.bisect(runs[0], from_file(runs[1], tmp_path)))
    assert [column.header for column in kept.columns] == ["layer", "iteration", "unequal blocks"]
    assert list(kept.columns[2].cells) == ["0.0%", "100.0%"]


def test_every_value_that_leaves_an_isolated_layer_counts() -> None:
    def fn(x: jax.Array, factor: float) -> jax.Array:
        with jax.named_scope("both"):
            first, second = jnp.sin(x) * jnp.float32(factor), jnp.cos(x)[:, :2]
        with jax.named_scope("after"):
            return first + jnp.pad(second, ((0, 0), (0, 2)))

    x = jnp.arange(8.0).reshape(2, 4) + 1
    run = detjax.trace_digests(fn, (0, None))
    result = detjax.bisect(run(x, 2.0)[1], run(x, 3.0)[1], isolate=True)
    assert result.isolated is not None
    layers = {one.layer: one for one in result.isolated}
    assert (layers["both"].compared, layers["both"].unequal) == (2, 8 / 12) and layers["both"].ulps > 0
    assert (layers["after"].compared, layers["after"].unequal, layers["after"].ulps) == (1, 0.0, 0)
