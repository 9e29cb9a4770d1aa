"""libtpu's compiler accepts kernels at the sizes of real models, whole steps, and sums over a mesh."""

import importlib
import importlib.util
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from detjax import ops
from detjax.bench import cases
from detjax.bench.compile import compile_for
from detjax.bench.deviceless import TPU_CHIPS, compiled_for, topology
from detjax.runtime import backends, compilation

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: see make test-tpu"
)

CASES = [
    pytest.param(fn, args, id=f"{module.rpartition('.')[2].removesuffix('_cases')} {name}")
    for module in map("tests.pallas.tpu.{}_cases".format, ("matmul", "rows", "attention", "delta"))
    for name, (fn, args) in importlib.import_module(module).cases().items()
]
MEMORY = {"v5e": 16 << 30, "v5p": 95 << 30, "v6e": 32 << 30, "tpu7x": 96 << 30}
"""Bytes of a device's memory. A TPU7x has two devices, each with half of the chip's memory."""


def assert_fits(program: jax.stages.Compiled, chip: str) -> None:
    memory: Any = program.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert held + memory.temp_size_in_bytes < MEMORY[chip]


@pytest.mark.sampled(60)
@pytest.mark.parametrize("chip", TPU_CHIPS)
@pytest.mark.parametrize(("fn", "args"), CASES)
def test_kernels_compile(fn, args, chip: str) -> None:
    assert_fits(compiled_for(chip, fn, *args, backend="tpu"), chip)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("chip", TPU_CHIPS)
@pytest.mark.parametrize("operation", ["prefill_step", "decode_step"])
def test_whole_steps_of_qwen3_8b_compile(operation: str, chip: str) -> None:
    # One request: the weights alone are 15.3 of a v5e's 16 GiB.
    sizes = cases.Sizes(models=("Qwen3-8B",), prefill_steps=((1, 1024),), decode_steps=((1, 1024),))
    (step,) = cases.cases(sizes, (operation,))
    program = compiled_for(chip, step.run, *step.shapes, backend="tpu", donate=tuple(range(step.carried)))
    assert_fits(program, chip)
    assert 'custom_call_target="tpu_custom_call"' in str(program.as_text()), "no kernel of the backend is in it"


def test_small_cases_compile() -> None:
    content = compile_for("v5e", small=True, only=["rms_norm", "matmul"])
    assert content["rows"] and all(row["memory"]["argument"] > 0 for row in content["rows"])


def test_the_pinned_options_reach_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: jax.Array) -> jax.Array:
        return x + 1

    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    compiled_for("v6e", fn, x, backend="tpu")
    monkeypatch.setattr(compilation, "compiler_options", lambda _: {"xla_tpu_unheard_of": False})
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        compiled_for("v6e", fn, x, backend="tpu")
    compiled_for("v6e", fn, x, backend="stock")


@pytest.mark.parametrize("chip", ["v5e", "tpu7x"])
def test_sums_over_a_mesh_move_terms_and_no_addition_is_left_to_the_network(chip: str) -> None:
    mesh = Mesh(np.array(topology(chip).devices), "d", axis_types=(AxisType.Auto,))

    def collectives(fn, out_specs: P) -> set[str]:
        x = jax.ShapeDtypeStruct((mesh.size, 512, 256), jnp.bfloat16, sharding=NamedSharding(mesh, P("d")))
        mapped = jax.shard_map(lambda x: fn(x[0], "d"), mesh=mesh, in_specs=P("d"), out_specs=out_specs)
        program = jax.jit(mapped, compiler_options=compilation.options_of("tpu", "tpu"))
        with backends.tracing_for("tpu"), backends.use_backend("tpu"):
            text = program.trace(x).lower(lowering_platforms=("tpu",)).compile().as_text()
        assert text is not None
        return set(re.findall(r"\b(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)[a-z-]*\(", text))

    assert collectives(ops.psum, P()) == {"all-gather"}
    assert collectives(ops.psum_scatter, P("d")) == {"all-to-all"}
    assert collectives(jax.lax.psum, P()) == {"all-reduce"}


def test_the_steps_of_k_of_xlas_own_dot_depend_on_the_number_of_tokens() -> None:
    def windows(tokens: int) -> list[str]:
        shapes = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((tokens, 14336), (14336, 4096)))
        text = compiled_for("v5e", lambda x, w: x @ w, *shapes).as_text()
        assert text is not None
        return re.findall(r'"kernel_window_bounds":\["(\d+)', text)

    assert len({*map(tuple, map(windows, (64, 512, 4096)))}) > 1
