"""Hopper attention kernels: their lowering, their PTX, and their results on a GPU if there is one."""

import functools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.contract import KV_BLOCK
from detjax.ops.quantized_kv import KINDS
from detjax.pallas.hopper import attention as hopper_attention
from detjax.pallas.hopper.attention import decode
from detjax.pallas.hopper.attention.decode import Schedule
from detjax.pallas.hopper.mosaic import warps
from tests.pallas.hopper.compiler import Program, attention, compile_programs, compiled, latent_attention
from tests.support.attention_requests import (
    OPTIONS,
    WIDTHS,
    Requests,
    assert_close,
    assert_gradients_close,
    causal_mask,
    last_of,
    mask_of_heads,
)
from tests.support.bits import assert_same_bits


def test_rows_of_wide_keys_and_odd_values_are_refused() -> None:
    q, v = jnp.ones((1, 3, 2, 256), "bfloat16"), jnp.ones((1, 3, 2, 80), "bfloat16")
    words = "q has 256 columns and v_pages has 80 columns on .*; accepted .*: multiples of 64 where either is above 128"
    with detjax.use_backend("hopper"), pytest.raises(NotImplementedError, match=words):
        ops.dot_product_attention(q, q, v)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tokens", [1, 1024], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    ("width", "options"),
    [(width, {}) for width in WIDTHS] + [(128, options) for name, options in OPTIONS.items() if name != "causal"],
    ids=[*map(str, WIDTHS), *list(OPTIONS)[1:]],
)
def test_attention_lowers(tokens: int, width: int, options: dict[str, Any]) -> None:
    fn, operands = attention(tokens, width, **options)
    jax.jit(fn).trace(*operands).lower(lowering_platforms=("cuda",))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tokens", [1, 1024], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    ("kind", "width"),
    [(kind, width) for kind in ("int8", "fp8_e4m3") for width in (16, 80, 256)]
    + [("q4_0", width) for width in (32, 128)],
)
def test_attention_over_quantized_pages_lowers(tokens: int, kind: str, width: int) -> None:
    fn, operands = attention(tokens, width, kind=kind)
    jax.jit(fn).trace(*operands).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(
    ("dtype", "width", "words"),
    [
        (
            "float32",
            64,
            r"attention: q has dtype float32 on .*; accepted by the backend 'hopper': bfloat16, float16. Cast",
        ),
        (
            "bfloat16",
            72,
            r"attention: q has 72 columns and v_pages has 72 columns on .*; accepted .*: 16, 32, .* 512. Pad",
        ),
        ("bfloat16", 160, r"'portable', which takes them"),
    ],
)
def test_what_no_kernel_serves_is_refused(dtype: str, width: int, words: str) -> None:
    x = jnp.ones((1, 3, 2, width), dtype)
    with detjax.use_backend("hopper"), pytest.raises(NotImplementedError, match=words):
        ops.dot_product_attention(x, x, x)


@pytest.mark.parametrize("count", [1, 5, 32, 33, 300])
def test_32_lanes_find_places_among_neighbours(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # An array's elements stand in for the lanes of a warp.
    lanes = {"lane": lambda: jnp.arange(32), "warp_sum": jnp.sum, "warp_prefix_sum": jnp.cumsum}
    for name, replacement in lanes.items():
        monkeypatch.setattr(warps, name, replacement)
    lengths = np.random.default_rng(count).integers(1, 9, count).astype(np.int32)
    owners = np.repeat(np.arange(count), lengths)
    offsets = np.concatenate([np.arange(length) for length in lengths])
    positions = np.unique(np.linspace(0, len(owners), 7).astype(np.int32))
    total, places = warps.find_places(
        lambda index: jnp.asarray(lengths)[index], count, lambda _: [jnp.asarray(x) for x in positions]
    )
    assert total == len(owners)
    expected = [(owners[x], offsets[x]) if x < len(owners) else (0, 0) for x in positions]
    assert [tuple(map(int, place)) for place in places] == [tuple(map(int, place)) for place in expected]


# --- on the device ----------------------------------------------------------------------------------------------------


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", hopper_attention.DTYPES)
@pytest.mark.parametrize(
    ("width", "options"),
    [(width, {}) for width in WIDTHS] + [(128, options) for options in OPTIONS.values()],
    ids=[*map(str, WIDTHS), *OPTIONS],
)
def test_prefill_decode_and_chunks_have_the_same_bits_on_the_device(
    width: int, options: dict[str, Any], dtype: str
) -> None:
    requests = Requests.random((300, 129, 1, 128), 8, 2, width, dtype=dtype, **options)
    expected = requests.whole()
    assert_close(expected, requests.exact())
    for size in (1, 7, 100):
        for with_normalizers in (False, True):
            assert_same_bits(requests.in_chunks(size, with_normalizers), expected)


@pytest.mark.hopper
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (7, 1), (14, 2), (6, 2), (16, 1), (64, 1)])
@pytest.mark.parametrize("width", [80, 128])
def test_groups_of_any_number_have_the_same_bits_on_the_device(heads: int, kv_heads: int, width: int) -> None:
    requests = Requests.random((300, 129, 1, 128), heads, kv_heads, width)
    expected = requests.whole()
    assert_close(expected, requests.exact())
    for size in (1, 16):
        assert_same_bits(requests.in_chunks(size, with_normalizers=False), expected)


@pytest.mark.hopper
def test_ragged_queries_have_the_bits_of_a_whole_prefill_on_the_device() -> None:
    requests, counts = Requests.random((3000, 129, 1, 700), 8, 2, 128), (2000, 7, 1, 0)
    expected = requests.whole()
    assert_same_bits(requests.ragged(counts), [x[len(x) - n :] for x, n in zip(expected, counts, strict=True)])


@pytest.mark.hopper
@pytest.mark.parametrize(
    ("width", "options"),
    [(width, {}) for width in WIDTHS] + [(128, options) for options in OPTIONS.values()],
    ids=[*map(str, WIDTHS), *OPTIONS],
)
def test_gradients_on_the_device(width: int, options: dict[str, Any]) -> None:
    requests = Requests.random((300, 129, 1, 128), 8, 2, width, dtype="bfloat16", **options)
    gradients = requests.gradients("hopper")
    assert_gradients_close(gradients, requests.gradients("portable"))
    for _ in range(10):
        assert_same_bits(requests.gradients("hopper"), gradients)
    alone = requests.gradients("hopper", slice(1, 2))
    for name in ("q", "k", "v"):
        assert_same_bits(alone[name], gradients[name][1:2])


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", hopper_attention.DTYPES)
@pytest.mark.parametrize(
    ("kind", "width", "options"),
    [(kind, width, {}) for kind in KINDS for width in (64, 96, 192, 256)]
    + [(kind, 80, {}) for kind in ("int8", "fp8_e4m3")]
    + [(kind, 128, OPTIONS[name]) for kind in KINDS for name in ("causal", "not causal", "everything")],
)
def test_quantized_pages_give_the_bits_of_what_they_are_read_as_on_the_device(
    kind: str, width: int, options: dict[str, Any], dtype: str
) -> None:
    lengths = (3000, 300, 129, 1, 128)
    requests, dense = Requests.random(lengths, 8, 2, width, dtype=dtype, **options).quantized(kind)
    expected = dense.whole()
    assert not any(np.isnan(x.astype(np.float32)).any() for x in expected)
    assert_same_bits(requests.whole(), expected)
    for tokens in (1, 5, 100):
        start = requests.last(tokens)
        assert_same_bits(requests.prefill(start, tokens), last_of(expected, start))
        if tokens <= 16:
            for schedule in (None, Schedule(7), Schedule(132, cut=False)):
                assert_same_bits(requests.decode(start, tokens, schedule), last_of(expected, start))
    assert_same_bits(requests.ragged((40, 7, 1, 0, 128)), dense.ragged((40, 7, 1, 0, 128)))


@pytest.mark.hopper
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", *hopper_attention.DTYPES])
def test_codes_and_scales_on_the_device_are_the_contracts(kind: str, dtype: str) -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((40, 8, KV_BLOCK, 128), np.float32) * np.exp2(
        random.integers(-12, 12, (40, 8, KV_BLOCK, 1))
    )
    x = jnp.asarray(x, dtype)
    whole = ops.quantize_kv(x, kind)  # pyright: ignore
    for page in (0, 39):
        alone = ops.quantize_kv(x[page : page + 1], kind)  # pyright: ignore
        assert_same_bits(jax.tree.map(lambda leaf, page=page: leaf[page : page + 1], whole), alone)
    error = np.abs(np.asarray(ops.dequantize_kv(whole, "float32") - x.astype(jnp.float32))).max(axis=-1)
    largest = np.abs(np.asarray(x, np.float32)).max(axis=-1)
    assert np.all(error <= 1.01 * {"int8": 1 / 254, "fp8_e4m3": 1 / 28, "q4_0": 1 / 8}[kind] * largest)


@pytest.mark.hopper
def test_where_the_line_of_blocks_is_cut_changes_no_bit_on_the_device() -> None:
    requests = Requests.random((40000, 17, 1, 4096), 8, 2, 128, sinks=True)
    for tokens in (1, 5):
        start = requests.last(tokens)
        expected = requests.prefill(start, tokens)
        schedules = Schedule(2), Schedule(7, slack=0.4), Schedule(131, slack=0.0), Schedule(1000)
        for schedule in (None, *schedules, Schedule(132, cut=False)):
            assert_same_bits(requests.decode(start, tokens, schedule), expected)


@pytest.mark.hopper
@pytest.mark.parametrize("width", [64, 128, 256])
def test_a_mask_on_the_device(width: int) -> None:
    requests = Requests.random((300, 129, 1, 128), 8, 2, width, dtype="bfloat16")
    causal, per_head = causal_mask(requests), mask_of_heads(requests)
    assert_same_bits(requests.with_mask(causal), requests.whole())
    gradients = requests.gradients("hopper", mask=per_head)
    assert_gradients_close(gradients, requests.gradients("portable", mask=per_head))
    assert_same_bits(requests.gradients("hopper", mask=per_head), gradients)
    assert_same_bits(requests.gradients("hopper", mask=causal), requests.gradients("hopper"))


@pytest.mark.hopper
def test_three_hundred_requests_have_the_bits_of_prefill_on_the_device() -> None:
    requests = Requests.random(tuple(1 + 37 * i % 290 for i in range(300)), 4, 1, 64)
    start = requests.last(1)
    assert_same_bits(requests.decode(start, 1), requests.prefill(start, 1))


@pytest.mark.hopper
def test_a_decode_gives_the_same_bits_a_thousand_times() -> None:
    requests = Requests.random((5000, 300, 129, 1), 32, 8, 128)
    forward = detjax.jit(functools.partial(decode.forward, masking=requests.masking))
    operands = requests.operands(requests.last(1), 1)
    expected = forward(operands)
    differing = sum((forward(operands) != expected).any().astype(jnp.int32) for _ in range(1000))
    assert int(differing) == 0


# --- PTX --------------------------------------------------------------------------------------------------------------


def programs() -> dict[str, Program]:
    everything = OPTIONS["everything"]
    return {
        f"{phase}, head size {width}{', everything' if options else ''}": attention(tokens, width, **options)
        for phase, tokens in (("prefill", 1024), ("decode", 1))
        for width, options in ((96, {}), (128, {}), (128, everything), (192, {}), (256, {}))
    } | {
        **{f"decode, {kind}": attention(1, 128, kind=kind) for kind in KINDS},
        "latents": latent_attention(16, 1, 128),
    }


def products_in_sums(ptx: str) -> list[str]:
    """Returns additions and subtractions of a product or quotient in PTX, which a compiler may fuse."""
    additions = []
    for entry in re.split(r"^\.visible \.entry ", ptx, flags=re.MULTILINE)[1:]:
        lines = re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+([^;]*);", entry, re.MULTILINE)
        instructions = [(operation, re.split(r",\s*", operands.strip())) for operation, operands in lines]
        products = {operands[0] for operation, operands in instructions if _is(operation, "mul", "div")}
        moves = [operands for operation, operands in instructions if re.match(r"(mov|neg|abs)\.", operation)]
        count = 0
        while count < len(products):
            count = len(products)
            products |= {target for target, source, *_ in moves if source in products}
        sums = [(operation, operands) for operation, operands in instructions if _is(operation, "add", "sub")]
        additions += [
            f"{operation} {', '.join(operands)}" for operation, operands in sums if products & {*operands[1:]}
        ]
    return additions


def _is(operation: str, *names: str) -> bool:
    parts = operation.split(".")
    return parts[0] in names and parts[-1] == "f32"


@pytest.mark.parametrize(
    "names",
    [
        ("prefill, head size 128, everything", "decode, head size 128, everything"),
        pytest.param((), marks=pytest.mark.nightly),
    ],
    ids=["some", "all"],
)
def test_no_product_meets_a_sum_in_the_kernels(names: Sequence[str]) -> None:
    names = names or [*programs()]
    ptx = compiled(Path(__file__), names, dump="MOSAIC_GPU_DUMP_PTX")
    assert list(ptx) == list(names)
    for name, text in ptx.items():
        kernels = re.findall(r"^\.visible \.entry attention_([a-z]+)", text, re.MULTILINE)
        expected = {"prefill": ["prefill"], "latents": ["latent", "merge"]}
        assert kernels == expected.get(name.split(",")[0], ["decode", "merge"]), name
        assert text.count("fma.rn.f32") > 50 * len(kernels) and "add.rn.f32" in text, name
        assert products_in_sums(text) == [], name


def test_a_product_in_a_sum_is_seen() -> None:
    text = """
.visible .entry one(
	mul.f32 	%r1, %r2, %r3;
	add.f32 	%r4, %r5, %r2;
	mov.b32 	%r6, %r1;
	neg.f32 	%r7, %r6;
	@%p1 sub.rn.f32 	%r8, %r7, %r5;
	fma.rn.f32 	%r9, %r1, %r1, %r1;
	max.f32 	%r10, %r1, 0f00000000;
	add.f32 	%r4, %r10, %r9;
.visible .entry two(
	add.f32 	%r4, %r5, %r1;
	div.full.f32 	%r1, %r2, %r3;
"""
    assert products_in_sums(text) == ["sub.rn.f32 %r8, %r7, %r5", "add.f32 %r4, %r5, %r1"]


if __name__ == "__main__":
    compile_programs({name: program for name, program in programs().items() if name in sys.argv[1:]})
