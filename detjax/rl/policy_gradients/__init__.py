"""From rewards to a loss: advantages, corrections for another sampler, and the policy gradient.

Read `policy_gradient` first.
"""
