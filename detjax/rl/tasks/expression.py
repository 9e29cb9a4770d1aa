"""Arithmetic expressions over given numbers, evaluated exactly and without recursion."""

import operator
import re
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from typing import Final

PRECEDENCE: Final = {"+": 1, "-": 1, "*": 2, "/": 2}
"""The binary operators. A higher precedence binds tighter; equal ones associate to the left."""

_FUNCTIONS: Final = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_EXPRESSION: Final = re.compile(r"[-+*/()0-9]*")
_TOKEN: Final = re.compile(r"[-+*/()]|[0-9]+")


def evaluate(text: str, numbers: Iterable[str]) -> Fraction | None:
    """Returns the exact value of an expression; None if the text is not a valid expression over the numbers.

    An expression consists of numbers, binary operators and parentheses, without spaces or signs. The cost is linear in
    the text's length at any depth of parentheses (the shunting-yard algorithm, Dijkstra 1961, "Algol 60 translation").
    Numbers other than the given ones are never parsed.

    Args:
        text: any text.
        numbers: the numbers as written. The expression may use a number as often as it is given.
    """
    if not _EXPRESSION.fullmatch(text):
        return None
    unused = Counter(numbers)
    values: list[Fraction] = []
    waiting: list[str] = []
    value_is_next = True
    try:
        for token in _TOKEN.findall(text):
            if value_is_next:
                if token == "(":
                    waiting.append(token)
                elif unused[token]:
                    unused[token] -= 1
                    values.append(Fraction(int(token)))
                    value_is_next = False
                else:
                    return None
            elif token == ")":
                _apply(waiting, values, least=1)
                if not waiting:
                    return None
                waiting.pop()
            elif token in PRECEDENCE:
                _apply(waiting, values, least=PRECEDENCE[token])
                waiting.append(token)
                value_is_next = True
            else:
                return None
        if value_is_next or "(" in waiting:
            return None
        _apply(waiting, values, least=1)
    except ZeroDivisionError:
        return None
    return values[0]


def _apply(waiting: list[str], values: list[Fraction], least: int) -> None:
    """Applies the last operators, down to a parenthesis or an operator of lower precedence than `least`."""
    while waiting and PRECEDENCE.get(waiting[-1], 0) >= least:
        right, left = values.pop(), values.pop()
        values.append(_FUNCTIONS[waiting.pop()](left, right))
