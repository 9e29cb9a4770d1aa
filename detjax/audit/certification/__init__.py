"""Certification: whether a function's rows depend on their batch, by its program and by trials.

Read `certify`, then `roles` for the meaning of each equation, then `freedoms` for what a compiler may choose.
"""
