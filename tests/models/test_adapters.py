"""Adapters of peft: their files, what is refused, and rows of one call with adapters of their own."""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import detjax
from detjax.models import AdapterConfig, CheckpointError, merged, new_adapter, read_adapter, save_adapter
from detjax.models.adapters.adapter import Adapter
from tests.support.adapters import FIXTURE, LINEAR, make_adapter
from tests.support.bits import assert_same_bits, same_bits
from tests.support.simulated_devices import ALL_HOLD, run_on_devices

FIXTURES = FIXTURE.parent
IDS = jnp.asarray(np.random.default_rng(1).integers(0, 100, (4, 9)), jnp.int32)


def loaded(base: Path, **folders: Path) -> Any:
    return detjax.models.load(base, dtype="float32", progress=False, adapters=folders)[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("base", "targets"),
    [
        ("qwen3", LINEAR),
        ("qwen3-moe", LINEAR),
        ("phi3", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
        ("deepseek-v3", ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", *LINEAR[4:]]),
        ("qwen3-next", ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "k_proj"]),
        ("gemma3", LINEAR),
    ],
)
def test_a_row_with_an_adapter_has_the_bits_that_it_has_alone_and_the_values_of_a_merged_model(
    base: str, targets: list[str], tmp_path: Path
) -> None:
    folders = {
        name: make_adapter(tmp_path / name, targets, rank, base=FIXTURES / base, seed=rank)
        for name, rank in (("one", 4), ("two", 3))
    }
    model = loaded(FIXTURES / base, **folders)
    mixed = model(IDS, adapter=["one", None, "two", "one"])
    assert_same_bits(mixed[1:2], model(IDS[1:2]))
    for row, name in ((0, "one"), (2, "two"), (3, "one")):
        alone = model(IDS[row : row + 1], adapter=name)
        assert_same_bits(mixed[row : row + 1], alone)
        by_merging = merged(model, read_adapter(folders[name]))(IDS[row : row + 1])
        assert not same_bits(by_merging, alone)
        np.testing.assert_allclose(by_merging, alone, atol=3e-4)


def test_patterns_set_the_rank_and_the_factor_of_a_module(tmp_path: Path) -> None:
    config: dict[str, Any] = {"rank_pattern": {"v_proj": 3}, "alpha_pattern": {r".*\.1\..*down_proj": 7.0}}
    folder = make_adapter(tmp_path / "one", ["q_proj", "v_proj", "down_proj"], 4, use_rslora=True, **config)
    factors = read_adapter(folder).factors
    layer = "model.layers.{}.{}".format
    assert {len(factors[layer(i, "self_attn.v_proj")].a) for i in (0, 1)} == {3}
    scales = [factors[layer(i, "mlp.down_proj")].scale for i in (0, 1)]
    assert scales == [np.float32(9 / 2), np.float32(7 / 2)]
    assert factors[layer(0, "self_attn.v_proj")].scale == np.float32(9 / 3**0.5)


def test_modules_to_save_replace_weights_and_untie_the_head(tmp_path: Path) -> None:
    names = ["model.norm.weight", "model.embed_tokens.weight"]
    saved = {"replaced": names, "modules_to_save": ["norm", "embed_tokens"]}
    folder = make_adapter(tmp_path / "one", ["q_proj"], 4, **saved)
    other = make_adapter(tmp_path / "two", ["q_proj"], 4)
    model = loaded(FIXTURE, one=folder, two=other)
    mixed = model(IDS, adapter=["two", "one", None, "one"])
    assert_same_bits(mixed[0:1], model(IDS[:1], adapter="two"))
    assert_same_bits(mixed[2:3], model(IDS[2:3]))
    rows = jnp.array([1, 3])
    alone = model(IDS[rows], adapter="one")
    assert_same_bits(mixed[rows], alone)
    by_merging = merged(model, read_adapter(folder))
    assert by_merging.lm_head is not None
    np.testing.assert_allclose(by_merging(IDS[rows]), alone, atol=3e-4)


def test_a_saved_adapter_is_the_one_that_was_read(tmp_path: Path) -> None:
    saved = {"replaced": ["model.norm.weight"], "modules_to_save": ["norm"]}
    adapter = read_adapter(make_adapter(tmp_path / "one", LINEAR, 4, rank_pattern={"v_proj": 3}, **saved))
    save_adapter(adapter, tmp_path / "two")
    assert read_adapter(tmp_path / "two").digest == adapter.digest
    with pytest.raises(FileExistsError, match="exists"):
        save_adapter(adapter, tmp_path / "two")
    names = safetensors.numpy.load_file(tmp_path / "two" / "adapter_model.safetensors")
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("lora_bias", True),
        ("fan_in_fan_out", True),
        ("layer_replication", [[0, 1]]),
        ("trainable_token_indices", [1]),
        ("target_parameters", ["experts.down_proj"]),
        ("alora_invocation_tokens", [1]),
        ("init_lora_weights", "pissa_niter_4"),
        ("bias", "some"),
        ("peft_type", "IA3"),
        ("rank_pattern", {"q_proj": 0}),
        ("an_option_of_later_years", 3),
        ("target_modules", ["k_proj"]),
        ("r", 5),
    ],
)
def test_options_that_would_change_the_result_are_refused_by_name(key: str, value: Any, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "one", ["q_proj"], 4)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(CheckpointError, match="4 rows|5 rows" if key == "r" else key) as error:
        read_adapter(folder)
    assert "accepted" in str(error.value)


def test_files_and_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "one", ["q_proj"], 4)
    weights = folder / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(weights)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

    def refusal(changed: dict[str, np.ndarray]) -> str:
        safetensors.numpy.save_file(changed, weights)
        with pytest.raises(CheckpointError) as error:
            loaded(FIXTURE, one=folder)
        return str(error.value)

    assert "also the module's lora_A.weight" in refusal({k: v for k, v in tensors.items() if k != name})
    assert "modules_to_save" in refusal(tensors | {"base_model.model.model.norm.weight": np.zeros(8, np.float32)})
    assert "are for a weight of shape" in refusal(tensors | {name: tensors[name][:, 1:].copy()})
    outside = {key.replace("layers.0", "layers.9"): value for key, value in tensors.items()}
    assert "the model has no weight" in refusal(outside)
    router = tmp_path / "router"
    with pytest.raises(CheckpointError, match=r"mlp\.gate.*Routers"):
        loaded(FIXTURES / "qwen3-moe", one=make_adapter(router, ["mlp.gate"], 2, base=FIXTURES / "qwen3-moe"))
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="a pickle"):
        read_adapter(folder)


def test_names_and_numbers_of_adapters_that_a_call_cannot_have_are_refused() -> None:
    model = detjax.models.load(FIXTURE, dtype="float32", progress=False)[0]
    with pytest.raises(ValueError, match="the model has no adapters"):
        model(IDS, adapter="one")
    with pytest.raises(ValueError, match="new_adapter: targets"):
        new_adapter(model, AdapterConfig(rank=2, alpha=2.0, targets=("nothing",)))


def test_devices_that_share_a_model_change_no_bit_of_adapters(tmp_path: Path) -> None:
    for name, rank in (("a", 4), ("b", 3)):
        make_adapter(tmp_path / name, LINEAR, rank, seed=rank)
    run_on_devices(__name__, str(tmp_path), devices=2)


def test_the_digest_covers_every_number_and_no_name(tmp_path: Path) -> None:
    adapter = read_adapter(make_adapter(tmp_path / "one", ["q_proj"], 4))
    module, factors = next(iter(adapter.factors.items()))
    for changed in (
        factors._replace(a=factors.a + 1),
        factors._replace(b=-factors.b),
        factors._replace(scale=np.float32(3)),
    ):
        other = Adapter(adapter.config, {**adapter.factors, module: changed})
        assert other.digest != adapter.digest
    assert Adapter(adapter.config, dict(adapter.factors), {"x": np.zeros(1)}).digest != adapter.digest


def check_on_devices(folder: Path) -> None:
    """Compares a model that two devices share with the same on one device."""
    folders, rows = {name: folder / name for name in "ab"}, ["a", None, "b", "a"]
    alone = loaded(FIXTURE, **folders)(IDS, adapter=rows)
    mesh = jax.make_mesh((2,), ("tensor",))
    shared = detjax.models.load(FIXTURE, dtype="float32", progress=False, mesh=mesh, adapters=folders)[0]
    assert_same_bits(shared(IDS, adapter=rows), alone)
    assert not same_bits(alone, shared(IDS))


if __name__ == "__main__":
    check_on_devices(Path(sys.argv[1]))
    print(ALL_HOLD)
