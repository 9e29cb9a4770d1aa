"""Adapters (LoRA): files of peft, models with one adapter, and pools of many adapters for a batch.

Read `adapter_config` and `adapter` first, which are the files, then `targets`, then `adapted_model` and `pool`.
"""
