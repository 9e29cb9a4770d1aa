"""Experts: their projections, with and without gradients."""
