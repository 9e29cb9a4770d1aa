"""The matmul's tuned tables and its candidates: every schedule that may serve fits its problem and lowers for CUDA."""

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detjax.bench import shapes
from detjax.contract import CONTRACT_VERSION
from detjax.operands.options import Epilogue
from detjax.pallas.hopper.matmul import tuning
from detjax.pallas.hopper.matmul.kernel import Operands, product
from detjax.pallas.hopper.matmul.plan import Plan, Problem, Schedule
from detjax.pallas.hopper.matmul.tuning import BUCKETS, bucket, candidates, default_schedule, estimated_seconds, key
from tests.pallas.hopper import interpreter

TABLE_FILES = sorted(tuning.TABLES.glob("*.json"))
H200 = "NVIDIA H200"

KEY = re.compile(
    r"(?P<dtype>\w+?)-(?P<gated>2x)?(?P<n>\d+)x(?P<k>\d+)(-(?P<layouts>[mk]{2}-[nk]{2}))?(-(?P<out>\w+))?-m(?P<m>\d+)"
)


def problem_named(name: str) -> Problem:
    """The problem that has this key."""
    match = KEY.fullmatch(name)
    assert match is not None, name
    tokens, weights = (match["layouts"] or "mk-nk").split("-")
    return Problem(
        int(match["m"]),
        int(match["n"]),
        int(match["k"]),
        2 if match["gated"] else 1,
        jnp.dtype(match["dtype"]),
        jnp.dtype(match["out"] or match["dtype"]),
        token_layout=tokens,  # pyright: ignore
        layout=weights,  # pyright: ignore
    )


def lowered(problem: Problem, schedule: Schedule | None) -> str:
    """The program of the problem's product, lowered for CUDA."""
    epilogue = Epilogue("silu", gated=True) if problem.parts == 2 else Epilogue()
    multiply = functools.partial(
        product,
        layout=problem.layout,
        token_layout=problem.token_layout,
        epilogue=epilogue,
        out_dtype=problem.out_dtype,
        schedule=schedule,
    )
    x = (problem.m, problem.k) if problem.token_layout == "mk" else (problem.k, problem.m)
    w = (problem.n, problem.k) if problem.layout == "nk" else (problem.k, problem.n)
    bias = residual = None
    if problem.bias_dtype is not None:
        bias = jax.ShapeDtypeStruct((problem.parts, problem.n)[2 - problem.parts :], problem.bias_dtype)
    if problem.residual_dtype is not None:
        residual = jax.ShapeDtypeStruct((problem.m, problem.n), problem.residual_dtype)
    operands = (
        jax.ShapeDtypeStruct(x, problem.dtype),
        jax.ShapeDtypeStruct((2, *w) if problem.parts == 2 else w, problem.dtype),
        bias,
        residual,
    )
    return interpreter.lowered(lambda *operands: multiply(Operands(*operands)), *operands)


def kernels_of_tables() -> dict[str, list[tuple[Problem, Schedule]]]:
    """One entry of the tables for each kind of kernel, by the product's name.

    Kernels that differ only in their number of tiles are of one kind.
    """
    kinds: dict[Any, tuple[Problem, Schedule]] = {}
    for file in TABLE_FILES:
        for name, fields in json.loads(file.read_text())["schedules"].items():
            problem, schedule = problem_named(name), Schedule(**fields)
            plan = Plan(problem, schedule)
            more_than_one = problem.m > schedule.tile_m, plan.grid[0] * plan.grid[1] > plan.clusters
            kind = schedule, problem.parts, problem.dtype, problem.out_dtype, plan.stages, more_than_one
            kinds.setdefault(kind, (problem, schedule))
    products: dict[str, list[tuple[Problem, Schedule]]] = {}
    for problem, schedule in kinds.values():
        products.setdefault(key(problem).rpartition("-m")[0], []).append((problem, schedule))
    return products


KERNELS = kernels_of_tables()


@pytest.mark.parametrize("file", TABLE_FILES, ids=lambda file: file.stem)
def test_every_schedule_of_a_table_fits_its_problem(file: Path) -> None:
    stored = json.loads(file.read_text())
    environment = stored["origin"]["fingerprint"]
    device_kind = environment["device_kind"]
    assert tuning.table_file(device_kind) == file
    assert 1 <= environment["contract_version"] <= CONTRACT_VERSION
    table = tuning.table(device_kind)
    assert list(stored["schedules"]) == sorted(table)
    for name, schedule in table.items():
        problem = problem_named(name)
        assert key(problem) == name
        schedule.check(problem)
        assert default_schedule(problem, device_kind) == schedule
    assert tuning.table_text(table, stored["origin"]) == file.read_text()


def overwritten(plan: Plan, waits: Sequence[int]) -> bool:
    """Returns whether a warpgroup may stage a chunk over one that is still copied, if it awaits all but `waits`."""
    copied: list[int] = []
    for _ in range(3):
        for store, in_flight in zip(range(plan.stores), waits, strict=True):
            copied, slot = copied[max(len(copied) - in_flight, 0) :], store % plan.slots
            if slot in copied:
                return True
            copied.append(slot)
    return False


def emitted_waits(problem: Problem, schedule: Schedule) -> list[int]:
    """The copies that the kernel leaves in flight before each chunk."""
    multiply = functools.partial(
        product, layout="nk", epilogue=Epilogue(), out_dtype=problem.out_dtype, schedule=schedule
    )
    x, w = (jax.ShapeDtypeStruct((size, problem.k), problem.dtype) for size in (problem.m, problem.n))
    text = str(jax.make_jaxpr(lambda x, w: multiply(Operands(x, w)))(x, w))
    *before_chunks, at_the_end = re.findall(r"wait_smem_to_gmem\[n=(\d+) wait_read_only=True\]", text)
    assert at_the_end == "0"
    return [int(n) for n in before_chunks]


def test_no_chunk_of_a_result_is_staged_over_one_that_is_still_copied() -> None:
    few_steps = [Problem(8192, n, 64, out_dtype=jnp.dtype(dtype)) for n in (3072, 4096) for dtype in DTYPES]
    few_steps += [Problem(8192, 3072, 192, parts=2, keeps=True), Problem(300, 1288, 1096, parts=2, keeps=True)]
    plans = [Plan(problem, schedule) for problem in few_steps for schedule in candidates(problem)[::7]]
    plans += [Plan(problem_named(name), schedule) for name, schedule in tuning.table(H200).items()]
    uneven = [plan for plan in plans if plan.stores % plan.slots]
    assert len(uneven) > 100
    for plan in plans:
        assert not overwritten(plan, [plan.copies_in_flight(store) for store in range(plan.stores)])
    # The slot of a tile's first chunk may be the one of the previous tile's last chunk.
    assert all(overwritten(plan, [plan.slots - 1] * plan.stores) for plan in uneven)

    uneven_plan = Plan(Problem(512, 1024, 64, out_dtype=jnp.dtype("float32")), Schedule(176, 256, warpgroups=2))
    assert not overwritten(uneven_plan, emitted_waits(uneven_plan.problem, uneven_plan.schedule))


@pytest.mark.parametrize(("outputs", "inputs"), [(2048, 4096), (2048, 12288), (5120, 25600), (8192, 28672)])
def test_a_residual_leaves_no_default_schedule_so_few_stages_that_copies_and_products_take_turns(
    outputs: int, inputs: int
) -> None:
    plain = Problem(8192, outputs, inputs)
    added = dataclasses.replace(plain, residual_dtype=plain.dtype)
    two_stages = Schedule(128, 256, warpgroups=2, panel=8)
    assert (Plan(plain, two_stages).stages, Plan(added, two_stages).stages) == (3, 2)
    assert estimated_seconds(Plan(added, two_stages)) > 1.5 * estimated_seconds(Plan(plain, two_stages))
    for device_kind in (H200, "a device without a table"):
        assert Plan(added, default_schedule(added, device_kind)).stages > 2
    # The table has a schedule that a residual leaves two stages.
    with mock.patch.object(tuning, "table", lambda device_kind: {key(plain): two_stages}):
        assert default_schedule(plain, H200) == two_stages != default_schedule(added, H200)


def test_the_h200s_table_has_the_linear_layers_of_the_tuned_models() -> None:
    for name, m in itertools.product(shapes.MODELS, shapes.TOKENS):
        if m <= 4096 and (name != "Qwen3-30B-A3B" or m in (1, 1024, 4096)):
            products = {key(problem) for problem in shapes.products(shapes.MODELS[name], m)}
            assert products <= tuning.table(H200).keys()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("product_name", KERNELS)
def test_every_kernel_of_the_tables_lowers_for_cuda(product_name: str) -> None:
    for problem, schedule in KERNELS[product_name]:
        assert "mosaic_gpu" in lowered(problem, schedule)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [name for i, name in enumerate(sorted(tuning.table(H200))) if i % 25 == 0])
def test_kernels_of_the_table_lower_with_bias_and_residual(name: str) -> None:
    problem = dataclasses.replace(
        problem_named(name), bias_dtype=jnp.dtype("bfloat16"), residual_dtype=jnp.dtype("bfloat16")
    )
    assert "mosaic_gpu" in lowered(problem, default_schedule(problem, H200))


# --- the candidates ---------------------------------------------------------------------------------------------------

DTYPES = [jnp.dtype("bfloat16"), jnp.dtype("float16"), jnp.dtype("float32")]
ANY_SIZE = st.one_of(st.integers(1, 100), st.integers(1, 2000))
ANY_PROBLEM = st.builds(
    Problem,
    m=ANY_SIZE,
    n=ANY_SIZE,
    k=ANY_SIZE,
    parts=st.sampled_from([1, 2]),
    dtype=st.sampled_from(DTYPES[:2]),
    out_dtype=st.sampled_from(DTYPES),
    residual_dtype=st.sampled_from([None, *DTYPES]),
    bias_dtype=st.sampled_from([None, *DTYPES]),
    token_layout=st.sampled_from(["mk", "km"]),
    layout=st.sampled_from(["nk", "kn"]),
)


def padded(problem: Problem) -> Problem:
    """The problem with sizes that the copy engine can address, as schedules are looked up for."""
    in_64s = problem.layout == "kn" or problem.token_layout == "km"
    multiples = {
        "m": 64 if problem.token_layout == "km" else 8 if problem.m > 8 else 1,
        "n": 64 if problem.layout == "kn" else 8,
        "k": 64 if in_64s else 16,
    }
    return dataclasses.replace(
        problem, **{name: -(-getattr(problem, name) // by) * by for name, by in multiples.items()}
    )


NIGHTS = [pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 12)]


def drawn_problem(seed: int) -> Problem:
    """A random problem, the same for the same seed."""
    random = np.random.default_rng(seed)
    dtypes = ["bfloat16", "float16", "float32"]

    def draw(*choices: Any) -> Any:
        return choices[random.integers(len(choices))]

    extras = (None, *map(jnp.dtype, dtypes))
    return Problem(
        *(int(random.integers(1, draw(100, 2000))) for _ in range(3)),
        parts=draw(1, 2),
        dtype=jnp.dtype(draw(*dtypes[:2])),
        out_dtype=jnp.dtype(draw(*dtypes)),
        residual_dtype=draw(*extras),
        bias_dtype=draw(*extras),
        token_layout=draw("mk", "km"),
        layout=draw("nk", "kn"),
    )


@pytest.mark.parametrize("seed", [0, 1, *NIGHTS])
def test_there_is_a_schedule_for_every_problem_and_its_product_lowers_for_cuda(seed: int) -> None:
    problem = drawn_problem(seed)
    for device_kind in (H200, "a kind that nobody tuned for"):
        default_schedule(padded(problem), device_kind).check(padded(problem))
    assert "mosaic_gpu" in lowered(problem, None)


@pytest.mark.parametrize(
    ("layout", "tokens"),
    [
        ("nk", (1, 7, 8, 72, 9000)),
        *(
            pytest.param(layout, (*range(1, 9), *range(16, 73, 8), 9000), marks=pytest.mark.nightly)
            for layout in ("nk", "kn")
        ),
    ],
)
def test_there_is_a_schedule_for_any_number_of_tokens(layout: Any, tokens: Sequence[int]) -> None:
    for m in tokens:
        problem = Problem(m, 1216, 1088, layout=layout)
        default_schedule(problem, H200).check(problem)


def test_a_schedule_of_the_table_serves_only_if_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(16, 1288, 1096)
    named, too_wide = Schedule(16, 56), Schedule(264, 64)
    tuned = {key(problem): named}
    monkeypatch.setattr(tuning, "table", lambda kind: tuned if kind == "fitting" else {key(problem): too_wide})
    assert default_schedule(problem, "fitting") == named
    assert default_schedule(dataclasses.replace(problem, m=9), "fitting") == named
    # The tiles of the next number of tokens hold these too, but the ones of the previous number read the weights twice.
    few, fewer, more = (Problem(m, 6144, 4096) for m in (24, 16, 32))
    tuned[key(fewer)], best = Schedule(16, 48, lines=4), candidates(few)[0]
    assert default_schedule(few, "fitting") == best
    tuned[key(more)] = next_one = Schedule(32, 48, lines=4)
    assert default_schedule(few, "fitting") == next_one != best
    many = dataclasses.replace(problem, m=192)
    assert default_schedule(many, "fitting") == candidates(many)[0]
    assert default_schedule(problem, "other") == candidates(problem)[0]


def test_no_number_of_tokens_takes_much_longer_than_its_best_candidate() -> None:
    """Between the tuned numbers, the cost model decides whether a neighbour's tiles hold the tokens."""
    for n, k, parts in ((6144, 4096, 1), (4096, 4096, 1), (12288, 4096, 2), (4096, 12288, 1)):
        for m in (17, 24, 33, 48):
            problem = Problem(m, n, k, parts).addressable
            chosen, best = (
                estimated_seconds(Plan(problem, schedule))
                for schedule in (default_schedule(problem, H200), candidates(problem)[0])
            )
            assert chosen <= 1.1 * best


def test_candidates_fit_and_are_distinct() -> None:
    for problem in (Problem(1, 1288, 1096), Problem(300, 1288, 1096, parts=2), Problem(200, 64, 64, layout="kn")):
        schedules = candidates(problem)
        assert len(schedules) == len(set(schedules)) > 3
        assert all(schedule.fits(problem) for schedule in schedules)


@pytest.mark.parametrize("rows", ["tokens", "weights"])
@pytest.mark.parametrize("columns", [8, 96, 144, 224])
def test_biases_lie_where_the_copy_engine_can_put_them(rows: Any, columns: int) -> None:
    problem = Problem(128, 1024, 1024, 2, bias_dtype=jnp.dtype("bfloat16"))
    plan = Plan(problem, Schedule(*((columns, 64) if rows == "weights" else (64, columns)), rows))
    assert plan.bias_size * 2 % 128 == 0
    assert plan.bias_size >= (64 if rows == "weights" else columns)


def test_sizes_are_padded_to_what_the_copy_engine_can_address() -> None:
    def sizes(*given: int, **layouts: Any) -> tuple[int, int, int]:
        problem = Problem(*given, **layouts).addressable
        return problem.m, problem.n, problem.k

    assert sizes(7, 1, 1) == (7, 8, 16)
    assert sizes(8, 8, 16) == (8, 8, 16)
    assert sizes(9, 9, 17) == (16, 16, 32)
    assert sizes(9, 9, 17, layout="kn") == (16, 64, 64)
    assert sizes(9, 9, 65, token_layout="km") == (64, 16, 128)


# --- names ------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_a_bucket_is_the_next_tuned_size(a: int, b: int) -> None:
    assert bucket(a) in BUCKETS
    assert bucket(a) >= a or bucket(a) == BUCKETS[-1]
    assert bucket(bucket(a)) == bucket(a)
    assert bucket(min(a, b)) <= bucket(max(a, b))
    assert not any(a <= size < bucket(a) for size in BUCKETS)


@settings(deadline=None)
@given(ANY_PROBLEM, ANY_PROBLEM)
def test_keys_have_all_that_schedules_are_tuned_for(a: Problem, b: Problem) -> None:
    def tuned_for(problem: Problem) -> Problem:
        tokens = bucket(problem.tokens)
        return dataclasses.replace(problem.with_tokens(tokens), bias_dtype=None, residual_dtype=None)

    assert problem_named(key(a)) == tuned_for(a)
    assert (key(a) == key(b)) == (tuned_for(a) == tuned_for(b))


@settings(deadline=None)
@given(
    st.dictionaries(
        st.text("abc-0123", min_size=1),
        st.builds(
            Schedule,
            tile_m=st.integers(8, 256),
            tile_n=st.integers(8, 256),
            rows=st.sampled_from(["weights", "tokens"]),
            warpgroups=st.sampled_from([1, 2]),
            cluster_n=st.sampled_from([1, 2]),
            lines=st.sampled_from([1, 4]),
        ),
    )
)
def test_a_table_that_is_written_is_read_as_it_was(table: dict[str, Schedule]) -> None:
    stored = json.loads(tuning.table_text(table, {"device_kind": "some"}))
    assert {name: Schedule(**fields) for name, fields in stored["schedules"].items()} == table
    assert stored["origin"] == {"device_kind": "some"}


def test_a_device_without_a_table_has_no_tuned_schedules() -> None:
    assert tuning.table("a kind that nobody tuned for") == {}
