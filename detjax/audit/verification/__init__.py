"""Verifies that answers come from a given model, bit for bit.

Read `verify`, then `replay`; `transcripts` and `receipts` define its input.
"""
