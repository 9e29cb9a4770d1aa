"""Bisection: the first equation at which two runs diverge, and how the difference grows from there.

Read `bisect`, then `traces`; `flat_programs` opens calls so that equations follow one another.
"""
