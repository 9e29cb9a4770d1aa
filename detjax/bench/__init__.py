"""Measures speed, and searches for the fastest schedules: `python -m detjax.bench`.

Read `cases` and `timing` for the operations, `serve` for the engine under load, `tune` for the search.
"""
