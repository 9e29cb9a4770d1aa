"""A step's programs are compiled before their first calls, and no call compiles or traces them again."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import detjax
from detjax.pallas.hopper import elements
from detjax.rl.functional import Training
from detjax.rl.runs.policy import small_policy
from detjax.rl.trainer import step, train_state
from detjax.rl.trainer.losses import ClippedRatio
from detjax.rl.trainer.microbatches import Packed, Rows, Sample
from detjax.rl.trainer.optimizers import adamw
from detjax.rl.trainer.placement import Placement
from detjax.rl.trainer.step import Plan
from detjax.rl.trainer.trainer import Trainer
from detjax.runtime import ahead
from tests.pallas.hopper.compiler import decoder_gradients
from tests.rl.policies import policy

LENGTH = 13
"""Tokens of a sample; no other test has microbatches of such shapes, whose programs would be known."""


def samples(count: int = 3) -> list[Sample]:
    tokens = np.random.default_rng(0).integers(0, 32, (count, LENGTH)).astype(np.int32)
    weights = np.full(LENGTH - 1, 0.25, np.float32)
    return [Sample(row, weights, np.full_like(weights, -3)) for row in tokens]


@contextlib.contextmanager
def events() -> Iterator[dict[str, list[str]]]:
    """The names of programs that are traced, lowered and compiled in the context, by event."""
    seen: dict[str, list[str]] = {"jaxpr_trace": [], "jaxpr_to_mlir_module": [], "backend_compile": []}

    def listen(event: str, seconds: float, **details: Any) -> None:
        del seconds
        name = event.rsplit("/", 1)[-1].removesuffix("_duration")
        if name in seen:
            seen[name].append(details.get("fun_name", ""))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("max_norm", [1.0, None])
def test_every_program_of_a_step_is_compiled_ahead_and_never_again(
    max_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The loss makes programs that no other test has compiled.
    optimizer, loss = adamw(0.0123), ClippedRatio(0.123 if max_norm else 0.122, 0.3)
    trainer = Trainer(policy(), optimizer, loss, Plan(Rows(3, 16), shards=1), max_norm=max_norm)
    compile_ahead, after = step.compile_ahead, {}

    def watched(calls: Any) -> None:
        compile_ahead(calls)
        context = events()
        after.update(context=context, seen=context.__enter__())

    monkeypatch.setattr(step, "compile_ahead", watched)
    trainer.step(samples())
    trainer.step(samples())
    after["context"].__exit__(None, None, None)
    assert after["seen"] == {"jaxpr_trace": [], "jaxpr_to_mlir_module": [], "backend_compile": []}


def test_steps_of_known_shapes_compile_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[list[str]] = []
    compile_ahead = step.compile_ahead

    def watched(calls: Any) -> None:
        calls = list(calls)
        prepared.append([call.fn.__name__ for call in calls])
        compile_ahead(calls)

    monkeypatch.setattr(step, "compile_ahead", watched)
    plan = Plan(Packed(64), shards=1)
    trainer = Trainer(policy(), adamw(0.0125), ClippedRatio(0.124, 0.3), plan)
    for _ in range(2):
        trainer.step(samples())
    (names,) = prepared
    assert names[0] == "add" and {"reduced", "squares", "norm_and_scale", "step"} <= set(names)


def test_gradients_as_functions_compile_ahead_too(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[str] = []
    monkeypatch.setattr(step, "compile_ahead", lambda calls: prepared.extend(call.fn.__name__ for call in calls))
    model = policy()
    training = Training(model, adamw(0.0127), ClippedRatio(0.126, 0.3), shards=1)
    training.loss_and_gradients(nnx.state(model), samples(), microbatch=Rows(3, 16))
    assert prepared == ["add", "reduced"]


def test_a_kernel_that_fails_to_compile_alone_leaves_its_program_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "kernels", lambda lowered: {b"unknown to XLA": {}})
    fn = detjax.jit(lambda x: x + np.float32(0.126))
    with events() as seen:
        ahead.compile_ahead([ahead.Call(fn, (np.zeros(3, np.float32),))])
        np.testing.assert_array_equal(fn(np.zeros(3, np.float32)), np.full(3, 0.126, np.float32))
    assert len(seen["backend_compile"]) == 2  # the failure and the program
    assert b"unknown to XLA" not in ahead._compiled_kernels


def test_kernels_of_a_program_are_found_once_each() -> None:
    half, third = (jax.jit(lambda x, by=by: elements.map_elements(lambda z: z / by, x)) for by in (2, 3))

    def fn(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        return half(x), third(x), half(y)

    types = (jax.ShapeDtypeStruct((4096,), np.float32),) * 2
    lowered = jax.jit(fn).trace(*types).lower(lowering_platforms=("cuda",))
    kernels = ahead.kernels(lowered)
    assert len(kernels) == 2
    for name, attributes in kernels.items():
        assert attributes["kernel_hash"] == name and len(name) == 32
        assert attributes["module"].startswith(b"ML\xefR") and attributes["use_custom_barrier"] is False


def test_programs_without_kernels_have_none() -> None:
    assert ahead.kernels(jax.jit(lambda x: x + 1).lower(np.float32(1))) == {}


def test_leaves_of_equal_shapes_share_a_kernel() -> None:
    leaves = tuple(jax.ShapeDtypeStruct((size,), np.float32) for size in (4096, 8192, 4096))
    with detjax.use_backend("hopper"):
        squares: Any = train_state._squares_program(Placement(1))
        lowered = jax.jit(squares.__wrapped__).trace(leaves).lower(lowering_platforms=("cuda",))
    assert len(ahead.kernels(lowered)) == 2


def test_layers_of_a_decoder_share_all_kernels() -> None:
    fn, types = decoder_gradients(Rows(1, 16), small_policy(3, 128)[0].config)
    lowered = jax.jit(fn).trace(*types).lower(lowering_platforms=("cuda",))
    kernels = {attributes["module"] for attributes in ahead.kernels(lowered).values()}
    # Each linear layer has three products, and so has the head; the rest are norms, attention, the embedding's gradient
    # and sums over tokens. More layers need no further kernels.
    assert len(kernels) <= 30
