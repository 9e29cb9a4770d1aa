"""Verification: whether answers are the ones that a model gives, bit for bit.

Read `verify`, then `replay`; `transcripts` and `receipts` are what is verified.
"""
