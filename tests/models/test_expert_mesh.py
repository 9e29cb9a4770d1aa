"""Experts that devices share: every mesh gives the bits of one device, and no number is added across devices."""

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import detjax
from detjax import models, ops
from detjax.models.cache import declarations
from detjax.models.mesh import Call, _run, shardings_of, specs_of
from detjax.models.network import parameters, split
from detjax.runtime import compilation
from tests.support.bits import assert_same_bits
from tests.support.simulated_devices import ALL_HOLD, run_on_devices

FIXTURES: Final = Path(__file__).parents[1] / "fixtures"
FAMILIES: Final = (
    "olmoe",
    "qwen3-moe",
    "gemma4-moe",
    "gpt-oss",
    "glm4-moe",
    "deepseek-v3",
    "qwen3-next",
    "qwen3-vl-moe",
)
MESHES: Final = ((1, 2), (2, 2), (1, 8), (4, 2))
"""The devices of each along "tensor" and "expert"."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", ["one layer", "engine", *FAMILIES])
def test_devices_with_different_experts_give_the_bits_of_one(case: str) -> None:
    run_on_devices(__name__, case)


def main(case: str) -> None:
    """Compares a model on one device and on meshes of more."""
    if case == "one layer":
        compare_one_layer()
        compare_with_the_usual_sum()
    elif case == "engine":
        compare_engines()
    else:
        compare_family(FIXTURES / case)
    print(ALL_HOLD)


def compare_one_layer() -> None:
    """Hidden states of a layer, and what its devices exchange: of 6 experts three pairs of devices have two each."""
    config = models.load(FIXTURES / "olmoe", dtype="float32", progress=False)[0].config
    assert config.experts is not None
    options = dataclasses.replace(config.experts, experts=6, layers=(True,))
    config = dataclasses.replace(config, layers=1, experts=options, windows=config.windows[:1])
    model = models.Decoder(config, rngs=nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (1, 7)))
    expected, _ = model.hidden(tokens)
    mesh = models.mesh_of(tensor=2, expert=4)
    assert mesh is not None
    shared = models.sharded(model, mesh)
    places = dict(zip(parameters(shared), shardings_of(shared, mesh), strict=True))
    (down,) = (sharding for path, sharding in places.items() if path[-1] == "down" and sharding is not None)
    assert down.experts is not None and (down.experts.shards, down.groups[0].shards) == (4, 2)
    cache = shared.empty_cache(len(tokens), tokens.shape[1])
    queries = cache.next_queries(jnp.full(len(tokens), tokens.shape[1], jnp.int32))
    specs = specs_of(mesh, declarations(config))
    call = Call("hidden_states", (P(), P(), specs, P()), (P(), specs), (("rematerialized", False),))
    (network, weights), arguments = split(shared), (tokens, queries, cache.state, None)
    program: Any = compilation.compiled(_run, network, call, weights, None, arguments)
    assert_same_bits(program(weights, None, arguments)[0], expected)
    assert "all-to-all" in program.as_text() and not re.search("all-reduce|reduce-scatter", program.as_text())


def compare_with_the_usual_sum() -> None:
    """Devices that add the results of their own experts, and then each other's sums, have other bits."""
    rng = np.random.default_rng(1)
    y, weights = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((64, 8, 32), (64, 8)))
    expected = ops.combine_experts(y, weights, None)
    # With one expert each, simulated devices happen to add in the contract's order.
    for devices in (2, 4):
        mesh = Mesh(np.array(jax.devices()[:devices]), ("expert",), axis_types=(AxisType.Auto,))

        def added(y: jax.Array, weights: jax.Array) -> jax.Array:
            return jax.lax.psum(ops.combine_experts(y, weights, None), "expert")

        specs = P(None, "expert"), P(None, "expert")
        usual = jax.shard_map(added, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
        assert (np.asarray(detjax.jit(usual)(y, weights)) != np.asarray(expected)).mean() > 0.2


def compare_family(folder: Path) -> None:
    """A whole sequence, and its prefill in two pieces and a decode, on every mesh."""
    model, _ = models.load(folder, dtype="float32", progress=False)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 11))
    expected = np.asarray(model(jnp.asarray(tokens)))
    for tensor, expert in MESHES:
        mesh = models.mesh_of(tensor, expert)
        assert mesh is not None
        shared = models.sharded(model, mesh)
        assert models.digest(shared) == models.digest(model)
        shardings = [sharding for sharding in shardings_of(shared, mesh) if sharding is not None]
        assert any(sharding.experts is not None and sharding.experts.shards > 1 for sharding in shardings)
        assert_same_bits(shared(jnp.asarray(tokens)), expected)
        cache, shards = shared.empty_cache(len(tokens), tokens.shape[1]), []
        for shard in np.split(tokens, (4, 10), axis=1):
            logits, cache = shared(jnp.asarray(shard), cache)
            shards.append(logits)
        assert_same_bits(np.concatenate(shards, axis=1), expected)


def compare_engines() -> None:
    """Answers of an engine, whose weights come straight from a file and change once."""
    model, _ = models.load(FIXTURES / "olmoe", progress=False)
    mesh = models.mesh_of(tensor=2, expert=2)
    shared, _ = models.load(FIXTURES / "olmoe", progress=False, mesh=mesh)
    assert models.digest(shared) == models.digest(model)
    rng = np.random.default_rng(0)
    params = [detjax.SamplingParams(max_tokens=6, seed=seed, top_logprobs=2) for seed in range(3)]
    prompts = [rng.integers(0, model.config.vocab_size, size).tolist() for size in (3, 50, 20)]
    expected = [answer.completions for answer in detjax.generate(model, prompts, params)]
    requests = [detjax.Request(*pair) for pair in zip(prompts, params, strict=True)]
    with detjax.Engine(shared, max_samples=2, token_budget=32, max_length=128) as engine:
        assert [answer.completions for answer in engine.generate(requests)] == expected
        engine.update_weights(jax.tree.map(lambda x: 2 * x, nnx.state(model)))
        assert [answer.completions for answer in engine.generate(requests)] != expected
        engine.update_weights(nnx.state(model))
        assert [answer.completions for answer in engine.generate(requests)] == expected


if __name__ == "__main__":
    main(sys.argv[1])
