"""Loading in shards: a host reads no more of a parameter than the part of one device."""

import contextlib
import dataclasses
import functools
import itertools
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from detjax import models
from detjax.models.checkpoint import loading as checkpoint
from detjax.models.checkpoint.lazy_parameter import LazyParameter
from detjax.models.checkpoint.weight_files import StoredTensor, open_weights
from detjax.models.parts.parameters import Tensors
from tests.support.bits import assert_same_bits
from tests.support.simulated_devices import ALL_HOLD, ROOT, run_on_devices

FIXTURES = ROOT / "tests" / "fixtures"
STORED_OTHERWISE = ("glm4", "gpt-oss-mxfp4", "qwen3-next")
"""Checkpoints with blocks of codes, and with tensors in another order than parameters."""
FORMS = {
    "one": (Tensors(("a",)), (6, 5)),
    "one of three axes": (Tensors(("a",)), (3, 6, 4)),
    "rows": (Tensors(("a", "b", "c"), (4, 2, 2)), (8, 5)),
    "biases": (Tensors(("a", "b", "c"), (4, 2, 2)), (8,)),
    "stacked": (Tensors(("a", "b")), (2, 6, 4)),
    "stacked twice": (Tensors(tuple("abcdef"), stacked=(3, 2)), (3, 2, 4, 5)),
    "transposed": (Tensors(("a",), transposed=True), (6, 5)),
    "turns": (Tensors(("a",), pairs="interleaved"), (3, 2, 4, 5)),
    "joined": (Tensors(("a",), joined=True), (2, 6, 4)),
    "joined biases": (Tensors(("a",), joined=True), (2, 6)),
    "heads": (Tensors(("a", "b", "c"), (8, 4, 4), head_order=(0, 2, 3, 1), ordered=12), (16, 5)),
    "heads of one": (Tensors(("a",), head_order=(0, 2, 3, 1), ordered=8), (12,)),
    "groups": (Tensors(("a",), (4, 8), groups=2), (12, 5)),
}


@pytest.mark.parametrize("stored_as", ["float32", "float16"])
@pytest.mark.parametrize("form", FORMS)
def test_a_part_has_the_bits_of_the_whole(form: str, stored_as: str, tmp_path: Path) -> None:
    tensors, shape = FORMS[form]
    rng = np.random.default_rng(0)
    written = dict(zip(tensors.names, tensors.shapes(shape), strict=True))
    written = {name: rng.standard_normal(size).astype(stored_as) for name, size in written.items()}
    safetensors.numpy.save_file(written, tmp_path / "model.safetensors")
    with contextlib.ExitStack() as stack:
        _, stored = open_weights(tmp_path, stack)
        unread = LazyParameter(tensors, [stored[name] for name in tensors.names], shape, np.dtype("float16"))
        whole = tensors.join(written[name] for name in tensors.names).astype("float16")
        assert_same_bits(np.asarray(unread), whole)
        for axis in range(len(shape)):
            for start, stop in itertools.combinations(range(shape[axis] + 1), 2):
                index = (..., slice(start, stop), *[slice(None)] * (len(shape) - 1 - axis))
                assert_same_bits(unread[index], whole[index])


def test_no_more_is_read_than_a_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tensors, shape = FORMS["rows"]
    content = [np.zeros(size, np.float32) for size in tensors.shapes(shape)]
    safetensors.numpy.save_file(dict(zip("abc", content, strict=True)), tmp_path / "model.safetensors")
    read = list[tuple[str, int]]()
    read_bytes = StoredTensor.read_bytes

    def noted(tensor: StoredTensor, first: int, count: int) -> Any:
        read.append((tensor.name, count))
        return read_bytes(tensor, first, count)

    monkeypatch.setattr(StoredTensor, "read_bytes", noted)
    with contextlib.ExitStack() as stack:
        _, stored = open_weights(tmp_path, stack)
        unread = LazyParameter(tensors, [stored[name] for name in "abc"], shape, np.dtype(np.float32))
        _ = unread[..., 3:5, :]
    assert read == [("a", 5 * 4), ("b", 5 * 4)]


@functools.cache
def tied_model() -> models.Decoder:
    return models.Decoder(small_config(1, 16, 8, tied=True), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("differs_at", [None, 0, 8, 15])
def test_a_tied_head_is_compared_to_its_end(
    differs_at: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_COMPARED_AT_ONCE", 7)
    models.save(tied_model(), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    stored = safetensors.numpy.load_file(file)
    head = stored["model.embed_tokens.weight"].copy()
    if differs_at is not None:
        head[differs_at, -1] += 1
    safetensors.numpy.save_file({**stored, "lm_head.weight": head}, file, metadata={"format": "pt"})
    with contextlib.nullcontext() if differs_at is None else pytest.warns(UserWarning, match="serves as it differs"):
        again, _ = models.load(tmp_path / "model", progress=False)
    assert again.config.tied_embeddings == (differs_at is None)


def test_a_host_holds_less_than_a_layer_beyond_the_devices_weights(tmp_path: Path) -> None:
    assert run_on_devices(__name__, str(tmp_path), devices=4) == f"{ALL_HOLD}\n"


def small_config(layers: int, vocab: int, width: int, *, tied: bool = False) -> models.DecoderConfig:
    model, _ = models.load(FIXTURES / "qwen3", progress=False)
    return dataclasses.replace(
        model.config,
        layers=layers,
        windows=(None,) * layers,
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=4 * width,
        tied_embeddings=tied,
    )


def main(folder: Path) -> None:
    """Loads a model whose embedding has more bytes than a layer."""
    config = small_config(3, 12_288, 256)
    model = models.Decoder(config, rngs=nnx.Rngs(0))
    models.save(model, folder / "model")
    layer = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model.layers[0])))
    assert model.embedding.weight[...].nbytes > 2 * layer
    mesh = models.mesh_of(4)
    for path in (folder / "model", *(FIXTURES / name for name in STORED_OTHERWISE)):
        shared, _ = models.load(path, mesh=mesh, progress=False)
        assert models.digest(shared) == models.digest(models.load(path, progress=False)[0]), path
    # What lies on a device is not the host's. A simulated one may take the host's array as its own, so it gets zeros.
    jax.device_put = lambda x, device=None, **_: jnp.zeros(x.shape, x.dtype)
    jax.make_array_from_single_device_arrays = lambda shape, sharding, parts: parts
    assert peak(folder, mesh) < layer
    # The control: a device that has all of the model gets whole parameters.
    assert peak(folder, None) > 2 * layer
    print(ALL_HOLD)


def peak(folder: Path, mesh: jax.sharding.Mesh | None) -> int:
    """The bytes that Python has allocated at most while it loads."""
    tracemalloc.start()
    try:
        begin, _ = tracemalloc.get_traced_memory()
        models.load(folder / "model", mesh=mesh, progress=False)
        return tracemalloc.get_traced_memory()[1] - begin
    finally:
        tracemalloc.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
