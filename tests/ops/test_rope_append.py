"""Keys and values are appended to their pages in the bits of `qk_rope` and a scatter, and nothing else is touched."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from tests.ops.cases import at, stacked
from tests.support.append_cases import CASES, Append
from tests.support.bits import assert_same_bits

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("case", "backend"),
    [(case, "portable") for case in CASES.values()] + [(CASES["ragged"], "stock"), (CASES["no norms"], "stock")],
    ids=[*CASES, "ragged, stock", "no norms, stock"],
)
def test_the_bits_are_those_of_the_three_steps(case: Append, backend: str) -> None:
    with detjax.use_backend(backend):
        assert_same_bits(case(), case.in_steps())


@pytest.mark.sampled(5)
@every_case
def test_new_tokens_are_written_and_no_others(case: Append) -> None:
    _, *pools = case()
    assert [case.written(pool) for pool in pools] == [case.slots()] * 2


def test_values_are_copied_bit_by_bit() -> None:
    case = CASES["ragged"]
    payloads = np.random.default_rng(0).integers(0x7F81, 0x8000, case.arrays["qkv"].shape).astype(np.uint16)
    qkv = case.arrays["qkv"].at[:, :, 6:].set(payloads.view(jnp.bfloat16)[:, :, 6:])
    _, _, v_pages = case(qkv=qkv, v_pages=jnp.zeros_like(case.arrays["v_pages"]))
    page, slot = case.arrays["page_table"][1, 0], 127
    assert_same_bits(v_pages[page, :, slot], qkv[1, 7, 6:])


def test_a_token_is_the_same_whatever_its_neighbours_are() -> None:
    case = CASES["ragged"]
    q, k_pages, _ = case()
    others = case.arrays["qkv"].at[jnp.asarray([0, 2, 3])].set(np.nan)
    result = case(qkv=others)
    assert_same_bits(result[0][1], q[1])
    pages = case.arrays["page_table"][1]
    assert_same_bits(result[1][pages], k_pages[pages])


@pytest.mark.parametrize("page", [-1, -7, 6, 10_000])
def test_what_goes_to_a_page_that_is_not_there_is_dropped(page: int) -> None:
    case = CASES["one page"]
    assert len(case.arrays["k_pages"]) == 4
    elsewhere = case.changed(page_table=case.arrays["page_table"].at[1, 0].set(page))
    q, *pools = elsewhere()
    assert_same_bits(q, case()[0])
    expected = case.changed(q_length=jnp.asarray([3, 0], jnp.int32))
    assert [case.written(pool) for pool in pools] == [expected.slots()] * 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "backend"),
    [("decode, some ended", "portable"), ("ragged", "portable"), ("no norms", "portable"), ("ragged", "stock")],
)
def test_gradients_have_the_bits_of_the_three_steps(name: str, backend: str) -> None:
    case = CASES[name]
    pools = {pool: jnp.zeros_like(case.arrays[pool]) for pool in ("k_pages", "v_pages")}
    floats = {n: x for n, x in (case.arrays | pools).items() if jnp.issubdtype(x.dtype, jnp.floating)}

    def gradients(append: Any) -> Any:
        out, transposed = jax.vjp(lambda floats: append(**floats), floats)
        random = np.random.default_rng(0)
        return transposed(tuple(jnp.asarray(random.standard_normal(y.shape), y.dtype) for y in out))[0]

    with detjax.use_backend(backend):
        result, expected = detjax.jit(lambda: gradients(case))(), detjax.jit(lambda: gradients(case.in_steps))()
    assert_same_bits(result, expected)
    assert all(bool((x != 0).any()) for x in jax.tree.leaves(result))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mapped", [("qkv",), ("qkv", "q_start", "q_length"), ("k_pages", "v_pages"), "all"])
def test_vmap_gives_the_bits_of_each(mapped: tuple[str, ...] | str) -> None:
    cases = [Append.random((start, 120), (3, 2), 3) for start in (0, 126, 254)]
    shared = {n: x for n, x in cases[0].arrays.items() if mapped != "all" and n not in mapped}
    several = [{n: x for n, x in case.arrays.items() if n not in shared} for case in cases]
    result = jax.vmap(lambda arrays: cases[0](**shared | arrays))(jax.tree.map(jnp.asarray, stacked(several)))
    for i, one in enumerate(several):
        assert_same_bits(at(result, i), cases[0](**shared | one))


def test_a_donated_pool_is_written_where_it_lies() -> None:
    case = CASES["ragged"]
    arrays = jax.tree.map(jnp.copy, case.arrays)

    def fn(k_pages: jax.Array, v_pages: jax.Array, rest: dict[str, jax.Array]) -> Any:
        return case(k_pages=k_pages, v_pages=v_pages, **rest)

    pools = arrays.pop("k_pages"), arrays.pop("v_pages")
    places = [pool.unsafe_buffer_pointer() for pool in pools]
    out = detjax.jit(fn, donate_argnums=(0, 1))(*pools, arrays)
    assert [pool.unsafe_buffer_pointer() for pool in out[1:]] == places
    assert all(pool.is_deleted() for pool in pools)
    assert_same_bits(out, case())
