"""A local Ray cluster that serves a checkpoint until its standard input ends.

`python -m tools.soak.ray_cluster '{"port": 8000, "arguments": {...}}'`, with the arguments of
`detjax.server.replicas.ray_serve.application`, prints a line when it is ready.
"""

import json
import sys

import ray  # pyright: ignore[reportMissingImports]
from ray import serve  # pyright: ignore[reportMissingImports]

from detjax.server.replicas.ray_serve import Arguments, application

READY = "the cluster serves"

_TOO_SLOW = "timed out during startup"
"""Ray's message after its fixed 30-second limit on starting processes."""


def start_ray() -> None:
    """Starts Ray's processes, and retries on a machine so busy that Ray times out."""
    while True:
        try:
            # Ray gives out processors that it counts itself. This machine has few, and the replicas share them.
            ray.init(num_cpus=64, include_dashboard=False, logging_level="error", log_to_driver=False)
            return
        except Exception as error:
            if _TOO_SLOW not in str(error):
                raise
            print(error, flush=True)
            ray.shutdown()


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    start_ray()
    serve.start(http_options={"host": "127.0.0.1", "port": options["port"]})
    serve.run(application(Arguments(**options["arguments"])))
    print(READY, flush=True)
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()
