"""Small functions, each with one defect that may give a row other bits in another batch, on the line that says so."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

W = jnp.asarray(np.random.default_rng(0).standard_normal((16, 16)) / 4, jnp.float32)
X = jnp.asarray(np.random.default_rng(1).standard_normal((3, 6, 16)), jnp.float32)
KEY = jax.random.key(3)
MESH = Mesh(np.array(jax.devices()[:1]), "devices")


def marked_line(fn: Callable[..., Any]) -> str:
    """The line of a function that ends in "# planted", as certificates name it."""
    lines, first = inspect.getsourcelines(inspect.unwrap(fn))
    (number,) = (first + index for index, line in enumerate(lines) if line.rstrip().endswith("# planted"))
    return f"{inspect.getsourcefile(inspect.unwrap(fn))}:{number}"


def sum_over_the_batch(x: Array) -> Array:
    return x - x.mean(axis=0, keepdims=True)  # planted


def batch_norm_in_training(x: Array) -> Array:
    y, _ = nn.BatchNorm(use_running_average=False, use_scale=False, use_bias=False).init_with_output(KEY, x)
    return y


def statistics_of_the_batch(x: Array) -> Array:
    deviation = jnp.sqrt(jnp.square(x).sum(axis=(0, 1), keepdims=True))  # planted
    return x / deviation


def scale_of_the_batch(x: Array) -> Array:
    largest = jnp.abs(x).max()  # planted
    return jnp.round(x / largest)


def every_row_meets_every_other(x: Array) -> Array:
    scores = jnp.einsum("btd,cd->btc", x, x[:, 0])  # planted
    return x + scores.max(axis=-1, keepdims=True)


def dropout_with_one_key(x: Array) -> Array:
    kept = jax.random.bernoulli(KEY, 0.9, x.shape)
    return jnp.where(kept, x, 0)  # planted


def noise_by_slot(x: Array) -> Array:
    keys = jax.vmap(lambda slot: jax.random.fold_in(KEY, slot))(jnp.arange(x.shape[0]))
    noise = jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(keys)
    return jnp.maximum(x, noise)  # planted


def mask_by_position_in_the_batch(x: Array) -> Array:
    return jnp.where((jnp.arange(x.shape[0]) < 2)[:, None, None], x, 0)  # planted


def number_of_the_slot(x: Array) -> Array:
    return x + jnp.arange(x.shape[0], dtype=x.dtype)[:, None, None]  # planted


def numbers_of_slots_alone(x: Array) -> Array:
    return jnp.arange(x.shape[0])  # planted


def loop_until_all_are_done(x: Array) -> Array:
    return lax.while_loop(
        lambda x: (jnp.abs(x).max(axis=(1, 2)) > 1).any(),  # planted
        lambda x: x * 0.5,
        x,
    )


def branch_if_any_row_wants(x: Array) -> Array:
    is_large = (x > 2).any()  # planted
    return lax.cond(is_large, lambda x: x * 2, lambda x: x, x)


def scatter_add_with_duplicates(x: Array) -> Array:
    groups = jnp.argmax(x[:, 0, :4], axis=-1)
    sums = jax.ops.segment_sum(x[:, 0], groups, 4)  # planted
    return x + sums.max()


def scatter_add_within_a_row(x: Array) -> Array:
    columns = jnp.asarray([0, 1, 1, 2, 2, 2])
    return jnp.zeros_like(x).at[:, columns].add(x)  # planted


def capacity_of_experts(x: Array) -> Array:
    flat = x.reshape(-1, x.shape[-1])
    chosen = jax.nn.one_hot(jnp.argmax(flat[:, :4], axis=-1), 4, dtype=jnp.int32)
    place = (jnp.cumsum(chosen, axis=0) * chosen).max(axis=-1)  # planted
    return jnp.where((place <= 5)[:, None], flat, 0).reshape(x.shape)


def tokens_sorted_by_expert(x: Array) -> Array:
    flat = x.reshape(-1, x.shape[-1])
    order = jnp.argsort(jnp.argmax(flat[:, :4], axis=-1))  # planted
    return flat[order][jnp.argsort(order)].reshape(x.shape)


def rows_rolled(x: Array) -> Array:
    return jnp.maximum(x, jnp.roll(x, 1, axis=0))  # planted


def first_row_read_by_all(x: Array) -> Array:
    return x + x[:1]  # planted


def cumulative_sum_over_the_batch(x: Array) -> Array:
    return jnp.cumsum(x, axis=0)  # planted


def length_of_the_longest(x: Array) -> Array:
    lengths = jnp.argmax(x[..., 0], axis=1)
    longest = lengths.max()  # planted
    return jnp.where(jnp.arange(x.shape[1])[None, :, None] <= longest, x, 0)


def scan_over_the_batch(x: Array) -> Array:
    return lax.scan(lambda carry, row: (carry + row, row - carry), jnp.zeros(x.shape[1:]), x)[1]  # planted


def split_by_batch_size(x: Array) -> Array:
    if x.shape[0] > 2:
        return x @ W
    return x[..., :8] @ W[:8] + x[..., 8:] @ W[8:]  # planted


def padded_to_a_bucket(x: Array) -> Array:
    padded = jnp.pad(x, ((0, -x.shape[0] % 4), (0, 0), (0, 0)))  # planted
    return (padded * 2)[: x.shape[0]]


def stock_product(x: Array) -> Array:
    return x @ W  # planted


def split_of_k(x: Array) -> Array:
    parts = x.reshape(*x.shape[:-1], 2, 8)
    return jnp.einsum("btsk,skn->btsn", parts, W.reshape(2, 8, 16)).max(axis=2)  # planted


def sum_of_a_row(x: Array) -> Array:
    return x - x.sum(axis=-1, keepdims=True)  # planted


def bfloat16_accumulation(x: Array) -> Array:
    narrow = x.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    return lax.dot_general(*narrow, (((2,), (0,)), ((), ())), preferred_element_type=jnp.bfloat16)  # planted


def convolution(x: Array) -> Array:
    return lax.conv_general_dilated(x, W[None], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))  # planted


def cumulative_sum(x: Array) -> Array:
    return jnp.cumsum(x, axis=1)  # planted


@functools.partial(jax.shard_map, mesh=MESH, in_specs=PartitionSpec(None, None, "devices"), out_specs=PartitionSpec())
def sum_over_devices(x: Array) -> Array:
    return lax.psum(x, "devices")  # planted


def exponential(x: Array) -> Array:
    return jnp.exp(x)  # planted


def product_that_may_fuse(x: Array) -> Array:
    return x * 3 + 1  # planted


def opaque_call(x: Array) -> Array:
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda x: np.asarray(x), shape, x, vmap_method="sequential")  # planted


MIXES = {
    sum_over_the_batch: "reduces over the batch",
    statistics_of_the_batch: "reduces over the batch",
    scale_of_the_batch: "reduces over the batch",
    every_row_meets_every_other: "combines every row with every other",
    dropout_with_one_key: "depend on its position in the batch",
    noise_by_slot: "depend on its position in the batch",
    mask_by_position_in_the_batch: "depend on its position in the batch",
    number_of_the_slot: "depend on its position in the batch",
    numbers_of_slots_alone: "gives a result whose rows",
    loop_until_all_are_done: "reduces over the batch",
    branch_if_any_row_wants: "reduces over the batch",
    scatter_add_with_duplicates: "writes numbers of different rows into one array",
    capacity_of_experts: "accumulates over the batch",
    tokens_sorted_by_expert: "orders or accumulates over the batch",
    rows_rolled: "takes some rows of the batch",
    first_row_read_by_all: "takes some rows of the batch",
    cumulative_sum_over_the_batch: "accumulates over the batch",
    length_of_the_longest: "reduces over the batch",
    scan_over_the_batch: "scans over the batch",
    split_by_batch_size: "for a batch of 2",
    padded_to_a_bucket: "pads the batch",
    opaque_call: "is not known to keep rows separate",
}
"""Functions that mix rows, and the reason that certificates give for their marked line."""

CHOSEN = {
    stock_product: "adds products in blocks",
    split_of_k: "adds products in blocks",
    sum_of_a_row: "adds in an order",
    bfloat16_accumulation: "the sums are bfloat16",
    convolution: "convolves",
    cumulative_sum: "accumulates by a tree",
    scatter_add_within_a_row: "equal indices",
    sum_over_devices: "adds over devices",
    exponential: "approximate it with different bits",
    product_that_may_fuse: "fused multiply-add",
}
"""Functions that leave an order or a rounding to XLA, and the reason that certificates give for their marked line."""
