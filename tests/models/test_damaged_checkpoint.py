"""Damaged Hugging Face directories: `load` reads nothing of them and names the file, and the tensor or key."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from detjax.models import CheckpointError, checkpoint, load
from tests.models.hugging_face import EMBEDDING, FIXTURES, HEAD, INDEX, SINGLE, changed_json, changed_tensors, copied

Q_PROJ, K_PROJ = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk")


def refusal(directory: Path | str) -> str:
    with pytest.raises(CheckpointError) as error:
        load(directory)
    return str(error.value)


@pytest.mark.parametrize("path", ["Qwen/Qwen3-8B", FIXTURES / "qwen3" / "config.json"])
def test_a_path_that_is_no_directory_is_refused_and_nothing_downloaded(path):
    message = refusal(path)
    assert message.startswith(f"load: '{path}' is not a directory; accepted: ")
    assert "Nothing is downloaded" in message


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("contents", "words"),
    [(b"", "is not JSON"), (b'{"a":', "is not JSON"), (b"[]", "a JSON object"), (b"\xff", "is not JSON")],
)
def test_a_damaged_json_file_is_named(tmp_path, name, contents, words):
    directory = copied("qwen3", tmp_path)
    (directory / name).write_bytes(contents)
    message = refusal(directory)
    assert message.startswith(str(directory / name))
    assert words in message


def test_a_missing_configuration_is_named(tmp_path):
    directory = copied("qwen3", tmp_path)
    (directory / "config.json").unlink()
    assert refusal(directory) == f"{directory / 'config.json'} is missing"


def test_an_unknown_architecture_is_named_before_weights_are_looked_at(tmp_path):
    directory = copied("qwen3", tmp_path)
    (directory / SINGLE).unlink()
    with changed_json(directory / "config.json") as raw:
        raw["architectures"] = ["GPT2LMHeadModel"]
    assert refusal(directory).startswith(
        f"{directory / 'config.json'}: architectures is ['GPT2LMHeadModel']; accepted: "
    )


def test_a_directory_without_safetensors_is_refused(tmp_path):
    directory = copied("qwen3", tmp_path)
    (directory / SINGLE).rename(directory / "pytorch_model.bin")
    assert f"{directory} has neither {SINGLE} nor {INDEX}" in refusal(directory)


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def cut_in_the_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:200])


def cut_in_the_data(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def lengthened(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def overwritten(file: Path) -> None:
    file.write_bytes(b"<html>" * 1000)


@pytest.mark.parametrize("damage", [emptied, cut_in_the_header, cut_in_the_data, lengthened, overwritten])
@pytest.mark.parametrize(("name", "file"), [("qwen3", SINGLE), ("qwen3-yarn", "model-00002-of-00003.safetensors")])
def test_a_truncated_or_damaged_file_is_named(tmp_path, damage, name, file):
    directory = copied(name, tmp_path)
    damage(directory / file)
    assert refusal(directory).startswith(f"{directory / file} is truncated or damaged: ")


def test_a_missing_shard_is_named(tmp_path):
    directory = copied("qwen3-yarn", tmp_path)
    (directory / "model-00003-of-00003.safetensors").unlink()
    assert refusal(directory) == f"{directory / 'model-00003-of-00003.safetensors'} is missing"


def without(name: str) -> Callable[[dict], None]:
    return lambda stored: stored.pop(name)


def with_tensor(name: str, value: Any) -> Callable[[dict], None]:
    return lambda stored: stored.update({name: value})


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        (without(K_PROJ), K_PROJ, "is missing; accepted: one of shape (160, 72)"),
        (without("model.norm.weight"), "model.norm.weight", "is missing; accepted: one of shape (72,)"),
        (without(EMBEDDING), EMBEDDING, "is missing"),
        (with_tensor("model.layers.2.mlp.up_proj.weight", np.ones((2, 2), np.float32)), None, "is surplus"),
        (with_tensor("model.layers.0.self_attn.q_proj.bias", np.ones(1120, np.float32)), None, "is surplus"),
        (with_tensor(Q_PROJ, np.ones((72, 1120), np.float32)), Q_PROJ, "has shape (72, 1120); accepted: (1120, 72)"),
        (
            with_tensor("model.norm.weight", np.ones((), np.float32)),
            "model.norm.weight",
            "has shape (); accepted: (72,)",
        ),
        (with_tensor(Q_PROJ, np.ones((1120, 72), np.int8)), Q_PROJ, "is stored as I8; accepted: BF16, F16, F32"),
        (
            with_tensor("model.norm.weight", np.ones(72, ml_dtypes.float8_e4m3fn)),
            "model.norm.weight",
            "is stored as F8_E4M3; accepted",
        ),
        (with_tensor(EMBEDDING, np.ones((515, 72), np.float64)), EMBEDDING, "is stored as F64; accepted"),
    ],
)
def test_a_missing_surplus_or_misshapen_tensor_is_named_with_its_file(tmp_path, monkeypatch, change, name, words):
    directory = copied("qwen3", tmp_path)
    with changed_tensors(directory / SINGLE) as stored:
        before = set(stored)
        change(stored)
        name = name or (set(stored) - before).pop()
    monkeypatch.setattr(checkpoint.StoredTensor, "read", lambda *_: pytest.fail("a tensor was read"))
    message = refusal(directory)
    assert message.startswith(f"{directory / SINGLE}: tensor '{name}' ")
    assert words in message


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (b"", "is not JSON"),
        (b'{"weight_map": ', "is not JSON"),
        (b"[]", "holds a list; accepted: a JSON object"),
        (b"{}", "weight_map is None; accepted: an object"),
        (b'{"weight_map": []}', "weight_map is []; accepted"),
        (b'{"weight_map": {}}', "weight_map is {}; accepted"),
        (b'{"weight_map": {"a": 3}}', "tensor 'a' lies in 3; accepted: a file name"),
        (b'{"weight_map": {"a": "../a.safetensors"}}', "tensor 'a' lies in '../a.safetensors'; accepted: a file name"),
    ],
)
def test_a_damaged_index_is_named(tmp_path, contents, words):
    directory = copied("qwen3-yarn", tmp_path)
    (directory / INDEX).write_bytes(contents)
    message = refusal(directory)
    assert message.startswith(str(directory / INDEX))
    assert words in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda files: files.update({"extra": "model-00001-of-00003.safetensors"}), "'extra' is missing, though"),
        (lambda files: files.pop(Q_PROJ), f"{Q_PROJ}' lies here, but {INDEX} does not list it"),
        (
            lambda files: files.update({HEAD: "model-00001-of-00003.safetensors"}),
            f"{HEAD}' lies here, but {INDEX} puts it",
        ),
    ],
)
def test_an_index_that_disagrees_with_its_shards_is_an_error_that_names_both(tmp_path, change, words):
    directory = copied("qwen3-yarn", tmp_path)
    with changed_json(directory / INDEX) as raw:
        change(raw["weight_map"])
    message = refusal(directory)
    assert re.match(rf"{re.escape(str(directory))}/model-0000\d-of-00003.safetensors: tensor '", message)
    assert words in message


def test_a_tensor_that_neither_index_nor_shards_have_is_named_with_the_index(tmp_path):
    directory = copied("qwen3-yarn", tmp_path)
    with changed_json(directory / INDEX) as raw:
        shard = raw["weight_map"].pop(HEAD)
    with changed_tensors(directory / shard) as stored:
        del stored[HEAD]
    assert refusal(directory).startswith(f"{directory / INDEX}: tensor '{HEAD}' is missing")
