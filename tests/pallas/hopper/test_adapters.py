"""Adapters by Hopper's kernels: a row has the bits that it has alone, and the plain weight's without an adapter."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.operands.adapted_weight import AdaptedWeight
from detjax.operands.numerics import round_up
from detjax.operands.options import Epilogue
from detjax.operands.products import AdapterOperands, GroupedOperands, MatmulOperands
from detjax.ops import single_adapter
from detjax.ops.adapter_places import BlocksOfRows, SortedRows, places_of_rows
from detjax.ops.adapters import adapted_product
from detjax.ops.experts import expert_rows
from detjax.ops.matmul import _PRODUCT
from detjax.pallas.hopper import grouped_matmul
from detjax.pallas.hopper import matmul as hopper
from detjax.pallas.hopper.matmul import adapters_of_rows, first_products
from detjax.pallas.hopper.matmul.kernel import Operands, product
from detjax.pallas.hopper.matmul.plan import Plan, Problem, Schedule
from detjax.pallas.hopper.matmul.tuning import default_schedule
from tests.pallas.hopper.interpreter import interpreted, interpreted_without_races, normal
from tests.pallas.hopper.test_decoder import kernel_counts
from tests.support.bits import assert_same_bits, same_bits

K, N, ROWS = 64, 64, [1, -1, 0, 1]

pytestmark = pytest.mark.usefixtures("matrix_unit")


@pytest.mark.parametrize("is_sorted", [False, True])
def test_rows_with_different_adapters_have_the_bits_that_they_have_alone(is_sorted: bool) -> None:
    """Alone, a row is a block. Among others, rows are in blocks if they are few."""
    x, w = (jnp.asarray(normal(*shape, dtype="bfloat16")) for shape in ((len(ROWS), K), (N, K)))
    a, b = np.zeros((2, 32, K), jnp.bfloat16), np.zeros((2, N, 32), jnp.bfloat16)
    for slot, rank in enumerate((3, 20)):
        a[slot, :rank], b[slot, :, :rank] = (normal(*shape, dtype="bfloat16") for shape in ((rank, K), (N, rank)))
    scales = jnp.full((2, N), 1 / 3, jnp.float32)

    def multiply(x: jnp.ndarray, w: jnp.ndarray, rows: list[int], ranks: int, slots: slice) -> np.ndarray:
        factors = jnp.asarray(a[slots, :ranks]), jnp.asarray(b[slots, :, :ranks]), scales[slots]
        weight = AdaptedWeight(w, *factors, jnp.asarray(rows, jnp.int32))

        def shared(x: Any) -> jax.Array:
            places = None  # the product computes them
            if len(rows) > 1:
                places = SortedRows.for_rows(weight.rows, 2) if is_sorted else places_of_rows(weight.rows, 2)
            return ops.matmul(x, dataclasses.replace(weight, places=places), layout="nk")

        with detjax.use_backend("hopper"):
            return interpreted(shared, x)

    mixed = multiply(x, w, ROWS, 32, slice(2))
    assert_same_bits(mixed[2:3], multiply(x[2:3], w, [0], 16, slice(1)))
    assert_same_bits(mixed[3:4], multiply(x[3:4], w, [0], 32, slice(1, 2)))
    with detjax.use_backend("hopper"):
        plain = interpreted(lambda x: ops.matmul(x, w, layout="nk"), x)
    assert_same_bits(mixed[1], plain[1])
    assert not same_bits(mixed[0], plain[0])


SLOTS = np.array([2, 0, 0, -1, 2, 3, 0, 0, *[3] * 8, *[-1] * 8, 0, -1, 2], np.int32)
"""Slots of rows in four blocks: with several adapters, one, and none. The last one is not full; no row has slot 1."""


def test_rows_that_are_not_sorted_have_the_products_of_sorted_rows() -> None:
    x, a = normal(len(SLOTS), K, dtype="bfloat16"), normal(4, 32, K, dtype="bfloat16")

    def products(x: Any, a: Any) -> Any:
        places, has_adapter = BlocksOfRows.for_rows(jnp.asarray(SLOTS), 8), SLOTS >= 0
        u = places.first_products(x, a)[places.place[has_adapter]]
        rows = expert_rows(jnp.asarray(SLOTS)[:, None], 4, jnp.asarray(has_adapter))
        options: dict[str, Any] = {"layout": "nk", "epilogue": Epilogue(), "out_dtype": x.dtype}
        expected = grouped_matmul.forward(
            GroupedOperands(rows.gather(x), a, None, rows.group_sizes), unit=rows.unit, **options
        )
        return u, rows.results(expected)[has_adapter, 0]

    with detjax.use_backend("hopper"):
        assert_same_bits(*interpreted(products, x, a))


@pytest.mark.parametrize(("gated", "width"), [(True, 72), (False, 40)])
def test_the_kernel_of_rows_with_adapters_has_the_bits_of_separate_products(
    gated: bool, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, ranks = (2, 48) if gated else (1, 16)
    shape = (2, width) if gated else (width,)
    u, b = normal(len(SLOTS) * 8, ranks, dtype="bfloat16"), normal(4, *shape, ranks, dtype="bfloat16")
    sums = [normal(len(SLOTS), width, seed=seed) for seed in range(parts)]
    sums[0][3, 0] = -0.0  # of a row without an adapter
    residual, scales = normal(len(SLOTS), width, dtype="bfloat16"), normal(4, *shape, seed=7)
    residual = residual if gated else None
    epilogue = Epilogue("silu", gated=True) if gated else Epilogue()

    def added(residual: Any, u: Any, b: Any, scales: Any, *sums: Any) -> jax.Array:
        places = BlocksOfRows.for_rows(jnp.asarray(SLOTS), 8)
        with detjax.use_backend("hopper"):
            return places.joined([*sums], u, b, scales, residual, epilogue=epilogue, out_dtype=jnp.float32)

    def computed() -> np.ndarray:
        return interpreted(lambda *operands: added(*operands), residual, u, b, scales, *sums)

    fused = computed()
    monkeypatch.setattr(adapters_of_rows, "serves", lambda *_: False)
    separate = computed()
    assert_same_bits(fused, separate)
    assert gated or same_bits(fused[SLOTS < 0], sums[0][SLOTS < 0])


MANY = 132
FORMS_OF_SUMS = {
    "one request": (1, 80, False, None, MANY),
    "gate and up": (8, 16, True, None, MANY),
    "shared tokens": (len(SLOTS), 16, False, Schedule(32, 24, lines=2, cluster_n=2), MANY),
    "shared weights": (len(SLOTS), 80, False, Schedule(16, 64, cluster_m=2), MANY),
    "tokens of gate and up on rows": (len(SLOTS), 16, True, Schedule(64, 72, "tokens", cluster_n=2), MANY),
    "two warpgroups": (len(SLOTS), 32, False, Schedule(128, 72, "tokens", warpgroups=2), MANY),
    # With 26 rows, there are 5 blocks.
    "tiles of 3 and 2 blocks": (26, 16, False, Schedule(32, 24, lines=2), 6 + 2),
    "tiles of 3 and 2 blocks in a cluster": (26, 3, True, Schedule(32, 24, cluster_n=2), 6 + 2),
    "one tile of all blocks": (26, 8, False, Schedule(64, 48, lines=4), 3 + 1),
    "tiles of 2 blocks": (15, 32, True, Schedule(64, 72, "tokens", cluster_n=2), 2 + 2),
    "tiles after the sums": (26, 48, False, Schedule(32, 80, lines=2, warpgroups=2), 2 + 1),
    "tiles after the sums of clusters": (26, 80, False, Schedule(16, 48, cluster_m=2, lines=2), 6 + 2),
    "no idle multiprocessor": (26, 64, True, Schedule(32, 72, cluster_n=2), 2),
}
"""By name, forms of the kernel of sums and first products: rows, ranks, whether there are gate and up, a schedule, and
multiprocessors; the ones that are more than the schedule's CTAs are idle."""


def arrays_of_sums(rows: int, ranks: int, gated: bool, inner: int = 160) -> tuple[BlocksOfRows, list[np.ndarray]]:
    """Places of the first rows of `SLOTS`, and the rows, a weight, its bias and first factors."""
    outputs = (2, 144) if gated else (144,)
    shapes = (rows, inner), (*outputs, inner), outputs, (4, ranks, inner)
    arrays = [normal(*shape, dtype="bfloat16", seed=seed) for seed, shape in enumerate(shapes)]
    return BlocksOfRows.for_rows(jnp.asarray(SLOTS[:rows]), 8), arrays


@pytest.mark.parametrize(
    ("rows", "ranks", "gated", "schedule", "multiprocessors"), FORMS_OF_SUMS.values(), ids=FORMS_OF_SUMS
)
def test_the_kernel_of_sums_and_first_products_has_the_bits_of_separate_kernels(
    rows: int,
    ranks: int,
    gated: bool,
    schedule: Schedule | None,
    multiprocessors: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places, arrays = arrays_of_sums(rows, ranks, gated)
    place = places.place[SLOTS[:rows] >= 0]
    if schedule is not None:
        monkeypatch.setattr(first_products, "default_schedule", lambda _: schedule)
    monkeypatch.setattr(first_products, "resident_clusters", lambda size: multiprocessors // size)

    def separate(x: Any, w: Any, bias: Any, a: Any) -> Any:
        sums = single_adapter.biased_sums(_PRODUCT, x, w, bias, gated)
        return sums, places.first_products(x, a)[place]

    def together(x: Any, w: Any, bias: Any, a: Any) -> Any:
        sums, u = places.sums_and_first_products(x, w, bias, a) or pytest.fail("no kernel computes both")
        return sums, u[place]

    with detjax.use_backend("hopper"):
        expected = interpreted(separate, *arrays)
        assert_same_bits(interpreted(together, *arrays), expected)


@pytest.mark.parametrize(
    ("rows", "schedule", "multiprocessors"),
    [
        (8, Schedule(8, 24, lines=4), MANY),
        (26, Schedule(32, 72, lines=4), 2 + 3),
        (15, Schedule(16, 72, lines=4, cluster_n=2), 2),
    ],
    ids=["a block in a tile", "two blocks in a tile, and one in the last", "tiles after the sums"],
)
def test_sums_and_first_products_share_stages_without_races(
    rows: int, schedule: Schedule, multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    places, arrays = arrays_of_sums(rows, 32, gated=False, inner=1088)
    rows_of_blocks = 8 * int(places.firsts[-1])
    monkeypatch.setattr(first_products, "default_schedule", lambda _: schedule)
    monkeypatch.setattr(first_products, "resident_clusters", lambda size: multiprocessors // size)

    def together(*arrays: Any) -> jax.Array:
        with detjax.use_backend("hopper"):
            (sums,), u = places.sums_and_first_products(*arrays) or pytest.fail("no kernel computes both")
        return jnp.concatenate([sums.reshape(-1), u[:rows_of_blocks].reshape(-1).astype(jnp.float32)])

    interpreted_without_races(together, *arrays)


def test_rows_without_adapters_have_sums_and_no_first_products() -> None:
    _, arrays = arrays_of_sums(15, 16, gated=False)
    places = BlocksOfRows.for_rows(jnp.full(15, -1, jnp.int32), 8)

    def separate(x: Any, w: Any, bias: Any, _: Any) -> Any:
        return single_adapter.biased_sums(_PRODUCT, x, w, bias, False)

    def together(*arrays: Any) -> Any:
        sums, _ = places.sums_and_first_products(*arrays) or pytest.fail("no kernel computes both")
        return sums

    with detjax.use_backend("hopper"):
        assert_same_bits(interpreted(together, *arrays), interpreted(separate, *arrays))


@pytest.mark.parametrize(
    ("rows", "ranks", "most_blocks", "tiles"),
    [
        (1, 16, 1, (1, 2)),
        (3, 16, 1, (3, 1)),
        (8, 16, 2, (8, 1)),
        (64, 3, 4, (64, 1)),
        (64, 16, 4, (64, 1)),
        (64, 32, 2, (64, 1)),
        (64, 48, 1, (64, 1)),
        (64, 72, 1, (64, 2)),
    ],
)
def test_blocks_share_a_tile_if_they_are_more_than_the_idle_multiprocessors(
    rows: int, ranks: int, most_blocks: int, tiles: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = Schedule(32, 64, cluster_m=2, lines=2)
    monkeypatch.setattr(first_products, "resident_clusters", lambda size: MANY // size)
    problem = Problem(64, 4096, 4096, out_dtype=jnp.dtype("float32"))
    sums = first_products.SumsPlan(problem, schedule)
    plan = first_products._first_plan(Problem(8 * rows, ranks, 4096, experts=8, in_blocks=True).addressable, sums)
    assert sums.ctas == 128
    assert (plan.most_blocks, plan.grid) == (most_blocks, tiles)
    assert plan.further_ctas == min(4, round_up(math.prod(tiles), 2))
    assert plan.tiles_follow_sums == (math.prod(tiles) > 4 * most_blocks)


@pytest.mark.parametrize("tokens", [8, 64])
def test_sums_are_staged_beside_the_stages_of_a_layers_product(tokens: int) -> None:
    """Their dtype takes no stage from gate and up of Qwen3-8B, and no other schedule than the tuned one."""
    shape: dict[str, Any] = {"m": tokens, "n": 12288, "k": 4096, "parts": 2}
    problem = Problem(**shape)
    product = Plan(problem, default_schedule(problem, "NVIDIA H200"))
    sums = first_products.SumsPlan(Problem(**shape, out_dtype=jnp.dtype("float32")), product.schedule)
    assert not sums.unmet_requirements()
    assert sums.stages == product.stages


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (64, {"matmul_and_first_products": 1, "adapters_of_rows": 1}),
        (65, {"matmul": 2, "adapters_of_rows": 1}),
    ],
)
def test_adapters_of_few_rows_add_one_kernel_to_the_one_of_a_weight(
    rows: int, expected: dict[str, int], gated: bool
) -> None:
    weight, x = one_adapter(gated=gated), normal(rows, K, dtype="bfloat16")
    options: dict[str, Any] = {"activation": "silu", "gated": True} if gated else {}

    def multiply(x: Any, rows: Any) -> jax.Array:
        adapted = dataclasses.replace(weight, rows=rows, places=places_of_rows(rows, 1))
        return ops.matmul(x, adapted, layout="nk", **options)

    with detjax.use_backend("hopper"):
        assert kernel_counts(jax.make_jaxpr(multiply)(x, np.zeros(rows, np.int32)).jaxpr) == expected


def test_no_stage_is_read_before_it_arrives_or_overwritten_before_it_is_read() -> None:
    """A block of rows with four adapters has more steps than stages."""
    slots, u, b = np.array([2, 0, 0, -1, 2, 3, 0, 1], np.int32), normal(64, 16), normal(4, N, 16)
    operands = normal(8, N), normal(8, N, seed=1), u.astype(jnp.bfloat16), b.astype(jnp.bfloat16), normal(4, N)

    def added(sums: Any, residual: Any, u: Any, b: Any, scales: Any) -> jax.Array:
        places = BlocksOfRows.for_rows(jnp.asarray(slots), 8)
        with detjax.use_backend("hopper"):
            return places.joined([sums], u, b, scales, residual, epilogue=Epilogue(), out_dtype=jnp.float32)

    interpreted_without_races(added, *operands)


@pytest.mark.parametrize("count", [1, 7, 8, 21, 64])
def test_each_row_finds_its_adapter_in_a_block_of_its_neighbours(count: int) -> None:
    for seed in range(20):
        slot = np.random.default_rng([seed, count]).integers(-1, 4, count).astype(np.int32)
        places = BlocksOfRows.for_rows(jnp.asarray(slot), 8)
        slots, blocks, firsts, place = map(np.asarray, (places.adapters, places.blocks, places.firsts, places.place))
        rows, has_adapter = np.arange(count), slot >= 0
        assert (place[~has_adapter] == -1).all()
        block = place[has_adapter] // 8
        np.testing.assert_array_equal(slots[block], slot[has_adapter])
        np.testing.assert_array_equal(blocks[block], rows[has_adapter] // 8)
        np.testing.assert_array_equal(place[has_adapter] % 8, rows[has_adapter] % 8)
        pairs = {(r // 8, s) for s, r in zip(slot, rows, strict=True) if s >= 0}
        assert slots[-1] == firsts[-1] == len(pairs)
        counts = [sum(block == index for block, _ in pairs) for index in range(len(firsts) - 1)]
        np.testing.assert_array_equal(np.diff(firsts), counts)


def one_adapter(dtype: str = "bfloat16", *, gated: bool = False, ranks: int = 32) -> AdaptedWeight:
    """A weight, or gate's and up's, with one adapter for all rows; ranks after the 13th are zeros."""
    shape = (2, N) if gated else (N,)
    a, b = np.zeros((1, ranks, K), dtype), np.zeros((1, *shape, ranks), dtype)
    a[0, :13], b[0, ..., :13] = normal(13, K, dtype=dtype), normal(*shape, 13, dtype=dtype, seed=1)
    scales = normal(1, *shape, seed=2)
    return AdaptedWeight(*map(jnp.asarray, (normal(*shape, K, dtype=dtype), a, b, scales)))


@pytest.mark.parametrize(("backend", "gated"), [("hopper", False), ("hopper", True), ("mma", True)])
def test_an_adapter_of_all_rows_has_the_bits_that_it_has_among_others(backend: str, gated: bool) -> None:
    weight, x, residual = one_adapter(gated=gated), normal(5, K, dtype="bfloat16"), normal(5, N, dtype="bfloat16")
    options: dict[str, Any] = {"layout": "nk", "activation": "silu" if gated else None, "gated": gated}
    pooled = dataclasses.replace(weight, rows=jnp.zeros(5, jnp.int32))
    bias = jnp.asarray(normal(*weight.shape[:-1], dtype="bfloat16"))

    def multiply(x: Any, residual: Any, weight: Any) -> jax.Array:
        return ops.matmul(x, weight, bias=bias, residual=residual, **options)

    with detjax.use_backend(backend):
        alone, among_others = (interpreted(multiply, x, residual, one) for one in (weight, pooled))
    assert_same_bits(alone, among_others)


@pytest.mark.parametrize(
    ("gated", "schedule"),
    [(True, Schedule(8, 40, lines=2)), (False, Schedule(64, 48, "tokens", cluster_m=2))],
    ids=["gate and up", "tokens on rows"],
)
def test_the_kernel_of_an_adapter_has_the_bits_of_separate_products(gated: bool, schedule: Schedule) -> None:
    tokens, ranks = (9, 32) if gated else (70, 80)
    weight = one_adapter(gated=gated, ranks=ranks)
    x, residual = (normal(tokens, width, dtype="bfloat16") for width in (K, N))
    bias, u = normal(*weight.shape[:-1], dtype="bfloat16"), normal(tokens, ranks, dtype="bfloat16", seed=3)
    value, b, scales = weight.value, weight.b[0], weight.scales[0]
    epilogue = Epilogue("silu", gated=True) if gated else Epilogue("relu")
    options: dict[str, Any] = {"epilogue": epilogue, "out_dtype": "bfloat16", "keeps": True}

    def separate(x: Any, u: Any, residual: Any) -> Any:
        parts = [(value, bias, b, scales)] if not gated else list(zip(value, bias, b, scales, strict=True))
        plain: dict[str, Any] = {"layout": "nk", "epilogue": Epilogue(), "out_dtype": "float32"}
        sums = [product(Operands(x, w, bias), **plain) for w, bias, _, _ in parts]
        products = [product(Operands(u, b), **plain) for _, _, b, _ in parts]
        return hopper.add_adapter(sums, products, [part[3] for part in parts], residual, dtype="bfloat16", **options)

    def fused(x: Any, u: Any, residual: Any) -> Any:
        operands, adapter = MatmulOperands(x, value, jnp.asarray(bias), residual), AdapterOperands(u, b, scales)
        return hopper.forward_with_adapter(operands, adapter, layout="nk", schedule=schedule, **options)

    assert_same_bits(interpreted(fused, x, u, residual), interpreted(separate, x, u, residual))


def test_the_kernel_of_an_adapter_adds_gradients_of_rows() -> None:
    g, v = normal(70, K, dtype="bfloat16"), normal(70, 64, dtype="bfloat16")
    w, a = normal(K, N, dtype="bfloat16"), normal(64, N, dtype="bfloat16", seed=1)
    plain: dict[str, Any] = {"layout": "kn", "epilogue": Epilogue()}

    def separate(g: Any, v: Any, w: Any, a: Any) -> jax.Array:
        base = product(Operands(g, w), out_dtype="float32", **plain)
        return product(Operands(v, a, None, base), out_dtype="bfloat16", **plain)

    def fused(g: Any, v: Any, w: Any, a: Any) -> jax.Array:
        schedule = Schedule(128, 64, "tokens", warpgroups=2)
        options: dict[str, Any] = {"out_dtype": "bfloat16", "keeps": False, "schedule": schedule}
        return hopper.forward_with_adapter(MatmulOperands(g, w), AdapterOperands(v, a, None), **plain, **options)[0]

    assert_same_bits(interpreted(fused, g, v, w, a), interpreted(separate, g, v, w, a))


@pytest.mark.parametrize("has_kernel", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_gradients_of_an_adapter_of_all_rows_have_the_bits_of_the_contract(
    gated: bool, has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The functions of rows with different adapters compute the reference."""
    monkeypatch.setattr(hopper, "multiplies_adapters", lambda *_: has_kernel)
    weight, x, dy = one_adapter(gated=gated, ranks=16), normal(48, K, dtype="bfloat16"), normal(48, N, dtype="bfloat16")
    epilogue = Epilogue("silu", gated=True) if gated else Epilogue()
    starts = [normal(*factor.shape, seed=5) for factor in (weight.a, weight.b)]

    def gradients(x: Any, dy: Any, *starts: Any) -> Any:
        def multiply(x: Any, residual: Any, *sums: Any) -> jax.Array:
            a, b = (ops.AccumulatedWeight(*pair) for pair in zip((weight.a, weight.b), sums, strict=True))
            adapted = dataclasses.replace(weight, a=a, b=b, b_mask=jnp.asarray(weight.b != 0))
            return adapted_product(_PRODUCT, x, adapted, None, residual, epilogue=epilogue, out_dtype="bfloat16")

        y, pull = jax.vjp(multiply, x, dy, *starts)
        return y, pull(dy)

    with detjax.use_backend("hopper"):
        alone = interpreted(gradients, x, dy, *starts)
        monkeypatch.setattr(single_adapter, "is_served", lambda: False)
        assert_same_bits(alone, interpreted(lambda *arrays: gradients(*arrays), x, dy, *starts))


@pytest.mark.parametrize(("ranks", "has_kernel"), [(64, True), (80, True), (256, True), (272, False)])
def test_more_ranks_than_stay_in_shared_memory_take_separate_kernels(ranks: int, has_kernel: bool) -> None:
    weight, x = one_adapter(ranks=ranks), normal(64, K, dtype="bfloat16")

    def multiply(x: Any) -> jax.Array:
        return adapted_product(_PRODUCT, x, weight, None, None, epilogue=Epilogue(), out_dtype="bfloat16")

    with detjax.use_backend("hopper"):
        counts = kernel_counts(jax.make_jaxpr(multiply)(x).jaxpr)
    separate, one = {"matmul": 3, "map_elements": 1}, {"matmul": 1, "matmul_with_adapter": 1}
    assert counts == (one if has_kernel else separate)


@pytest.mark.parametrize(
    ("backend", "gated", "expected"),
    [
        ("mma", False, {"mma_matmul": 8, "map_elements": 1}),
        ("mma", True, {"mma_matmul": 10, "map_elements": 1}),
        # One kernel computes two products and their sum: forward, and for one weight also its gradient of rows.
        ("hopper", False, {"matmul": 4, "matmul_with_adapter": 2}),
        ("hopper", True, {"matmul": 7, "matmul_with_adapter": 1}),
    ],
)
def test_an_adapter_adds_few_kernels_to_those_of_its_weight(
    backend: str, gated: bool, expected: dict[str, int]
) -> None:
    """A trained weight has 3 products. Without its gradient, an adapter adds 2 forward, and 4 backward."""
    weight, x = one_adapter(gated=gated), normal(64, K, dtype="bfloat16")
    epilogue = Epilogue("silu", gated=True) if gated else Epilogue()

    def gradients(x: Any, a: Any, b: Any) -> Any:
        def multiply(x: Any, a: Any, b: Any) -> jax.Array:
            factors = ops.AccumulatedWeight(weight.a, a), ops.AccumulatedWeight(weight.b, b)
            adapted = dataclasses.replace(weight, a=factors[0], b=factors[1])
            return adapted_product(_PRODUCT, x, adapted, None, None, epilogue=epilogue, out_dtype="bfloat16")

        y, pull = jax.vjp(multiply, x, a, b)
        return y, pull(y)

    sums = [jnp.zeros(factor.shape) for factor in (weight.a, weight.b)]
    with detjax.use_backend(backend):
        counts = kernel_counts(jax.make_jaxpr(gradients)(x, *sums).jaxpr)
    assert counts == expected


def test_the_kernel_of_an_adapter_adds_a_bias_or_a_residual() -> None:
    weight, x = one_adapter(gated=False), normal(64, K, dtype="bfloat16")
    outputs = weight.b.shape[-2]
    bias, residual = normal(outputs, dtype="bfloat16"), normal(64, outputs, dtype="bfloat16")
    for addends in ((bias, None), (None, residual)):

        def multiply(x: Any, *addends: Any) -> jax.Array:
            return adapted_product(_PRODUCT, x, weight, *addends, epilogue=Epilogue(), out_dtype="bfloat16")

        with detjax.use_backend("hopper"):
            counts = kernel_counts(jax.make_jaxpr(multiply)(x, *addends).jaxpr)
        assert counts == {"matmul": 1, "matmul_with_adapter": 1}
