"""Each contract in plain JAX at fixed tile shapes: runs on any device, and is what the text of a contract means."""
