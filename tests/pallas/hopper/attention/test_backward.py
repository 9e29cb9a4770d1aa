"""Gradients of Hopper attention in Pallas' interpreter."""

import itertools
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
import pytest

from tests.pallas.hopper.attention.gradients import packed_gradients, rectangular_gradients
from tests.support.attention_requests import INTERPRETER, Requests, in_the_interpreter, mask_of_heads


def assert_rows_close(actual: Any, expected: Any) -> None:
    """Fails if a row of a gradient differs by more than roundings: one key too many or too few shows in its row."""
    x, y = (np.asarray(array, np.float64) for array in (actual, expected))
    sizes, errors = (np.linalg.norm(rows, axis=-1) for rows in (y, x - y))
    usual = np.sqrt((sizes[sizes > 0] ** 2).mean())
    assert (errors <= 0.01 * np.maximum(sizes, usual)).all(), (errors / usual).max()


# Tiles of queries have 128 rows, or 64 at a request's end; keys come in 64s, and their gradients by pages of 128.
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    # The first query's own key is the last but one of 64.
    "causal": ({"heads": 2, "kv_heads": 1, "width": 16}, (132, 5), (70, 3)),
    # The second tile's window begins with the last of 128 keys, and its last query is the only one that sees a key.
    "window of two": (
        {"heads": 2, "kv_heads": 1, "width": 16, "window": 2, "alibi": True, "sinks": True},
        (129, 130),
        (129, 2),
    ),
    # One of 64 queries misses one of 64 keys.
    "window of 127": (
        {"heads": 1, "kv_heads": 1, "width": 16, "window": 127, "soft_cap": 1.0, "sinks": True},
        (128,),
        (128,),
    ),
    "not causal": ({"heads": 2, "kv_heads": 2, "width": 16, "causal": False}, (65,), (65,)),
    # Keys and values have a kernel each.
    "wide": ({"heads": 1, "kv_heads": 1, "width": 192, "soft_cap": 1.0}, (66,), (66,)),
}
PACKED = "causal", "window of 127", "wide"
"""The cases whose packed queries are compared in every run; of the others, rectangular ones are."""


@in_the_interpreter
@pytest.mark.parametrize(
    ("name", "packed"),
    [
        (name, packed) if packed == (name in PACKED) else pytest.param(name, packed, marks=pytest.mark.nightly)
        for name, packed in itertools.product(CASES, (False, True))
    ],
)
def test_gradients_are_those_of_the_portable_backend(name: str, packed: bool) -> None:
    options, lengths, counts = CASES[name]
    requests = Requests.random(lengths, **options)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        if packed:
            order = range(len(counts))[::-1]
            dq, (dkv, dsinks) = packed_gradients(requests, counts, order, [8 * (i % 2) for i in order], 5)
        else:
            dq, (dkv, dsinks) = rectangular_gradients(requests, counts)
    expected_dq, (expected_dkv, expected_dsinks) = rectangular_gradients(requests, counts, "portable")
    for one, other in zip(dq, expected_dq, strict=True):
        assert_rows_close(one, other)
    for one, other in ((dkv.k, expected_dkv.k), (dkv.v, expected_dkv.v)):
        assert_rows_close(one, other)
    if requests.sinks is not None:
        np.testing.assert_allclose(np.asarray(dsinks), np.asarray(expected_dsinks), rtol=1e-2, atol=1e-2)


@in_the_interpreter
def test_gradients_with_a_mask_are_those_of_the_portable_backend() -> None:
    requests = Requests.random((66,), 2, 1, 16, causal=False)
    mask = mask_of_heads(requests)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        gradients = requests.gradients("hopper", mask=mask)
    for name, expected in requests.gradients("portable", mask=mask).items():
        assert_rows_close(gradients[name], expected)
