"""A checkpoint's JSON files as dataclasses, and back: `config.json` and `generation_config.json`.

Read `json_object`, then `family`, then `config`; the others read one group of keys each.
"""
