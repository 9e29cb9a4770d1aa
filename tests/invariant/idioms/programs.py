"""Derivatives inside, callbacks, devices, and numbers of the whole batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import AxisType, PartitionSpec

from tests.invariant.idioms.layers import weights
from tests.invariant.idioms.registry import Function, accepted, refused

DERIVATIVES = "Losses and derivatives"
OUTSIDE = "Devices, callbacks and printing"
BATCH = "Values of the whole batch"
ITS_SCALE = (
    "other rows would change it: compute the value per row (`axis=-1, keepdims=True`), or pass it as an argument"
)


@accepted(DERIVATIVES, "optax losses, one number per row", "average outside", "labelled")
def optax_losses() -> Function:
    def fn(logits: Array, labels: Array) -> Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses + jnp.sum(optax.huber_loss(logits), axis=-1)

    return fn


@refused(
    DERIVATIVES,
    "the mean loss of the batch as the result",
    "return one number per row, and average outside",
    "reduces over the batch",
    "labelled",
)
def mean_loss() -> Function:
    return lambda logits, labels: optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@accepted(
    DERIVATIVES,
    "`jax.custom_vjp`",
    "JAX computes no gradient of values that it closes over: pass trainable weights as arguments",
)
def custom_vjp() -> Function:
    @jax.custom_vjp
    def straight_through(x: Array) -> Array:
        return jnp.round(x)

    straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g * 3,))
    w = weights(8, 8)

    @jax.custom_vjp
    def bounded(x: Array) -> Array:
        return jnp.tanh(x @ w)

    bounded.defvjp(lambda x: (bounded(x), x), lambda x, g: (jnp.clip(g, -1, 1) @ w.T,))
    return lambda x: straight_through(4 * bounded(x) @ w)


@accepted(DERIVATIVES, "`jax.checkpoint`", "")
def checkpoint() -> Function:
    w = weights(8, 8)
    return jax.checkpoint(lambda x: jnp.tanh(jnp.tanh(x @ w) @ w))


def _energy(w: Array, x: Array) -> Array:
    return jnp.sum(jnp.tanh(x @ w) ** 2)


@accepted(DERIVATIVES, "`jax.grad` inside", "")
def grad_inside() -> Function:
    w = weights(8, 8)
    return lambda x: x - 0.1 * jax.vmap(jax.grad(lambda x: _energy(w, x)))(x)


@accepted(DERIVATIVES, "`jax.hessian` and `jax.jvp` inside", "", "vectors")
def hessian_inside() -> Function:
    w = weights(8, 8)

    def row(x: Array) -> Array:
        energy = lambda x: _energy(w, x)  # noqa: E731
        return jax.hessian(energy)(x) @ x + jax.jvp(jax.grad(energy), (x,), (x,))[1]

    return jax.vmap(row)


@accepted(
    DERIVATIVES,
    "`lax.stop_gradient`, and an inner gradient that sums over the whole batch",
    "a row's gradient does not involve other rows",
)
def grad_over_the_batch_inside() -> Function:
    w = weights(8, 8)
    return lambda x: x - 0.1 * jax.grad(lambda x: _energy(w, x))(lax.stop_gradient(x))


@accepted(DERIVATIVES, "loops: `lax.scan`, `lax.fori_loop`, `lax.cond`, `lax.switch`", "")
def loops() -> Function:
    w = weights(8, 8)

    def fn(x: Array) -> Array:
        x = lax.fori_loop(0, 2, lambda k, x: jnp.tanh(x @ w), x)
        x, _ = lax.scan(lambda x, scale: (lax.cond(scale > 1, jnp.sin, jnp.cos, scale * x), None), x, jnp.arange(3.0))
        return lax.switch(1, [jnp.sin, jnp.tanh], x)

    return fn


def _mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])


@accepted(
    OUTSIDE,
    "`jax.shard_map` around it, with JAX's default `check_vma`",
    "a device's rows are a batch",
    around=lambda fn: jax.shard_map(fn, mesh=_mesh(), in_specs=PartitionSpec("rows"), out_specs=PartitionSpec("rows")),
)
def shard_map_around() -> Function:
    w = weights(8, 8)
    return lambda x: jnp.tanh(x @ w).sum((1, 2))


@accepted(
    OUTSIDE,
    "`jax.shard_map` inside",
    "called for each row in sequence; whether it gives the same bits twice is up to it",
    has_gradient=False,
)
def shard_map_inside() -> Function:
    w = weights(8, 8)
    return jax.shard_map(lambda x: jnp.tanh(x @ w), mesh=_mesh(), in_specs=PartitionSpec(), out_specs=PartitionSpec())


@accepted(OUTSIDE, "`jax.debug.print`", "prints for each row")
def debug_print() -> Function:
    def fn(x: Array) -> Array:
        jax.debug.print("{x}", x=x[:, 0, 0])
        return 2 * x

    return fn


@accepted(
    OUTSIDE,
    "`jax.debug.callback` and `jax.debug.print` of a value over the whole batch",
    "only the print reads it, and sees each row alone",
)
def debug_callback_of_the_batch() -> Function:
    def fn(x: Array) -> Array:
        y = jnp.tanh(x)
        jax.debug.callback(lambda total: None, y.sum())
        return y

    return fn


@accepted(OUTSIDE, "`jax.pure_callback`", "called for each row in sequence, which is slow", has_gradient=False)
def pure_callback() -> Function:
    def host(x: Any) -> np.ndarray:
        return np.sinh(np.asarray(x))

    return lambda x: jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@accepted(
    BATCH,
    "shapes of the batch: `jnp.zeros((x.shape[0], ...))`, `jnp.pad` and `jnp.tile` of values that all rows share",
    "",
)
def padded_constants() -> Function:
    return lambda x: x + jnp.pad(jnp.zeros((x.shape[0], 5, 8)), ((0, 0), (1, 0), (0, 0)), constant_values=1.0)


@accepted(BATCH, "`jnp.take_along_axis` on a table that all rows share", "")
def repeated_tables() -> Function:
    def fn(x: Array) -> Array:
        table = jnp.tile(jnp.arange(6.0), (len(x), 1))
        return x + jnp.take_along_axis(table, jnp.tile(jnp.arange(6), (len(x), 1)), 1)[..., None]

    return fn


@refused(BATCH, "`x - x.mean(0)`", ITS_SCALE, "reduces over the batch")
def mean_over_rows() -> Function:
    return lambda x: x - x.mean(0)


@refused(BATCH, "`x - x.max(0)`", ITS_SCALE, "reduces over the batch")
def maximum_over_rows() -> Function:
    return lambda x: x - x.max(0)


@refused(BATCH, "`jnp.round(x / jnp.abs(x).max() * 127)`: one scale for the batch", ITS_SCALE, "reduces over the batch")
def scale_of_the_batch() -> Function:
    return lambda x: jnp.round(x / jnp.abs(x).max() * 127)


@refused(
    BATCH,
    "a branch or a mask that depends on all rows: `lax.cond(x.max() > 0, ...)`, `jnp.where(jnp.any(x > 0), ...)`",
    "other rows would decide: decide per row, or decide outside and pass the result as an argument",
    "reduces over the batch",
)
def branch_by_all_rows() -> Function:
    return lambda x: lax.cond(x.max() > 0, jnp.sin, jnp.cos, x)


@refused(
    BATCH,
    "`x - x[:1]`",
    "a row reads another one: pass that row as an argument without rows",
    "combines a row with another one",
)
def first_row() -> Function:
    return lambda x: x - x[:1]


@refused(
    BATCH,
    "`jnp.roll(x, 1, 0)`",
    "rows would change places: move rows outside",
    "joins rows in another order",
)
def rolled() -> Function:
    return lambda x: jnp.roll(x, 1, 0)


@refused(BATCH, "`x[::-1]`", "rows change places", "takes rows of the batch out of their positions")
def reversed_rows() -> Function:
    return lambda x: x[::-1]


@refused(
    BATCH,
    "`x * jnp.concatenate([x[1:], x[:1]])`",
    "a row reads its neighbour: pass the neighbours as an argument with rows",
    "joins rows in another order",
)
def neighbours() -> Function:
    return lambda x: x * jnp.concatenate([x[1:], x[:1]])


@refused(BATCH, "`jnp.argsort(x.sum((1, 2)))`: ranks among rows", "rank outside", "orders or counts rows of the batch")
def ranks() -> Function:
    return lambda x: jnp.argsort(x.sum((1, 2)))


@refused(
    BATCH,
    "`x.sum(-1) / x.shape[0]`",
    "a row would depend on the number of rows: divide outside",
    "computes with the number of rows",
)
def number_of_rows() -> Function:
    return lambda x: x.sum(-1) / x.shape[0]


@refused(
    BATCH,
    "`x + jnp.arange(x.shape[0])[:, None, None]`",
    "a row would depend on its position: pass values as an argument with rows",
    "depend on its position in the batch",
)
def place_of_a_row() -> Function:
    return lambda x: x + jnp.arange(x.shape[0], dtype=x.dtype)[:, None, None]


@refused(BATCH, "`jnp.cumsum` over the flattened batch", "sum over each row", "accumulates over the batch")
def cumsum_over_rows() -> Function:
    return lambda x: jnp.cumsum(x.reshape(-1, 8), axis=0).reshape(x.shape)


@refused(
    BATCH,
    "contrastive losses: products of every row with every other (`x @ x.T`)",
    "each result depends on two rows: compute the table outside, from the rows that `batch_invariant` returns",
    "combines every row with every other",
    "vectors",
)
def contrasts() -> Function:
    return lambda x: x @ x.T
