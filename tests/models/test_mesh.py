"""Models that the devices of a mesh share: every number of devices gives the bits of one."""

import dataclasses
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import detjax
import detjax.demo
from detjax import models, ops
from detjax.models.mesh import checked, put, shardings_of
from detjax.models.network import parameters
from detjax.models.parts.sharding import (
    AXES,
    TENSOR,
    OutputSharding,
    ShardGroup,
    gathered,
    head_shards,
    linked,
    local_columns,
    outputs,
)
from tests.models.shallow_models import shallow
from tests.support.bits import assert_same_bits
from tests.support.one_layer import one_layer
from tests.support.simulated_devices import ALL_HOLD, ROOT, run_on_devices

FIXTURES = ROOT / "tests" / "fixtures"
FAMILIES = (
    "deepseek-v3",
    "qwen3-next",
    "gpt-oss",
    "olmoe",
    "llama3",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4-moe",
    "glm4",
    "glm4-moe",
    "granite",
    "kimi-k2",
    "kimi-k2-5",
    "mistral",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen2_5_vl-tiny",
    "qwen3",
    "qwen3-5",
    "qwen3-5-moe",
    "qwen3-5-moe-vl",
    "qwen3-moe",
    "qwen3-vl",
    "qwen3-vl-moe",
    "smollm3",
)
HARDLY_CUT = {
    "gemma3",
    "gemma4-moe",
    "kimi-k2",
    "kimi-k2-5",
    "mistral",
    "qwen2",
    "qwen2_5_vl-tiny",
    "qwen3",
    "qwen3-moe",
    "qwen3-vl",
    "qwen3-vl-moe",
}
"""Their fixtures have few sizes that divide into pieces, so devices have most weights as a whole."""


# What every device has.


@given(st.integers(1, 5), st.integers(1, 4), st.sampled_from([1, 2, 4, 8]), st.integers(1, 3))
def test_the_pieces_of_all_devices_make_the_whole(groups: int, length: int, devices: int, rest: int) -> None:
    shards = [[1, 2, 4, 8][index % (devices.bit_length())] for index in range(groups)]
    sharding = OutputSharding(tuple(ShardGroup(length * count, count) for count in shards))
    x = np.arange(2 * sharding.size * rest).reshape(2, sharding.size, rest)
    parts = [sharding.shards(x, device, devices) for device in range(devices)]
    assert {part.shape for part in parts} == {(2, sharding.length, rest)}
    assert_same_bits(sharding.whole(parts), x)


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 16))
def test_heads_lie_with_the_heads_that_they_share(shared: int, sharing: int, devices: int) -> None:
    heads = shared * sharing
    shards, shared_pieces = head_shards(heads, shared, devices)
    q, k = ShardGroup(heads, shards), ShardGroup(shared, shared_pieces)
    assert devices % shards == 0 and heads % shards == 0 and shared % shared_pieces == 0
    for device in range(devices):
        first, first_shared = q.shard_of(device, devices) * q.length, k.shard_of(device, devices) * k.length
        needed = {(first + head) // sharing for head in range(q.length)}
        assert needed <= set(range(first_shared, first_shared + k.length))
        # Attention takes its heads in order, the same number for each head that they share.
        local = q.length // k.length
        assert [(first + head) // sharing - first_shared for head in range(q.length)] == [
            head // local for head in range(q.length)
        ]


def test_outputs_are_cut_into_multiples_of_what_kernels_load() -> None:
    shards = [outputs(size, 8).groups[0].shards for size in (4096, 24, 16, 44, 151936, 509)]
    assert shards == [8, 1, 2, 4, 8, 1]


# Bits.


@pytest.mark.parametrize(
    ("case", "devices"),
    [
        ("deepseek-v3", 8),
        ("engine", 2),
        *(
            pytest.param(case, devices, marks=pytest.mark.nightly)
            for devices in (8, 2)
            for case in (*(f"{family} whole" for family in FAMILIES), "engine whole")
        ),
    ],
)
def test_every_number_of_devices_gives_the_bits_of_one(case: str, devices: int) -> None:
    run_on_devices(__name__, case, str(devices), keeps_programs=case != "engine whole")


def main(case: str, devices: str) -> None:
    """Compares a model on one device and on more of eight. A case that is not `whole` has one layer."""
    assert jax.device_count() == 8
    name, _, whole = case.partition(" ")
    if name == "engine":
        compare_engines(int(devices), is_whole=whole != "")
    else:
        compare_family(FIXTURES / name, int(devices), is_whole=whole != "")
        compare_with_the_usual_cut()
    print(ALL_HOLD)


def compare_family(folder: Path, devices: int, *, is_whole: bool) -> None:
    """A whole sequence, and its prefill in two pieces and a decode."""
    model, _ = models.load(folder, dtype="float32", progress=False)
    if not is_whole:
        last = model.config.layers - 1
        model = shallow(folder.name, last, last + 1)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 11))
    sizes = (4, 6, 1) if is_whole else (10, 1)
    expected, pieces = outputs_of(model, tokens, sizes)
    assert_same_bits(pieces, expected)
    mesh = models.mesh_of(devices)
    assert mesh is not None
    shared = models.sharded(model, mesh)
    assert models.digest(shared) == models.digest(model)
    for result in outputs_of(shared, tokens, sizes):
        assert_same_bits(result, expected)
    sharding = sum(one is not None for one in shardings_of(shared, mesh))
    assert (sharding > len(parameters(model)) / 4) == (folder.name not in HARDLY_CUT)


def outputs_of(model: models.Decoder, tokens: np.ndarray, sizes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Logits of all tokens in one call, and in pieces; a long piece is padded to all tokens."""
    batch, length = tokens.shape
    whole = model(jnp.asarray(tokens))
    cache, pieces, start = model.empty_cache(batch, length), [], 0
    for size in sizes:
        piece = tokens[:, start : start + size]
        if size > length // 2:
            piece = np.pad(piece, ((0, 0), (0, length - size)))
        logits, cache = model(jnp.asarray(piece), cache, jnp.full(batch, size))
        pieces.append(logits[:, :size])
        start += size
    return np.asarray(whole), np.concatenate(pieces, axis=1)


def compare_with_the_usual_cut() -> None:
    """The cut by inputs, whose products are added across devices, has other bits for every number of devices."""
    rng = np.random.default_rng(1)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((5, 256), (64, 256)))
    expected = ops.matmul(x, w, layout="nk")
    for devices in (2, 4, 8):
        mesh = Mesh(np.array(jax.devices()[:devices]), ("tensor",), axis_types=(AxisType.Auto,))

        def added(x: jax.Array, w: jax.Array) -> jax.Array:
            return jax.lax.psum(ops.matmul(x, w, layout="nk"), "tensor")

        specs = P(None, "tensor"), P(None, "tensor")
        usual = jax.shard_map(added, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
        assert (np.asarray(detjax.jit(usual)(x, w)) != np.asarray(expected)).mean() > 0.2


def compare_engines(devices: int, *, is_whole: bool) -> None:
    """Answers of an engine, of its warm programs and its cache of programs if it is large, and after new weights."""
    checkpoint = detjax.demo.CHECKPOINT if is_whole else FIXTURES / "qwen3"
    mesh = models.mesh_of(devices)
    with tempfile.TemporaryDirectory() as folder:
        if not is_whole:
            small, tokenizer = one_layer(checkpoint, seed=1)
            checkpoint = Path(folder) / "small"
            models.save(small, checkpoint, tokenizer=tokenizer)
        model, tokenizer = models.load(checkpoint, progress=False)
        shared, _ = models.load(checkpoint, progress=False, mesh=mesh)
        assert models.digest(shared) == models.digest(model)
        requests = requests_of(model.config.vocab_size, is_whole=is_whole)
        prompts, params = [list(one.prompt) for one in requests], [one.sampling for one in requests]
        expected = [answer.completions for answer in detjax.generate(model, prompts, params)]
        options = {"max_samples": 2, "token_budget": 32, "max_length": 256}
        for _ in range(2 if is_whole else 1):  # the second one finds its programs
            with detjax.Engine(shared, **options) as engine:
                if is_whole:
                    engine.warm_up(cache=Path(folder) / "programs")
                assert [answer.completions for answer in engine.generate(requests)] == expected
                engine.update_weights(jax.tree.map(lambda x: 2 * x, nnx.state(model)))
                changed = [answer.completions for answer in engine.generate(requests)]
                assert changed != expected
                engine.update_weights(nnx.state(model))
                assert [answer.completions for answer in engine.generate(requests)] == expected
        models.save(shared, Path(folder) / "saved", tokenizer=tokenizer)
        again, _ = models.load(Path(folder) / "saved", progress=False)
        assert models.digest(again) == models.digest(model)
    if is_whole:
        with detjax.Engine(model, **options, mesh=models.mesh_of(2)) as engine:
            assert [answer.completions for answer in engine.generate(requests)] == expected
    hidden, _ = model.hidden(jnp.ones((1, 3), jnp.int32))
    assert_same_bits(
        np.asarray(shared.logprobs(hidden, jnp.ones((1, 3), jnp.int32))),
        np.asarray(model.logprobs(hidden, jnp.ones((1, 3), jnp.int32))),
    )
    with pytest.raises(NotImplementedError, match="would be added across devices; accepted: a model that each device"):
        graph, state = nnx.split(shared)
        jax.grad(lambda state: nnx.merge(graph, state)(jnp.ones((1, 3), jnp.int32)).sum())(state)


def requests_of(vocabulary: int, *, is_whole: bool) -> list[detjax.Request]:
    """Greedy and random samples, some with adjusted logits if there are many."""
    rng = np.random.default_rng(0)
    options = [{"temperature": 0.0}, {"top_p": 0.9, "top_logprobs": 2}, {"temperature": 0.7, "frequency_penalty": 0.5}]
    sizes = (3, 150, 20)
    if not is_whole:
        options, sizes = [{"temperature": 0.0}, {"temperature": 0.7, "top_logprobs": 2}], (131, 20)
    params = [detjax.SamplingParams(max_tokens=8, seed=seed, **some) for seed, some in enumerate(options)]
    prompts = [rng.integers(0, vocabulary, size).tolist() for size in sizes]
    return [detjax.Request(*pair) for pair in zip(prompts, params, strict=True)]


# What is refused.


def test_an_array_is_put_only_where_it_is_not_yet() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    replicated, split = (NamedSharding(mesh, spec) for spec in (P(), P("tensor")))
    uncommitted = jnp.arange(4.0)
    x = put(uncommitted, replicated)
    assert x.committed and x.sharding == replicated
    assert put(x, NamedSharding(mesh, P())) is x
    assert put(x, split).sharding == split
    assert put(np.arange(4.0), replicated).sharding == replicated


@pytest.mark.parametrize(
    ("mesh", "other", "is_found"),
    [
        # A mesh without devices along "expert" has the same columns along both axes as along "tensor".
        ((2, 1), outputs(16, 2), True),
        ((2, 2), outputs(16, 2), False),
        ((2, 1), OutputSharding((ShardGroup(8, 2), ShardGroup(8, 2))), False),
    ],
)
def test_a_device_finds_its_columns_of_a_gathered_array(
    mesh: tuple[int, int], other: OutputSharding, is_found: bool
) -> None:
    def columns(part: jax.Array) -> jax.Array:
        whole = gathered(part, dataclasses.replace(outputs(16, 2), over=(TENSOR,)))
        # The array itself, reshaped to its shape, is found as well: packed tokens are flattened so.
        slices = [local_columns(x, other) for x in (whole, whole.reshape(-1, 16))]
        assert [x is part for x in slices] == [is_found] * 2
        return whole

    with linked(None):
        on_each = jax.shard_map(columns, mesh=AbstractMesh(mesh, AXES), in_specs=P(), out_specs=P(), check_vma=False)
        jax.eval_shape(on_each, jnp.zeros((3, 8)))


def test_a_mesh_of_other_axes_is_refused() -> None:
    model = models.Decoder(small_config(), rngs=nnx.Rngs(0))
    mesh = jax.make_mesh((1,), ("data",))
    with pytest.raises(
        ValueError, match=r"sharded: the mesh has the axes \('data',\); accepted: 'tensor', 'expert' or both"
    ):
        models.sharded(model, mesh)
    with pytest.raises(ValueError, match=r"load: the mesh has .* For the axis 'data' run an engine for each replica"):
        models.load(detjax.demo.CHECKPOINT, mesh=mesh)
    with pytest.raises(ValueError, match=r"sharded: the mesh has the axes \('tensor', 'data'\)"):
        detjax.Engine(model, mesh=jax.make_mesh((1, 1), ("tensor", "data")))
    shared = models.sharded(model, jax.make_mesh((1,), ("tensor",)))
    with pytest.raises(ValueError, match="the model is shared by 1 devices; accepted: a model on one device"):
        models.sharded(shared, jax.make_mesh((1,), ("tensor",)))


@pytest.mark.parametrize(("tensor", "expert"), [(0, 1), (1000, 1), (1, 0), (1, 1000)])
def test_devices_that_are_not_there_are_refused(tensor: int, expert: int) -> None:
    with pytest.raises(ValueError, match=rf"mesh_of: tensor is {tensor} and expert is {expert}; accepted: positive "):
        models.mesh_of(tensor, expert)


@dataclasses.dataclass(frozen=True)
class Device:
    """A device with the attributes that a mesh reads before it is used."""

    id: int
    process_index: int = 0


def test_axes_may_come_in_any_order_and_one_may_be_missing() -> None:
    devices = np.array([Device(number) for number in range(6)]).reshape(2, 3)
    for placed, axes in ((devices, ("tensor", "expert")), (devices.T, ("expert", "tensor"))):
        mesh = checked("sharded", Mesh(placed, axes))
        assert mesh.axis_names == ("tensor", "expert")
        assert mesh.devices.tolist() == devices.tolist()
    assert checked("sharded", Mesh(devices[0], ("expert",))).devices.tolist() == [[*devices[0]]]
    assert checked("sharded", Mesh(devices[0], ("tensor",))).devices.tolist() == [[device] for device in devices[0]]


def small_config() -> models.DecoderConfig:
    model, _ = models.load(FIXTURES / "qwen3", progress=False)
    return model.config


if __name__ == "__main__":
    main(*sys.argv[1:])
