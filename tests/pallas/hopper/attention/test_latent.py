"""Latent attention on Hopper has the contract's bits in any phase and schedule, in Pallas' interpreter."""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.contract import KV_BLOCK, SPAN_BLOCKS
from detjax.operands.kv_pages import KVPages
from detjax.pallas.hopper import mosaic
from detjax.pallas.hopper.attention import latent, latent_schedule
from detjax.pallas.hopper.attention.decode import Schedule
from detjax.pallas.hopper.attention.latent_schedule import Problem, default_schedule, padded_heads, tokens_of_a_tile
from detjax.pallas.hopper.mosaic.tiles import LANE_SUMS, block_sums, row_sums_of_halves, store_lane_sums
from tests.contract import emulation
from tests.contract.emulation import AttentionOptions
from tests.pallas.hopper import interpreter
from tests.support.attention_contract import DEVICE, PRODUCTS
from tests.support.attention_requests import INTERPRETER, Requests, assert_close, in_the_interpreter, last_of
from tests.support.bits import assert_same_bits

SPAN = SPAN_BLOCKS * KV_BLOCK


@pytest.fixture
def spans_of_two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes seconds for a block."""
    for module in (latent_schedule, emulation):
        monkeypatch.setattr(module, "SPAN_BLOCKS", 2)


def rows_of(requests: Requests, start: np.ndarray, tokens: int, schedule: Schedule | None) -> list[np.ndarray]:
    """Returns the output of `count` tokens of each request with a schedule."""
    options = {"masking": requests.masking, "with_normalizers": False, "schedule": schedule}
    q, kv, queries, *_ = requests.operands(start, tokens)
    o = detjax.jit(functools.partial(latent.forward, **options))(q, kv, queries)[0]
    return requests.rows_of_requests(o, start)


def expected(requests: Requests, request: int, token: int, head: int) -> np.ndarray:
    """Returns the contract's result of a query of one head."""
    keys, values = (x[request, : token + 1, 0] for x in (requests.k, requests.v))
    query, options = requests.q[request, token, head], AttentionOptions(requests.masking.scale)
    o, _ = emulation.attention(query, keys, values, token, options, DEVICE, PRODUCTS)
    return o.astype(requests.q.dtype) + requests.q.dtype.type(0)


@in_the_interpreter
def test_a_split_decode_has_the_bits_of_the_contract(spans_of_two_blocks: None) -> None:
    """Two sequences of 33 heads and three spans each, on three CTAs: the second CTA ends one and begins the other."""
    requests = Requests.random((600,), 66, 1, 448).with_latents(384)
    start = requests.last(1)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        (row,) = rows_of(requests, start, 1, Schedule(3, slack=0.0))
    for head in (0, 32, 33, 65):
        assert_same_bits(row[0, head], expected(requests, 0, int(start[0]), head))


@in_the_interpreter
@pytest.mark.parametrize(
    ("heads", "width", "lengths", "counts"),
    [
        (20, 448, (259, 130), (7, 3)),
        pytest.param(20, 576, (516, 129, 1), (7, 3, 1), marks=pytest.mark.nightly),
    ],
)
def test_verify_steps_prefill_and_ragged_queries_have_the_bits_of_the_contract(
    heads: int, width: int, lengths: tuple[int, ...], counts: tuple[int, ...], spans_of_two_blocks: None
) -> None:
    """Seven tokens of a request cross the end of a span; tiles have two tokens of 20 heads."""
    requests = Requests.random(lengths, heads, 1, width).with_latents(width - 64)
    start = requests.last(7)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        whole = rows_of(requests, start, 7, Schedule(2, cut=False))
        ragged = requests.ragged(counts)
    assert_same_bits(ragged, [x[len(x) - n :] for x, n in zip(whole, counts, strict=True)])
    for request, first in enumerate(start):
        for token in {0, 3, 4, len(whole[request]) - 1}:
            row = expected(requests, request, int(first) + token, heads - 1)
            assert_same_bits(whole[request][token, heads - 1], row)


@in_the_interpreter
@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_narrow_latents_are_right(causal: bool) -> None:
    requests = Requests.random((130, 5), 8, 1, 192, causal=causal).with_latents(128)
    start = requests.last(9)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        rows = rows_of(requests, start, 9, Schedule(3))
    assert_close(rows, last_of(requests.exact(), start))


def test_halves_of_a_block_are_added_in_the_contracts_order() -> None:
    p = jnp.asarray(np.random.default_rng(0).standard_normal((64, KV_BLOCK), np.float32))

    class Memory:
        shape = LANE_SUMS

        def __setitem__(self, _: Any, x: jax.Array) -> None:
            self.content = x

        def __getitem__(self, _: Any) -> jax.Array:
            return self.content

    memory: Any = Memory()
    with mosaic.twins():
        store_lane_sums(p[:, :64], memory)
        sums = row_sums_of_halves(p[:, 64:], memory)
    assert_same_bits(sums, block_sums(p))


def test_tiles_have_rows_for_as_many_heads_and_tokens_as_fit() -> None:
    def problem(tokens: int, heads: int, batch: int = 1) -> Problem:
        heads = padded_heads(heads)
        return Problem(batch, tokens_of_a_tile(tokens, heads), heads, 576, 512, 33, jnp.dtype("bfloat16"))

    sizes = [(1, 128), (1, 16), (2, 16), (3, 16), (100, 16), (100, 66), (100, 1), (100, 67)]
    shapes = [(x.tokens, x.group, x.sequences) for x in (problem(*size) for size in sizes)]
    assert shapes == [
        (1, 64, 2),
        (1, 16, 1),
        (2, 16, 1),
        (4, 16, 1),
        (4, 16, 1),
        (1, 40, 2),
        (8, 8, 1),
        (1, 40, 2),
    ]
    cuts = {1: True, 16: True, 50: True, 64: False, 90: True, 256: False}
    assert {batch: default_schedule(problem(1, 128, batch)).cut for batch in cuts} == cuts
    assert not default_schedule(dataclasses.replace(problem(1, 128), value_width=256, width=320)).cut


def test_long_requests_are_split_only_as_far_as_there_is_memory() -> None:
    def cut(batch: int, blocks: int) -> bool:
        return default_schedule(Problem(batch, 1, 128, 576, 512, blocks, jnp.dtype("bfloat16"))).cut

    assert cut(1, 8192) and cut(32, 8192) and not cut(64, 8192)
    assert latent_schedule.partial_results(Problem(4, 1, 128, 576, 512, 33, jnp.dtype("bfloat16")), Schedule(132)) == 40


LATENTS = {"heads": 2, "kv_heads": 1, "width": 576, "values": 512, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"dtype": "float32"}, {}, "q has dtype float32 on .*; accepted by the backend 'hopper': bfloat16, float16. "),
        ({"kv_heads": 2}, {}, "key columns as values with 2 KV heads on .*; accepted .*: 1 KV head"),
        (
            {"values": 256},
            {},
            "keys of 576 columns whose values are the first 256 on .*; accepted .*: 128, 256, 384, 512 value columns, "
            "and 64 more for keys, or choose the backend 'portable'",
        ),
        (
            {},
            {"window": 4, "soft_cap": 2.0},
            "key columns as values with window, soft_cap on .*; accepted .*: only scale and causal with key columns",
        ),
        ({}, {"sinks": True}, "key columns as values with sinks on"),
        ({}, {"alibi_slopes": (0.5, 0.25)}, "key columns as values with alibi_slopes on"),
    ],
)
def test_what_no_kernel_serves_is_refused(changes: dict[str, Any], options: dict[str, Any], words: str) -> None:
    case: Any = LATENTS | changes
    q = jnp.ones((1, 3, case["heads"], case["width"]), case["dtype"])
    pages = jnp.ones((1, case["kv_heads"], KV_BLOCK, case["width"]), case["dtype"])
    options = options | ({"sinks": jnp.ones(2, case["dtype"])} if "sinks" in options else {})
    queries = ops.Queries(jnp.zeros((1, 1), jnp.int32), jnp.array([0]), jnp.array([3]))
    with detjax.use_backend("hopper"), pytest.raises(NotImplementedError, match=f"attention: {words}"):
        ops.attention(q, KVPages(pages, ops.KeyColumns(case["values"])), queries, **options)


def test_sequences_begin_at_whole_groups_of_rows() -> None:
    """The device, but not the interpreter, reads wrong rows in copies that begin within a group."""
    for heads in range(1, 200):
        filled = padded_heads(heads)
        problem = Problem(1, 1, filled, 576, 512, 33, jnp.dtype("bfloat16"))
        assert filled >= heads and problem.group % 8 == 0 and problem.group * problem.sequences == filled
        assert problem.group <= 64
    with pytest.raises(ValueError, match="heads is 66; accepted: 80"):
        Problem(1, 1, 66, 576, 512, 33, jnp.dtype("bfloat16"))


@pytest.mark.parametrize(("heads", "values"), [(66, 384), (3, 128)])
def test_any_number_of_heads_lowers_for_the_device(heads: int, values: int) -> None:
    """A copy takes rows in groups of eight, and neither 33 nor three heads fill such groups."""
    requests = Requests.random((300, 5), heads, 1, values + 64).with_latents(values)
    q, kv, queries, *_ = requests.operands(requests.last(5), 5)
    forward = functools.partial(latent.forward, masking=requests.masking, with_normalizers=False)
    assert "mosaic_gpu" in interpreter.lowered(forward, q, kv, queries)


# --- on the device ----------------------------------------------------------------------------------------------------


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("heads", "width", "values"), [(128, 576, 512), (16, 576, 512), (66, 448, 384), (3, 192, 128)])
def test_every_phase_and_schedule_has_the_same_bits_on_the_device(
    heads: int, width: int, values: int, dtype: str
) -> None:
    requests = Requests.random((3 * SPAN + 300, SPAN, 129, 1), heads, 1, width, dtype=dtype).with_latents(values)
    start = requests.last(200)
    expected = rows_of(requests, start, 200, None)
    one_head = dataclasses.replace(requests, q=requests.q[:, :, -1:])
    assert_close([rows[:, -1:] for rows in expected], last_of(one_head.exact(), start))
    counts = tuple(len(rows) for rows in expected)
    assert_same_bits(requests.ragged(counts), expected)
    few, whole, many = Schedule(7, slack=0.0), Schedule(132, cut=False), Schedule(1000, slack=0.0)
    # Each is a separate kernel, which takes seconds to compile.
    for tokens, schedule in ((1, None), (1, few), (1, whole), (2, many), (5, few), (16, None), (16, many)):
        first = requests.last(tokens)
        rows = rows_of(requests, first, tokens, schedule)
        assert_same_bits(rows, last_of(expected, first - start))


@pytest.mark.hopper
def test_a_decode_gives_the_same_bits_in_any_batch_a_thousand_times_on_the_device() -> None:
    requests = Requests.random((4096, 300, 4100, 129, 1, 2000), 128, 1, 576, dtype="bfloat16").with_latents(512)
    start = requests.last(1)
    together = rows_of(requests, start, 1, None)
    for request, length in enumerate(requests.lengths):
        one = slice(request, request + 1)
        alone = dataclasses.replace(
            requests, lengths=(length,), q=requests.q[one], k=requests.k[one], page_table=requests.page_table[one]
        )
        assert_same_bits(rows_of(alone, start[one], 1, None), together[one])
    forward = detjax.jit(functools.partial(latent.forward, masking=requests.masking, with_normalizers=False))
    operands = requests.operands(start, 1)[:3]
    first = forward(*operands)[0]
    differing = sum((forward(*operands)[0] != first).any().astype(jnp.int32) for _ in range(1000))
    assert int(differing) == 0


@pytest.mark.hopper
def test_gradients_are_those_of_the_portable_backend_on_the_device() -> None:
    requests = Requests.random((300, 129), 16, 1, 576, dtype="bfloat16").with_latents(512)
    q, kv, queries, *_ = requests.operands(np.zeros(2, int), 300)
    is_row = (np.arange(300) < np.array(requests.lengths)[:, None])[..., None, None]

    def loss(q: jax.Array, k: jax.Array) -> jax.Array:
        o = ops.attention(q, KVPages(k, ops.KeyColumns(512)), queries, scale=requests.masking.scale)
        return jnp.where(is_row, o.astype(jnp.float32), 0.0).sum()

    gradients = []
    for backend in ("hopper", "portable"):
        with detjax.use_backend(backend):
            dq, dk = detjax.jit(jax.grad(loss, argnums=(0, 1)))(q, kv.k)
        gradients.append([np.asarray(x, np.float64) for x in (dq, dk[queries.page_table])])
    for x, y in zip(*gradients, strict=True):
        assert np.linalg.norm(x - y) < 1e-2 * np.linalg.norm(y)
