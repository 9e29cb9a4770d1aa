"""Experts: their projections, and these with their gradients."""
