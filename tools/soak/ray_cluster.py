"""A cluster of Ray on this machine that serves a checkpoint, until its standard input ends.

`python -m tools.soak.ray_cluster '{"port": 8000, "arguments": {...}}'`, with the arguments of
`detjax.server.ray_serve.application`, prints a line as soon as it serves.
"""

import json
import sys

import ray  # pyright: ignore[reportMissingImports]
from ray import serve  # pyright: ignore[reportMissingImports]

from detjax.server.ray_serve import Arguments, application

READY = "the cluster serves"

if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    # Ray gives out processors that it counts itself. This machine has few, and the replicas share them.
    ray.init(num_cpus=64, include_dashboard=False, logging_level="error", log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": options["port"]})
    serve.run(application(Arguments(**options["arguments"])))
    print(READY, flush=True)
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()
