"""A model and a training step that the devices of several processes share, and the loss of one of them."""
