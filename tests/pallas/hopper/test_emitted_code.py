"""The code that Mosaic GPU emits for kernels: the signs of its integers, and what an emulator of PTX computes.

Pallas' interpreter has no faults of that code.
"""

import functools
import re
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.pallas.hopper.rows import NO_AUTO_BARRIERS, layout
from tests.pallas.hopper import compiler
from tests.pallas.hopper.interpreter import lowered
from tests.pallas.hopper.test_expert_choice import logits, problem, steps
from tests.support.bits import assert_same_bits
from tests.support.ptx import kernels

CHOICES = {
    "choice of some experts": (problem(33, 128, 8, local=32, unit=16), 40),
    "choice of most experts": (problem(64, 512, 16, local=128, unit=16, normalized=False), 300),
}
"""Programs that choose experts, with their problems and the first expert of the device."""
MORE = "choice of more tokens' experts"
"""A program that chooses the experts of 150 tokens in one kernel, and places their rows in two others."""
PLACES = "rows of chosen experts"
PIECES = "pieces of a device's columns"
RESULTS = "ids", "weights", "group_sizes", "token", "place", "tiles"


@pytest.mark.parametrize("number_first", [False, True])
def test_an_integer_that_loses_its_sign_is_seen(number_first: bool) -> None:
    rows = layout(4, 32)

    def body(x: jax.Array, y: jax.Array) -> None:
        numbers = plgpu.load(x, layout=rows, optimized=False)
        y[...] = jnp.where(numbers < 3, -1, numbers) if number_first else jnp.where(numbers >= 3, numbers, -1)

    array = jax.ShapeDtypeStruct((4, 128), jnp.int32)
    kernel = plgpu.kernel(body, out_type=array, compiler_params=NO_AUTO_BARRIERS)
    lower = functools.partial(lowered, kernel, array)
    if number_first:
        with pytest.raises(AssertionError, match=r"select_n: the emitted array of int32 has is_signed=False"):
            lower()
    else:
        assert "mosaic_gpu" in lower()


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """The PTX of each program."""
    return compiler.compiled(Path(compiler.__file__), [*CHOICES, MORE, PLACES, PIECES], dump="MOSAIC_GPU_DUMP_PTX")


def emulated(text: str, names: Sequence[str], arrays: dict[str, np.ndarray]) -> None:
    """Runs a text's kernel, whose parameters have these names in the order of their first use."""
    (kernel,) = kernels(text)
    kernel.run([arrays[name] for name in names])


def choose(text: str, name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The results of an emulated choice of experts, and the separate operations' results."""
    p, first = CHOICES[name]
    x, present = logits(p.tokens, p.experts), jnp.arange(p.tokens) % 5 != 2
    expected = dict(zip(RESULTS, steps(x, present, first, p), strict=True))
    arrays = {"logits": np.array(x), "present": np.array(present, np.int32), "first": np.array([first], np.int32)}
    actual = {key: np.full_like(value, -7) for key, value in expected.items()}
    order = "token", "tiles", "logits", "first", "present", "group_sizes", "place", "ids", "weights"
    emulated(text, order, arrays | actual)
    return actual, expected


@pytest.mark.parametrize("name", CHOICES)
def test_emitted_code_chooses_and_places_as_the_separate_operations(name: str, texts: dict[str, str]) -> None:
    """Ties, NaN, absent tokens, and experts of other devices among them."""
    actual, expected = choose(texts[name], name)
    np.testing.assert_allclose(actual.pop("weights"), expected.pop("weights"), rtol=1e-6)
    assert_same_bits(actual, expected)


def test_emitted_code_places_rows_as_the_separate_operations(texts: dict[str, str]) -> None:
    """Expert 256 is on another device, and may occur several times."""
    p = problem(64, 257, 8, local=256)
    x, present = logits(64, 257), jnp.arange(64) % 5 != 2
    expected = dict(zip(RESULTS, steps(x, present, 0, p), strict=True))
    ids, _ = expected.pop("ids"), expected.pop("weights")
    arrays = {"ids": np.minimum(ids, 256), "present": np.array(present, np.int32)}
    actual = {key: np.full_like(value, -7) for key, value in expected.items()}
    emulated(texts[PLACES], ("token", "tiles", "ids", "present", "group_sizes", "place"), arrays | actual)
    assert_same_bits(actual, expected)


def test_emitted_code_chooses_and_places_in_blocks_as_the_separate_operations(texts: dict[str, str]) -> None:
    """The third block of tokens is not full. Experts from 40 to 71 are the device's."""
    p = problem(150, 128, 8, local=32, unit=64)
    x, present = logits(150, 128), np.arange(150) % 5 != 2
    expected = dict(zip(RESULTS, steps(x, jnp.asarray(present), 40, p), strict=True))
    actual = {key: np.full_like(value, -7) for key, value in expected.items()}
    by_name = {kernel.name.removesuffix("_mosaic_gpu_kernel"): kernel for kernel in kernels(texts[MORE])}
    choosing, counting, placing = (by_name[f"expert_{name}"] for name in ("choice", "counts", "places"))
    for cta in range(10):
        choosing.run([np.array(x), actual["ids"], actual["weights"]], (cta, 0))
    np.testing.assert_allclose(actual.pop("weights"), expected.pop("weights"), rtol=1e-6)
    ids = actual["ids"]
    local = np.where((ids >= 40) & (ids < 72), ids - 40, 32).astype(np.int32)
    arrays = actual | {"ids": local, "present": present.astype(np.int32), "counts": np.full((3, 32), -7, np.int32)}
    for kernel, order in (
        (counting, ("token", "tiles", "ids", "present", "counts")),
        (placing, ("counts", "ids", "present", "group_sizes", "tiles", "place", "token")),
    ):
        for block in range(p.blocks):
            kernel.run([arrays[name] for name in order], (block, 0))
    assert_same_bits(actual, expected)


def test_emitted_code_copies_a_devices_columns_in_pieces(texts: dict[str, str]) -> None:
    """The second piece ends within the units of its threads."""
    x = np.random.default_rng(0).integers(0, 2**32, (500, 12), np.uint32)
    y = np.full((500, 24), 7, np.uint32)
    (kernel,) = kernels(texts[PIECES])
    for cta in range(2):
        kernel.run([np.array([1], np.int32), x, y], (cta, 0))
    assert_same_bits(y[:, 12:], x)
    assert (y[:, :12] == 7).all()  # the other device's


def test_emitted_code_needs_its_barriers(texts: dict[str, str]) -> None:
    name = "choice of some experts"
    barriers = list(re.finditer(r"bar\.sync (%r\d+|15), \d+;", texts[name]))
    assert len(barriers) == 3
    for barrier in barriers:
        with pytest.raises(AssertionError, match="expert_choice_mosaic_gpu_kernel: a thread reads too early"):
            choose(texts[name][: barrier.start()] + texts[name][barrier.end() :], name)
