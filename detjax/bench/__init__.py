"""Measures speed, and searches the schedules that give it: `python -m detjax.bench`.

Read `cases` and `timing` for the operations, `serve` for the engine under load, `tune` for the search.
"""
