"""Models that devices of several processes share: every number of processes gives the bits of one device."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import detjax
from detjax import models, ops
from detjax.models.mesh import replicate
from tests.support.bits import assert_same_bits
from tests.support.one_layer import one_layer
from tests.support.processes import join, run_in_processes
from tests.support.simulated_devices import ALL_HOLD

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("qwen3", "calls"),
        *(
            pytest.param(family, case, marks=pytest.mark.nightly)
            for family, case in [("qwen3-next", "calls"), ("qwen3", "an engine"), ("qwen3-next", "an engine")]
        ),
    ],
)
def test_devices_of_two_processes_give_the_bits_of_one_device(family: str, case: str, tmp_path: Path) -> None:
    checkpoint = ROOT / "tests" / "fixtures" / family
    if family == "qwen3":  # one layer shows as much as all, and compiles faster
        checkpoint = tmp_path / "model"
        models.save(one_layer(ROOT / "tests" / "fixtures" / family, seed=1)[0], checkpoint)
    run_in_processes(
        __name__, str(checkpoint), str(tmp_path / "saved"), case, flags="--xla_backend_optimization_level=0"
    )


def main(port: str, process: str, checkpoint: str, saved: str, case: str) -> None:
    """Compares a model on a device of this process and on all devices of all processes."""
    join(port, process)
    mesh = models.mesh_of(jax.device_count())
    assert mesh is not None
    model, _ = models.load(checkpoint, progress=False)
    shared, _ = models.load(checkpoint, progress=False, mesh=mesh)
    assert models.digest(shared) == models.digest(model)
    if case == "an engine":
        compare_engines(model, shared)
    else:
        compare_calls(model, shared)
        compare_with_the_usual_cut(mesh)
        compare_what_is_saved(model, shared, Path(saved))
        check_refusals(model)
    print(ALL_HOLD)
    jax.distributed.shutdown()


def compare_calls(model: models.Decoder, shared: models.Decoder) -> None:
    """The likeliest tokens of an engine, and the results of the training forward for these."""
    prompt, params = [*range(12)], detjax.SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    (answer,) = detjax.generate(shared, [prompt], params)
    tokens = answer.completions[0].tokens
    sequence = jnp.asarray([[*prompt, *tokens]])
    expected = scores(model, sequence)
    for one, other in zip(scores(shared, sequence), expected, strict=True):
        assert_same_bits(one, other)
    logits = expected[1][0, len(prompt) - 1 : -1]
    assert tokens == tuple(logits.argmax(axis=-1).tolist())
    chosen = np.take_along_axis(np.asarray(ops.log_softmax(jnp.asarray(logits))), np.asarray(tokens)[:, None], axis=1)
    assert_same_bits(np.float32(answer.completions[0].logprobs), chosen[:, 0])


def scores(model: models.Decoder, tokens: jax.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    hidden, _ = model.hidden(tokens)
    return np.asarray(hidden), np.asarray(model.logits(hidden)), np.asarray(model.logprobs(hidden, tokens))


def compare_engines(model: models.Decoder, shared: models.Decoder) -> None:
    """Answers of an engine in lockstep, to calls that come while others are computed."""
    params = [detjax.SamplingParams(max_tokens=4, temperature=1.0, seed=seed, top_logprobs=1) for seed in range(4)]
    long = [index % 100 for index in range(150)]
    prompts = [[5, 6, 7], long, long, [1]]
    requests = [detjax.Request(*pair) for pair in zip(prompts, params, strict=True)]
    expected = [answer.completions for answer in detjax.generate(model, prompts, params)]
    options = {"max_samples": 2, "token_budget": 16, "max_length": 256}
    with pytest.raises(
        ValueError, match="num_pages is None, and devices of several processes share the model; accepted"
    ):
        detjax.Engine(shared, **options)
    with detjax.Engine(shared, **options, num_pages=3) as engine:
        assert [answer.completions for answer in engine.generate(requests)] == expected
        futures = [engine.submit(request) for request in requests]
        futures[3].cancel()
        assert [future.result().completions for future in futures[:3]] == expected[:3]
        assert engine.stats().snapshots == 0


def compare_with_the_usual_cut(mesh: Mesh) -> None:
    """The negative control: products that are added across devices have other bits."""
    rng = np.random.default_rng(1)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 256), (64, 256)))

    def added(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.psum(ops.matmul(x, w, layout="nk"), "tensor")

    specs = P(None, "tensor"), P(None, "tensor")
    usual = jax.shard_map(added, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    sharding = jax.sharding.NamedSharding(mesh, P())
    seen = np.asarray(detjax.jit(usual)(*replicate((x, w), sharding)))
    assert (seen != np.asarray(ops.matmul(jnp.asarray(x), jnp.asarray(w), layout="nk"))).mean() > 0.2


def compare_what_is_saved(model: models.Decoder, shared: models.Decoder, folder: Path) -> None:
    models.save(shared, folder)
    assert models.digest(models.load(folder, progress=False)[0]) == models.digest(model)
    assert {path.name for path in folder.parent.iterdir()} <= {"model", folder.name}
    multihost_utils.sync_global_devices("read")


def check_refusals(model: models.Decoder) -> None:
    others = [device for device in jax.devices() if device.process_index != jax.process_index()]
    with pytest.raises(ValueError, match="sharded: the mesh has no device of this process, which is number"):
        models.sharded(model, Mesh(np.array(others), ("tensor",)))


if __name__ == "__main__":
    main(*sys.argv[1:])
