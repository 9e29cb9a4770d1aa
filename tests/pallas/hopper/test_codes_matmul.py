"""Products of e4m3 codes on Hopper, in Pallas' interpreter, which multiplies the numbers of the codes instead."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.studies.fp8_products.products import product_cases, variants
from detjax.operands.options import Epilogue
from detjax.operands.products import GroupedOperands, MatmulOperands
from detjax.operands.quantized_weight import QuantizedFormat, QuantizedWeight
from detjax.pallas.hopper.matmul.plan import Schedule
from detjax.pallas.hopper.quantized import codes
from tests.pallas.hopper.interpreter import interpreted, lowered
from tests.support.bits import assert_same_bits
from tests.support.quantized_weights import added_in_blocks, exact_operands


def product(x: Any, w: QuantizedWeight, schedule: Schedule | None, epilogue: Epilogue, *addends: Any) -> jax.Array:
    operands = MatmulOperands(x, w, *(addends or (None, None)))
    plan = codes.codes_plan(operands, out_dtype="float32")
    plan = dataclasses.replace(plan, schedule=schedule or plan.schedule)
    return codes.codes_product(operands, plan, epilogue=epilogue)


def gated(x: np.ndarray, w: QuantizedWeight) -> np.ndarray:
    """The contract's product with gate and up, the gate's activation being relu."""
    gate, up = (added_in_blocks(x, w.matrix(part)) for part in range(2))
    return np.maximum(gate, 0) * up


CASES: dict[str, tuple[tuple[int, int, int], str, str, Schedule | None]] = {
    # Tiles end beyond the last row and the last weight, and the last block has 64 of 128 columns.
    "group": ((11, 72, 448), "group", "float32", Schedule(8, 32, lines=2)),
    "group, two warpgroups of 24 rows": ((20, 136, 640), "group", "float32", Schedule(24, 48, warpgroups=2, lines=1)),
    "group, stages of eight blocks": ((5, 72, 2048), "group", "float32", Schedule(8, 16, lines=8)),
    # The kernel quantizes a single row itself. The first one has more blocks than stages.
    "group, a single row": ((1, 40, 2304), "group", "float32", Schedule(8, 24)),
    "group, a single row in pairs of blocks": (
        (1, 136, 1024),
        "group",
        "bfloat16",
        Schedule(8, 48, warpgroups=2, lines=2),
    ),
    "group, the default plan": ((9, 72, 384), "group", "bfloat16", None),
    "row": ((20, 136, 448), "row", "float32", Schedule(16, 128, warpgroups=2, lines=2)),
    # Neither the copy engine nor the kernel that quantizes rows takes such sizes.
    "group, odd sizes": ((3, 13, 139), "group", "float16", None),
    "row, odd sizes": ((10, 77, 5), "row", "float32", None),
    "static": ((9, 24, 256), "static", "float32", None),
}


@pytest.mark.usefixtures("two_multiprocessors")
@pytest.mark.parametrize("name", CASES)
def test_blocks_are_scaled_and_added_in_the_contracts_order(name: str) -> None:
    (m, n, k), kind, scale_dtype, schedule = CASES[name]
    x, w = exact_operands(m, n, k, kind, scale_dtype)
    draw = np.random.default_rng(1)
    bias, residual = draw.standard_normal(n).astype(np.float32), draw.standard_normal((m, n)).astype(np.float32)

    def fn(x: Any, w: Any, bias: Any, residual: Any) -> jax.Array:
        return product(x, w, schedule, Epilogue(), bias, residual)

    y = interpreted(fn, jnp.asarray(x), w, jnp.asarray(bias), jnp.asarray(residual))
    assert_same_bits(y, added_in_blocks(x, w) + bias + residual)


@pytest.mark.usefixtures("two_multiprocessors")
def test_a_single_row_is_quantized_where_it_is_multiplied() -> None:
    """Unless it is long: then this takes longer than a separate kernel."""
    for m, k, is_joined in ((1, 4096, True), (1, 4224, False), (1, 4032, False), (2, 4096, False)):
        x, w = exact_operands(m, 72, k, "group")
        text = lowered(lambda x, w: product(x, w, None, Epilogue()), jnp.asarray(x), w)
        assert ("with_prologue" in text) == is_joined and ("quantized_groups" in text) != is_joined, (m, k)


def with_shared_scales(w: QuantizedWeight, sharing: str) -> QuantizedWeight:
    """The weight with scales that blocks of 128 rows share: all of them, all but a block's last group, or none."""
    if sharing == "none":
        return w
    shared = jnp.repeat(w.scales[..., ::128, :], 128, axis=-2)[..., : w.shape[-2], :]
    if sharing == "but one group":
        shared = shared.at[..., 135, -1].multiply(2)
    return dataclasses.replace(w, scales=shared)


TOKENS_ON_ROWS = {
    "two warpgroups": ((130, 168, 512), Schedule(128, 96, "tokens", warpgroups=2, lines=2, panel=2)),
    "a product at a time": ((130, 168, 384), Schedule(128, 32, "tokens", warpgroups=2)),
    "one warpgroup, the last block of 64 columns": ((66, 168, 448), Schedule(64, 48, "tokens", lines=2)),
    "the default plan": ((70, 136, 384), None),
}


@pytest.mark.usefixtures("two_multiprocessors")
@pytest.mark.parametrize("sharing", ["all", "but one group", "none"])
@pytest.mark.parametrize("name", TOKENS_ON_ROWS)
def test_tokens_on_the_rows_take_the_scales_of_each_weight(name: str, sharing: str) -> None:
    (m, n, k), schedule = TOKENS_ON_ROWS[name]
    x, w = exact_operands(m, n, k, "group", "float32" if sharing == "all" else "bfloat16")
    w = with_shared_scales(w, sharing)
    y = interpreted(lambda x, w: product(x, w, schedule, Epilogue()), jnp.asarray(x), w)
    assert_same_bits(y, added_in_blocks(x, w))


@pytest.mark.usefixtures("two_multiprocessors")
@pytest.mark.parametrize("kind", ["row", "static"])
def test_tokens_on_the_rows_with_scales_by_rows(kind: str) -> None:
    x, w = exact_operands(130, 72, 256, kind)
    y = interpreted(lambda x, w: product(x, w, None, Epilogue()), jnp.asarray(x), w)
    assert_same_bits(y, added_in_blocks(x, w))


@pytest.mark.usefixtures("two_multiprocessors")
@pytest.mark.parametrize("sharing", ["all", "but one group"])
def test_two_tiles_of_tokens_load_gate_and_up_together(sharing: str) -> None:
    """Up alone has a group that is not shared."""
    x, w = exact_operands(200, 160, 384, "group", "float32", 2)
    mixed = with_shared_scales(w, sharing).scales[1]
    w = dataclasses.replace(w, scales=with_shared_scales(w, "all").scales.at[1].set(mixed))
    schedule = Schedule(128, 96, "tokens", warpgroups=2, cluster_m=2)
    y = interpreted(lambda x, w: product(x, w, schedule, Epilogue("relu", True)), jnp.asarray(x), w)
    assert_same_bits(y, gated(x, w))


@pytest.mark.usefixtures("two_multiprocessors")
def test_gate_and_up_take_the_same_codes_of_a_row() -> None:
    x, w = exact_operands(9, 72, 384, "group", "float32", 2)
    y = interpreted(lambda x, w: product(x, w, None, Epilogue("relu", True)), jnp.asarray(x), w)
    assert_same_bits(y, gated(x, w))


@pytest.mark.usefixtures("two_multiprocessors")
@pytest.mark.parametrize(("kind", "unit"), [("group", 8), ("row", 1), ("static", 8)])
def test_a_row_of_an_expert_has_the_bits_of_its_own_product(kind: str, unit: int) -> None:
    """Groups of a unit that no tile size divides are padded. The second expert has no rows."""
    sizes = [16, 0, 8] if unit == 8 else [11, 0, 5]
    rows = sum(sizes) + unit
    parts = () if kind == "static" else (2,)
    x, weights = exact_operands(rows, 76, 384, kind, "float32", 3, *parts)
    bias = jnp.asarray(np.random.default_rng(5).standard_normal((3, *parts, 76)), "float32")
    epilogue = Epilogue("relu", True) if parts else Epilogue("relu")

    def grouped(x: Any, w: Any, bias: Any) -> jax.Array:
        operands = GroupedOperands(x, w, bias, jnp.int32(sizes))
        return codes.grouped_codes_product(operands, epilogue=epilogue, out_dtype="float32", unit=unit)

    y = interpreted(grouped, jnp.asarray(x), weights, bias)
    for expert, first in ((0, 0), (2, sizes[0])):
        some = slice(first, first + sizes[expert])
        one = jax.tree.map(lambda leaf, expert=expert: leaf[expert], weights)
        matrices = [one.matrix(part) for part in range(2)] if parts else [one]
        sums = np.stack([added_in_blocks(x[some], matrix) for matrix in matrices], axis=1)
        gate, *up = (sums + np.asarray(bias[expert]).reshape(len(matrices), -1)).swapaxes(0, 1)
        assert_same_bits(y[some], np.maximum(gate, 0) * (up[0] if parts else 1))


def problems() -> list[tuple[int, QuantizedWeight, dict[str, Any], Any, Any]]:
    """Random products: rows, shapes of a weight, options of plans, and the shapes of bias and residual."""
    draw, dtypes = np.random.default_rng(0), ("bfloat16", "float16", "float32")
    sizes = (1, 7, 8, 9, 16, 20, 63, 64, 65, 100, 128, 129, 300, 513, 4096)
    chosen = []
    for _ in range(300):
        m, n = int(draw.choice(sizes)), int(draw.choice([*sizes, 151936]))
        k, experts = int(draw.choice([*sizes, 1104, 12288])), int(draw.choice([0, 0, 0, 3]))
        kind, stack = (
            str(draw.choice(["group", "row", "static"])),
            (*(experts,) * (experts > 0), *(2,) * draw.integers(2)),
        )
        group = 128 if kind == "group" else k
        described = QuantizedFormat("e4m3", k, group, "bfloat16", kind)
        scales: Any = jax.ShapeDtypeStruct((*stack, n, -(-k // group)), jnp.dtype(draw.choice(dtypes)))
        codes: Any = jax.ShapeDtypeStruct((*stack, n, k), jnp.uint8)
        options: dict[str, Any] = {"out_dtype": draw.choice(dtypes)}
        if experts:
            tile = int(draw.choice([128, 64, 32, 16, 8]))
            m, options = m * tile, options | {"experts": experts, "tile": tile}
        bias = jax.ShapeDtypeStruct((*stack, n), jnp.dtype(draw.choice(dtypes)))
        residual = jax.ShapeDtypeStruct((m, n), jnp.dtype(draw.choice(dtypes)))
        has = draw.integers(2, size=2)
        both = bias if has[0] else None, residual if has[1] and not experts else None
        chosen.append((m, QuantizedWeight(codes, scales, format=described), options, *both))
    return chosen


def test_every_product_of_a_served_weight_has_a_plan() -> None:
    for m, w, options, bias, residual in problems():
        assert codes.serves(w)
        plan = codes._plan_of_rows(m, w, bias, residual, **options)
        assert not plan.unmet_requirements() and plan.problem.n >= w.shape[-2] and plan.problem.k >= w.shape[-1]


def test_a_product_without_a_plan_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes, "default_plan", lambda *_: None)
    x, w = exact_operands(9, 72, 384, "group")
    with pytest.raises(RuntimeError, match=r"no plan multiplies the codes of Problem\(m=16, n=72, k=384"):
        codes.codes_plan(MatmulOperands(jnp.asarray(x), w), out_dtype="float32")


def test_a_plan_that_cannot_be_built_says_what_is_accepted() -> None:
    x, w = exact_operands(9, 72, 384, "group", "float32")
    with pytest.raises(ValueError, match=r"lines=4.*accepted: K in whole stages"):
        product(jnp.asarray(x), w, Schedule(16, 64, lines=4), Epilogue())
    with pytest.raises(ValueError, match=r"accepted: .*stages that divide a unit of scales"):
        product(jnp.asarray(x), w, Schedule(16, 64, lines=3), Epilogue())


def test_products_of_the_study_lower_for_cuda() -> None:
    """Also what their bits are compared with."""
    for case in product_cases((17,)):
        for variant in itertools.islice(variants(case), 3):
            operands = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), case.operands)
            kernel = "block_sums" if variant.name == "by a product for each block" else "codes_matmul"
            assert kernel in lowered(variant.multiply, operands), (case.name, variant.name)
