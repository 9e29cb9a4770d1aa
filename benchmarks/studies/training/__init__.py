"""Training: a step and its parts, and the rival that promises nothing."""
