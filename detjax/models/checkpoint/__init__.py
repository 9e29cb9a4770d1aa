"""Checkpoints on disk: loading, saving, stored formats, and the digest of a model.

Read `loading` first; `lazy_parameter` and `weight_files` read the slices that a device needs.
"""
