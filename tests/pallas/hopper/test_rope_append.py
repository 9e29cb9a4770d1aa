"""The Hopper kernel that rotates queries and keys and writes the KV cache: bits in Pallas' interpreter and on a Hopper
GPU, and lowering."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax.contract import KV_BLOCK
from detjax.operands.kv_pages import KVPages, Queries
from detjax.pallas.hopper import rope
from tests.support.append_cases import CASES, Append
from tests.support.bits import assert_same_bits
from tests.support.unchecked import without_checks


def interpreted(fn: Callable[[], Any], backend: str = "hopper") -> Any:
    """The result of `fn`, its kernels interpreted, as NumPy arrays."""
    with detjax.use_backend(backend), plgpu.force_gpu_interpret_mode():
        return jax.tree.map(np.asarray, detjax.jit(fn)())


def exactly(case: Append) -> Append:
    """The case with whole numbers: sums of their squares are exact, so the interpreter's order has the same bits."""
    random = np.random.default_rng(0)
    return case.changed(qkv=jnp.asarray(random.integers(-7, 8, case.arrays["qkv"].shape), case.arrays["qkv"].dtype))


FEW_CASES = "at capacity", "beyond the capacity", "norms with an offset", "no norms"


@pytest.mark.parametrize(
    "name", [name if name in FEW_CASES else pytest.param(name, marks=pytest.mark.nightly) for name in CASES]
)
def test_the_kernel_has_the_bits_of_the_portable_backend(name: str) -> None:
    case = exactly(CASES[name])
    result = interpreted(case)
    assert_same_bits(result, interpreted(case, "portable"))
    if name in ("norms with an offset", "float16", "one key head"):
        assert_same_bits(result, interpreted(case.in_steps))
    assert [case.written(pool) for pool in result[1:]] == [case.slots()] * 2


def test_what_is_in_the_pages_stays() -> None:
    case = exactly(CASES["ragged"])
    shape = case.arrays["k_pages"].shape
    k_pages, v_pages = (jnp.asarray(np.random.default_rng(i).standard_normal(shape), jnp.bfloat16) for i in range(2))
    full = case.changed(k_pages=k_pages, v_pages=v_pages)
    assert_same_bits(interpreted(full), interpreted(full, "portable"))
    nothing = full.changed(q_length=jnp.zeros_like(case.arrays["q_length"]))
    assert_same_bits(interpreted(nothing)[1:], (k_pages, v_pages))


FEW_SCHEDULES = (16, 1, 4), (4, 4, 2)
SCHEDULES = [(2, 8, 1), (8, 1, 1), (16, 8, 4)]


@pytest.mark.parametrize(
    ("kv_heads", "schedules"),
    [
        (6, FEW_SCHEDULES),
        pytest.param(6, SCHEDULES, marks=pytest.mark.nightly),
        pytest.param(1, (*FEW_SCHEDULES, *SCHEDULES), marks=pytest.mark.nightly),
    ],
)
def test_every_schedule_writes_the_same_bits(kv_heads: int, schedules: Sequence[tuple[int, int, int]]) -> None:
    # Nine tokens: with two or more to a CTA, the last one moves up to tokens that another CTA writes too.
    case = exactly(Append.random((126, 250, 0), (3, 2, 3), 3, heads=8, kv_heads=kv_heads, width=128))
    random = np.random.default_rng(0)
    cos, sin = (jnp.asarray(random.standard_normal((3, 3, 64)), jnp.float32) for _ in range(2))
    arrays = case.arrays
    operands = arrays["qkv"], (cos, sin), arrays["q_norm"], arrays["k_norm"]
    start, count = arrays["q_start"], arrays["q_length"]
    pages = {"kv": KVPages(arrays["k_pages"], arrays["v_pages"])}
    pages["queries"] = Queries(arrays["page_table"], start, start + count, count)

    def appended(schedule: rope.Schedule | None) -> Any:
        return interpreted(lambda: rope.append_kv(*operands, **pages, eps=1e-6, schedule=schedule))

    expected = appended(None)
    assert case.written(expected[1].k) == case.slots()
    for threads, tokens, heads in schedules:
        assert_same_bits(appended(rope.Schedule(threads, tokens, heads)), expected)


def test_gradients_have_the_bits_of_the_separate_steps() -> None:
    case = exactly(CASES["ragged"])
    pools = {name: jnp.zeros_like(case.arrays[name]) for name in ("k_pages", "v_pages")}
    floats = {n: x for n, x in (case.arrays | pools).items() if jnp.issubdtype(x.dtype, jnp.floating)}

    def gradients(append: Callable[..., Any]) -> Any:
        out, transposed = jax.vjp(lambda floats: append(**floats), floats)
        return transposed(tuple(jnp.linspace(-1, 1, y.size).reshape(y.shape).astype(y.dtype) for y in out))[0]

    assert_same_bits(interpreted(lambda: gradients(case)), interpreted(lambda: gradients(case.in_steps)))


def test_vmap_gives_the_bits_of_each() -> None:
    case = exactly(CASES["decode, some ended"])
    qkv = jnp.stack([case.arrays["qkv"], case.arrays["qkv"][::-1]])
    results = interpreted(lambda: jax.vmap(lambda qkv: case(qkv=qkv))(qkv))
    for i, one in enumerate(qkv):
        assert_same_bits(jax.tree.map(lambda x, i=i: x[i], results), interpreted(functools.partial(case, qkv=one)))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("width", [20, 64, 80, 128, 256])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (64, 1), (3, 7), (4, 1024)])
def test_it_lowers_for_cuda(width: int, batch: int, tokens: int) -> None:
    def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    turns = (array(batch, tokens, width // 2, dtype="float32"),) * 2
    integers = array(batch, dtype="int32")
    fields = dict.fromkeys(("start", "length", "count"), integers)
    queries = without_checks(Queries, page_table=array(batch, 16, dtype="int32"), **fields)
    pool = array(99, 8, KV_BLOCK, width)
    pages = {"kv": KVPages(pool, pool), "queries": queries}
    operands = array(batch, tokens, 48, width), turns, array(width), array(width)
    append = functools.partial(rope.append_kv, eps=1e-6)
    text = jax.jit(append).trace(*operands, **pages).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == (3 if width == 20 else 1)


def on_the_device(fn: Callable[..., Any], **arrays: jax.Array) -> Any:
    return jax.tree.map(np.asarray, detjax.jit(lambda arrays: fn(**arrays))(arrays))


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("norms", [True, False])
def test_the_device_has_the_bits_of_the_separate_steps(dtype: str, norms: bool) -> None:
    for width, kv_heads in ((64, 2), (128, 8), (128, 1), (80, 4), (256, 4)):
        sizes: dict[str, Any] = {"heads": 4 * kv_heads, "kv_heads": kv_heads, "width": width}
        sizes |= {"dtype": dtype, "norms": norms}
        for starts, counts, tokens in (
            ((0, 127, 128, 300), (1, 1, 1, 0), 1),
            ((0, 120, 250, 383), (17, 0, 9, 17), 17),
            ((5, 0), (300, 299), 300),
            (tuple(range(0, 300, 7)), (1,) * 43, 1),
        ):
            case = Append.random(starts, counts, tokens, columns=3, **sizes)
            result = on_the_device(case, **case.arrays)
            assert_same_bits(result, on_the_device(case.in_steps, **case.arrays))
            assert [case.written(pool) for pool in result[1:]] == [case.slots()] * 2
            for row in {0, len(starts) - 1}:
                request = {n: case.arrays[n][row : row + 1] for n in ("qkv", "page_table", "q_start", "q_length")}
                alone = on_the_device(case, **case.arrays | request)
                pages = np.asarray(case.arrays["page_table"][row])
                expected = result[0][row : row + 1], *(np.asarray(pool)[pages] for pool in result[1:])
                assert_same_bits((alone[0], *(np.asarray(pool)[pages] for pool in alone[1:])), expected)
