"""Products with quantized weights on Hopper.

The kernel in `packed/` multiplies plain rows with weights that it reads in codes. `fragments.py` widens these in
registers, by the arithmetic of `widening.py`; `turns.py` is for warpgroups that hand sums on. The kernel in `codes/`
multiplies quantized rows, which `rows.py` makes, with e4m3 codes, and scales the products of each block with the
primitives of `promotion.py`.
"""
