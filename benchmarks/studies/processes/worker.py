"""A process of the study: it joins the others, has one device of its own, and writes what it computed as JSON."""

import dataclasses
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import jax

from benchmarks.studies import training_devices
from benchmarks.studies.training.measures import Sizes as TrainingSizes
from benchmarks.studies.training.measures import samples
from detjax.bench import presets
from detjax.bench.serve import Workload, digest
from detjax.engine import Engine, EngineClosed, EngineConfig, Request
from detjax.engine.watchdog import StepTimeout
from detjax.models import mesh_of

FAILURE: Final = "the engine failed: "
"""The beginning of the line that says why."""
JOIN_SECONDS: Final = 120
"""Time limit for the other processes to start."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a run.

    Attributes:
        preset: the model's shape.
        layers: its layers.
        requests: the number of requests.
        prompt: minimum and maximum tokens of a prompt.
        output: minimum and maximum tokens of an answer.
        engine: the engine's settings.
        sequences: sequences of a microbatch of training.
        length: their tokens.
        step_seconds: the engine's limit for a step, after which a lost process is noticed. A process may wait as long
            for another one that compiles.
    """

    preset: str = "Qwen3-8B"
    layers: int = 4
    requests: int = 64
    prompt: tuple[int, int] = (16, 200)
    output: tuple[int, int] = (20, 140)
    engine: EngineConfig = EngineConfig(  # noqa: RUF009 - it is frozen
        max_samples=64, token_budget=1024, max_length=384, num_pages=192, top_logprobs=0
    )
    sequences: int = 4
    length: int = 1024
    step_seconds: float = 30.0

    def drawn(self) -> list[Request]:
        """Returns the requests."""
        vocabulary = presets.config(self.preset, self.layers).vocab_size
        return Workload(self.requests, self.prompt, self.output, temperature=0.8).draw(vocabulary)

    def settings(self) -> EngineConfig:
        """Returns the engine's settings with the limit for a step."""
        return dataclasses.replace(self.engine, step_seconds=self.step_seconds)


SMALL: Final = Sizes(
    "tiny",
    1,
    3,
    (4, 20),
    (4, 9),
    EngineConfig(max_samples=2, token_budget=16, max_length=128, num_pages=3, top_logprobs=0),
    2,
    32,
    8.0,
)


def training(sizes: Sizes, processes: int) -> dict[str, Any]:
    """Returns digests of gradients, logprobs, weights and state: on a device of this process, and on all devices."""
    given = TrainingSizes(sizes.preset, sizes.layers, sizes.sequences, sizes.length, 2 * processes, processes, rounds=2)
    batch = samples(given, presets.config(sizes.preset, sizes.layers).vocab_size)
    arms = {
        "one": (1, batch),
        "several": (processes, batch),
        "several, another order": (processes, training_devices.rotated(batch)),
    }
    results = {}
    for name, (devices, order) in arms.items():
        results[name] = training_devices.trained(given, devices, order, timed=order is batch)
        gc.collect()
    return results


def answers(sizes: Sizes, processes: int) -> dict[str, Any]:
    """Returns digests of answers of an engine on a device of this process, and on all devices in lockstep."""
    results = {}
    for name, devices in {"one": 1, "several": processes}.items():
        with Engine(presets.decoder(sizes.preset, sizes.layers, mesh_of(devices)), config=sizes.settings()) as engine:
            results[name] = digest(engine.generate(sizes.drawn()))
        gc.collect()
    return results


def lost(sizes: Sizes, processes: int) -> dict[str, Any]:
    """Answers until the last process kills itself amid a request; the others' engines then have to fail.

    Never returns: the exit code of this process, its output and the parent's clock are the result.
    """
    is_last = jax.process_index() == processes - 1
    engine = Engine(presets.decoder(sizes.preset, sizes.layers, mesh_of(processes)), config=sizes.settings())
    engine.generate(sizes.drawn())  # all programs are compiled
    print("answering", flush=True)
    seen = threading.Event()
    futures = [engine.submit(request, lambda _: seen.set()) for request in sizes.drawn()]
    seen.wait()
    if is_last:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:  # the failure comes with these answers or with later ones
            for future in futures:
                future.result()
            futures = [engine.submit(request) for request in sizes.drawn()]
    except EngineClosed:
        print(f"{FAILURE}{type(engine.failure).__name__}: {engine.failure}".splitlines()[0], flush=True)
        if isinstance(engine.failure, StepTimeout):
            raise  # the watchdog ends this process
        # JAX would wait for the lost process until it stops hearing from it, which takes a minute.
        os._exit(1)


PARTS: Final = {"training": training, "answers": answers, "lost": lost}


def main(arguments: Sequence[str]) -> None:
    """Runs a part.

    Args:
        arguments: the part, the port to meet at, the number of this process, the number of all, 1 for small sizes or 0,
            and the file of the result.
    """
    part, port, number, count, small, out = arguments
    jax.distributed.initialize(
        f"127.0.0.1:{port}", int(count), int(number), local_device_ids=[0], initialization_timeout=JOIN_SECONDS
    )
    assert (jax.device_count(), jax.local_device_count()) == (int(count), 1), jax.devices()
    result = PARTS[part](SMALL if int(small) else Sizes(), int(count))
    Path(out).write_text(json.dumps(result))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
