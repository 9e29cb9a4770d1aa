"""The benchmarks' comparisons of bits notice what differs. Functions that differ on purpose stand for kernels."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.bits import anchor_positions
from benchmarks.studies import decoder, portable
from benchmarks.studies.attention import option_bits, request_bits
from benchmarks.studies.attention.cases import SMALL
from benchmarks.studies.attention.comparison import Comparison
from benchmarks.studies.matmul import row_bits
from benchmarks.studies.matmul.cases import small_sizes
from benchmarks.studies.matmul.programs import Programs
from benchmarks.studies.norms import suite as rows
from benchmarks.studies.norms.cases import Case
from detjax.operands.kv_pages import Queries

type Attention = Callable[..., jax.Array]

SIZES = dataclasses.replace(SMALL, chunks=(64,), verified=(2,), repeated_prefills=2, repeated_decodes=2)


def honest(q: jax.Array, k_pages: Any, v_pages: Any, queries: Queries, **options: Any) -> jax.Array:
    """Each token's result is a function of its query."""
    return q * 2


def off_where(condition: Callable[[jax.Array, Any, Queries], Any]) -> Attention:
    """`honest`, but for tokens that meet a condition."""

    def attend(q: jax.Array, k_pages: Any, v_pages: Any, queries: Queries, **options: Any) -> jax.Array:
        return jnp.where(condition(q, k_pages, queries), q * 3, q * 2)

    return attend


def compared_requests(attend: Attention) -> Comparison:
    comparison = Comparison()
    request_bits.compare_requests(SIZES, comparison, attend)
    assert not comparison.failed and not comparison.refused, comparison
    return comparison


def test_requests_that_keep_their_bits_have_no_difference() -> None:
    comparison = compared_requests(honest)
    assert comparison.differences == []
    for kind in ("training forward", "chunks of 64", "decode alone", "decode together", "verify 2"):
        assert comparison.tokens[kind] > 0
    assert comparison.tokens["chunks of 64"] == SIZES.tokens
    assert comparison.tokens["decode alone"] == SIZES.requests * SIZES.sampled
    assert comparison.repeats == 4


@pytest.mark.parametrize(
    ("condition", "kinds"),
    [
        (lambda q, k, queries: q.shape[1] == 1, {"decode alone", "decode together"}),
        (lambda q, k, queries: (q.shape[0] > 1) & (jnp.arange(q.shape[0]) == 1)[:, None, None, None], {"verify 2"}),
        (lambda q, k, queries: (queries.start > 100)[:, None, None, None] & (q.shape[1] == 64), {"chunks of 64"}),
        (lambda q, k, queries: jnp.isnan(k).any(), {"NaN in others' pages", "NaN after the last token"}),
        (lambda q, k, queries: queries.page_table[0, 0] != _first_page(queries), {"shuffled pages, prefill"}),
    ],
)
def test_requests_that_change_their_bits_are_named(condition: Any, kinds: set[str]) -> None:
    comparison = compared_requests(off_where(condition))
    assert kinds <= {difference.split(":")[0] for difference in comparison.differences}


def _first_page(queries: Queries) -> Any:
    """A page that some request begins with if, and only if, pages are not shuffled."""
    firsts = request_bits.inputs.page_table(request_bits.request_lengths(SIZES).tolist())[:, 0]
    first = queries.page_table[0, 0]
    return jnp.where((first == jnp.asarray(firsts)).any(), first, -1)


def test_options_that_change_bits_are_named_by_whichever_process_compares_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def attend(q: jax.Array, k: Any, v: Any, queries: Queries, **options: Any) -> jax.Array:
        return jnp.where(("soft_cap" in options) & (q.shape[1] == option_bits.CHUNK), q * 3, q)

    monkeypatch.setattr(option_bits, "paged_attention", attend)
    comparison = Comparison()
    option_bits.compare_options(SMALL, "portable", comparison)
    assert comparison.options == len(option_bits.option_cases(SMALL)) == 6
    (difference,) = comparison.differences
    assert difference == "head size 64, soft cap 30: 140 of 140 tokens by chunks of 7"
    total = Comparison(tokens={"a": 1}, repeats=1)
    total.include([comparison, Comparison({"a": 2}, 3, 4, 5.0, ["x"], {"y": "refused"}, {"z": "failed"})])
    assert total == Comparison({"a": 3}, 4, 10, 0.0, [difference, "x"], {"y": "refused"}, {"z": "failed"})


def test_an_option_that_is_refused_or_fails_is_no_difference_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: jax.Array, *_: Any, **options: Any) -> jax.Array:
        if "window" in options:
            raise NotImplementedError("no windows")
        if "sinks" in options:
            raise RuntimeError("no room")
        return q

    monkeypatch.setattr(option_bits, "paged_attention", attend)
    comparison = Comparison()
    option_bits.compare_options(SMALL, "portable", comparison)
    assert comparison.refused == {"head size 64, window 100": "NotImplementedError: no windows"}
    assert comparison.failed == {"head size 64, sinks": "RuntimeError: no room"}
    assert comparison.options == 4 and not comparison.differences


SIZES_OF_PRODUCTS = dataclasses.replace(small_sizes(), tokens=(1, 3, 17), neighbours=(17,))


def products(off: Callable[[str, int, np.ndarray], np.ndarray]) -> Programs:
    """Programs that add up tokens, and add what `off` says to the results of rows."""

    def program(layout: str, m: int) -> Callable[..., Any]:
        def call(x: jax.Array, w: jax.Array) -> jax.Array:
            y = np.nan_to_num(np.asarray(x, np.float32))[:, :4] + np.float32(0)
            return jnp.asarray(y + off(layout, m, np.arange(m))[:, None].astype(np.float32))

        return call

    ours: Any = {(layout, m): program(layout, m) for layout in ("nk", "kn") for m in SIZES_OF_PRODUCTS.tokens}
    return Programs(ours, {})


@pytest.mark.parametrize(
    ("off", "place"),
    [
        (lambda layout, m, row: 0 * row, None),
        (lambda layout, m, row: (m == 17) & (row == 16), "row 16 of 17"),
        (lambda layout, m, row: (m == 17) & (row == 8), "row 8 of 17"),
        (lambda layout, m, row: 0 * row + (m == 3), " of 3"),
        (lambda layout, m, row: 0 * row + (layout == "kn"), "weights kn"),
    ],
)
def test_an_anchor_row_that_changes_its_bits_is_named(off: Any, place: str | None) -> None:
    comparison = row_bits.Comparison()
    row_bits.compare_anchors(SIZES_OF_PRODUCTS, (8, 128), jnp.zeros((8, 128), "bfloat16"), products(off), comparison)
    # Of 1, 3 and 17 rows, 1, 3 and 3 hold the anchor; 17 rows have five kinds of neighbours; two layouts.
    assert comparison.anchor_rows == 2 * (1 + 3 + 5 * 3)
    assert bool(comparison.differences) == (place is not None)
    assert place is None or all(place in difference for difference in comparison.differences)


def test_the_anchor_row_is_first_in_the_middle_and_last() -> None:
    assert [anchor_positions(rows) for rows in (1, 2, 3, 17)] == [[0], [0, 1], [0, 1, 2], [0, 8, 16]]
    case = Case("x", lambda x: x, ((4,),))
    one, other = (np.asarray(case.rows(5, seed)[0], np.float32) for seed in (0, 1))
    assert (one[[0, 2, 4]] == other[[0, 2, 4]]).all() and (one[[1, 3]] != other[[1, 3]]).any()


@pytest.mark.parametrize("row", [None, 0, 8, 16])
def test_rows_that_change_their_bits_are_noticed_wherever_they_stand(row: int | None) -> None:
    def run(x: jax.Array) -> jax.Array:
        return x + (0 if row is None or len(x) < 17 else (jnp.arange(len(x)) == row)[:, None].astype(x.dtype))

    bits = rows.compare_bits(Case("x", run, ((4,),)), (1, 3, 17), repeats=2)
    assert bits == {"same_bits_over_rows": row is None, "same_bits_over_runs": True}


def test_an_operation_that_a_backend_refuses_has_no_bits() -> None:
    def run(x: jax.Array) -> jax.Array:
        raise NotImplementedError("no kernels")

    assert rows.compare_bits(Case("x", run, ((4,),)), (1,), repeats=1) == {}


@pytest.mark.parametrize(("wrong", "count"), [((), 0), ((1, 2), 2), ((16,), 3)])
def test_batch_sizes_with_different_bits_are_counted(wrong: tuple[int, ...], count: int) -> None:
    def run(x: jax.Array) -> jax.Array:
        return x + float(len(x) in wrong)

    def inputs(rows: int, rng: np.random.Generator) -> tuple[jax.Array]:
        return (jnp.ones((rows, 2)),)

    results = portable.measure(portable.Case("x", run, inputs, rows=(1, 2, 3, 16)), rounds=2)
    assert [result["rows"] for result in results] == [1, 2, 3, 16]
    assert {result["other_bits"]["portable"] for result in results} == {count}


def test_a_request_with_different_bits_in_its_batch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeBatch:
        def __init__(self, model: Any, load: decoder.Load, slots: int) -> None:
            self.slots = slots

        def run(self, prompts: list[list[int]]) -> tuple[list[tuple[bytes, bytes]], int]:
            logprobs = [b"y" if self.slots > 1 and len(prompt) == 9 else b"x" for prompt in prompts]
            return [(bytes(prompt), logprob) for prompt, logprob in zip(prompts, logprobs, strict=True)], 1

    monkeypatch.setattr(decoder, "Batch", FakeBatch)
    load = decoder.Load(tokens=1, requests=5, longest=9, alone=5)
    model: Any = type("Model", (), {"config": type("Config", (), {"vocab_size": 200})})
    prompts = load.prompts(200)
    expected = [index for index, prompt in enumerate(prompts) if len(prompt) == 9]
    assert expected and decoder.compare_batches(model, load)["requests alone that differ"] == expected
