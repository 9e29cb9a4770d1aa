"""Attention against its rivals: time, accuracy, and the invariance of a token's bits.

`cases` defines the calls, `inputs` draws arrays, `programs` has the functions, `cells` measures times, `accuracy`
errors, `request_bits` and `option_bits` compare bits, `summary` and `picture` show results, `study` runs everything.
"""
