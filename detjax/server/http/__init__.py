"""HTTP: settings, connections, limits, errors, streams, logs, metrics and the server process.

Read `run` for the process and `guard` for the limits that protect requests from each other.
"""
