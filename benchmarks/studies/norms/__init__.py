"""Operations on rows (norms, rotary embedding, softmax, sampling) against XLA's own and against a copy.

`cases` defines the operations, `suite` measures them and compares bits, `cache_writes` measures writing keys and values
to a cache, and `schedules` the schedules of the Hopper kernels for norms and rotary embedding.
"""
