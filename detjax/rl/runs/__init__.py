"""Whole runs: their recipe, their state on disk, their log, and the command that starts them.

Read `run`, then `run_state`.
"""
