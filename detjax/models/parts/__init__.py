"""The modules that layers are composed of. Each knows its tensors in a checkpoint and the state that it needs.

A part is made from its own options, so that families with different configurations can share it.
"""
