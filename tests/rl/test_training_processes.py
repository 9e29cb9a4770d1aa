"""Training on the devices of several processes: gradients, states and weights have the bits of one device."""

import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from detjax.models import Decoder
from detjax.rl.functional import Training
from detjax.rl.runs.run_state import RunState
from detjax.rl.trainer.microbatches import Rows, Sample
from detjax.rl.trainer.placement import Placement, on_host
from detjax.rl.trainer.step import Plan
from detjax.rl.trainer.trainer import Trainer
from tests.rl.training_cases import ADAMW, LOSS, network, samples
from tests.support.bits import assert_same_bits, same_bits
from tests.support.processes import DEVICES, PROCESSES, join, run_in_processes
from tests.support.simulated_devices import ALL_HOLD

ALL = PROCESSES * DEVICES
LAYOUT = Rows(2, 48)


@pytest.mark.parametrize("part", ["trainers", pytest.param("functions", marks=pytest.mark.nightly)])
def test_devices_of_two_processes_train_the_bits_of_one_device(part: str) -> None:
    run_in_processes(__name__, part, flags="--xla_backend_optimization_level=0")


def main(port: str, process: str, part: str) -> None:
    join(port, process)
    batches = samples(11, longest=33, seed=0), samples(11, longest=33, seed=1)
    net, weights = network("qwen3, tied", "float32")
    model = net.with_weights(weights)
    one = Trainer(model, ADAMW, LOSS, Plan(LAYOUT))
    if part == "functions":
        compare_functions(one, model, batches[0])
    else:
        compare_trainers(one, model, batches)
        check_refusals()
    print(ALL_HOLD)
    jax.distributed.shutdown()


def compare_trainers(one: Trainer, model: Decoder, batches: Sequence[Sequence[Sample]]) -> None:
    """Reports, states and weights where each device of both processes has a part of the state."""
    parts, other_order = (Trainer(model, ADAMW, LOSS, Plan(LAYOUT, devices=ALL, is_sharded=True)) for _ in range(2))
    for batch in batches:
        report = one.step(batch)
        assert_same_bits(tuple(parts.step(batch)), tuple(report))
        other_order.step(batch[::-1])
    assert_same_bits(jax.tree.map(on_host, parts.state), jax.device_get(one.state))
    assert_same_bits(jax.tree.map(on_host, parts.weights), one.weights)
    assert_same_bits(parts.logprobs(batches[0]), one.logprobs(batches[0]))
    assert not same_bits(jax.tree.map(on_host, other_order.weights), one.weights)


def compare_functions(one: Trainer, model: Decoder, batch: Sequence[Sample]) -> None:
    """The pure functions on a device of each process, which has the whole state, against the trainer's first step."""
    training = Training(model, ADAMW, LOSS)
    params = training.network.state(one.weights)
    mesh = Mesh(np.array([jax.devices()[0], jax.devices()[-1]]), ("batch",))
    given = training.loss_and_gradients(params, batch, microbatch=LAYOUT, mesh=mesh)
    state, norm = training.update(training.init(params), given.gradients)
    first = Trainer(model, ADAMW, LOSS, Plan(LAYOUT))
    report = first.step(batch)
    assert_same_bits((given.logprobs, float(norm)), tuple(report))
    assert_same_bits(jax.tree.map(on_host, state.training), jax.device_get(first.state))
    assert_same_bits(jax.tree.map(on_host, state.params), first.params)


def check_refusals() -> None:
    others = tuple(device for device in jax.devices() if device.process_index != jax.process_index())
    with pytest.raises(ValueError, match="Placement: none of the 4 devices belongs to this process, number"):
        _ = Placement(ALL, others).mesh
    with pytest.raises(ValueError, match="RunState: this is one of 2 processes"):
        RunState(Path(), {})


if __name__ == "__main__":
    main(*sys.argv[1:])
