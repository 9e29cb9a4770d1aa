"""Attacks on a server from outside: `python -m tools.soak COMMAND --out REPORT.json`.

Each command starts real `detjax serve` processes, sends requests as clients, operators and attackers would, and writes
a report. The exit code is 1 if a bar is missed.
"""
