"""Reinforcement learning whose trainer sees the bits that its sampler saw: tasks with verifiers, advantages and their
weights, corrections and measures of what differs between sampler and trainer, and the log of a run."""
