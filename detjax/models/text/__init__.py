"""Text and tokens: tokenizers, chat templates and decoding while a text grows.

Nothing here imports JAX, because the server's text workers load these modules alone.
"""
