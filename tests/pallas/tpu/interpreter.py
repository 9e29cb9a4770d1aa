"""Helpers of the TPU kernels' tests: random arrays, Pallas' interpreter, and the precision of products in a kernel."""

import re
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # JAX has no public name for the races it found.

COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}
"""Nearly all of the time of these tests is XLA's, which compiles the interpreted kernels."""


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """Random numbers of a normal distribution, the same for the same arguments."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(jnp.dtype(dtype))


def shape(*sizes: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, compiled for the CPU, with NumPy arrays as arguments and results.

    JAX keeps what it traced by function, so each call here has a function of its own: a test may change a constant.
    """
    program = jax.jit(lambda *args: fn(*args), compiler_options=COMPILER_OPTIONS)

    def call(*args: Any) -> Any:
        return jax.tree.map(np.asarray, program(*jax.tree.map(jnp.asarray, args)))

    return call


def interpreting(cores: int = 1, copies: Literal["on_wait", "eager"] = "on_wait") -> Any:
    """A context in which TPU kernels run in the interpreter, where memory that nobody wrote is NaN.

    Args:
        cores: cores that share the grid.
        copies: when a copy between memories is made: as late as it may be, or as soon.
    """
    parameters = pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", num_cores_or_threads=cores, dma_execution_mode=copies
    )
    return pltpu.force_tpu_interpret_mode(parameters)


def assert_no_races() -> None:
    """The last interpreted kernel had no two cores or copies that raced for memory."""
    races = interpret_pallas_call.races
    assert races is not None and not races.races_found


def interpreted(fn: Callable[..., Any], cores: int = 1) -> Callable[..., Any]:
    """`fn` with its kernels in the interpreter; a call fails if memory races."""
    program = compiled(fn)

    def call(*args: Any) -> Any:
        with interpreting(cores):
            result = program(*args)
        assert_no_races()
        return result

    return call


def matrix_products(kernel_text: str) -> list[str]:
    """The lines of a kernel's text that ask for products of the matrix unit."""
    return re.findall(r"tpu\.matmul .*", kernel_text)


def assert_products_in_float32(kernel_text: str) -> None:
    """All products have float32 operands, and the precision keeps the matrix unit from rounding these to bfloat16.

    The interpreter's products are the CPU's, which has no such rounding, so only the text shows it.
    """
    products = matrix_products(kernel_text)
    assert products
    for line in products:
        assert "contract_precision<fp32>" in line and "bf16" not in line, line
