"""A process that polls /health: `python health_prober.py PORT SECONDS`.

It is a separate process with few modules, so that clients do not delay it. It writes a JSON list for each request: its
time by the system's monotonic clock, the seconds until its answer, the answer's status (0: none), and the request's own
delay in seconds, which shows how busy the machine is.
"""

import http.client
import json
import sys
import time

if __name__ == "__main__":
    port, interval = int(sys.argv[1]), float(sys.argv[2])
    planned = time.monotonic()
    while True:
        time.sleep(max(0.0, planned - time.monotonic()))
        start = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            response.read()
            status = response.status
        except (OSError, http.client.HTTPException):
            status = 0
        finally:
            connection.close()
        print(json.dumps([start, time.monotonic() - start, status, start - planned]), flush=True)
        planned = max(planned + interval, time.monotonic())
