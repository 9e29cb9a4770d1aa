"""Replicas of an engine that share one server, in processes of this machine or on Ray Serve.

Read `engine` and `choice`, then `processes`; `process` is the program of a replica.
"""
