"""Exchanges between GPUs in kernels: what they compute on two GPUs, and where their buffers lie."""

import functools
import math
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from detjax import ops
from detjax.models.parts.sharding import OutputSharding, ShardGroup, gathered_grouped_matmul, gathered_matmul, linked
from detjax.ops.collectives import gather_columns
from detjax.ops.grouped_matmul import shared_grouped_matmul
from detjax.ops.matmul import shared_matmul
from detjax.pallas.hopper import grouped_matmul
from detjax.pallas.hopper.matmul import tuning
from detjax.pallas.hopper.matmul.plan import Plan, Problem, Schedule
from detjax.pallas.hopper.matmul.tuning import default_schedule, shared_schedule
from detjax.runtime import backends, compilation
from detjax.runtime.device_links import (
    MAX_CTAS,
    Buffers,
    DeviceLinks,
    reach_one_another,
    region_begin,
    region_bytes,
    regions,
)
from tests.support.bits import assert_same_bits

OVER = ("tensor", "expert")
SHAPES = [
    ((1, 2048), "bfloat16"),
    ((3, 37), "float32"),
    ((5, 3), "int32"),
    ((257, 6144), "bfloat16"),
    ((8448, 2048), "bfloat16"),  # more than one piece for each CTA
    ((2, 9, 130), "float16"),
]


@pytest.mark.parametrize("shape", [{"tensor": 2, "expert": 1}, {"tensor": 2, "expert": 4}, {"tensor": 1, "expert": 8}])
def test_the_buffers_of_groups_of_devices_do_not_overlap(shape: dict[str, int]) -> None:
    end = 0
    for axes in regions(shape):
        assert region_begin(shape, axes) == end
        devices = math.prod(shape[axis] for axis in axes)
        # A counter for each CTA, and two buffers for each sender, in which every 4 bytes of data have 4 of a flag.
        assert region_bytes(shape, axes) == MAX_CTAS * (4 + 2 * devices * 2 * 4096)
        end += region_bytes(shape, axes)
    assert all(shape[axis] > 1 for axes in regions(shape) for axis in axes)


def test_devices_that_are_no_gpus_do_not_reach_one_another() -> None:
    assert not reach_one_another(jax.devices("cpu"))


def _mesh(tensor: int, expert: int) -> Mesh:
    devices = np.array(jax.devices()[: tensor * expert]).reshape(tensor, expert)
    return Mesh(devices, OVER, axis_types=(AxisType.Auto,) * 2)


@pytest.mark.hopper
@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
@pytest.mark.parametrize("axes", [(2, 1), (1, 2)])
def test_kernels_gather_what_xla_gathers(shape: tuple[int, ...], dtype: str, axes: tuple[int, int]) -> None:
    if len(jax.devices()) < 2 or not reach_one_another(jax.devices()[:2]):
        pytest.skip("needs two GPUs that reach one another")
    mesh = _mesh(*axes)
    buffers = Buffers.for_mesh(mesh)
    bits = np.random.default_rng(0).integers(0, 2**15, (*shape[:-1], 2 * shape[-1]))
    spec = P(*[None] * (len(shape) - 1), OVER)
    x = jax.device_put(jnp.asarray(bits).astype(dtype), NamedSharding(mesh, spec))

    def gathered(x: jax.Array, links: object, over: tuple[str, ...]) -> list[jax.Array]:
        # Several in a row, so that both turns of the buffers are used more than once.
        results = []
        for _ in range(5):
            y = gather_columns(x, over, links)  # pyright: ignore[reportArgumentType]
            results.append(y)
            x = y[..., x.shape[-1] :]
        return results

    over = OVER if axes == (2, 1) else ("expert",)
    run = functools.partial(jax.shard_map, mesh=mesh, out_specs=P(), check_vma=False)
    with compilation.chained(True), backends.use_backend("hopper"):
        exchanged = compilation.jit(run(functools.partial(gathered, over=over), in_specs=(spec, P())))
        exchanged(x, buffers.nowhere)
        for _ in range(3):
            exchanged_columns = exchanged(x, buffers.links)
    expected = compilation.jit(run(functools.partial(gathered, links=None, over=over), in_specs=spec))(x)
    for one, other in zip(exchanged_columns, expected, strict=True):
        assert_same_bits(one, other)


# --- products whose columns several devices compute -------------------------------------------------------------------

H100 = "NVIDIA H100 80GB HBM3"
PRODUCTS = [
    (128, 2048, 4096, {}),
    (257, 2048, 4096, {"bias": True, "residual": True}),
    (300, 6144, 512, {"activation": "silu", "gated": True}),
    (1024, 6144, 4096, {"activation": "silu", "gated": True, "bias": True}),
    (1030, 2048, 12288, {"residual": True}),
    (8448, 2048, 4096, {"residual": True}),
]
"""Tokens, outputs of a device, inputs, and options of products."""


@pytest.mark.parametrize(
    ("outputs", "schedule", "can_be_shared"),
    [
        (2048, Schedule(128, 256, "tokens", 2), True),
        (2048, Schedule(128, 256, "weights", 2), True),
        (2056, Schedule(128, 256, "weights", 2), False),  # the last tile would end in the other device's columns
        (2048 + 256, Schedule(128, 256, "tokens", 2, cluster_n=2), False),  # and so would the last cluster
        (40, Schedule(16, 40), True),
    ],
)
def test_devices_share_a_result_if_tiles_end_where_their_columns_do(
    outputs: int, schedule: Schedule, can_be_shared: bool
) -> None:
    assert Plan(Problem(1024, outputs, 4096), schedule).can_be_shared == can_be_shared


@pytest.mark.parametrize("changed", [{"continues": True}, {"keeps": True}])
def test_results_with_further_arrays_are_not_shared(changed: dict[str, int]) -> None:
    for problem in (Problem(1024, 2048, 4096), Problem(1024, 2048, 4096, experts=4)):
        assert Plan(problem, Schedule(128, 256, "tokens", 2)).can_be_shared
    assert not Plan(Problem(1024, 2048, 4096, **changed), Schedule(128, 256, "tokens", 2)).can_be_shared


def test_devices_share_results_of_many_tokens_in_the_default_schedule() -> None:
    many, few = Problem(1024, 2048, 4096), Problem(tuning._MIN_SHARED_TOKENS - 8, 2048, 4096)
    assert shared_schedule(many, H100) == default_schedule(many, H100)
    assert Plan(few, default_schedule(few, H100)).can_be_shared
    assert shared_schedule(few, H100) is None


def test_tiles_of_shared_results_end_with_a_devices_columns_unless_an_exchange_is_faster() -> None:
    default = Schedule(128, 176, "tokens", 2)
    with mock.patch.object(tuning, "default_schedule", lambda problem, device_kind: default):
        even = Problem(8448, 6144, 4096, 2)
        assert not Plan(even, default).can_be_shared
        schedule = shared_schedule(even, H100)
        assert schedule is not None and Plan(even, schedule).can_be_shared
        # No tile of more than 8 outputs divides these.
        assert shared_schedule(Problem(8448, 6152, 4096, 2), H100) is None


def test_backends_without_such_kernels_share_no_results() -> None:
    x, w = jnp.zeros((256, 64)), jnp.zeros((32, 64))
    with backends.use_backend("portable"):
        assert shared_matmul(x, w, OVER, DeviceLinks(jnp.zeros((2, 2), jnp.int32))) is None
    assert shared_matmul(x, w, OVER, None) is None


def test_devices_share_what_experts_give_many_rows_on_hopper_alone() -> None:
    sizes, w = jnp.full(4, 256, jnp.int32), jnp.zeros((4, 2, 128, 64), jnp.bfloat16)
    links = DeviceLinks(jnp.zeros((2, 2), jnp.int32))
    given: dict[str, Any] = {"activation": "silu", "gated": True, "unit": 8}

    def shares(rows: int, backend: str = "hopper", w: jax.Array = w, **changed: Any) -> bool:
        """Returns whether kernels write the results of a number of rows to all devices."""
        seen: list[Any] = []

        def product(x: jax.Array) -> None:
            options = {"links": links, **given, **changed}
            seen.append(shared_grouped_matmul(x, w, sizes, OVER, options.pop("links"), **options))

        with backends.tracing_for("gpu"), backends.use_backend(backend), compilation.chained(True):
            mesh = AbstractMesh((2, 1), OVER, (AxisType.Explicit, AxisType.Explicit))
            on_both = jax.shard_map(product, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
            jax.eval_shape(on_both, jax.ShapeDtypeStruct((rows, 64), jnp.bfloat16))
        assert seen[0] is None or seen[0].shape == (rows, 2 * w.shape[-2])
        return seen[0] is not None

    assert shares(1024)
    assert not shares(grouped_matmul._MIN_SHARED_ROWS - 8)
    assert not shares(1024, "portable")
    assert not shares(1024, links=None)
    assert not shares(1026, unit=1)  # rows are padded first
    # Tiles of 64 outputs do not end where these do.
    assert not shares(1024, w=jnp.zeros((4, 2, 96, 64), jnp.bfloat16))


@pytest.mark.hopper
@pytest.mark.parametrize("tokens", [200, 1000, 8192])
def test_kernels_write_to_all_devices_what_experts_give_on_one(tokens: int) -> None:
    if len(jax.devices()) < 2 or not reach_one_another(jax.devices()[:2]):
        pytest.skip("needs two GPUs that reach one another")
    mesh, draw = _mesh(2, 1), np.random.default_rng(tokens)
    buffers = Buffers.for_mesh(mesh)
    x = jnp.asarray(draw.normal(size=(tokens, 2048)) / 8, jnp.bfloat16)
    w = jnp.asarray(draw.normal(size=(32, 2, 768, 2048)) / 8, jnp.bfloat16)
    ids = jnp.asarray(np.sort(np.argsort(draw.normal(size=(tokens, 32)))[:, :8]), jnp.int32)
    sharding = OutputSharding((ShardGroup(768, 2),))
    options: dict[str, Any] = {"activation": "silu", "gated": True}

    def results(x: jax.Array, w: jax.Array, ids: jax.Array, links: Any = None) -> jax.Array:
        rows = ops.expert_rows(ids, 32)
        given = {"unit": rows.unit, "tiles": rows.tiles, **options}
        with linked(links):
            y = gathered_grouped_matmul(rows.gather(x), w, rows.group_sizes, sharding=sharding, **given)
        return rows.results(y)

    specs = P(), P(None, None, OVER), P()
    placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((x, w, ids), specs, strict=True)]
    on_both = jax.shard_map(results, mesh=mesh, in_specs=(*specs, P()), out_specs=P(), check_vma=False)
    with compilation.chained(True), backends.use_backend("hopper"):
        program = compilation.jit(on_both)
        x_, w_, ids_ = placed
        outcomes = [
            program(x_, w_, ids_, links) for links in (buffers.nowhere, buffers.links, buffers.links, buffers.links)
        ]
        expected = compilation.jit(results)(x, w, ids)
    for result in outcomes[1:]:
        for shard in result.addressable_shards:
            assert_same_bits(shard.data, jax.device_put(expected, shard.device))


@pytest.mark.hopper
@pytest.mark.parametrize(("tokens", "outputs", "inputs", "options"), PRODUCTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kernels_write_to_all_devices_what_one_device_computes(
    tokens: int, outputs: int, inputs: int, options: dict[str, object], dtype: str
) -> None:
    if len(jax.devices()) < 2 or not reach_one_another(jax.devices()[:2]):
        pytest.skip("needs two GPUs that reach one another")
    mesh, options = _mesh(2, 1), dict(options)
    buffers, draw = Buffers.for_mesh(mesh), np.random.default_rng(0)
    parts = (2,) if options.get("gated") else ()

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(draw.normal(size=shape) / 8, dtype)

    arrays = {"x": drawn(tokens, inputs), "w": drawn(*parts, 2 * outputs, inputs)}
    specs = {"x": P(), "w": P(*[None] * len(parts), OVER)}
    if options.pop("bias", False):
        arrays["bias"], specs["bias"] = drawn(*parts, 2 * outputs), P(*[None] * len(parts), OVER)
    if options.pop("residual", False):
        arrays["residual"], specs["residual"] = drawn(tokens, 2 * outputs), P()
    sharding = OutputSharding((ShardGroup(2 * outputs, 2),))
    shared: list[bool] = []

    def product(arrays: dict[str, jax.Array], links: object) -> list[jax.Array]:
        given = {**{name: arrays[name] for name in arrays if name not in ("x", "w")}, **options}
        shared.append(shared_matmul(arrays["x"], arrays["w"], OVER, links, **given) is not None)  # pyright: ignore
        with linked(links):  # pyright: ignore[reportArgumentType]
            # Twice, so that both turns of the buffers are used.
            return [gathered_matmul(arrays["x"], arrays["w"], sharding=sharding, **given) for _ in range(2)]

    placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in arrays.items()}
    on_both = jax.shard_map(product, mesh=mesh, in_specs=(specs, P()), out_specs=P(), check_vma=False)
    with compilation.chained(True), backends.use_backend("hopper"):
        program = compilation.jit(on_both)
        program(placed, buffers.nowhere)
        for _ in range(3):
            results = program(placed, buffers.links)
        expected = compilation.jit(lambda x, w, **rest: ops.matmul(x, w, layout="nk", **rest, **options))(**arrays)
    assert any(shared)
    for result in results:
        for shard in result.addressable_shards:
            assert_same_bits(shard.data, jax.device_put(expected, shard.device))
