"""Random programs of rows, and their certificates."""
