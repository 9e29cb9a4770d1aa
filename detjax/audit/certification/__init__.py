"""Certifies that a function's rows do not depend on their batch, by its program and by trials.

Read `certify`, then `roles` for the meaning of each equation, then `freedoms` for the choices of a compiler.
"""
