"""The command line: a function for each command, whose options come from the dataclasses that they set.

`commands` has the commands.
"""

from detjax.cli.commands import app as app
