"""Arrays and options of operations: KV pages, states of linear attention, sampling parameters.

Read `options` first, then `kv_pages`; `numerics` and `rounding` are small functions that all backends share.
"""
