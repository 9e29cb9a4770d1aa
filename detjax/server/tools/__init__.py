"""Tool calls: the tools of a request, the formats of calls, and incremental parsers.

Read `definitions`, then `formats`, then `answers`.
"""
