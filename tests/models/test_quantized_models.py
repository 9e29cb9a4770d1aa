"""Models whose weights keep the codes of a checkpoint: what they are read as, their memory, bits and copies."""

import contextlib
import dataclasses
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

from detjax import audit
from detjax.engine import Engine, Request, SamplingParams
from detjax.models import CheckpointError, Decoder, digest, load, mesh_of, save, sharded
from detjax.models.checkpoint.matrix_arrays import StoredMatrix
from detjax.models.checkpoint.quantized_export import quantize
from detjax.models.checkpoint.stored_formats import stored_formats
from detjax.models.checkpoint.weight_files import open_weights
from detjax.models.checkpoint.weight_updates import UpdatableWeights
from detjax.models.configuration.json_object import JsonObject
from detjax.models.network import split
from detjax.operands.quantized_weight import QuantizedWeight, is_quantized, widened
from detjax.rl.policy_gradients.policy_gradient import supervised_samples
from detjax.rl.trainer.losses import LogLikelihood
from detjax.rl.trainer.microbatches import Rows
from detjax.rl.trainer.step import Plan
from detjax.rl.trainer.trainer import Trainer
from tests.models import quantized_checkpoints as checkpoints
from tests.models.hugging_face import FIXTURES, changed_json, changed_tensors
from tests.support.bits import assert_same_bits, same_bits
from tests.support.simulated_devices import ALL_HOLD, run_on_devices

TOKENS = np.random.default_rng(1).integers(0, checkpoints.VOCABULARY, (3, 19))
CALLED = ("fp8 blocks", "fp8 static", "gptq ordered")
"""The formats whose models are called here; the others differ only in their reading."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Decoder]:
    folder, loaded = tmp_path_factory.mktemp("quantized"), dict[Any, Decoder]()

    def model(kind: str, **options: Any) -> Decoder:
        directory = folder / kind.replace(" ", "-")
        if not directory.exists():
            checkpoints.write(kind, directory)
        key = kind, *options.items()
        if key not in loaded:
            loaded[key] = load(directory, progress=False, **options)[0]
        return loaded[key]

    return model


def read(directory: Path) -> dict[str, StoredMatrix]:
    raw = json.loads((directory / "config.json").read_text())
    formats = stored_formats(JsonObject(raw, "config.json"))
    assert formats is not None
    with contextlib.ExitStack() as files:
        stored = formats.read(open_weights(directory, files)[1])
        matrices = {name: one for name, one in stored.items() if isinstance(one, StoredMatrix)}
        for one in matrices.values():
            one.__dict__["arrays_read"], one.__dict__["plain_read"] = one.arrays(), one.read(np.dtype("bfloat16"))
    return matrices


@pytest.mark.parametrize("kind", checkpoints.FORMATS)
def test_a_matrix_is_read_as_products_with_one_rounding(tmp_path: Path, kind: str) -> None:
    plain = checkpoints.write(kind, tmp_path / "model")
    matrices = read(tmp_path / "model")
    assert matrices.keys() == plain.keys()
    for name, matrix in matrices.items():
        arrays = matrix.__dict__["arrays_read"]
        assert matrix.shape == plain[name].shape
        np.testing.assert_array_equal(arrays.widened(np.dtype(np.float32)), plain[name])
        np.testing.assert_array_equal(matrix.__dict__["plain_read"], plain[name].astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", checkpoints.FORMATS)
def test_weights_in_codes_widen_to_the_plain_weights(models: Callable[..., Decoder], kind: str, dtype: str) -> None:
    in_codes, plain = (split(models(kind, dtype=dtype, quantized=way))[1] for way in ("weights", "widened"))
    assert sum(map(is_quantized, in_codes)) == 4  # queries, keys and values; output; gate and up; down
    for weight, expected in zip(in_codes, plain, strict=True):
        assert_same_bits(widened(weight) if is_quantized(weight) else weight, expected)


@pytest.mark.parametrize("kind", checkpoints.FORMATS)
def test_memory_is_the_format_s(models: Callable[..., Decoder], kind: str) -> None:
    weights = [weight for weight in split(models(kind))[1] if is_quantized(weight)]
    numbers = sum(weight.size for weight in weights)
    bits = 8 * sum(weight.nbytes for weight in weights) / numbers
    assert bits <= (8.7 if kind.startswith("fp8") else 4.9)


@pytest.mark.parametrize("kind", CALLED)
def test_a_row_does_not_depend_on_its_batch(models: Callable[..., Decoder], kind: str) -> None:
    model = models(kind)
    logits = model(jnp.asarray(TOKENS))
    assert_same_bits(model(jnp.asarray(TOKENS[1:2]))[0], logits[1])
    assert_same_bits(model(jnp.asarray(TOKENS[:, :7])), logits[:, :7])


def test_the_format_of_weights_with_plain_activations_is_a_schedule(models: Callable[..., Decoder]) -> None:
    in_codes, plain = models("gptq ordered"), models("gptq ordered", quantized="widened")
    assert_same_bits(in_codes(jnp.asarray(TOKENS)), plain(jnp.asarray(TOKENS)))
    assert digest(in_codes) == digest(plain)


@pytest.mark.parametrize("kind", ["fp8 blocks", "fp8 static"])
def test_quantized_activations_are_another_function(models: Callable[..., Decoder], kind: str) -> None:
    computed, plain = models(kind), models(kind, quantized="widened")
    logits, others = computed(jnp.asarray(TOKENS)), plain(jnp.asarray(TOKENS))
    assert not same_bits(logits, others)
    assert digest(computed) != digest(plain)
    distance = np.abs(logits - others).max() / np.ptp(others)
    assert 0.001 < distance < (0.15 if kind == "fp8 blocks" else 1)


def test_devices_share_quantized_weights() -> None:
    run_on_devices(__name__, devices=2)


def main() -> None:
    """Compares models on one device with the same models on two."""
    mesh = mesh_of(2)
    assert mesh is not None
    for kind in ("fp8 static", "gptq ordered"):
        with tempfile.TemporaryDirectory() as folder:
            checkpoints.write(kind, Path(folder) / "model")
            model, shared = (load(Path(folder) / "model", progress=False, mesh=place)[0] for place in (None, mesh))
            assert digest(shared) == digest(model)
            assert_same_bits(shared(jnp.asarray(TOKENS)), model(jnp.asarray(TOKENS)))
            assert_same_bits(nnx.to_pure_dict(nnx.state(sharded(model, mesh))), nnx.to_pure_dict(nnx.state(shared)))
    by_experts = mesh_of(1, 2)
    model, shared = (load(FIXTURES / "gpt-oss-mxfp4", progress=False, mesh=place)[0] for place in (None, by_experts))
    assert digest(shared) == digest(model)
    print(ALL_HOLD)


def test_engine_and_trainer_have_the_same_bits(models: Callable[..., Decoder]) -> None:
    model, prompt = models("fp8 static"), TOKENS[0].tolist()
    params = SamplingParams(max_tokens=4, temperature=0.0)
    plain_network, plain_weights = split(models("fp8 static", quantized="widened"))
    trainer = Trainer(model, optax.sgd(0.1), LogLikelihood(), Plan(Rows(sequences=1, length=32)))
    before = split(model)[1]
    with Engine(model, max_length=64, max_samples=2, token_budget=16) as engine:
        assert audit.engine_risks(model, engine.programs()) == {}
        with pytest.raises(ValueError, match="a trainer of plain ones compute other logprobs"):
            engine.update_weights(plain_network.state(plain_weights))
        for _ in range(2):
            completion = engine.generate([Request(tuple(prompt), params)])[0].completions[0]
            samples = supervised_samples([(prompt, list(completion.tokens))])
            assert_same_bits(np.asarray(completion.logprobs, np.float32), trainer.logprobs(samples)[0])
            trainer.step(samples)
            engine.sleep()
            engine.wake_up()
            engine.update_weights(trainer.params)
    for old, new, path in zip(before, trainer.weights, trainer.network.paths, strict=True):
        assert same_bits(old, new) == is_quantized(old), path


@pytest.mark.parametrize("kind", checkpoints.FORMATS)
def test_codes_are_saved_as_they_were_read(models: Callable[..., Decoder], tmp_path: Path, kind: str) -> None:
    model = models(kind)
    assert model.quantized_from is not None
    save(model, tmp_path / "saved")
    with contextlib.ExitStack() as files:
        old, new = (open_weights(Path(path), files)[1] for path in (model.quantized_from, tmp_path / "saved"))
        assert old.keys() == new.keys()
        for name, one in old.items():
            assert (one.format, one.shape) == (new[name].format, new[name].shape)
            np.testing.assert_array_equal(one.read_bytes(0, one.size), new[name].read_bytes(0, one.size))
    raws = [json.loads((Path(path) / "config.json").read_text()) for path in (model.quantized_from, tmp_path / "saved")]
    assert raws[0]["quantization_config"] == raws[1]["quantization_config"]


def test_changed_codes_are_not_saved(models: Callable[..., Decoder], tmp_path: Path) -> None:
    model = models("int4")
    network, weights = split(model)
    changed = [dataclasses.replace(one, codes=one.codes ^ 1) if is_quantized(one) else one for one in weights]
    with pytest.raises(ValueError, match="has other codes or scales than "):
        save(network.with_weights(tuple(changed)), tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_updates_replace_codes_by_codes(models: Callable[..., Decoder], tmp_path: Path) -> None:
    model = models("fp8 rows")
    assert model.quantized_from is not None
    updatable = UpdatableWeights(model)
    other = shutil.copytree(model.quantized_from, tmp_path / "other")
    with changed_tensors(other / "model.safetensors") as stored:
        stored["model.layers.0.mlp.down_proj.weight_scale"] *= 2
    update = updatable.read(other, lambda _: None)
    assert update.digest.value == digest(load(other, progress=False)[0]) != updatable.digest.value
    checkpoints.write("int4", tmp_path / "int4")
    with pytest.raises(CheckpointError, match="are stored in another format than the model's weights"):
        updatable.read(tmp_path / "int4", lambda _: None)


# --- what is refused --------------------------------------------------------------------------------------------------


def without_blocks(raw: dict[str, Any]) -> None:
    raw["quantization_config"] |= {"weight_block_size": None}


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("fp8 rows", {"ignore": ["lm_head", "re:.*q_proj"]}, "lists model.layers.0.self_attn.q_proj among the modules"),
        ("gptq", {"sym": True}, "holds other zero points than 8, though quantization_config.sym is true"),
        ("awq", {"zero_point": False}, "zero_point is False; accepted: true"),
        ("gptq", {"group_size": 32}, "has shape (5, 192); accepted: (10, 192), as groups of 32 columns have it"),
        ("nvfp4", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is {'num_bits': 8}; accepted: null"),
    ],
)
def test_lists_and_options_that_disagree_with_the_tensors_are_refused(
    tmp_path: Path, kind: str, changes: dict[str, Any], words: str
) -> None:
    checkpoints.write(kind, tmp_path / "model", **changes)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        load(tmp_path / "model", progress=False)


def test_a_plain_module_that_should_be_quantized_is_refused(tmp_path: Path) -> None:
    plain = checkpoints.write("fp8 rows", tmp_path / "model")
    name = "model.layers.0.mlp.down_proj"
    with changed_tensors(tmp_path / "model" / "model.safetensors") as stored:
        del stored[f"{name}.weight_scale"]
        stored[f"{name}.weight"] = plain[f"{name}.weight"]
    with pytest.raises(CheckpointError, match=f"'{name}.weight' is plain, but .*config.json does not list {name}"):
        load(tmp_path / "model", progress=False)
    with changed_json(tmp_path / "model" / "config.json") as raw:
        raw["quantization_config"]["ignore"].append(name)
    weights = split(load(tmp_path / "model", progress=False)[0])[1]
    assert sum(map(is_quantized, weights)) == 3


def test_a_zero_point_that_readers_disagree_about_is_refused(tmp_path: Path) -> None:
    checkpoints.write("gptq", tmp_path / "model")
    with changed_tensors(tmp_path / "model" / "model.safetensors") as stored:
        stored["model.layers.0.mlp.up_proj.qzeros"][0, 0] |= 15
    with pytest.raises(CheckpointError, match="holds the zero point 15, which readers of GPTQ's first format take as"):
        load(tmp_path / "model", progress=False)


@pytest.mark.parametrize("kind", ["batch", "fp4"])
def test_activations_that_are_not_computed_are_refused_unless_weights_are_asked_for(tmp_path: Path, kind: str) -> None:
    if kind == "batch":
        checkpoints.write("fp8 rows", tmp_path / "model")
        words = "one dynamic scale for a whole batch"
    else:
        checkpoints.write("nvfp4", tmp_path / "model")
        words = "activations of four bits"
    with changed_json(tmp_path / "model" / "config.json") as raw:
        group = raw["quantization_config"]["config_groups"]["group_0"]
        bits = {"batch": 8, "fp4": 4}[kind]
        group["input_activations"] = {"num_bits": bits, "type": "float", "strategy": "tensor", "dynamic": True}
    if kind == "fp4":
        with changed_tensors(tmp_path / "model" / "model.safetensors") as stored:
            for name in checkpoints.MATRICES:
                stored[f"model.layers.0.{name}.input_global_scale"] = np.array([1], np.float32)
    with pytest.raises(CheckpointError, match=f"asks for {words}.*quantized='weights'"):
        load(tmp_path / "model", progress=False)
    weights = split(load(tmp_path / "model", progress=False, quantized="weights")[0])[1]
    assert sum(isinstance(weight, QuantizedWeight) and not weight.is_computed for weight in weights) == 4


def test_one_product_has_one_scheme(tmp_path: Path) -> None:
    plain = checkpoints.write("fp8 rows", tmp_path / "model", ignore=["lm_head", "re:.*v_proj"])
    name = "model.layers.0.self_attn.v_proj.weight"
    with changed_tensors(tmp_path / "model" / "model.safetensors") as stored:
        del stored[f"{name}_scale"]
        stored[name] = plain[name]
    with pytest.raises(CheckpointError, match="of one product have quantized and plain activations"):
        load(tmp_path / "model", progress=False)
    assert sum(map(is_quantized, split(load(tmp_path / "model", progress=False, quantized="weights")[0])[1])) == 3


# --- export -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("to", "largest"), [("fp8-block", 0.04), ("fp8-channel", 0.04), ("int4", 0.13)])
def test_a_checkpoint_is_quantized_to_the_nearest_numbers(tmp_path: Path, to: Any, largest: float) -> None:
    checkpoints.write("gptq", tmp_path / "gptq")
    save(load(tmp_path / "gptq", progress=False, quantized="widened")[0], tmp_path / "plain")
    names = quantize(tmp_path / "plain", tmp_path / "out", to, group_size=64)
    assert names == sorted(f"model.layers.0.{name}.weight" for name in checkpoints.MATRICES)
    plain, model = load(tmp_path / "plain", progress=False)[0], load(tmp_path / "out", progress=False)[0]
    for weight, expected in zip(split(model)[1], split(plain)[1], strict=True):
        if not is_quantized(weight):
            assert_same_bits(weight, expected)
            continue
        difference = np.abs(np.asarray(widened(weight)) - np.asarray(expected)).max()
        assert 0 < difference < largest * np.abs(expected).max()
    with pytest.raises(FileExistsError, match="exists; accepted: a path that does not exist"):
        quantize(tmp_path / "plain", tmp_path / "out", to)
    with pytest.raises(CheckpointError, match="quantization_config is present; accepted: a checkpoint with plain"):
        quantize(tmp_path / "out", tmp_path / "again", to)
    assert not (tmp_path / "again").exists()


def test_export_options_are_checked(tmp_path: Path) -> None:
    to: Any = "int3"
    with pytest.raises(ValueError, match="to is 'int3'; accepted: fp8-block, fp8-channel, int4"):
        quantize(tmp_path, tmp_path / "out", to)
    with pytest.raises(ValueError, match="group_size is 12; accepted: multiples of 8"):
        quantize(tmp_path, tmp_path / "out", "int4", group_size=12)
    assert jax.tree.leaves(list(tmp_path.iterdir())) == []


if __name__ == "__main__":
    main()
