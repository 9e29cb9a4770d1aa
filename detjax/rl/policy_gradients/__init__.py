"""Policy gradients: advantages from rewards, corrections for a different sampler, and the samples of a step.

Read `policy_gradient` first.
"""
