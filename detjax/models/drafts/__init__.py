"""Heads that draft tokens for another model from that model's own hidden states: EAGLE-3, and layers that predict
further tokens (MTP).

Read `draft` first, then `eagle3` and `next_token`. `load_draft` in `loading` reads their checkpoints.
"""
