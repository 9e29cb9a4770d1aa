"""A verifiable task: prompts from a seed, and a verifier of answers."""

import dataclasses
from collections.abc import Callable
from typing import Final

from detjax.rl.tasks.draw import Draw

MAX_DIFFICULT: Final = 100
"""The largest difficulty of a task."""
LONGEST_TEXT: Final = 1000
"""Characters of an answer at most. Longer texts are wrong, so a verifier's cost is bounded."""


@dataclasses.dataclass(frozen=True)
class Example:
    """A prompt of a task.

    Attributes:
        prompt: the prompt's text, which ends with `=`.
        answer: a right answer, without end token; None if none is known. Other texts may be right too.
    """

    prompt: str
    answer: str | None


@dataclasses.dataclass(frozen=True)
class Task:
    """A source of prompts with a verifier.

    Attributes:
        name: the task's name, which is part of what examples are drawn from.
        generate: returns an example for a stream of random integers and a difficulty.
        accepts: whether a text of at most `LONGEST_TEXT` characters is a right answer to an example.

    Example:
        >>> from detjax.rl.tasks import TASKS
        >>> example = TASKS["addition"].example(seed=0, index=0, difficulty=2)
        >>> TASKS["addition"].reward(example, TASKS["addition"].solution(example))
        1.0
    """

    name: str
    generate: Callable[[Draw, int], Example]
    accepts: Callable[[Example, str], bool]

    def example(self, seed: int, index: int, difficulty: int) -> Example:
        """Returns the example that is a pure function of the task's name and of the arguments.

        Args:
            seed: any integer; another one gives another series of examples.
            index: the example's number in the series, at least 0.
            difficulty: 1 to `MAX_DIFFICULT`. What it counts is said where the task is defined.

        Raises:
            ValueError: the index or the difficulty is not accepted.
        """
        if index < 0:
            raise ValueError(f"{self.name}: index is {index}; accepted: at least 0")
        if not 1 <= difficulty <= MAX_DIFFICULT:
            raise ValueError(f"{self.name}: difficulty is {difficulty}; accepted: 1 to {MAX_DIFFICULT}")
        return self.generate(Draw(f"{self.name}/{seed}/{index}/{difficulty}"), difficulty)

    def reward(self, example: Example, text: str) -> float:
        """Returns 1.0 if a text is a right answer to an example of this task, and 0.0 otherwise.

        Args:
            example: an example of this task.
            text: any text that was sampled after the prompt, without end token. Nothing is stripped from it.
        """
        return float(len(text) <= LONGEST_TEXT and self.accepts(example, text))

    def solution(self, example: Example) -> str:
        """Returns one right answer to an example, for a supervised warm-up.

        Raises:
            ValueError: none is known.
        """
        if example.answer is None:
            raise ValueError(f"{self.name}: no answer is known to the prompt {example.prompt!r}")
        return example.answer


def accepts_answer_only(example: Example, text: str) -> bool:
    """Returns whether a text is the example's answer, for tasks where no other text is right."""
    return text == example.answer
