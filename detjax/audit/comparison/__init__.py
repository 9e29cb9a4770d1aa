"""Comparison: how far apart the logprobs of two engines are.

Read `compare`, then `divergence`.
"""
