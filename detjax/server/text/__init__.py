"""Text work in processes of their own: chat templates, tokenizing and decoding.

Read `texts` for the server's side and `worker` for the other; `process` starts a worker without JAX.
"""
