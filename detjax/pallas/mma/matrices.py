"""Loads of 8 x 8 matrices from shared memory to the registers that `mma.sync` takes them in."""

from typing import Any

from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, nvvm

from detjax.pallas.hopper.mosaic.registers import i32


def load_matrices(pointer: Any, byte: int, *, transposed: bool) -> list[Any]:
    """Emits the load of four matrices of 8 x 8 elements; each thread's pointer is a row of one of them.

    Returns:
        For each matrix, the int32 register that holds the two elements that `mma.sync` wants of the thread.
    """
    result = nvvm.ldmatrix(
        mgpu.getelementptr(pointer, [byte], ir.IntegerType.get_signless(8)),
        layout=nvvm.MMALayout.col if transposed else nvvm.MMALayout.row,
        num=4,
        shape=ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m=8, n=8>"),
        elt_type=nvvm.LdStMatrixEltType.B16,
    )
    return [llvm.extractvalue(i32(), result, [i]) for i in range(4)]
