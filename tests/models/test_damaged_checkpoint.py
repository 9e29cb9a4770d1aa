"""Damaged Hugging Face directories: `load` reads nothing of them and names the file, and the tensor or key."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from detjax.models import CheckpointError, load
from detjax.models.checkpoint import loading as checkpoint
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


# --- other files in a directory ---------------------------------------------------------------------------------------

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32\nsize 12345\n"


@pytest.mark.parametrize("has_model", [False, True])
@pytest.mark.parametrize("base", ["Qwen/Qwen3-8B", None])
def test_an_adapter_is_named_with_its_base_model_and_what_to_do(tmp_path, has_model, base):
    directory = copied("qwen3", tmp_path) if has_model else tmp_path
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": base}))
    (directory / "adapter_model.safetensors").write_bytes(b"")
    message = refusal(directory)
    kind = "LORA of Qwen/Qwen3-8B" if base else "LORA"
    assert message.startswith(f"{directory} holds an adapter (adapter_config.json, {kind}) ")
    assert ("next to a model" if has_model else "and no model") in message
    assert "accepted: a directory with a whole model. Pass the base model" in message


FOREIGN = {
    "qwen3-q4.gguf": "GGUF (qwen3-q4.gguf)",
    "pytorch_model.bin": "PyTorch's format (pytorch_model.bin)",
    "consolidated.00.pth": "PyTorch's format (consolidated.00.pth)",
    "tf_model.h5": "TensorFlow's format (tf_model.h5)",
    "flax_model.msgpack": "Flax's format (flax_model.msgpack)",
    "onnx/model.onnx": "ONNX (onnx/model.onnx)",
    "consolidated.safetensors": "other safetensors (consolidated.safetensors)",
    "adapter_model.bin": "an adapter's weights (adapter_model.bin)",
    "model.safetensors.dvc": "a pointer of DVC (model.safetensors.dvc)",
    "hf_quant_config.json": "a quantization that config.json does not describe (hf_quant_config.json)",
    "quant_config.json": "a quantization that config.json does not describe (quant_config.json)",
    "quantize_config.json": "a quantization that config.json does not describe (quantize_config.json)",
    "a.ggml": "GGML (a.ggml)",
    "a.pt": "PyTorch's format (a.pt)",
    "a.ckpt": "PyTorch's format (a.ckpt)",
    "a.nemo": "NeMo's format (a.nemo)",
    "params.json": "the original format of Llama and Mistral (params.json)",
    "model_index.json": "a pipeline of Diffusers (model_index.json)",
    "other.safetensors.index.json": "another index of safetensors (other.safetensors.index.json)",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_files_in_other_formats_are_named_alone_without_weights_and_besides_a_model(tmp_path, name):
    whole = copied("qwen3", tmp_path)
    (whole / name).parent.mkdir(exist_ok=True)
    (whole / name).write_bytes(b"x")
    with pytest.warns(UserWarning, match=re.escape(f"load: {whole} also holds {FOREIGN[name]}, which is not read")):
        load(whole)
    (whole / SINGLE).unlink()
    assert f"There is {FOREIGN[name]}, which is not read." in refusal(whole)
    (whole / "config.json").unlink()
    message = refusal(whole)
    assert message.startswith(
        f"{whole / 'config.json'} is missing, and {whole} holds {FOREIGN[name]}, which is not read;"
    )
    assert "accepted: a directory with config.json and safetensors" in message


@pytest.mark.parametrize("name", [".git/a.bin", "assets/params.json", "a/b/c.bin", "README.md"])
def test_hidden_and_deeper_files_and_objects_below_are_no_weights(tmp_path, name):
    directory = copied("qwen3", tmp_path)
    (directory / name).parent.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(b"x")
    load(directory)


def test_several_files_of_several_formats_are_named_by_format(tmp_path):
    for name in ("a.gguf", "b.gguf", "c.onnx", *(f"{number}.bin" for number in range(4))):
        (tmp_path / name).write_bytes(b"x")
    assert "PyTorch's format (0.bin, 1.bin, 2.bin, 3.bin), GGUF" in refusal(tmp_path)
    (tmp_path / "4.bin").write_bytes(b"x")
    assert "PyTorch's format (0.bin, 1.bin, 2.bin, 3.bin, ...), GGUF (a.gguf, b.gguf) and ONNX (c.onnx)" in refusal(
        tmp_path
    )


def test_shards_that_are_not_read_are_named(tmp_path):
    directory = copied("qwen3", tmp_path)
    (directory / "model-00001-of-00002.safetensors").write_bytes(b"x")
    with pytest.warns(UserWarning, match=r"other safetensors \(model-00001-of-00002.safetensors\), which is not read"):
        load(directory)


def test_a_directory_above_the_checkpoint_names_it(tmp_path):
    copied("qwen3", tmp_path / "snapshots")
    message = f"{tmp_path / 'config.json'} is missing; there is one in snapshots/qwen3 below it. Pass that directory"
    assert refusal(tmp_path) == message


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.model",
        "vocab.json",
        "tekken.json",
        "merges.txt",
        "vocab.txt",
        "spiece.model",
        "sentencepiece.bpe.model",
        "a.tiktoken",
    ],
)
def test_a_tokenizer_that_is_not_read_is_named(tmp_path, name):
    directory = copied("qwen3", tmp_path)
    (directory / name).write_text("{}")
    load(directory)
    (directory / "tokenizer.json").unlink()
    with pytest.warns(UserWarning, match=re.escape(f"a tokenizer without tokenizer.json ({name}), which is not read")):
        assert load(directory)[1] is None


def test_a_chat_template_that_is_not_read_is_named(tmp_path):
    directory = copied("qwen3", tmp_path)
    (directory / "chat_template.json").write_text("{}")
    load(directory)
    (directory / "chat_template.jinja").unlink()
    with changed_json(directory / "tokenizer_config.json") as raw:
        raw.pop("chat_template", None)
    with pytest.warns(UserWarning, match=r"a processor's chat template \(chat_template.json\), which is not read"):
        load(directory)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", SINGLE])
@pytest.mark.parametrize(
    ("contents", "says"),
    [
        (LFS, "is a pointer of Git LFS (fetch it with git lfs pull, or download it) and not the file itself"),
        (b"/annex/objects/SHA256E-s1--ab", "is a pointer of git-annex (fetch it with git annex get, or download it)"),
    ],
)
def test_a_pointer_of_version_control_is_named(tmp_path, name, contents, says):
    directory = copied("qwen3", tmp_path)
    (directory / name).write_bytes(contents)
    assert refusal(directory).startswith(f"{directory / name} {says}")


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", SINGLE]
)
def test_a_link_to_a_file_that_is_missing_is_named(tmp_path, name):
    directory = copied("qwen3", tmp_path)
    (directory / name).unlink()
    (directory / name).symlink_to("../blobs/4d7a21")
    assert (
        refusal(directory) == f"{directory / name} is a link to ../blobs/4d7a21, which is missing; fetch the file first"
    )


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        (
            "max_position_embeddings",
            10**18,
            f"an integer from 1 to {2**24}, as positions are float32 numbers in rotations",
        ),
        ("max_position_embeddings", 2**24 + 1, f"an integer from 1 to {2**24}"),
        ("num_hidden_layers", 4097, "an integer from 1 to 4096"),
        ("vocab_size", 2**31, f"an integer from 1 to {2**31 - 1}"),
        ("model_type", None, "'qwen3'"),
    ],
)
def test_a_key_beyond_its_range_or_missing_is_named(tmp_path, key, value, says):
    directory = copied("qwen3", tmp_path)
    with changed_json(directory / "config.json") as raw:
        raw[key] = value
        if value is None:
            del raw[key]
    state = "is missing" if value is None else f"is {value}"
    assert refusal(directory).startswith(f"{directory / 'config.json'}: {key} {state}; accepted: {says}")


def test_the_most_positions_are_taken(tmp_path):
    directory = copied("qwen3", tmp_path)
    with changed_json(directory / "config.json") as raw:
        raw["max_position_embeddings"] = 2**24
    assert load(directory)[0].config.max_positions == 2**24
