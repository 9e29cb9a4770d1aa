"""Text work in separate processes: chat templates, tokenizing and decoding.

Read `texts` for the server's side and `worker` for the other; `process` starts a worker without JAX.
"""
