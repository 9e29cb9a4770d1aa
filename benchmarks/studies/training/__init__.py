"""Training: a step and its parts, against a stock program."""
