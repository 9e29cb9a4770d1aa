"""Verifiable tasks for reinforcement learning without downloads: generators, verifiers and correct answers.

`TASKS` lists them by name. A prompt ends with `=`; the whole completion is the answer. An example is a function of the
task's name, the seed, the index and the difficulty, on every platform and Python version.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from detjax.rl.tasks.arithmetic import ADDITION, MULTIPLICATION
from detjax.rl.tasks.brackets import BRACKETS
from detjax.rl.tasks.countdown import COUNTDOWN
from detjax.rl.tasks.sorting import SORTING
from detjax.rl.tasks.task import LONGEST_TEXT as LONGEST_TEXT
from detjax.rl.tasks.task import MAX_DIFFICULTY as MAX_DIFFICULTY
from detjax.rl.tasks.task import Example as Example
from detjax.rl.tasks.task import Task as Task

TASKS: Final[Mapping[str, Task]] = MappingProxyType(
    {task.name: task for task in (ADDITION, MULTIPLICATION, SORTING, COUNTDOWN, BRACKETS)}
)
"""The tasks by name."""


def task_named(name: str) -> Task:
    """Returns the task with a name.

    Raises:
        ValueError: the name is unknown; the error lists the names of `TASKS`.
    """
    if name not in TASKS:
        raise ValueError(f"task_named: name is {name!r}; accepted: {', '.join(map(repr, TASKS))}")
    return TASKS[name]
