"""A step of training: no layout, device, microbatch or rematerialization changes a bit of it."""

import functools
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import detjax
from detjax import models
from detjax.models.network import abstract, split
from detjax.operands.options import Distribution
from detjax.rl.trainer.gradients import Loss, ShardTree, WeightSums, shard_bounds
from detjax.rl.trainer.losses import LogLikelihood
from detjax.rl.trainer.microbatches import Packed, Rows, Sample
from detjax.rl.trainer.optimizers import adamw
from detjax.rl.trainer.placement import Placement
from detjax.rl.trainer.step import Plan, _programs, batch_gradients
from detjax.rl.trainer.train_state import initial_state, update, weights_of
from detjax.runtime import compilation
from tests.rl.training_cases import ADAMW, CONFIGS, LOSS, network, samples, two_steps
from tests.support.bits import assert_same_bits, same_bits
from tests.support.simulated_devices import command_of

BATCHES = samples(21, seed=0), samples(21, seed=1)
BASE = Plan(Rows(1, 64), shards=2)
"""Shards of 10 and 11 sequences."""

PLANS = {
    "rows of 2, padded by 16": Plan(Rows(2, 80), shards=2),
    "rows of 4, rematerialized": Plan(Rows(4, 64), shards=2, rematerialized=True),
    "rows of 8, padded by 112": Plan(Rows(8, 176), shards=2),
    "all": Plan(Rows(11, 64), shards=2),
    "packed in 64": Plan(Packed(64), shards=2),
    "packed in 256, rematerialized": Plan(Packed(256), shards=2, rematerialized=True),
    "packed in 1024": Plan(Packed(1024), shards=2),
}
QUICK = [
    ("qwen2", "float32", "rows of 2, padded by 16"),
    ("deepseek-v3", "float32", "packed in 256, rematerialized"),
    ("gemma3", "bfloat16", "packed in 64"),
    ("granite", "bfloat16", "packed in 64"),
]
NIGHTLY = [
    ("qwen2", "bfloat16", "packed in 64"),
    ("deepseek-v3", "float32", "rows of 2, padded by 16"),
    ("gemma3", "bfloat16", "rows of 2, padded by 16"),
    # The test of devices compares layouts of this model, too.
    *(("qwen3, tied", "float32", name) for name in PLANS),
]
LOSSES: dict[str, Loss] = {"qwen2": LogLikelihood()}


@functools.cache
def base(model: str, dtype: str) -> dict[str, Any]:
    return two_steps(network(model, dtype), BATCHES, BASE, loss=LOSSES.get(model, LOSS))


@functools.cache
def gradients(shards: int, first: int = 0, end: int = 21) -> Any:
    net, weights = network("qwen3, tied", "float32")
    plan = Plan(Rows(1, 64), shards=shards)
    return batch_gradients(net, weights, BATCHES[0][first:end], LOSS, plan).leaves


@pytest.mark.parametrize(
    ("model", "dtype", "name"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY)]
)
def test_two_steps_have_the_same_bits_for_every_layout(model: str, dtype: str, name: str) -> None:
    loss = LOSSES.get(model, LOSS)
    result = two_steps(network(model, dtype), BATCHES, PLANS[name], loss=loss, update_plan=BASE)
    assert_same_bits(result, base(model, dtype))


DEVICES = {
    "two with parts, four with all": (
        Plan(Rows(3, 48), devices=2, is_sharded=True),
        Plan(Packed(64), devices=4, rematerialized=True),
    ),
    "eight": (
        Plan(Packed(128), devices=4),
        Plan(Packed(64), devices=8, is_sharded=True, rematerialized=True),
    ),
}


@pytest.mark.parametrize("name", ["two with parts, four with all", pytest.param("eight", marks=pytest.mark.nightly)])
def test_devices_that_share_batch_and_state_change_no_bit(name: str) -> None:
    # At full optimization, whatever these tests run with.
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = command_of("tests.rl.test_training", name)
    command[1:1] = ["-W", "error"]
    root = Path(__file__).parents[2]
    run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.split("\n")[-2] == "all hold"


def main(name: str) -> None:
    """Two steps on one and on several of 8 devices, with a state that each of them has, or has a part of."""
    assert jax.device_count() == 8
    batches = samples(19, longest=33, seed=0), samples(19, longest=33, seed=1)
    model = network("qwen3, tied", "float32")
    expected = two_steps(model, batches, Plan(Rows(2, 48)))
    for plan in DEVICES[name]:
        assert_same_bits(two_steps(model, batches, plan), expected)
    print("all hold")


# What a gradient is.


def logprobs_in_float32(logits: jax.Array, sample: Sample) -> jax.Array:
    """The logprobs of a completion, by XLA's own operations."""
    targets = sample.tokens[sample.prompt_tokens :, None]
    places = slice(sample.prompt_tokens - 1, len(sample.tokens) - 1)
    return jnp.take_along_axis(jax.nn.log_softmax(logits[places]), jnp.asarray(targets), axis=1)[:, 0]


@pytest.mark.parametrize("loss", [LogLikelihood(), LOSS], ids=["log likelihood", "clipped ratio"])
def test_gradients_are_those_of_the_loss_as_it_is_written(loss: Any) -> None:
    model, some = "qwen2" if loss == LogLikelihood() else "qwen3, tied", BATCHES[0][:5]
    net, weights = network(model, "float32")
    tokens = np.stack([np.pad(sample.tokens, (0, 64 - len(sample.tokens))) for sample in some])

    def value(weights: Any) -> jax.Array:
        logits, total = net.with_weights(weights)(jnp.asarray(tokens)), jnp.float32(0)
        for row, sample in zip(logits, some, strict=True):
            logprobs = logprobs_in_float32(row, sample)
            if loss == LogLikelihood():
                terms = logprobs * sample.weights
            else:
                ratio = jnp.exp(logprobs - sample.old_logprobs)
                clipped = jnp.clip(ratio, 1 - loss.low, 1 + loss.high)
                terms = jnp.minimum(ratio * sample.weights, clipped * sample.weights)
            total = total - terms.sum()
        return total

    with detjax.use_backend("stock"):
        expected = detjax.jit(jax.grad(value))(weights)
    result = batch_gradients(net, weights, some, loss, BASE)
    for one, other in zip(result.leaves, expected, strict=True):
        scale = float(jnp.abs(other).max())
        assert scale > 0
        np.testing.assert_allclose(one[: other.size], np.ravel(other), rtol=1e-4, atol=2e-5 * scale)
        assert not one[other.size :].any()


def test_a_table_that_is_embedding_and_head_has_the_gradients_of_both() -> None:
    net, weights = network("qwen3, tied", "float32")
    add, empty = _programs(net, LOSS, BASE.placement, False, Distribution())
    sums = empty(weights)
    for placed in BASE.layout.microbatches(BATCHES[0][:3]):
        sums, _ = add(weights, sums, jax.tree.map(lambda x: x[None], placed.arrays))
    place = net.paths.index(("embedding", "weight"))
    (products, lookups), together = sums[place], np.asarray(gradients(2, 0, 1)[place])
    assert products is not None and lookups is not None
    assert all(len(set(np.asarray(x).ravel().tolist())) > 99 for x in (products, lookups))
    # Only rows of tokens that were read have a gradient from lookups.
    read = {int(token) for sample in BATCHES[0][:3] for token in sample.tokens}
    assert set(np.flatnonzero(np.asarray(lookups)[0].any(axis=1)).tolist()) <= read
    assert together.any()
    assert all((total.lookups is None) == (index != place) for index, total in enumerate(sums))


@pytest.mark.parametrize("max_norm", [None, 0.5, 1e6])
def test_gradients_beyond_a_norm_are_scaled_down_to_it(max_norm: float | None) -> None:
    _, weights = network("qwen3, tied", "float32")
    given = [np.asarray(leaf) for leaf in gradients(2)]
    norm = np.sqrt(sum((leaf.astype(np.float64) ** 2).sum() for leaf in given))
    state = initial_state(weights, ADAMW, BASE.placement)
    leaves = tuple(map(jnp.asarray, given))
    state, _, result = update(state, leaves, weights, ADAMW, BASE.placement, max_norm=max_norm)
    np.testing.assert_allclose(result, norm, rtol=1e-6)
    scale = 1.0 if max_norm is None else max_norm / max(norm, max_norm)
    for moments, leaf in zip(state.optimizer, given, strict=True):
        np.testing.assert_allclose(moments.mean, leaf * (scale * 0.1), rtol=1e-5, atol=1e-12)


def test_a_weight_that_is_not_trained_has_no_gradient_and_no_decay() -> None:
    net, weights = network("deepseek-v3", "float32")
    fixed = net.paths.index(("layers", 0, "mlp", "router", "correction"))
    assert net.trained == tuple(index != fixed for index in range(len(weights)))
    state = initial_state(weights, ADAMW, BASE.placement, trained=net.trained)
    before = jax.tree.map(np.array, state)
    leaves = batch_gradients(net, weights, BATCHES[0], LOSS, BASE).leaves
    assert not leaves[fixed].any()
    # Whatever a gradient it is given, it is not in the norm either.
    leaves = tuple(jnp.ones_like(leaf) if index == fixed else leaf for index, leaf in enumerate(leaves))
    after, rounded, norm = update(state, leaves, weights, ADAMW, BASE.placement, max_norm=1.0)
    squares = [np.square(np.asarray(leaf, np.float64)).sum() for leaf in leaves]
    np.testing.assert_allclose(norm, np.sqrt(sum(squares) - squares[fixed]), rtol=1e-6)
    assert after.optimizer[fixed] is None
    for index, (one, other) in enumerate(zip(after.masters, before.masters, strict=True)):
        assert same_bits(one, other) == (index == fixed)
    assert_same_bits(rounded, weights_of(after, weights, BASE.placement))
    assert_same_bits(rounded[fixed], weights[fixed])


def test_a_state_that_is_not_donated_stays_as_it_is() -> None:
    _, weights = network("qwen3, tied", "float32")
    state, leaves = initial_state(weights, ADAMW, BASE.placement), gradients(2)
    before = jax.tree.map(np.array, state)
    kept = update(state, leaves, weights, ADAMW, BASE.placement, donated=False)
    assert_same_bits(state, before)
    given = update(state, leaves, weights, ADAMW, BASE.placement)
    assert_same_bits(given, kept)
    assert all(master.is_deleted() for master in state.masters)


@pytest.mark.parametrize(("max_norm", "dtype"), [(None, "float16"), (0.5, "bfloat16"), (0.5, "float32")])
def test_an_update_in_one_pass_has_the_bits_of_its_steps(max_norm: float | None, dtype: str) -> None:
    """The optimizer without its own pass is any optimizer of optax': clipping, moments and addition are steps."""
    _, weights = network("qwen3, tied", "float32")
    weights, leaves = tuple(weight.astype(dtype) for weight in weights), gradients(2)
    one_pass = adamw(1e-3, weight_decay=0.1)
    in_steps = optax.GradientTransformation(one_pass.init, one_pass.update)
    results = []
    for optimizer in (one_pass, in_steps):
        state, rounded = initial_state(weights, optimizer, BASE.placement), weights
        for _ in range(2):
            state, rounded, _ = update(state, leaves, rounded, optimizer, BASE.placement, max_norm=max_norm)
        assert_same_bits(rounded, weights_of(state, weights, BASE.placement))
        results.append((state, rounded))
    assert_same_bits(*results)
    assert not same_bits(results[0][1], weights)


def test_masters_are_rounded_to_weights_of_any_dtype_and_a_state_comes_back_from_the_host() -> None:
    _, weights = network("qwen2", "bfloat16")
    state = initial_state(weights, ADAMW, BASE.placement)
    assert_same_bits(weights_of(state, weights, BASE.placement), weights)
    again = BASE.placement.placed(jax.device_get(state))
    assert_same_bits(again, state)
    moved = state._replace(masters=tuple(x * np.float32(1 + 2.0**-12) for x in state.masters))
    for one, weight in zip(weights_of(moved, weights, BASE.placement), weights, strict=True):
        assert_same_bits(one, (weight.astype("float32") * np.float32(1 + 2.0**-12)).astype("bfloat16"))


# Shards.


def test_shards_are_contiguous_and_differ_by_one_sequence_at_most() -> None:
    assert shard_bounds(21, 2) == [(0, 10), (10, 21)]
    assert shard_bounds(3, 4) == [(0, 0), (0, 1), (1, 2), (2, 3)]
    for sequences in (1, 7, 8, 19, 100):
        for shards in (1, 2, 8):
            bounds = shard_bounds(sequences, shards)
            assert bounds[0][0] == 0 and bounds[-1][1] == sequences
            assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))
            assert max(end - first for first, end in bounds) - min(end - first for first, end in bounds) <= 1


def sums_of(*numbers: float) -> tuple[WeightSums, ...]:
    return (WeightSums(jnp.float32(numbers), None), WeightSums(None, 2 * jnp.float32(numbers)))


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_shards_are_added_as_a_tree(shards: int) -> None:
    numbers = np.random.default_rng(0).standard_normal((8, 100)).astype(np.float32)[:shards]
    tree, expected = ShardTree(), list(numbers)
    for row in numbers:
        tree.add(sums_of(*row))
    while len(expected) > 1:
        expected = [left + right for left, right in zip(expected[::2], expected[1::2], strict=True)]
    total = tree.total()
    assert_same_bits(total, (WeightSums(expected[0], None), WeightSums(None, 2 * expected[0])))
    # The negative control: left to right.
    assert same_bits(functools.reduce(np.add, numbers), expected[0]) == (shards < 4)


def test_other_numbers_of_shards_are_refused() -> None:
    tree = ShardTree()
    for count in range(1, 8):
        tree.add(sums_of(1.0))
        if count & (count - 1):
            with pytest.raises(ValueError, match=f"ShardTree.total: {count} shards; accepted: a power of two"):
                tree.total()
    for shards in (0, -2, 3, 12):
        with pytest.raises(ValueError, match=f"Placement: shards is {shards}; accepted: powers of two"):
            Plan(Rows(1, 64), shards=shards)
    for devices in (0, 3, 16):
        with pytest.raises(
            ValueError, match=f"Placement: devices is {devices}; accepted: powers of two up to shards, 8"
        ):
            Plan(Rows(1, 64), devices=devices)
    with pytest.raises(ValueError, match=r"Placement: devices is 8; accepted: up to \d+, JAX's devices"):
        assert Placement(devices=8).mesh or jax.device_count() >= 8


def test_one_sequence_has_its_gradient_whatever_the_number_of_shards() -> None:
    first, second = gradients(2, 4, 5), gradients(4, 4, 5)
    cut = [x[: min(len(x), len(y))] for x, y in zip(first, second, strict=True)]
    assert_same_bits(cut, [y[: len(x)] for x, y in zip(cut, second, strict=True)])


def test_a_batch_of_nothing_is_refused() -> None:
    net, weights = network("qwen3, tied", "float32")
    with pytest.raises(ValueError, match="batch_gradients: no samples; accepted: at least one"):
        batch_gradients(net, weights, [], LOSS, BASE)
    # The number counts in the batch, not in the shard that the sequence is in.
    with pytest.raises(ValueError, match="sequence 2 has 65 tokens; accepted: at most 64"):
        batch_gradients(net, weights, [BATCHES[0][1], *samples(2, longest=65)], LOSS, BASE)


# Negative controls: what must differ.


def test_another_number_of_shards_gives_other_bits() -> None:
    pairs = zip(gradients(2), gradients(4), strict=True)
    assert not all(same_bits(x[: len(y)], y[: len(x)]) for x, y in pairs)


def test_another_order_of_the_samples_gives_other_bits() -> None:
    net, weights = network("qwen3, tied", "float32")
    exchanged = [BATCHES[0][1], BATCHES[0][0], *BATCHES[0][2:]]
    assert not same_bits(batch_gradients(net, weights, exchanged, LOSS, BASE).leaves, gradients(2))


def test_gradients_that_are_averaged_step_by_step_depend_on_the_microbatches() -> None:
    def averaged(parts: int) -> Any:
        """The mean over several microbatches of 20 sequences, by Optax, times their number, which is a power of two."""
        size, steps = 20 // parts, optax.MultiSteps(optax.sgd(1.0), parts)
        updates, state = None, steps.init(gradients(2, 0, 5))
        for part in range(parts):
            with jax.numpy_dtype_promotion("standard"):
                updates, state = steps.update(gradients(2, part * size, (part + 1) * size), state)
        return jax.tree.map(lambda x: -x * parts, updates)

    two, four, whole = averaged(2), averaged(4), gradients(2, 0, 20)
    assert not same_bits(two, four)
    for one, other in zip(four, whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5 * float(jnp.abs(other).max()))


def test_stock_gradients_depend_on_the_microbatches() -> None:
    net, weights = network("qwen3, tied", "float32")
    with detjax.use_backend("stock"):
        results = [batch_gradients(net, weights, BATCHES[0], LOSS, Plan(Rows(rows, 64), 1)).leaves for rows in (1, 7)]
    assert not same_bits(*results)


# Memory.


def test_sums_are_updated_where_they_lie_without_a_second_copy() -> None:
    sizes = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 1024, "layers": 2, "windows": (None, None)}
    config = models.DecoderConfig(**{**vars(CONFIGS["qwen3, tied"]), **sizes})
    net, weights = split(abstract(lambda: models.Decoder(config, rngs=nnx.Rngs(0), dtype="bfloat16")))
    weights = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in weights)
    plan = Plan(Rows(1, 16), shards=1)
    add, empty = _programs(net, LogLikelihood(), plan.placement, False, Distribution())
    sums = jax.eval_shape(empty, weights)
    (placed,) = plan.layout.microbatches(samples(2, longest=16)[1:])
    microbatch = jax.tree.map(lambda x: x[None], placed.arrays)
    memory: Any = compilation.compiled(add, weights, sums, microbatch).memory_analysis()  # pyright: ignore
    taken = sum(4 * x.size for x in jax.tree.leaves(sums))
    assert memory.alias_size_in_bytes == taken
    # One weight's gradient at a time, and the largest table in float32.
    assert memory.temp_size_in_bytes < 0.6 * taken


if __name__ == "__main__":
    main(*sys.argv[1:])
