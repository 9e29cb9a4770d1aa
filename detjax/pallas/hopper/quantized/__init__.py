"""Products with quantized weights on Hopper.

The kernel in `packed/` multiplies plain rows with weights that it reads in codes. `fragments.py` widens these in
registers, by the arithmetic of `widening.py`, which also widens tiles in shared memory. The kernel in `scaled.py`
multiplies quantized rows, which `rows.py` makes, and scales the products of each block with the primitives of
`promotion.py`. So does the one in `codes.py`, which multiplies e4m3 codes without widening them, with other bits.
"""
