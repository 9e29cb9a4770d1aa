"""OpenAI's calls: the bodies of requests, how they become requests of the engine, and how answers are written.

Read `api_calls` first, then `chat_calls`; the schemas of bodies are in `schemas` and `response_fields`.
"""
