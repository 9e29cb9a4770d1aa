"""Runs of reinforcement learning whose samplers differ from the trainer."""
