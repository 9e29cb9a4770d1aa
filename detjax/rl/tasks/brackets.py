"""Repair of a string of brackets with gaps: `([])` is one of the answers to `?[]?=`."""

from typing import Final

from detjax.rl.tasks.draw import Draw
from detjax.rl.tasks.task import Example, Task

_PAIRS: Final = {"(": ")", "[": "]", "{": "}"}
_GAP: Final = "?"
_END: Final = "="


def _balanced(draw: Draw, pairs: int) -> str:
    """Returns a random balanced string of `pairs` pairs."""
    written, closing = "", ""
    for remaining in range(2 * pairs, 0, -1):
        if not closing or (len(closing) < remaining and draw.below(2)):
            opening = draw.choice(list(_PAIRS))
            written, closing = written + opening, closing + _PAIRS[opening]
        else:
            written, closing = written + closing[-1], closing[:-1]
    return written


def _generate(draw: Draw, difficulty: int) -> Example:
    whole = _balanced(draw, difficulty)
    gaps = draw.positions(difficulty, len(whole))
    shown = "".join(_GAP if position in gaps else character for position, character in enumerate(whole))
    return Example(shown + _END, whole)


def _is_balanced(text: str) -> bool:
    closing: list[str] = []
    for character in text:
        if character in _PAIRS:
            closing.append(_PAIRS[character])
        elif not closing or closing.pop() != character:
            return False
    return not closing


def _accepts(example: Example, text: str) -> bool:
    shown = example.prompt.removesuffix(_END)
    if len(text) != len(shown):
        return False
    return all(old in (_GAP, new) for old, new in zip(shown, text, strict=True)) and _is_balanced(text)


BRACKETS: Final = Task("brackets", _generate, _accepts)
"""Fills the gaps `?` in a string of brackets `()[]{}`. The difficulty is the number of pairs, and the number of gaps.

Any balanced string of the prompt's length that keeps the prompt's brackets outside of the gaps is correct.
"""
