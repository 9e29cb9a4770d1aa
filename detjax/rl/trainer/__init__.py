"""The trainer: gradients, losses, microbatches, optimizers, and the training state on its devices.

Read `trainer`, then `step`, which computes the gradients of a batch.
"""
