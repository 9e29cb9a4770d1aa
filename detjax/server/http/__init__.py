"""HTTP around the API: settings, connections, limits, errors, streams, logs, metrics and the process.

Read `run` for the process and `guard` for the limits that protect requests from one another.
"""
