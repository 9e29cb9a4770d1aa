"""Studies, by name: see `benchmarks.study`."""
