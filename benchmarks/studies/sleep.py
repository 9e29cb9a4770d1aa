"""The memory of devices that an engine gives back while it sleeps, and the time until it computes again.

    python -m benchmarks sleep --out benchmarks/results/sleep-h200.json

An engine of Qwen3-8B's shape with random weights answers a request, sleeps, wakes up and answers it again, twice: JAX
takes host memory for the weights at the first sleep, and keeps it. `in use` is what JAX's allocator counts, and `taken
from the device` what the driver counts, so it shows what other processes can use. Start it with
`XLA_PYTHON_CLIENT_ALLOCATOR=platform` to see memory return to the driver.

`--small` runs on a CPU in seconds, where it counts the bytes of arrays.
"""

import contextlib
import ctypes
import dataclasses
import gc
import os
import time
from typing import Any, Final

import jax

from benchmarks import study as options
from benchmarks.study import SMALL_ENGINE, EngineSettings, Result, Run
from detjax.engine import Engine, Request, SamplingParams

_ALLOCATOR: Final = "XLA_PYTHON_CLIENT_ALLOCATOR"


def memory() -> dict[str, int | None]:
    """Returns the bytes in use, and the bytes taken from the first device; None without a driver."""
    gc.collect()
    device = jax.local_devices()[0]
    stats: dict[str, int] = device.memory_stats() or {}
    on_devices = (array for array in jax.live_arrays() if array.sharding.memory_kind != "pinned_host")
    in_use = stats.get("bytes_in_use", sum(array.nbytes for array in on_devices))
    return {"in use": in_use, "taken from the device": _taken() if device.platform == "gpu" else None}


def _taken() -> int | None:
    """Returns the bytes of the current GPU that all processes have taken, as the driver counts them."""
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
        driver.cuInit(0)
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        driver.cuCtxPushCurrent_v2(context)
        failed = driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        driver.cuCtxPopCurrent_v2(ctypes.byref(context))
        return None if failed else total.value - free.value
    return None


def study(run: Run, *, preset: options.Preset = EngineSettings.preset, layers: options.Layers = None) -> Result:
    sleeper = SMALL_ENGINE if run.small else EngineSettings(preset, layers)
    request = Request([1, 2, 3], SamplingParams(max_tokens=8, temperature=0.8, seed=1))
    bytes_, seconds = {"before": memory()}, dict[str, float]()
    decoder = sleeper.decoder()
    with Engine(decoder, config=sleeper.config()) as engine:
        del decoder  # the engine alone has the weights
        first = engine.generate([request])
        bytes_["awake"] = memory()
        answers = []
        for turn in ("first", "second"):
            seconds[f"{turn} sleep"] = _timed(engine.sleep)
            bytes_["asleep"] = memory()
            seconds[f"{turn} wake-up"] = _timed(engine.wake_up)
            bytes_["awake again"] = memory()
            seconds[f"{turn} answer"] = _timed(lambda: answers.append(engine.generate([request])))
    content = {
        "sleeper": dataclasses.asdict(sleeper),
        "allocator": os.environ.get(_ALLOCATOR, "default"),
        "bytes": bytes_,
        "seconds": seconds,
        "returned": 1 - (bytes_["asleep"]["in use"] or 0) / (bytes_["awake"]["in use"] or 1),
        "has_the_same_bits": answers == [first] * 2,
    }
    return Result(content, "" if content["has_the_same_bits"] else "the answer after sleep differs")


def _timed(function: Any) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin
