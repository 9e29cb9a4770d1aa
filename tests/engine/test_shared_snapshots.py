"""Snapshots of slots of a model that devices share: programs compiled in advance restore them."""

import jax
import numpy as np

from detjax.engine import BatchShapes, SamplingVariant, StepLoop, StepLoopConfig
from detjax.models import mesh_of, sharded
from detjax.runtime import compilation
from tests.models.shallow_models import shallow
from tests.support.bits import assert_same_bits
from tests.support.simulated_devices import ALL_HOLD, run_on_devices

CONFIG = StepLoopConfig(
    shapes=BatchShapes.for_chunks(slots=3, prefill_chunk=8, mixes=False),
    num_pages=4,
    pages_per_sequence=2,
    variants=(SamplingVariant(filtered=False, top_logprobs=0),),
)


def main() -> None:
    """Takes a slot's rows and puts them into another slot, from the device and from the host."""
    mesh = mesh_of(2)
    assert mesh is not None
    runner = StepLoop.for_model(sharded(shallow("qwen3-next", 1, 2), mesh), CONFIG)._runner
    programs = runner.programs([])
    for program in programs.by_key().values():
        if program.size == "slot":
            arguments = programs.network, programs.parameters, *program.args
            runner._compiled[program.key] = compilation.compiled(program.fn, *arguments, **program.static)
    assert len(runner._compiled) == 2
    draw = np.random.default_rng(0)
    state = jax.tree.map(
        lambda x: jax.device_put(draw.standard_normal(x.shape).astype(x.dtype), x.sharding), runner._state
    )
    runner._state, expected = state, jax.tree.map(np.array, state)
    for target, is_on_host in ((1, False), (2, True)):
        rows = runner.take_slot(0)
        runner.put_slot(target, jax.tree.map(np.asarray, rows) if is_on_host else rows)
        for x in jax.tree.leaves(expected):
            x[target] = x[0]
        jax.tree.map(assert_same_bits, runner._state, expected)
    print(ALL_HOLD)


def test_two_devices_restore_a_slot_by_programs_compiled_in_advance() -> None:
    run_on_devices(__name__, devices=2)


if __name__ == "__main__":
    main()
