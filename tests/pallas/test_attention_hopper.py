"""Attention's Hopper kernels: in Pallas' interpreter, lowered, and on a GPU where there is one."""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from bits import assert_same_bits

import detjax
from detjax.contract import KV_BLOCK, Masking
from detjax.pallas import attention_decode_hopper, attention_hopper, attention_prefill_hopper
from detjax.pallas.attention_decode_hopper import Schedule

INTERPRETER = plgpu.InterpretGPUParams(inline_mgpu="_hack_model_inline_mgpu_tokamax")
in_the_interpreter = pytest.mark.usefixtures("matrix_unit", "attention_in_the_interpreter")

OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "not causal": {"causal": False},
    "window": {"window": 100},
    "soft cap": {"soft_cap": 3.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "everything": {"window": 150, "soft_cap": 5.0, "sinks": True, "alibi": True},
}


@dataclasses.dataclass(frozen=True, eq=False)
class Requests:
    """Requests of several lengths, their keys and values in shuffled pages; whatever is nobody's is NaN.

    Queries are `[B, T, H, K]`, a token for each key, and garbage behind a request's last; keys and values
    `[B, T, h, K]`.
    """

    lengths: tuple[int, ...]
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    k_pages: jax.Array
    v_pages: jax.Array
    page_table: jax.Array
    masking: Masking
    sinks: jax.Array | None

    @classmethod
    def random(
        cls,
        lengths: tuple[int, ...],
        heads: int = 4,
        kv_heads: int = 2,
        width: int = 32,
        *,
        dtype: str = "bfloat16",
        sinks: bool = False,
        alibi: bool = False,
        **options: Any,
    ) -> "Requests":
        random = np.random.default_rng([heads, width, *lengths])
        shape = len(lengths), max(lengths)
        q, k, v = (
            random.standard_normal((*shape, count, width), np.float32).astype(dtype)
            for count in (heads, kv_heads, kv_heads)
        )
        own = np.arange(max(lengths)) < np.array(lengths)[:, None]
        k, v = (np.where(own[..., None, None], x, np.array(np.nan, x.dtype)) for x in (k, v))
        columns = -(-max(lengths) // KV_BLOCK) + 1
        order = random.permutation(len(lengths) * columns).astype(np.int32)
        pools = []
        for x in (k, v):
            padding = [(0, 0), (0, columns * KV_BLOCK - x.shape[1]), (0, 0), (0, 0)]
            pages = np.pad(x, padding, constant_values=np.nan).reshape(-1, KV_BLOCK, kv_heads, width).swapaxes(1, 2)
            pools.append(jnp.asarray(pages[np.argsort(order)]))
        slopes = tuple(2.0 ** -(1 + head) for head in range(heads)) if alibi else None
        masking = Masking(width**-0.5, alibi_slopes=slopes, **options)
        given = jnp.asarray(random.standard_normal(heads), dtype) if sinks else None
        return cls(lengths, q, k, v, *pools, jnp.asarray(order.reshape(len(lengths), columns)), masking, given)

    def last(self, tokens: int) -> np.ndarray:
        """The position of the first of each request's last tokens."""
        return np.maximum(np.array(self.lengths) - tokens, 0)

    def operands(self, start: np.ndarray, tokens: int) -> list[Any]:
        """What a kernel's `forward` takes, for so many tokens of each request from position `start` on."""
        padded = np.pad(self.q, [(0, 0), (0, tokens), (0, 0), (0, 0)])
        q = np.stack([x[first : first + tokens] for x, first in zip(padded, start, strict=True)])
        where = np.asarray(start, np.int32), np.array(self.lengths, np.int32)
        return [jnp.asarray(q), self.k_pages, self.v_pages, self.page_table, *map(jnp.asarray, where), self.sinks]

    def own(self, o: Any, start: np.ndarray) -> list[np.ndarray]:
        """Of a result, each request's own tokens."""
        return [np.asarray(x)[: n - first] for x, first, n in zip(o, start, self.lengths, strict=True)]

    def prefill(self, start: np.ndarray, tokens: int, options: dict[str, Any] | None = None) -> list[np.ndarray]:
        forward = functools.partial(attention_hopper.forward, masking=self.masking)
        o, _ = jax.jit(forward, compiler_options=options)(*self.operands(start, tokens))
        return self.own(o, start)

    def decode(
        self, start: np.ndarray, tokens: int, schedule: Schedule | None = None, options: dict[str, Any] | None = None
    ) -> list[np.ndarray]:
        forward = functools.partial(attention_decode_hopper.forward, masking=self.masking, schedule=schedule)
        return self.own(jax.jit(forward, compiler_options=options)(*self.operands(start, tokens)), start)

    def whole(self, options: dict[str, Any] | None = None) -> list[np.ndarray]:
        return self.prefill(np.zeros(len(self.lengths), int), max(self.lengths), options)

    def exact(self) -> list[np.ndarray]:
        return [self._exact(request) for request in range(len(self.lengths))]

    def _exact(self, request: int) -> np.ndarray:
        """In float64, by the textbook."""
        masking, length = self.masking, self.lengths[request]
        q, k, v = (np.asarray(x[request, :length], np.float64) for x in (self.q, self.k, self.v))
        group = q.shape[1] // k.shape[1]
        s = np.einsum("thk,shk->hts", q, np.repeat(k, group, axis=1)) * masking.scale
        if masking.soft_cap is not None:
            s = masking.soft_cap * np.tanh(s / masking.soft_cap)
        distance = np.arange(length) - np.arange(length)[:, None]
        if masking.alibi_slopes is not None:
            s = s + np.array(masking.alibi_slopes)[:, None, None] * distance
        unseen = (distance > 0) & masking.causal
        if masking.window is not None:
            unseen |= distance <= -masking.window
        p = np.exp(np.where(unseen, -np.inf, s))
        total = p.sum(axis=-1, keepdims=True)
        if self.sinks is not None:
            total += np.exp(np.asarray(self.sinks, np.float64))[:, None, None]
        return np.einsum("hts,shk->thk", p / total, np.repeat(v, group, axis=1))


def assert_close(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for o, e in zip(found, expected, strict=True):
        error = np.linalg.norm(o.astype(np.float64) - e) / np.linalg.norm(e)
        assert error < 5e-3


def last_of(rows: list[np.ndarray], start: np.ndarray) -> list[np.ndarray]:
    return [x[first:] for x, first in zip(rows, start, strict=True)]


@in_the_interpreter
@pytest.mark.parametrize("name", OPTIONS)
def test_decode_has_the_bits_of_prefill(name: str) -> None:
    requests = Requests.random((129, 1, 300, 128), **OPTIONS[name])
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        expected = requests.whole()
        assert_close(expected, requests.exact())
        for tokens, schedule in ((1, Schedule(2)), (3, Schedule(3)), (1, Schedule(7)), (3, Schedule(3, cut=False))):
            start = requests.last(tokens)
            assert_same_bits(requests.decode(start, tokens, schedule), last_of(expected, start))
