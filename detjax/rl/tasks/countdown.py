"""The numbers round of the game show Countdown: `(12+3)*(7-2)` is one of the answers to `2,3,7,12:75=`.

Gandhi et al. 2024 ("Stream of Search") introduced the game as a task for language models.
"""

import re
from typing import Final, NamedTuple

from detjax.rl.tasks.draw import Draw
from detjax.rl.tasks.expression import PRECEDENCE, evaluate
from detjax.rl.tasks.task import Example, Task

_LARGEST_NUMBER: Final = 20
_LARGEST_VALUE: Final = 999
"""The largest target, and the largest value of a part of the generated solution."""

_PROMPT: Final = re.compile(r"([0-9]+(?:,[0-9]+)*):([0-9]+)=")
_ATOM: Final = 3
"""The precedence of a single number, which no operator reaches."""


class _Part(NamedTuple):
    """A part of the solution: its value, its text and the precedence of its outermost operator."""

    value: int
    text: str
    precedence: int

    def as_operand(self, least: int) -> str:
        return self.text if self.precedence >= least else f"({self.text})"


def _generate(draw: Draw, difficulty: int) -> Example:
    while True:
        numbers = [draw.between(1, _LARGEST_NUMBER) for _ in range(difficulty + 1)]
        parts = [_Part(number, str(number), _ATOM) for number in numbers]
        while len(parts) > 1:
            left, right = (parts.pop(draw.below(len(parts))) for _ in range(2))
            parts.append(_joined(draw, left, right))
        (whole,) = parts
        if whole.value not in numbers:
            return Example(f"{','.join(map(str, numbers))}:{whole.value}=", whole.text)


def _joined(draw: Draw, left: _Part, right: _Part) -> _Part:
    """Returns the two parts under a random operator whose result is an integer from 1 to `_LARGEST_VALUE`."""
    larger, smaller = sorted((left, right), key=lambda part: -part.value)
    candidates = {
        "+": left.value + right.value,
        "-": larger.value - smaller.value,
        "*": left.value * right.value if smaller.value > 1 else 0,
        "/": larger.value // smaller.value if smaller.value > 1 and larger.value % smaller.value == 0 else 0,
    }
    # At least one remains: the difference of two numbers, the quotient of two equal ones, or 1 + 1.
    operator = draw.choice([sign for sign, value in candidates.items() if 1 <= value <= _LARGEST_VALUE])
    if operator in "-/":
        left, right = larger, smaller
    precedence = PRECEDENCE[operator]
    right_text = right.as_operand(precedence + 1 if operator in "-/" else precedence)
    return _Part(candidates[operator], f"{left.as_operand(precedence)}{operator}{right_text}", precedence)


def _accepts(example: Example, text: str) -> bool:
    prompt = _PROMPT.fullmatch(example.prompt)
    if prompt is None:
        raise ValueError(f"countdown: the prompt is {example.prompt!r}; accepted: prompts such as '3,7,12:75='")
    return evaluate(text, prompt[1].split(",")) == int(prompt[2])


COUNTDOWN: Final = Task("countdown", _generate, _accepts)
"""Reaches a target with `difficulty + 1` given numbers from 1 to 20.

A correct answer is any expression of numbers, `+ - * /` and parentheses that uses each given number at most once and
whose exact rational value is the target, without spaces, signs or leading zeros. Every prompt is solvable with all
numbers, and its target is not one of them.
"""
