"""The parts that layers are composed of: modules that know their tensors in a checkpoint and the state that they need.

A part is made from options of its own, so that families with different configurations share it.
"""
