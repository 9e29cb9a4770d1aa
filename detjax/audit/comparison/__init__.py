"""Measures the differences between the logprobs of two engines.

Read `compare`, then `divergence`.
"""
