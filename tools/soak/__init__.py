"""Attacks on a server from outside: `python -m tools.soak COMMAND --out REPORT.json`.

Each command starts real `detjax serve` processes, asks them over HTTP as clients, operators and attackers would, and
writes a report. Its exit code is 1 if a bar is missed.
"""
