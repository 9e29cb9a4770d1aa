"""Sorting of digits: the answer to `5283=` is `2358`."""

from typing import Final

from detjax.rl.tasks.draw import Draw
from detjax.rl.tasks.task import Example, Task, accepts_answer_only


def _generate(draw: Draw, difficulty: int) -> Example:
    digits = [str(draw.below(10)) for _ in range(difficulty + 1)]
    return Example("".join(digits) + "=", "".join(sorted(digits)))


SORTING: Final = Task("sorting", _generate, accepts_answer_only)
"""Sorts `difficulty + 1` digits in ascending order, including repetitions."""
