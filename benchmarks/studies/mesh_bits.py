"""Bits of answers on several devices that share a model, against one device, under orders, preemption and prefixes.

    python -m benchmarks mesh_bits --out benchmarks/results/mesh-bits-h100.json

An engine on one device and one on each mesh answer the same workloads: one request, 64, and 1000 in three orders. A
model is shared by 2, 4 and so on up to `--devices`; one with experts by all devices, its experts over any number of
them. Every other prompt begins alike, and pages are scarce, so prefixes are reused and requests are preempted. Digests
of all tokens and logprobs are compared. The control is the usual sharding of a product, whose parts are added across
devices. The exit code is 1 if a digest differs, if nothing was preempted or reused, or if the control has equal bits.

Without `--layers`, a model has as many as fit on a device. Few layers have all kinds of programs, and compile sooner.
`--small` takes a minute on a CPU with two devices simulated by `XLA_FLAGS=--xla_force_host_platform_device_count=2`.
"""

import dataclasses
import gc
import random
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from benchmarks import study as options
from benchmarks.study import Result, Run
from detjax import ops
from detjax.bench import command_line, presets
from detjax.bench.serve import Workload, digest
from detjax.cli.options import Option
from detjax.engine import Engine, EngineConfig, Request
from detjax.models import mesh_of
from detjax.runtime import backends, compilation


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The workloads of a run.

    Attributes:
        requests: the numbers of requests of the workloads. The last workload runs in several orders.
        prompt: minimum and maximum number of tokens of a prompt, not counting the shared beginning.
        output: minimum and maximum number of tokens of an answer.
        shared: number of tokens at the beginning of every other prompt.
        engine: the engine's settings.
    """

    requests: tuple[int, ...] = (1, 64, 1000)
    prompt: tuple[int, int] = (16, 200)
    output: tuple[int, int] = (20, 140)
    shared: int = 256
    engine: EngineConfig = EngineConfig(  # noqa: RUF009 - it is frozen
        max_samples=128, token_budget=2048, max_length=640, num_pages=160, snapshot_tokens=128
    )


SMALL = Sizes(
    (1, 3, 6), (4, 40), (90, 140), 128, EngineConfig(max_samples=4, token_budget=32, max_length=384, num_pages=5)
)
SHARE_OF_WEIGHTS = 0.6
"""The share of a device's memory that weights may take, where they decide the number of layers."""
ORDERS = 3


def study(
    run: Run,
    *,
    preset: options.Preset = "Qwen3-8B",
    layers: options.Layers = None,
    devices: Annotated[int, Option("Devices that share the model.", minimum=2)] = 2,
) -> Result:
    sizes = Sizes()
    if run.small:
        has_experts = presets.config(preset).experts is not None
        sizes, preset, layers = SMALL, "tiny-experts" if has_experts else "tiny", 1
    elif layers is None:
        layers = options.layers_that_fit(preset, SHARE_OF_WEIGHTS)
    has_experts = presets.config(preset, layers).experts is not None
    meshes = [mesh_of(tensor, expert) for tensor, expert in shapes(devices, has_experts=has_experts)]
    content: dict[str, Any] = {
        "preset": preset,
        "layers": layers,
        "devices": devices,
        "sizes": dataclasses.asdict(sizes),
        "meshes": {},
    }
    content["one"] = _answers(sizes, preset, layers, None)
    command_line.print_line(f"one: {content['one']}")
    for mesh in meshes:
        assert mesh is not None
        run.save(content)
        gc.collect()  # the last engine's weights leave the memory that the next model's need
        arm = _answers(sizes, preset, layers, mesh)
        name = ", ".join(f"{axis} {count}" for axis, count in mesh.shape.items())
        content["meshes"][name] = arm
        command_line.print_line(f"{name}: {arm}")
    assert meshes[0] is not None
    content["usual_cut_differs"] = _usual_cut_differs(meshes[0])
    return Result(content, _problem(content))


def shapes(devices: int, *, has_experts: bool) -> list[tuple[int, int]]:
    """Returns the devices along "tensor" and "expert" of each mesh. The most come first: a run may be cut short."""
    several = options.counts(devices)
    if has_experts:
        return [(devices // expert, expert) for expert in several if devices % expert == 0]
    return [(tensor, 1) for tensor in reversed(several[1:])]


def _problem(content: dict[str, Any]) -> str:
    one = content["one"]
    if any(len(set(orders)) > 1 for orders in one["digests"].values()):
        return f"bits differ between orders on one device: {one['digests']}"
    for name, arm in content["meshes"].items():
        if arm["digests"] != one["digests"]:
            return f"bits differ between one device and {name}: {one['digests']}, {arm['digests']}"
    if not all(arm["preemptions"] and arm["cached_tokens"] for arm in (one, *content["meshes"].values())):
        return "no request was preempted, or no prefix was reused"
    return "" if content["usual_cut_differs"] else "the control has the same bits"


def _answers(sizes: Sizes, preset: str, layers: int | None, mesh: Mesh | None) -> dict[str, Any]:
    """Digests of the answers by workload, for all its orders."""
    decoder, digests, reused = presets.decoder(preset, layers, mesh), {}, 0
    with Engine(decoder, config=sizes.engine) as engine:
        if backends.backend() != "portable":
            engine.warm_up(in_background=True)  # compiles in parallel; the few steps of small sizes do not need it
        for count in sizes.requests:
            requests = _requests(sizes, count, decoder.config.vocab_size)
            orders = ORDERS if count == sizes.requests[-1] else 1
            answers = [_in_order(engine, requests, order) for order in range(orders)]
            digests[str(count)] = [digest(generations) for generations in answers]
            reused += sum(answer.cached_tokens for generations in answers for answer in generations)
        preemptions = engine.stats().preemptions
    return {"digests": digests, "preemptions": preemptions, "cached_tokens": reused}


def _requests(sizes: Sizes, count: int, vocabulary: int) -> list[Request]:
    draw = random.Random(7)
    shared = [draw.randrange(vocabulary) for _ in range(sizes.shared)]
    plain = Workload(count, sizes.prompt, sizes.output, temperature=0.8, seed=count).draw(vocabulary)
    return [
        dataclasses.replace(request, prompt=[*shared, *request.prompt]) if index % 2 == 0 else request
        for index, request in enumerate(plain)
    ]


def _in_order(engine: Engine, requests: Sequence[Request], order: int) -> list[Any]:
    """The answers in the order of the requests, which are submitted in random order unless `order` is 0."""
    places = list(range(len(requests)))
    if order:
        random.Random(order).shuffle(places)
    futures = {place: engine.submit(requests[place]) for place in places}
    return [futures[place].result() for place in range(len(requests))]


def _usual_cut_differs(mesh: Mesh) -> bool:
    """Returns whether adding a product's parts across devices changes its bits."""
    draw = np.random.default_rng(1)
    x, w = (jnp.asarray(draw.standard_normal(shape), jnp.bfloat16) for shape in ((64, 4096), (4096, 4096)))

    def added(x: Array, w: Array) -> Array:
        return jax.lax.psum(ops.matmul(x, w, layout="nk"), mesh.axis_names)

    cut = P(None, mesh.axis_names)
    usual = compilation.jit(jax.shard_map(added, mesh=mesh, in_specs=(cut, cut), out_specs=P(), check_vma=False))
    spread = [jax.device_put(array, NamedSharding(mesh, cut)) for array in (x, w)]
    return bool((np.asarray(usual(*spread)) != np.asarray(ops.matmul(x, w, layout="nk"))).any())
