"""Products with quantized weights on Hopper.

The kernel in `packed/` multiplies plain rows with weights that it reads in codes. `fragments.py` widens these in
registers, by the arithmetic of `widening.py`, which also widens tiles in shared memory. The kernel in `codes.py`
multiplies quantized rows, which `rows.py` makes, with e4m3 codes, and scales the products of each block with the
primitives of `promotion.py`.
"""
