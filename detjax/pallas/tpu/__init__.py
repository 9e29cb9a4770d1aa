"""Mosaic TPU kernels, a file or a folder for each operation, named as in `detjax.pallas.hopper`."""
