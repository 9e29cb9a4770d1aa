"""Measures speed, and searches the schedules that give it: `python -m detjax.bench`."""
