"""A plain Flax model, trained on one, two and four devices to the same bits.

python examples/train_wrapped_model.py
"""

import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import detjax
from detjax import ops

STEPS, ROWS, WIDTH = 3, 32, 64
SHARDS = 4  # parts of a batch, whose gradients are added as a tree; bits depend on it, as on a seed


@functools.partial(detjax.batch_invariant, batch_axes=(None, 0, 0))
def losses(model: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns a loss for each row."""
    return optax.softmax_cross_entropy_with_integer_labels(model(x).astype(jnp.float32), labels)


def gradient(graph: Any, devices: int, weights: Any, *rows: Any) -> Any:
    """Returns the mean gradient of a batch, on a device with some of its shards."""
    # JAX would add the gradients of shared values in an order that depends on the number of devices.
    weights = jax.lax.pcast(weights, "data", to="varying")
    loss = lambda weights, shard: losses(nnx.merge(graph, weights), *shard).sum() / ROWS  # noqa: E731
    shards = [part.reshape(SHARDS // devices, ROWS // SHARDS, *part.shape[1:]) for part in rows]
    terms = jax.lax.map(lambda shard: jax.grad(loss)(weights, shard), shards)
    for _ in range((SHARDS // devices).bit_length() - 1):
        terms = jax.tree.map(lambda term: term[::2] + term[1::2], terms)
    return ops.psum(jax.tree.map(lambda term: term[0], terms), "data")  # the rest of the tree


def train(devices: int) -> str:
    """Trains on a power of two up to SHARDS devices, and returns a digest of the weights."""
    linear = functools.partial(nnx.Linear, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))  # the weights are float32
    model = nnx.Sequential(linear(WIDTH, WIDTH), nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(1)), nnx.gelu, linear(WIDTH, 10))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    mesh, data = jax.sharding.Mesh(jax.devices()[:devices], ("data",)), jax.P("data")
    part = functools.partial(gradient, nnx.graphdef(model), devices)
    step = detjax.jit(jax.shard_map(part, mesh=mesh, in_specs=(jax.P(), data, data), out_specs=jax.P()))
    for random in map(np.random.default_rng, range(STEPS)):
        x, labels = random.standard_normal((ROWS, WIDTH), np.float32), random.integers(0, 10, ROWS, np.int32)
        optimizer.update(model, jax.device_get(step(nnx.state(model), x, labels)))
    weights = jax.device_get(jax.tree.leaves(nnx.state(model)))
    return hashlib.sha256(b"".join(map(bytes, weights))).hexdigest()


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)  # simulated devices, without an accelerator
    digests = {devices: train(devices) for devices in (1, 2, 4) if devices <= jax.device_count()}
    print(f"weights after {STEPS} steps on {', '.join(map(str, digests))} devices: {len({*digests.values()})} digest")
