"""Arrays and options that operations take: pages of keys and values, states of linear attention, sampling parameters.

Read `options` first, then `kv_pages`; `numerics` and `rounding` are the small functions that all backends share.
"""
