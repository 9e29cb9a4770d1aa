"""Reinforcement learning whose trainer computes the same bits as its sampler.

Read `trainer` first, then `rollouts` and `policy_gradients`; `runs` combines them to train on `tasks`. `functional`
offers the same steps as pure functions, and `tunix` adapts them to Tunix.
"""
