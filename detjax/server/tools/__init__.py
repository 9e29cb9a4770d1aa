"""Answers of chats: reasoning, content and tool calls, with the formats in which models write them.

Read `definitions` (the tools of a request), then `formats` (the formats by name) and `tool_format`, then `answers`.
Each family of formats has its own module, with parsers and grammars: `json_objects`, `mistral`, `sectioned`, `tagged`
with `tagged_formats`, and `harmony`. `reasoning` has the marks of reasoning.
"""
