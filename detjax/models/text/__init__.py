"""Text and tokens: tokenizers, chat templates and incremental decoding.

Nothing here imports JAX, because the server's text workers load only these modules.
"""
