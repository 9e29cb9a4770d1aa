"""Products with quantized weights on Hopper.

The kernel in `packed.py` multiplies plain rows with weights that it reads in codes; `widening.py` widens these on the
chip. The kernel in `scaled.py` multiplies quantized rows, which `rows.py` makes, and scales the products of each block
with the primitives of `promotion.py`.
"""
