"""Kernels: one operation on one backend in each file.

Read `hopper/matmul`, `mma/matmul` or `tpu/matmul` first. The modules here are shared by several of these packages.
"""
