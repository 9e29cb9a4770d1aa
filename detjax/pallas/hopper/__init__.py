"""Mosaic GPU kernels for Hopper GPUs (compute capability 9.0), a file or a folder for each operation."""
