"""Training on several devices against one: seconds of a step with the same batch, and bits after three steps.

    python -m benchmarks training_devices --layers 8 --out benchmarks/results/training-two-h100.json

The devices share the batch, masters and moments; weights are replicated. One device computes the shards of the batch in
sequence. Gradients of the first batch, and logprobs, weights, masters and moments after the steps are compared by
digests computed on the devices. The control has the sequences in another order. The exit code is 1 if bits differ
between numbers of devices, or if the control's are the same. `--skip-one` trains only on several devices, for a model
that does not fit on one.

`--small` takes seconds on a CPU with two devices simulated by `XLA_FLAGS=--xla_force_host_platform_device_count=2`.
"""

import dataclasses
import gc
import hashlib
import statistics
import time
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from benchmarks import study as options
from benchmarks.studies.training.measures import Sizes, samples
from benchmarks.study import Result, Run
from detjax.bench import command_line, presets
from detjax.cli.options import Option
from detjax.rl.trainer.losses import LogLikelihood
from detjax.rl.trainer.microbatches import Rows, Sample
from detjax.rl.trainer.optimizers import adamw
from detjax.rl.trainer.step import Plan, batch_gradients
from detjax.rl.trainer.trainer import Trainer

_COMPARED_STEPS = 3
"""The number of steps before bits are compared. The first one compiles."""


def study(
    run: Run,
    *,
    preset: options.Preset = "Qwen3-8B",
    layers: options.Layers = None,
    devices: Annotated[int, Option("Devices that share a batch; a power of two.", minimum=2)] = 2,
    sequences: Annotated[int, Option("Sequences of a microbatch.", minimum=1)] = 4,
    length: Annotated[int, Option("Tokens of a sequence.", minimum=16)] = 1024,
    microbatches: Annotated[int, Option("Microbatches per step, over all devices.", minimum=2)] = 8,
    rounds: Annotated[int, Option("Additional timed steps.", minimum=1)] = 4,
    one: Annotated[bool, Option("Also train on one device, and compare.", name="--one/--skip-one")] = True,
) -> Result:
    sizes = Sizes(preset, layers, sequences, length, microbatches, devices, rounds)
    if run.small:
        sizes = Sizes("tiny", 1, 2, 32, 2, devices, 1)
    batch = samples(sizes, presets.config(sizes.preset, sizes.layers).vocab_size)
    content: dict[str, Any] = {"sizes": dataclasses.asdict(sizes), "devices": devices}
    arms = {"one": (1, batch)} if one else {}
    arms |= {"several": (devices, batch)}
    arms |= {"several, another order": (devices, rotated(batch))} if one else {}
    for name, (count, given) in arms.items():
        content[name] = trained(sizes, count, given, timed=given is batch)
        command_line.print_line(f"{name}: {content[name]}")
        run.save(content)
    return Result(content, _compared(content) if one else "")


def _compared(content: dict[str, Any]) -> str:
    """Adds the comparison of one device with several, and returns its problem."""
    one, several, control = (content[name] for name in ("one", "several", "several, another order"))
    content["speed_over_one"] = one["seconds"] / several["seconds"]
    content["equal"] = {key: one["digests"][key] == several["digests"][key] for key in one["digests"]}
    # Logprobs differ in another order even if they are the same numbers.
    content["control_differs"] = control["digests"]["gradients"] != several["digests"]["gradients"]
    wrong = [key for key, equal in content["equal"].items() if not equal]
    if wrong:
        return f"bits differ between one device and {content['devices']}: {', '.join(wrong)}"
    return "" if content["control_differs"] else "the control has the same bits"


def rotated[T](batch: Sequence[T]) -> list[T]:
    """Returns a batch in another order, which adds other pairs: a reversed one may add the same ones."""
    return [*batch[1:], batch[0]]


def trained(sizes: Sizes, devices: int, batch: Sequence[Sample], *, timed: bool) -> dict[str, Any]:
    """Returns digests after the compared steps, and the median seconds of additional steps if it is timed."""
    plan = Plan(Rows(sizes.sequences, sizes.length), sizes.shards, devices, is_sharded=devices > 1, rematerialized=True)
    optimizer = adamw(1e-4, weight_decay=1e-4)
    trainer = Trainer(presets.decoder(sizes.preset, sizes.layers), optimizer, LogLikelihood(), plan)
    gc.collect()
    gradients = batch_gradients(trainer.network, trainer.weights, batch, LogLikelihood(), plan)
    digests, logprobs = {"gradients": _digest(gradients.leaves)}, []
    del gradients
    means = []
    for _ in range(_COMPARED_STEPS):
        logprobs = trainer.step(batch).logprobs
        means.append(float(np.mean(np.concatenate(logprobs))))
    digests["logprobs"] = hashlib.sha256(b"".join(x.tobytes() for x in logprobs)).hexdigest()
    digests["weights"] = _digest(trainer.weights)
    digests["state"] = _digest(jax.tree.leaves(trainer.state))
    seconds = []
    for _ in range(sizes.rounds if timed else 0):
        start = time.perf_counter()
        trainer.step(batch)
        jax.block_until_ready(trainer.weights)
        seconds.append(time.perf_counter() - start)
    memory = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    result = {"devices": devices, "digests": digests, "mean_logprobs": means, "rounds": seconds, "peak_bytes": memory}
    return result | ({"seconds": statistics.median(seconds)} if seconds else {})


def _digest(arrays: Sequence[Array]) -> str:
    """A digest of arrays: the sum of their bits, each times an odd number by position, modulo 2**32."""
    sums = [_sum(x) for x in arrays]
    return hashlib.sha256(b"".join(np.asarray(one).tobytes() for one in sums)).hexdigest()


@jax.jit
def _sum(x: Array) -> UInt32[Array, ""]:
    kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(x, kind).astype(jnp.uint32).reshape(-1)
    return jnp.sum(bits * (2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)
