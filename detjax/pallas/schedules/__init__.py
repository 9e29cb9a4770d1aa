"""How the kernels' work is spread over a chip: tuned tables, and rules for the shapes that no table names.

Nothing in here reaches the bits of a result.
"""
