"""Matrix products against XLA's dot and PyTorch's: time, and whether a row's bits depend on how it is computed.

`cases` says what is measured and draws inputs, `programs` compiles, `cells` measures times, `row_bits` compares bits,
`summary` and `pictures` show results, `study` runs it all.
"""
