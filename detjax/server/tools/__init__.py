"""Tool calls: the tools of a request, the formats in which models call them, and their incremental reading.

Read `definitions`, then `formats`, then `answers`.
"""
