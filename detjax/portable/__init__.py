"""Each contract in plain JAX at fixed tile shapes.

This backend runs on any device and is the reference: it computes what a contract's text states.
"""
