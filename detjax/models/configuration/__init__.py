"""How a checkpoint's JSON files describe a model: `config.json` and `generation_config.json` as dataclasses, and back.

Read `json_object`, then `family`, then `config`; the others read one group of keys each.
"""
