"""Conversion of a checkpoint's JSON files, `config.json` and `generation_config.json`, to dataclasses and back.

Read `json_object`, then `family`, then `config`; the other modules read one group of keys each.
"""
