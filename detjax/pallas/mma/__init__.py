"""Mosaic GPU kernels for every NVIDIA GPU of compute capability 8.0 and above, on warp-level `mma.sync`.

Only kernels that multiply matrices are here. Kernels that add, exchange or look up rows alone have no instruction that
is special to one chip: the backend `mma` takes them from `hopper`; see `detjax.ops.dispatch.backend_modules`.
"""
