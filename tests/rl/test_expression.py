"""Expressions have the value that Python's own parser and exact fractions give them."""

import random
import sys
from fractions import Fraction

import pytest

from detjax.rl.tasks.expression import evaluate


def random_expression(draw: random.Random, depth: int) -> str:
    if depth == 0 or draw.random() < 0.2:
        return str(draw.randint(0, 9))
    left, right = (random_expression(draw, depth - 1) for _ in range(2))
    joined = f"{left}{draw.choice('+-*/')}{right}"
    return f"({joined})" if draw.random() < 0.5 else joined


def by_python(text: str) -> Fraction | None:
    exact = "".join(f"Fraction({character})" if character.isdigit() else character for character in text)
    try:
        return eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        return None


def test_values_are_exact_with_the_usual_precedence() -> None:
    draw = random.Random(0)
    values = []
    for _ in range(3000):
        text = random_expression(draw, 4)
        values.append(evaluate(text, [character for character in text if character.isdigit()]))
        assert values[-1] == by_python(text), text
    assert values.count(None) > 30
    assert sum(value is not None and value.denominator > 1 for value in values) > 300


NO_EXPRESSIONS = """
    + 1+ +1 -1 1--2 () (1 1) (1)) )1( 1(2) (1)(2) (1)2 1//2 1**2 1+2= 1.0 01 1+01 12 1+1 3 1+(2 1/0 2/(1-1) (+) 1,2 *
    (1+)2 (1+2 1++2 2/0/1
"""


@pytest.mark.parametrize("text", ["", " ", "1 2", "1 + 2", "1\n", *NO_EXPRESSIONS.split()])
def test_texts_that_are_no_expressions_over_the_numbers_have_no_value(text: str) -> None:
    assert evaluate(text, ["1", "2", "0"]) is None


def test_a_number_is_used_as_often_as_it_is_given() -> None:
    assert evaluate("1+1", ["1", "1"]) == 2
    assert evaluate("1+1+1", ["1", "1"]) is None
    assert evaluate("2", ["1", "2"]) == 2


def test_parentheses_may_be_deeper_than_the_interpreter_can_recurse() -> None:
    depth = 10 * sys.getrecursionlimit()
    assert evaluate("(" * depth + "7" + ")" * depth, ["7"]) == 7
    assert evaluate("(" * depth, ["7"]) is None
