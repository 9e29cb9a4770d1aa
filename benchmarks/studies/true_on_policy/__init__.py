"""Reinforcement learning with samplers that differ from the trainer."""
