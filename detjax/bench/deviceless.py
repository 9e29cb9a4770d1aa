"""Programs compiled for TPUs without a TPU: libtpu compiles on any machine, but can execute nothing there.

Compiling shows that a program is accepted and how much memory it takes, never its bits or its time.
"""

import functools
import os
import re
from collections.abc import Callable
from typing import Any, Final

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, SingleDeviceSharding

from detjax.runtime import backends, compilation

TPU_CHIPS: Final = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
"""For each chip's name, the smallest topology that libtpu knows of it."""

_QUIET: Final = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Environment variables that keep libtpu from searching for TPUs, and from complaining that there are none."""


@functools.cache
def topology(chip: str) -> Any:
    """The topology of one of `TPU_CHIPS`, as libtpu describes it.

    Raises:
        ValueError: no chip has this name.
        ModuleNotFoundError: libtpu is not installed.
    """
    if chip not in TPU_CHIPS:
        raise ValueError(f"chip is {chip!r}; accepted: {', '.join(TPU_CHIPS)}. Choose one of them.")
    try:
        import libtpu  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "libtpu is not installed; it is needed to compile for TPUs. Run: pip install 'detjax[tpu]'",
            name="libtpu",
        ) from error
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    return topologies.get_topology_desc(platform="tpu", topology_name=TPU_CHIPS[chip])


def compiled_for(
    chip: str, fn: Callable[..., Any], *args: Any, backend: str = backends.STOCK, donate: tuple[int, ...] = ()
) -> jax.stages.Compiled:
    """`fn`, compiled for one chip in the way a backend's programs are compiled.

    Args:
        chip: one of `TPU_CHIPS`.
        fn: a function of arrays.
        args: trees of `jax.ShapeDtypeStruct`.
        backend: the backend that serves the operations in `fn`, and whose compiler options are used.
        donate: indices of arguments whose memory the result may reuse.

    Raises:
        ValueError: no chip or no backend has this name.
        ModuleNotFoundError: libtpu is not installed.
        jax.errors.JaxRuntimeError: the compiler refuses the program.
    """
    device = topology(chip).devices[0]
    sharding = SingleDeviceSharding(device)
    args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), args)
    mesh = Mesh(np.array([device]), ("_",)).abstract_mesh
    # Kernels that ask for the kind of device see the target's kind.
    with jax.sharding.use_abstract_mesh(mesh), backends.tracing_for("tpu"), backends.use_backend(backend):
        options = compilation.options_of(backend, "tpu")
        program = jax.jit(fn, out_shardings=sharding, donate_argnums=donate, compiler_options=options)
        return program.trace(*args).lower(lowering_platforms=("tpu",)).compile()


_GRID_SIZES: Final = re.compile(r"iteration_bounds = array<i64[^>]*>|(?<=memref<)\d+(?=xi32, #tpu.memory_space<smem>>)")
"""The parts of a kernel's text that depend on the grid: its bounds, and the lengths of lists with an entry per step."""


def kernel_texts(fn: Callable[..., Any], *args: Any) -> list[str]:
    """The text of each Mosaic TPU kernel in `fn`, in order, without the size of its grid; libtpu is not needed.

    If two calls have kernels with the same text, their grids have different numbers of steps, and all else is the same.

    Args:
        fn: a function of arrays.
        args: trees of `jax.ShapeDtypeStruct`.
    """
    from jax._src import tpu_custom_call  # JAX has no public way to a kernel's text.

    texts: list[str] = []
    original = tpu_custom_call._lower_to_custom_call_config  # pyright: ignore[reportAttributeAccessIssue]

    def recorded(module: Any, *rest: Any, **options: Any) -> Any:
        texts.append(_GRID_SIZES.sub("", str(module)))
        return original(module, *rest, **options)

    tpu_custom_call._lower_to_custom_call_config = recorded  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with backends.tracing_for("tpu"):
            jax.jit(fn).trace(*args).lower(lowering_platforms=("tpu",))
    finally:
        tpu_custom_call._lower_to_custom_call_config = original  # pyright: ignore[reportAttributeAccessIssue]
    return texts
