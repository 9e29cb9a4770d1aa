"""Copies of the fixtures, and ways to change them."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import safe_open

FIXTURES = Path(__file__).parents[1] / "fixtures"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/config.json"))
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def copied(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / name, folder / name))


def tensors(directory: Path, files: str = "*.safetensors") -> dict[str, np.ndarray]:
    read = {}
    for file in directory.glob(files):
        with safe_open(file, framework="numpy") as handle:
            read |= {name: handle.get_tensor(name) for name in handle.keys()}
    return read


@contextlib.contextmanager
def changed_tensors(file: Path) -> Iterator[dict[str, Any]]:
    with safe_open(file, framework="numpy") as handle:
        read = {name: handle.get_tensor(name) for name in handle.keys()}
    yield read
    safetensors.numpy.save_file(read, file, metadata={"format": "pt"})


@contextlib.contextmanager
def changed_json(file: Path) -> Iterator[dict[str, Any]]:
    raw = json.loads(file.read_text(encoding="utf-8"))
    yield raw
    file.write_text(json.dumps(raw), encoding="utf-8")
