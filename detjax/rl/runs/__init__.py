"""Whole runs: recipe, state on disk, log, and the command that starts a run.

Read `run`, then `run_state`.
"""
