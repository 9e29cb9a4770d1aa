"""Training on the devices of several processes: gradients, states and weights have the bits of one device."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from detjax.rl.functional import Training
from detjax.rl.runs.run_state import RunState
from detjax.rl.trainer.losses import ClippedRatio, LogLikelihood
from detjax.rl.trainer.microbatches import Packed, Rows, Sample
from detjax.rl.trainer.placement import Placement, on_host
from detjax.rl.trainer.step import Plan
from detjax.rl.trainer.trainer import Trainer
from tests.rl.training_cases import ADAMW, network, samples, two_steps
from tests.support.bits import assert_same_bits, same_bits
from tests.support.processes import DEVICES, PROCESSES, join, run_in_processes
from tests.support.simulated_devices import ALL_HOLD

ALL = PROCESSES * DEVICES


def test_devices_of_two_processes_train_the_bits_of_one_device() -> None:
    run_in_processes(__name__, flags="--xla_backend_optimization_level=0")


def main(port: str, process: str) -> None:
    join(port, process)
    batches = samples(19, seed=0), samples(19, seed=1)
    model = network("qwen3, tied", "float32")
    expected = two_steps(model, batches, Plan(Rows(2, 64)))
    for plan in (
        Plan(Rows(3, 64), devices=ALL, is_sharded=True),
        Plan(Packed(64), devices=(jax.devices()[0], jax.devices()[-1]), rematerialized=True),
    ):
        assert_same_bits(two_steps(model, batches, plan), expected)
    reversed_order = two_steps(model, [batch[::-1] for batch in batches], Plan(Rows(3, 64), devices=ALL))
    assert not same_bits(reversed_order, expected)
    compare_trainers(model, batches)
    compare_functions(model, batches[0])
    check_refusals()
    print(ALL_HOLD)
    jax.distributed.shutdown()


def compare_trainers(model: Any, batches: Sequence[Sequence[Sample]]) -> None:
    """Reports and weights of the class that users have."""
    net, weights = model
    one, all_devices = (
        Trainer(net.with_weights(weights), ADAMW, ClippedRatio(0.3, 0.5), plan)
        for plan in (Plan(Rows(2, 64)), Plan(Rows(2, 64), devices=ALL, is_sharded=True))
    )
    for batch in batches:
        reports = one.step(batch), all_devices.step(batch)
        assert_same_bits(*(report.logprobs for report in reports))
        assert reports[0].gradient_norm == reports[1].gradient_norm
    assert_same_bits(jax.tree.map(on_host, all_devices.weights), one.weights)
    assert_same_bits(all_devices.logprobs(batches[0]), one.logprobs(batches[0]))


def compare_functions(model: Any, batch: Sequence[Sample]) -> None:
    """The pure functions, which take a mesh."""
    net, weights = model
    training, params = Training(net.with_weights(weights), ADAMW, LogLikelihood()), net.state(weights)
    results = []
    for mesh in (None, Mesh(np.array(jax.devices()), ("batch",))):
        given = training.loss_and_gradients(params, batch, microbatch=Rows(2, 64), mesh=mesh)
        state, norm = training.update(training.init(params), given.gradients)
        results.append(jax.tree.map(on_host, (given, state, norm)))
    assert_same_bits(*results)


def check_refusals() -> None:
    others = tuple(device for device in jax.devices() if device.process_index != jax.process_index())
    with pytest.raises(ValueError, match="Placement: none of the 4 devices belongs to this process, number"):
        _ = Placement(ALL, others).mesh
    with pytest.raises(ValueError, match="RunState: this is one of 2 processes"):
        RunState(Path(), {})


if __name__ == "__main__":
    main(*sys.argv[1:])
