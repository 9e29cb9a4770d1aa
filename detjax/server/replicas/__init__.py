"""Replicas of an engine behind one server: processes of this machine, or Ray Serve.

Read `engine` and `choice`, then `processes`; `process` is the program of a replica.
"""
