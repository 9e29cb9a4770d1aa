"""Compiles programs for TPUs without a TPU, since libtpu compiles on any machine.

Compiling shows whether a program is accepted and how much memory it needs, but neither its bits nor its time.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, Final

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, SingleDeviceSharding

from detjax.runtime import backends, compilation

TPU_CHIPS: Final = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
"""The smallest topology that libtpu knows, by chip."""

_QUIET: Final = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Environment variables that keep libtpu from searching for TPUs and warning that it found none."""


@functools.cache
def topology(chip: str) -> Any:
    """Returns libtpu's description of a chip's topology.

    Raises:
        ValueError: the chip is unknown.
        ModuleNotFoundError: libtpu is not installed.
    """
    if chip not in TPU_CHIPS:
        raise ValueError(f"chip is {chip!r}; accepted: {', '.join(TPU_CHIPS)}")
    try:
        import libtpu  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "compiling for TPUs needs libtpu, which is not installed: pip install 'detjax[tpu]'",
            name="libtpu",
        ) from error
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    return topologies.get_topology_desc(platform="tpu", topology_name=TPU_CHIPS[chip])


def compiled_for(
    chip: str, fn: Callable[..., Any], *args: Any, backend: str = backends.STOCK, donate: tuple[int, ...] = ()
) -> jax.stages.Compiled:
    """Compiles `fn` for one chip with a backend's operations and compiler options.

    Args:
        chip: one of `TPU_CHIPS`.
        args: trees of `jax.ShapeDtypeStruct`.
        backend: the backend of the operations in `fn` and of the compiler options.
        donate: indices of donated arguments.

    Raises:
        ValueError: the chip or backend is unknown.
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
