"""Kernels: one operation on one backend in each file.

Read `hopper/matmul` or `tpu/matmul` first. The modules here are the functions that both chips share.
"""
