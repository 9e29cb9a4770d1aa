"""Every result names a command that still makes it."""

import importlib.util
import json
from pathlib import Path

import pytest

import benchmarks
from tests.benchmarks.commands import is_command

RESULTS = Path(benchmarks.__file__).parent / "results"
COMMANDS = {file.name: json.loads(file.read_text()).get("command") for file in sorted(RESULTS.glob("*.json"))}


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if isinstance(command, str)])
def test_a_result_names_a_command_that_exists_or_says_that_it_is_not_kept(name: str) -> None:
    command = COMMANDS[name]
    if command.startswith("python -m tests."):
        assert importlib.util.find_spec(command.split()[2])
    elif name in ("cost-h200.json", "peer-tensor-parallel-h200.json"):
        assert command.endswith("which is not kept") and not is_command(command)
    else:
        assert is_command(command)
