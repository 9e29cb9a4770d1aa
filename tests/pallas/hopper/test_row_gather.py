"""The kernel that gathers many rows: the portable backend's rows in Pallas' interpreter, lowered, and on a device."""

from collections.abc import Iterator

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.pallas.hopper import row_gather
from detjax.portable.experts import rows_at
from detjax.runtime import backends
from tests.pallas.hopper.interpreter import lowered
from tests.support.attention_requests import INTERPRETER
from tests.support.bits import assert_same_bits, same_bits


@pytest.fixture
def hopper_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel in the interpreter, also for few rows, which take less time."""
    monkeypatch.setattr(row_gather, "_MIN_ROWS", 16)
    with detjax.use_backend("hopper"), plgpu.force_gpu_interpret_mode(INTERPRETER):
        yield


def drawn(rows: int, known: int, width: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    """An array with NaN and infinity in it, and numbers of rows, some of them missing."""
    draw = np.random.default_rng([rows, width])
    x = draw.normal(size=(known, width)).astype(np.float32)
    x[0, 0], x[-1, -1] = np.nan, -np.inf
    return jnp.asarray(x, dtype), jnp.asarray(draw.integers(0, known + 2, rows), jnp.int32)


@pytest.mark.usefixtures("hopper_in_the_interpreter")
@pytest.mark.parametrize(
    ("rows", "known", "width", "dtype"),
    [(61, 37, 2048, "bfloat16"), (16, 1, 384, "float32"), (59, 9, 768, "float16"), (33, 3, 7168, "bfloat16")],
)
def test_rows_are_copied_and_missing_ones_are_zeros(rows: int, known: int, width: int, dtype: str) -> None:
    x, index = drawn(rows, known, width, dtype)
    assert row_gather.serves(x, index)
    gathered = jax.jit(row_gather.rows_at)(x, index)
    assert_same_bits(gathered, rows_at(x, index))
    assert not np.asarray(gathered, np.float32)[np.asarray(index) >= known].any()
    assert not same_bits(gathered, rows_at(x, jnp.roll(index, 1)))


@pytest.mark.parametrize(
    ("rows", "shape", "dtype"),
    [
        (1023, (8, 2048), "bfloat16"),
        (1024, (8, 2880), "bfloat16"),  # not a whole number of vectors for each thread of a warp
        (1024, (8, 256), "int8"),
        (1024, (0, 256), "float32"),
    ],
)
def test_other_operands_are_left_to_xla(rows: int, shape: tuple[int, int], dtype: str) -> None:
    assert not row_gather.serves(jnp.zeros(shape, dtype), jnp.zeros(rows, jnp.int32))


def test_experts_gather_many_rows_by_the_kernel_on_hopper_alone() -> None:
    def gather(x: jax.Array, ids: jax.Array) -> jax.Array:
        return ops.expert_rows(ids, 4).gather(x)

    def text(tokens: int, backend: str, target: str) -> str:
        with backends.tracing_for(target), detjax.use_backend(backend):
            types = jax.ShapeDtypeStruct((tokens, 256), jnp.bfloat16), jax.ShapeDtypeStruct((tokens, 2), jnp.int32)
            return str(jax.make_jaxpr(gather)(*types))

    assert "row_gather" in text(512, "hopper", "gpu")
    assert "row_gather" not in text(256, "hopper", "gpu")
    assert "row_gather" not in text(512, "portable", "cpu")


@pytest.mark.usefixtures("hopper_in_the_interpreter")
def test_examples_of_a_batch_have_the_rows_that_they_have_alone() -> None:
    x, index = drawn(64, 6, 256, "bfloat16")
    rows = ops.ExpertRows(jnp.full(1, 64, jnp.int32), index, jnp.zeros((6, 1), jnp.int32), 8)
    both = jnp.stack([x, x[::-1]])
    batched = jax.vmap(lambda x: rows.gather(x))(both)
    assert_same_bits(batched, jnp.stack([rows_at(example, index) for example in both]))


@pytest.mark.parametrize(("width", "dtype"), [(2048, "bfloat16"), (7168, "bfloat16"), (768, "float32")])
def test_gathers_lower_for_cuda(width: int, dtype: str) -> None:
    x, index = jax.ShapeDtypeStruct((8192, width), jnp.dtype(dtype)), jax.ShapeDtypeStruct((81792,), jnp.int32)
    lowered(row_gather.rows_at, x, index)


@pytest.mark.hopper
@pytest.mark.parametrize("width", [256, 2048, 7168])
def test_the_device_gives_the_rows_of_xla(width: int) -> None:
    x, index = drawn(70001, 8192, width, "bfloat16")
    assert_same_bits(jax.jit(row_gather.rows_at)(x, index), rows_at(x, index))
