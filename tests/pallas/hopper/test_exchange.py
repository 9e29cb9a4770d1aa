"""Exchanges between GPUs in kernels: what they compute on two GPUs, and where their buffers lie."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from detjax import backends, compilation
from detjax.device_links import MOST_CTAS, Buffers, reach_one_another, region_begin, region_bytes, regions
from detjax.ops.collectives import gather_columns
from tests.support.bits import assert_same_bits

OVER = ("tensor", "expert")
SHAPES = [
    ((1, 2048), "bfloat16"),
    ((3, 37), "float32"),
    ((5, 3), "int32"),
    ((257, 6144), "bfloat16"),
    ((2, 9, 130), "float16"),
]


@pytest.mark.parametrize("shape", [{"tensor": 2, "expert": 1}, {"tensor": 2, "expert": 4}, {"tensor": 1, "expert": 8}])
def test_the_buffers_of_groups_of_devices_do_not_overlap(shape: dict[str, int]) -> None:
    end = 0
    for axes in regions(shape):
        assert region_begin(shape, axes) == end
        devices = math.prod(shape[axis] for axis in axes)
        # A counter for each CTA, and two buffers for each sender, in which every 4 bytes of data have 4 of a flag.
        assert region_bytes(shape, axes) == MOST_CTAS * (4 + 2 * devices * 2 * 4096)
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
