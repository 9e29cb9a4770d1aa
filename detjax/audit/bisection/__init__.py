"""Finds the first equation at which two runs diverge, and how the difference grows from there.

Read `bisect`, then `traces`; `flat_programs` inlines calls so that a program is one list of equations.
"""
