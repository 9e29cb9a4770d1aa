"""Times of the schedules of the Hopper kernels for norms and rotary embedding."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import detjax
from benchmarks.studies.norms.cases import EPS, Case, Sizes, cases
from benchmarks.timing import copy_time
from detjax.bench.timing import device_time, rotations
from detjax.pallas.hopper import norm, rope


def measure(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Yields a result for each schedule at every number of rows."""
    by_name = {case.name: case for case in cases(sizes)}
    for count in sizes.swept_rows:
        yield from _measure_norm(sizes, by_name["rms_norm, residual"], count)
        yield from _measure_rope(sizes, by_name["q/k norm, rope"], count)


def _measure_norm(sizes: Sizes, case: Case, count: int) -> Iterator[dict[str, Any]]:
    sets = [(*case.rows(count, seed), *case.shared) for seed in range(rotations(4 * sizes.width * count))]
    copy = copy_time(8 * sizes.width * count, calls=sizes.calls)
    for threads, rows, first in ((128, 1, False), (128, 1, True), (128, 2, False), (128, 2, True), (64, 2, False)):
        if rows > count:
            continue
        schedule = norm.Schedule(threads, rows, first)

        def program(x: jax.Array, r: jax.Array, w: jax.Array, schedule: norm.Schedule = schedule) -> Any:
            return norm.forward(x, w, r, eps=EPS, weight_offset=0.0, schedule=schedule)

        seconds = device_time(detjax.jit(program), sets, calls=sizes.calls)
        yield _result(case, count, schedule, seconds, copy)


def _measure_rope(sizes: Sizes, case: Case, count: int) -> Iterator[dict[str, Any]]:
    width, groups = sizes.head_dim, (sizes.heads, sizes.kv_heads)
    sets = [
        (*case.rows(count, seed), *(jnp.full((count, width // 2), 0.5 + i) for i in range(2)), *case.shared)
        for seed in range(rotations(2 * count * width * sum(groups)))
    ]
    copy = copy_time(4 * count * width * sum(groups), calls=sizes.calls)
    for tokens in (1, 2, 4, 8):
        for heads in (1, 2, 4, 8):
            if tokens > count or not (tokens == 8 or tokens * 2 > count or heads == 1):
                continue
            schedule = rope.Schedule(width // 8, tokens, heads)

            def program(x: jax.Array, c: jax.Array, s: jax.Array, *w: jax.Array, schedule=schedule) -> Any:
                return rope.forward(x, (c, s), *w, heads=groups, eps=EPS, schedule=schedule)

            seconds = device_time(detjax.jit(program), sets, calls=sizes.calls)
            yield _result(case, count, schedule, seconds, copy)


def _result(case: Case, count: int, schedule: Any, seconds: float, copy: float) -> dict[str, Any]:
    fields = dataclasses.asdict(schedule)
    return {"case": case.name, "rows": count, "schedule": fields, "seconds": seconds, "copy": copy}
