"""Studies that produce the numbers of the documentation, and the performance goals: `python -m benchmarks`."""
