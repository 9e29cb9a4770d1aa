"""Reinforcement learning whose trainer sees the bits that its sampler saw.

Read `trainer` first, then `rollouts` and `policy_gradients`; `runs` puts them together for `tasks`. `functional` has
the same steps as pure functions, and `tunix` the adapter to Tunix.
"""
