"""OpenAI's API: request bodies, their conversion to requests of the engine, and responses.

Read `api_calls` first, then `chat_calls`; `schemas` and `response_fields` have the schemas of bodies.
"""
