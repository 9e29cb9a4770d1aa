"""A verifiable task: prompts from a seed, and a verifier of answers."""

import dataclasses
from collections.abc import Callable
from typing import Final

from detjax.rl.tasks.draw import Draw

MAX_DIFFICULTY: Final = 100
"""The largest difficulty of a task."""
LONGEST_TEXT: Final = 1000
"""Maximum length of an answer, in characters. Longer texts are wrong, which bounds a verifier's cost."""


@dataclasses.dataclass(frozen=True)
class Example:
    """A prompt of a task.

    Attributes:
        prompt: the prompt's text, which ends with `=`.
        answer: a correct answer without end token; None if unknown. Other texts may be correct too.
    """

    prompt: str
    answer: str | None


@dataclasses.dataclass(frozen=True)
class Task:
    """A source of prompts with a verifier.

    Attributes:
        name: the task's name, which also seeds its examples.
        generate: returns an example for a stream of random integers and a difficulty.
        accepts: whether a text of at most `LONGEST_TEXT` characters is a correct answer to an example.

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
        """Returns an example, a pure function of the task's name and the arguments.

        Args:
            seed: any integer; it selects a series of examples.
            index: the example's number in the series, at least 0.
            difficulty: 1 to `MAX_DIFFICULTY`; see the task for its meaning.

        Raises:
            ValueError: the index or the difficulty is not accepted.
        """
        if index < 0:
            raise ValueError(f"{self.name}: index is {index}; accepted: at least 0")
        if not 1 <= difficulty <= MAX_DIFFICULTY:
            raise ValueError(f"{self.name}: difficulty is {difficulty}; accepted: 1 to {MAX_DIFFICULTY}")
        return self.generate(Draw(f"{self.name}/{seed}/{index}/{difficulty}"), difficulty)

    def reward(self, example: Example, text: str) -> float:
        """Returns 1.0 if a text, without end token, is a correct answer to an example of this task, otherwise 0.0."""
        return float(len(text) <= LONGEST_TEXT and self.accepts(example, text))

    def solution(self, example: Example) -> str:
        """Returns one correct answer to an example, for supervised training.

        Raises:
            ValueError: no answer is known.
        """
        if example.answer is None:
            raise ValueError(f"{self.name}: no answer is known for the prompt {example.prompt!r}")
        return example.answer


def accepts_answer_only(example: Example, text: str) -> bool:
    """Returns whether a text is the example's answer, for tasks with a single correct answer."""
    return text == example.answer
