"""Products with quantized activations on Hopper: bits, sums of the matrix unit, and times.

`products` compares the kernels with themselves, plain JAX and NumPy, `widths` launches them again and again at the
widths of models, `sums` compares the dtypes that the matrix unit multiplies, and `speeds` measures times.
"""
