"""Attention against its rivals: time, accuracy, and whether a token's bits depend on how it is computed.

`cases` says what is measured, `inputs` draws arrays, `programs` are the functions, `cells` measures times, `accuracy`
errors, `request_bits` and `option_bits` compare bits, `summary` and `picture` show results, `study` runs it all.
"""
