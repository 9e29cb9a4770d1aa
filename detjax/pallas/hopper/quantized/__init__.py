"""Products with quantized weights on Hopper: kernels that read codes and scales from memory.

`packed.py` multiplies plain activations with weights that are widened on the chip by `widening.py`; `promoted.py`
multiplies e4m3 numbers and adds blocks of columns in float32 registers.
"""
