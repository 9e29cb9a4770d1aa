"""The contract of the gated delta rule written a second time, in NumPy, one addition after another.

What a matrix unit adds in one step is the device's, so a few last bits may differ, and with them a few roundings.
Every planted change of a place of rounding makes many more numbers differ.
"""

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

import detjax
from detjax.contract import DELTA_CHUNK, KV_BLOCK, PORTABLE_ROWS
from detjax.operands.linear_attention_state import DELTA_ROWS
from tests.ops import delta_cases as cases

CHUNK = 64
LOG2_E = np.float32(1.4426950408889634)
LENGTH = 200


def rounded(x: np.ndarray) -> np.ndarray:
    """Numbers rounded to bfloat16, in float32."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def kept(x: np.ndarray) -> np.ndarray:
    return x


@dataclasses.dataclass(frozen=True)
class Places:
    """The roundings, as functions of float32 arrays."""

    state: Callable[[np.ndarray], np.ndarray] = rounded
    update: Callable[[np.ndarray], np.ndarray] = rounded
    weight: Callable[[np.ndarray], np.ndarray] = rounded
    remainder: Callable[[np.ndarray], np.ndarray] = rounded
    faded: Callable[[np.ndarray], np.ndarray] = rounded
    chunk: int = CHUNK


def dot(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The sum over the last axis of both, ascending, in float32."""
    total = np.zeros(np.broadcast_shapes(x.shape, y.shape)[:-1], np.float32)
    for index in range(x.shape[-1]):
        total = total + x[..., index] * y[..., index]
    return total


def emulated(request: cases.Tokens, places: Places) -> np.ndarray:
    """The outputs `[T, H, V]` in float32 before their rounding."""
    q, k, v, g, beta = (np.asarray(x).astype(np.float32) for x in request)
    shape = cases.shape_of(request)
    scale = np.float32(shape.key_dim**-0.5)
    q, k = (np.repeat(x, shape.heads // shape.key_heads, axis=1) for x in (q, k))
    s = np.zeros(shape[1:], np.float32)
    outputs = np.zeros(v.shape, np.float32)
    for first in range(0, len(v), places.chunk):
        held = places.state(s).swapaxes(1, 2)
        u, decays = (np.zeros((places.chunk, *x.shape[1:]), np.float32) for x in (v, g))
        rows = range(first, min(first + places.chunk, len(v)))
        total = np.zeros(shape.heads, np.float32)
        for t, row in enumerate(rows):
            total = total + g[row] * LOG2_E
            decays[t] = total
            decay = np.exp2(total)[:, None]
            rest = beta[row][:, None] * (v[row] - decay * dot(k[row][:, None], held))
            between = np.exp2(total[None] - decays[: t + 1])
            output = decay * (scale * dot(q[row][:, None], held))
            for j in range(t):
                rest = rest - (beta[row] * dot(k[row], k[first + j]) * between[j])[:, None] * u[j]
            u[t] = places.update(rest)
            high, low = np.zeros_like(rest), np.zeros_like(rest)
            for j in range(t + 1):
                p = scale * dot(q[row], k[first + j]) * between[j]
                high = high + places.weight(p)[:, None] * u[j]
                low = low + places.remainder(p - places.weight(p))[:, None] * u[j]
            outputs[row] = output + (high + low)
        if len(rows) == places.chunk:
            s = np.exp2(total)[:, None, None] * s
            after = np.zeros_like(s)
            for j, row in enumerate(rows):
                after = after + k[row][:, :, None] * places.faded(u[j] * np.exp2(total - decays[j])[:, None])[:, None]
            s = s + after
    return outputs


def differing(outputs: np.ndarray, expected: np.ndarray) -> float:
    """The share of the outputs that are not the numbers expected, once those are rounded."""
    return float((np.asarray(outputs).astype(np.float32) != rounded(expected)).mean())


CHANGES = {
    "state": Places(state=kept),
    "updates": Places(update=kept),
    "weights in one term": Places(remainder=np.zeros_like),
    "faded updates": Places(faded=kept),
    "chunks of 32": Places(chunk=32),
}


@pytest.fixture(scope="module")
def outputs() -> tuple[cases.Tokens, np.ndarray]:
    request = cases.tokens(LENGTH)
    with detjax.use_backend("portable"):
        return request, cases.in_calls(request, [LENGTH])


def test_outputs_are_those_of_the_contract(outputs: tuple[cases.Tokens, np.ndarray]) -> None:
    request, given = outputs
    assert differing(given, emulated(request, Places())) < 2e-3


@pytest.mark.parametrize("name", CHANGES)
def test_outputs_are_not_those_of_another_contract(name: str, outputs: tuple[cases.Tokens, np.ndarray]) -> None:
    request, given = outputs
    assert differing(given, emulated(request, CHANGES[name])) > 5e-2


def test_chunks_fit_pages_and_tiles() -> None:
    assert KV_BLOCK % DELTA_CHUNK == 0
    assert DELTA_CHUNK % PORTABLE_ROWS == 0
    assert DELTA_ROWS % PORTABLE_ROWS == 0
