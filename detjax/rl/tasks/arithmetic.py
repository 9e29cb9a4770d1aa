"""Sums and products of two numbers: the answer to `47+85=` is `132`, to `12*34=` `408`."""

import operator
from collections.abc import Callable
from typing import Final

from detjax.rl.tasks.draw import Draw
from detjax.rl.tasks.task import Example, Task, accepts_answer_only


def _number(draw: Draw, digits: int) -> int:
    return draw.between(0 if digits == 1 else 10 ** (digits - 1), 10**digits - 1)


def _generator(sign: str, result: Callable[[int, int], int]) -> Callable[[Draw, int], Example]:
    def generate(draw: Draw, digits: int) -> Example:
        left, right = _number(draw, digits), _number(draw, digits)
        return Example(f"{left}{sign}{right}=", str(result(left, right)))

    return generate


ADDITION: Final = Task("addition", _generator("+", operator.add), accepts_answer_only)
"""Adds two numbers. The difficulty is the number of digits of each; a one-digit number may be 0.

The correct answer is the sum in decimal digits without leading zeros.
"""

MULTIPLICATION: Final = Task("multiplication", _generator("*", operator.mul), accepts_answer_only)
"""Multiplies two numbers. The difficulty is the number of digits of each; a one-digit number may be 0.

The correct answer is the product in decimal digits without leading zeros.
"""
