"""Programs compiled for TPUs that are not there: libtpu compiles on any machine, and executes nothing.

A compile proves that a program is accepted and what memory it takes, never its bits or its time.
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

from detjax import backends, compilation

TPU_CHIPS: Final = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
"""Names of chips, with the smallest topology of each that libtpu knows."""

_QUIET: Final = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""On a host without TPUs libtpu looks for some, and complains."""


@functools.cache
def topology(chip: str) -> Any:
    """The chip's topology, as libtpu describes it.

    Raises:
        ValueError: no chip of this name is known.
        ModuleNotFoundError: libtpu is not installed.
    """
    if chip not in TPU_CHIPS:
        raise ValueError(f"chip is {chip!r}; accepted: {', '.join(TPU_CHIPS)}")
    try:
        import libtpu  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "libtpu is not installed, which compiles for TPUs: pip install 'detjax[tpu]'", name="libtpu"
        ) from error
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    return topologies.get_topology_desc(platform="tpu", topology_name=TPU_CHIPS[chip])


def compiled_for(
    chip: str, fn: Callable[..., Any], *args: Any, backend: str = backends.STOCK, donate: tuple[int, ...] = ()
) -> jax.stages.Compiled:
    """`fn`, compiled for one chip as a backend's programs are.

    Args:
        chip: one of `TPU_CHIPS`.
        fn: a function of arrays.
        args: trees of `jax.ShapeDtypeStruct`.
        backend: which serves the operations in `fn`, and whose compiler options are taken.
        donate: arguments whose memory the result may take.

    Raises:
        ValueError: no chip or backend of this name is known.
        ModuleNotFoundError: libtpu is not installed.
        jax.errors.JaxRuntimeError: the compiler refuses the program.
    """
    device = topology(chip).devices[0]
    sharding = SingleDeviceSharding(device)
    args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), args)
    mesh = Mesh(np.array([device]), ("_",)).abstract_mesh
    # Kernels that ask for the kind of device see the target's.
    with jax.sharding.use_abstract_mesh(mesh), backends.tracing_for("tpu"), backends.use_backend(backend):
        options = compilation.options_of(backend, "tpu")
        program = jax.jit(fn, out_shardings=sharding, donate_argnums=donate, compiler_options=options)
        return program.trace(*args).lower(lowering_platforms=("tpu",)).compile()


_OF_THE_GRID: Final = re.compile(
    r"iteration_bounds = array<i64[^>]*>|(?<=memref<)\d+(?=xi32, #tpu.memory_space<smem>>)"
)
"""Its bounds, and how long the lists are that say what each step works on."""


def kernels_of(fn: Callable[..., Any], *args: Any) -> list[str]:
    """The text of each Mosaic TPU kernel in `fn`, in order, without the size of its grid; needs no libtpu.

    Two calls whose kernels have one text differ in how many steps their grids have, and in nothing else.
    """
    found: list[str] = []
    from jax._src import tpu_custom_call  # JAX has no public way to a kernel's text

    original = tpu_custom_call._lower_to_custom_call_config  # pyright: ignore[reportAttributeAccessIssue]

    def noted(module: Any, *rest: Any, **options: Any) -> Any:
        found.append(_OF_THE_GRID.sub("", str(module)))
        return original(module, *rest, **options)

    tpu_custom_call._lower_to_custom_call_config = noted  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with backends.tracing_for("tpu"):
            jax.jit(fn).trace(*args).lower(lowering_platforms=("tpu",))
    finally:
        tpu_custom_call._lower_to_custom_call_config = original  # pyright: ignore[reportAttributeAccessIssue]
    return found
