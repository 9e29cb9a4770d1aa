"""The kernels: one operation on one backend in each file."""
