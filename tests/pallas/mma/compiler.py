"""Compiles programs for one of six architectures, in a process of its own, on a machine without a GPU.

A test calls `compiled` with a script that ends with

    if __name__ == "__main__":
        compile_programs(PROGRAMS)

A process compiles for one architecture: XLA keeps the first target that it was given.
"""

import dataclasses
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental.mosaic.gpu import utils as mosaic_utils

from detjax.pallas import nvidia
from detjax.runtime import compilation
from tests.support.integer_signs import signs_checked

if TYPE_CHECKING:
    from tests.pallas.hopper.compiler import Kernel

Program = tuple[Callable[..., Any], Sequence[Any]]
"""A function and its arguments' shapes."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU that programs are compiled for."""

    name: str
    capability: nvidia.Architecture
    multiprocessors: int
    shared_memory_kib: int
    """Shared memory of a multiprocessor."""
    accelerated: bool
    """True if Mosaic GPU writes PTX for this architecture alone, which XLA must name to ptxas as well."""

    def config(self) -> str:
        """The GPU as XLA describes it."""
        major, minor = self.capability
        text = (Path(__file__).parent.parent / "hopper" / "h200.txtpb").read_text()
        extension = " feature_extension: ACCELERATED_FEATURES" if self.accelerated else ""
        kib = self.shared_memory_kib
        lines = {
            r"shared_memory_per_core: \d+": f"shared_memory_per_core: {kib * 1024}",
            r"shared_memory_per_block_optin: \d+": f"shared_memory_per_block_optin: {(kib - 1) * 1024}",
            r"core_count: \d+": f"core_count: {self.multiprocessors}",
            r"cuda_compute_capability {.*}": f"cuda_compute_capability {{ major: {major} minor: {minor}{extension} }}",
            r"Compute Capability 9\.0a": f"Compute Capability {major}.{minor}",
            "NVIDIA H200": self.name,
        }
        for pattern, line in lines.items():
            text, count = re.subn(pattern, line, text)
            assert count, pattern
        return text


GPUS = {
    "sm_80": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 164, False),
    "sm_86": Gpu("NVIDIA A10", (8, 6), 72, 100, False),
    "sm_89": Gpu("NVIDIA L4", (8, 9), 58, 100, False),
    "sm_90a": Gpu("NVIDIA H100", (9, 0), 132, 228, True),
    "sm_100a": Gpu("NVIDIA B200", (10, 0), 148, 228, True),
    "sm_120a": Gpu("NVIDIA GeForce RTX 5090", (12, 0), 170, 100, True),
}
"""GPUs by the name of their architecture. Mosaic GPU of jax 0.11.2 writes PTX for `sm_120a`, which ptxas refuses unless
XLA names the accelerated architecture, too. On such a device it does so itself."""


def compile_programs(programs: Mapping[str, Program]) -> None:
    """Compiles programs for the GPU that the script's first argument names; the others are names of programs.

    The compiler's output about a program follows a line with the program's name.
    """
    from jax.experimental import topologies
    from jax.sharding import Mesh, SingleDeviceSharding

    architecture, *names = sys.argv[1:]
    gpu = GPUS[architecture]
    target = topologies.get_topology_desc(platform="cuda", target_config=gpu.config(), topology="1x1x1").devices[0]
    sharding = SingleDeviceSharding(target)
    mesh = Mesh(np.array([target]), ("_",)).abstract_mesh
    # Without a device, Mosaic GPU takes every GPU for one of 9.0.
    mosaic_utils._infer_arch = lambda: gpu.capability
    with jax.sharding.use_abstract_mesh(mesh), nvidia.tracing_for(gpu.capability):
        for name in names or programs:
            fn, shapes = programs[name]
            print(f"# {name}", flush=True)
            operands = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in shapes]
            options = {**compilation.PINNED_OPTIONS["gpu"], "xla_gpu_enable_triton_gemm": False}
            program = jax.jit(fn, out_shardings=sharding, compiler_options=options)
            with signs_checked():
                kernels = program.trace(*operands).lower(lowering_platforms=("cuda",))
            kernels.compile()


def compiled(script: Path, architecture: str, names: Sequence[str] = ()) -> "dict[str, list[Kernel]]":
    """The resources of the kernels of each program of a script that calls `compile_programs`, by the program's name."""
    from tests.pallas.hopper import compiler as hopper_compiler  # takes seconds, which the scripts do not need

    output = hopper_compiler.compiled(script, [architecture, *names], dump="MOSAIC_GPU_DUMP_PTXAS")
    return {name: list(hopper_compiler.reported_kernels(text)) for name, text in output.items()}
