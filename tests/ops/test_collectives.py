"""Sums over the devices of a mesh, in a process with eight CPU devices."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import detjax
from detjax import ops

DEVICES = 8


def test_sums_over_devices_are_those_of_the_axis_as_tree() -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.split("\n")[-2] == "all hold"


def test_what_cannot_be_summed_is_refused() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), "d", axis_types=(AxisType.Auto,))

    def over(fn, x):
        return jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P())(x)

    with pytest.raises(TypeError, match=r"psum: x has dtype int32 on .*; accepted: bfloat16, float16, float32"):
        over(lambda x: ops.psum(x, "d"), jnp.ones(3, "int32"))
    with pytest.raises(ValueError, match=r"psum_scatter: x has shape \(\); accepted: a first axis that the 1 devices"):
        over(lambda x: ops.psum_scatter(x, "d"), jnp.float32(1))
    with pytest.raises(NameError, match="unbound axis name"):
        ops.psum(jnp.ones(3), "d")


def as_tree(terms: np.ndarray) -> np.ndarray:
    """The sum of 8 terms as a balanced binary tree."""
    a, b, c, d, e, f, g, h = terms.astype(np.float32)
    return (((a + b) + (c + d)) + ((e + f) + (g + h))).astype(terms.dtype)


def main() -> None:
    assert jax.device_count() == DEVICES
    random = np.random.default_rng(0)
    a, b = random.standard_normal((2, DEVICES, 1000)).astype(np.float32)
    terms = {}
    for dtype in ("float32", "bfloat16", "float16"):
        x = random.standard_normal((DEVICES, 16, 33)) * 2.0 ** random.integers(-6, 7, (DEVICES, 1, 1))
        terms[dtype] = x.astype(dtype)

    def loss(x):
        return jnp.vdot(ops.psum(jnp.sin(x), "d"), jnp.asarray(b[0]))

    def everything(terms, a, b):
        sums = jax.tree.map(lambda x: ops.psum(x, "d"), terms), jax.tree.map(lambda x: ops.psum_scatter(x, "d"), terms)
        return *sums, ops.psum(a * b, "d"), jax.grad(loss)(a)[None]

    # In one program, which takes a third of the time that three need.
    mesh = Mesh(np.array(jax.devices()), "d", axis_types=(AxisType.Auto,))
    program = jax.shard_map(
        lambda *x: everything(*jax.tree.map(lambda x: x[0], x)),
        mesh=mesh,
        in_specs=P("d"),
        out_specs=(P(), P("d"), P(), P("d")),
    )
    totals, scattered, products, gradients = detjax.jit(program)(terms, a, b)
    for dtype, x in terms.items():
        expected = as_tree(x)
        assert np.asarray(totals[dtype]).tobytes() == expected.tobytes(), dtype
        assert np.asarray(scattered[dtype]).tobytes() == expected.tobytes(), dtype
        # The negative control: in a different order the sum is different, unless the last rounding hides it.
        assert dtype != "float32" or as_tree(x[[1, 2, 3, 4, 5, 6, 7, 0]]).tobytes() != expected.tobytes()
    # Products are rounded before they are added.
    assert np.asarray(products).tobytes() == as_tree(a * b).tobytes()
    # Gradients are moved, not added: each term has the gradient of the sum.
    expected = np.asarray(jax.jit(lambda a: jnp.cos(a) * jnp.asarray(b[0]))(a))
    assert np.asarray(gradients).tobytes() == expected.tobytes()

    # The leaves of a tree are added over two axes of a mesh in row-major order.
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    sum_over_both = jax.shard_map(
        lambda x: ops.psum({"x": x[0]}, ("a", "b")), mesh=mesh, in_specs=P(("a", "b")), out_specs={"x": P()}
    )
    assert np.asarray(detjax.jit(sum_over_both)(jnp.asarray(a))["x"]).tobytes() == as_tree(a).tobytes()
    print("all hold")


if __name__ == "__main__":
    main()
