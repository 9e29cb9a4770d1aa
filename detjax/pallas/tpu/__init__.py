"""Mosaic TPU kernels: a file or a folder for each operation, with the file names of `detjax.pallas.hopper`."""
