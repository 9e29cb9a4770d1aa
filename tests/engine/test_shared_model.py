"""Programs of a model that devices share: who compiles them, and what runs before devices exchange."""

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.engine import BatchShapes, StepLoop, StepLoopConfig, model_runner, program_compiler
from detjax.engine.compiler_process import CompilerProcess
from detjax.engine.model_runner import ModelRunner
from detjax.engine.program_compiler import ProgramCompiler
from detjax.models import sharded
from detjax.runtime.device_links import Buffers, DeviceLinks
from tests.support.kept_programs import no_kept_programs
from tests.support.simulated_devices import ALL_HOLD, run_on_devices
from tests.support.small_loops import VARIANTS, answers, small_loop, small_model

VARIANTS_OF_TWO = (VARIANTS[2]._replace(distribution=True),)
LINKS, NOWHERE = (DeviceLinks(jnp.full((2, 2), value, jnp.int32)) for value in (1, 0))


def shared_loop(layers_at_once: int | None) -> StepLoop:
    mesh = jax.make_mesh((2,), ("tensor",))
    config = StepLoopConfig(
        shapes=BatchShapes.for_serving(1, 8),
        num_pages=2,
        pages_per_sequence=1,
        variants=VARIANTS_OF_TWO,
        runs_of=1,
        layers_at_once=layers_at_once,
        rows_in_blocks=1,
    )
    return StepLoop.for_model(sharded(small_model(), mesh), config)


@dataclasses.dataclass
class Calls:
    """Records the programs that a runner runs: their keys, and whether devices exchange in them."""

    exchanges: list[tuple[Hashable, bool]] = dataclasses.field(default_factory=list)

    def run(self, runner: ModelRunner, program: Any, *, is_linked: bool = True) -> Any:
        self.exchanges.append((program.key, is_linked))
        return _RUN(runner, program, is_linked=is_linked)


_RUN = ModelRunner._run


def main() -> None:
    """Compares answers of a model that two devices share, whose programs another process compiles, with one device's.

    Every program that exchanges first runs once without links.
    """
    expected = answers(small_loop(VARIANTS_OF_TWO))
    with no_kept_programs():
        compare(expected, None)
        jax.clear_caches()  # a program for a CPU that has run cannot be serialized
        compare(expected, 1)
    print(ALL_HOLD)


def compare(expected: list[Any], layers_at_once: int | None) -> None:
    """Fails if two devices do not give the answers expected."""
    calls, used = Calls(), list[Hashable]()
    buffers = Buffers(jnp.zeros(1, jnp.int32), LINKS, NOWHERE)
    model_runner.device_buffers = lambda mesh: None if mesh is None else buffers
    ModelRunner._run = lambda self, program, *, is_linked=True: calls.run(self, program, is_linked=is_linked)

    class Counted(CompilerProcess):
        def compiled(self, key: Hashable) -> bytes:
            content = super().compiled(key)
            used.append(key)
            return content

    program_compiler.CompilerProcess = Counted
    loop = shared_loop(layers_at_once)
    loop.warm_up(ProgramCompiler(processes=1))
    loop.wait_for_programs()
    programs = loop.programs().by_key()
    assert {*used} == {key for key in programs if programs[key].until is None} == {*loop._runner._compiled}
    names = [key[0] for key in used]  # pyright: ignore[reportIndexIssue]
    assert ("_forward_block" in names) == ("_embed" in names) == (layers_at_once is not None)
    assert len(used) == len({*used})
    assert answers(loop) == expected
    loop.sleep(keeps_weights=True)
    loop.wake_weights()
    loop.wake_state()
    assert answers(loop) == expected
    weights = {number: np.asarray(loop.weight(number)) for number in range(3)}
    loop.replace_weights({number: np.zeros_like(weight) for number, weight in weights.items()})
    assert answers(loop) != expected
    loop.replace_weights(weights)
    assert answers(loop) == expected
    by_key: dict[Hashable, list[bool]] = {}
    for key, is_linked in calls.exchanges:
        by_key.setdefault(key, []).append(is_linked)
    assert {*by_key} == {*used}
    for key, linked in by_key.items():
        name = key[0]  # pyright: ignore[reportIndexIssue]
        # No device waits for another one while tokens are noted. A step runs the program of a block for each block.
        first = {"_note_seen": 0, "_forward_block": 2}.get(name, 1)
        assert not any(linked[:first]), key
        assert len(linked) > first and all(linked[first:]), key
    loop.close()


def test_devices_that_share_a_model_have_the_bits_of_one_whoever_compiles_their_programs() -> None:
    run_on_devices(__name__, devices=2)


def test_the_links_of_an_engine_are_what_its_programs_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "device_buffers", lambda _: Buffers(jnp.zeros(1), LINKS, NOWHERE))
    links = small_loop().programs().parameters.links
    assert links is not None
    assert np.shape(links.addresses) == (2, 2)


if __name__ == "__main__":
    main()
