"""The host memory needed to load a checkpoint onto the devices of a mesh, not counting the devices' shards.

    python -m benchmarks loading --out benchmarks/results/loading-cpu.json

Devices are simulated, and checkpoints are sparse files of zeros (66 GB for the shape of Qwen3-32B). Where weights are
"deleted", each is freed as soon as it is on its device, so that a machine can load more than its memory. Mapped files
count separately, since the system reclaims their memory when needed.

`--small` takes seconds.
"""

import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import jax
import ml_dtypes
import numpy as np

from benchmarks.study import Result, Run
from detjax.bench import command_line, presets
from detjax.models import load, mesh_of
from detjax.models.checkpoint import loading as checkpoint
from detjax.models.checkpoint.weight_files import SINGLE_FILE

_SAMPLED_EVERY: Final = 0.002
"""Interval between two readings of the process's memory, in seconds; reading a gigabyte takes 100 times as long."""
_DTYPE: Final = np.dtype(ml_dtypes.bfloat16)


@dataclasses.dataclass(frozen=True)
class Load:
    """A checkpoint, and the devices that load it.

    Attributes:
        preset: the model's shape.
        layers: its number of layers; None: the preset's own.
        devices: the simulated devices that share the model.
        kept: whether devices keep their weights, or free each at once.
    """

    preset: str
    layers: int | None
    devices: int
    kept: bool


LOADS: Final = (
    Load("Qwen3-32B", None, 8, kept=False),
    Load("Qwen3-32B", None, 2, kept=False),
    Load("Qwen3-32B", 4, 8, kept=True),
    Load("Qwen3-235B-A22B", 2, 8, kept=False),
)
SMALL: Final = (Load("tiny", None, 2, kept=True), Load("tiny", None, 2, kept=False))


def write_sparse(folder: Path, preset: str, layers: int | None) -> dict[str, int]:
    """Writes a checkpoint of bfloat16 zeros that takes no disk space, and returns each tensor's bytes."""
    config = presets.config(preset, layers)
    raw = {**presets.MODELS[preset], "num_hidden_layers": config.layers}
    (folder / "config.json").write_text(json.dumps(raw))
    shapes = checkpoint.tensor_shapes(config)
    sizes = {name: math.prod(shape) * _DTYPE.itemsize for name, shape in shapes.items()}
    header, begin = dict[str, Any](), 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (begin, begin + sizes[name])}
        begin += sizes[name]
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)  # The format aligns data to 8 bytes.
    with (folder / SINGLE_FILE).open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        file.truncate(8 + len(content) + begin)
    return sizes


def _sizes(one: Load, sizes: dict[str, int]) -> dict[str, Any]:
    """A load, and the size of its weights."""
    layer = sum(size for name, size in sizes.items() if name.startswith(f"model.layers.{_layers(one) - 1}."))
    return dataclasses.asdict(one) | {
        "layers": _layers(one),
        "bytes": {"checkpoint": sum(sizes.values()), "layer": layer, "largest_tensor": max(sizes.values())},
    }


def _layers(one: Load) -> int:
    return presets.config(one.preset, one.layers).layers


def _watched(one: Load, folder: str) -> dict[str, Any]:
    """The peak memory of a process that loads a checkpoint."""
    context = multiprocessing.get_context("spawn")
    placed, begun, ended = context.Value("q", 0), context.Event(), context.Event()
    flags = f"--xla_force_host_platform_device_count={one.devices}"
    with mock.patch.dict(os.environ, {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}):
        process = context.Process(target=_load, args=(one, folder, placed, begun, ended), daemon=True)
        process.start()
    while not begun.wait(0.1) and process.is_alive():
        pass
    before, start = _memory(process.pid), time.perf_counter()
    beyond = mapped = 0
    while not ended.is_set() and process.is_alive():
        # The placed bytes are read first, so that shards placed in between count as overhead.
        held, now = placed.value, _memory(process.pid)
        beyond = max(beyond, now["RssAnon"] - before["RssAnon"] - held)
        mapped = max(mapped, now["RssFile"] - before["RssFile"])
        time.sleep(_SAMPLED_EVERY)
    seconds = time.perf_counter() - start
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the process that loads {one} ended with code {process.exitcode}")
    return {"seconds": seconds, "peak": {"beyond_shards": beyond, "mapped_files": mapped}}


def _memory(process: int | None) -> dict[str, int]:
    """The bytes of a process's memory by kind: allocated, and mapped from files."""
    try:
        text = Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        raise RuntimeError("the memory of a process is read from /proc; accepted: Linux") from None
    lines = dict(line.split(":", 1) for line in text.splitlines())
    # The status of an ended process lacks these lines.
    return {kind: 1024 * int(lines.get(kind, "0").split()[0]) for kind in ("RssAnon", "RssFile")}


def _load(one: Load, folder: str, placed: Any, begun: Any, ended: Any) -> None:
    """Loads the checkpoint, in a separate process."""
    mesh = mesh_of(one.devices)
    jax.block_until_ready(jax.device_put(np.zeros(1)))
    with _counted(placed, kept=one.kept):
        begun.set()
        load(folder, mesh=mesh, progress=False)
        ended.set()


@contextlib.contextmanager
def _counted(placed: Any, *, kept: bool) -> Iterator[None]:
    """A context that counts bytes placed on devices, and frees parameters unless they are kept."""
    device_put, placement = jax.device_put, checkpoint.placement

    def counted_put(x: Any, place: Any = None) -> Any:
        # They count from the start of the copy; everything else in memory is the host's.
        placed.value += x.nbytes * (len(place.device_set) if isinstance(place, jax.sharding.Sharding) else 1)
        return device_put(x, place)

    def dropping(put: Callable[[Any], Any]) -> Callable[[Any], None]:
        def put_and_delete(x: Any) -> None:
            array = jax.block_until_ready(put(x))
            size = sum(shard.data.nbytes for shard in array.addressable_shards)
            array.delete()
            placed.value -= size

        return put_and_delete

    def dropping_placement(*args: Any) -> list[Callable[[Any], Any]]:
        return [dropping(put) for put in placement(*args)]

    with mock.patch.object(jax, "device_put", counted_put):
        with contextlib.nullcontext() if kept else mock.patch.object(checkpoint, "placement", dropping_placement):
            yield


def study(run: Run) -> Result:
    rows = []
    for one in SMALL if run.small else LOADS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(_sizes(one, write_sparse(Path(folder), one.preset, one.layers)) | _watched(one, folder))
        command_line.print_line(f"{one.preset}, {rows[-1]['layers']} layers: {rows[-1]['seconds']:.1f} s")
    return Result({"rows": rows})
