"""Matrix products against XLA's dot and PyTorch's: time, and the invariance of a row's bits.

`cases` defines products and draws inputs, `programs` compiles, `cells` measures times, `row_bits` compares bits,
`summary` and `pictures` show results, `study` runs everything.
"""
