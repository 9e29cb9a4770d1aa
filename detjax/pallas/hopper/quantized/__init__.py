"""Products with quantized weights on Hopper.

The kernel in `packed.py` multiplies plain rows with weights that it reads in codes; `widening.py` widens these on the
chip.
"""
