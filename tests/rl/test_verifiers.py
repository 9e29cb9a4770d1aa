"""Verifiers reward every right answer, and refuse hostile texts at little cost."""

import pytest

from detjax.rl.tasks import LONGEST_TEXT, MAX_DIFFICULTY, TASKS, Example, Task


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("12+3", 0.0),
        ("(12+3)*(7-2)", 1.0),
        ("(7-2)*(3+12)", 1.0),
        ("((12+3))*(7-2)", 1.0),
        ("7*12-3*2-3", 0.0),
        ("75", 0.0),
        ("3*(12+7)+2*9", 0.0),
        ("12*7-3*3", 0.0),
        ("12*7-(2+7)", 0.0),
        ("12*(7-2/3)-5", 0.0),
        ("7*(12-3/2)+1", 0.0),
    ],
)
def test_countdown_takes_any_expression_with_each_number_used_at_most_once(text: str, reward: float) -> None:
    assert TASKS["countdown"].reward(Example("2,3,7,12:75=", None), text) == reward


def test_countdown_needs_no_more_numbers_than_the_target_takes_and_computes_with_fractions() -> None:
    countdown = TASKS["countdown"]
    assert countdown.reward(Example("2,3,5:6=", None), "2*3") == 1.0
    assert countdown.reward(Example("3,3,8,8:24=", None), "8/(3-8/3)") == 1.0
    assert countdown.reward(Example("2,4:0=", None), "2/4") == 0.0


@pytest.mark.parametrize(
    ("shown", "text", "reward"),
    [
        ("?[]?", "([])", 1.0),
        ("?[]?", "{[]}", 1.0),
        ("?[]?", "[[]]", 1.0),
        ("?[]?", "([])()", 0.0),
        ("?[]?", "(())", 0.0),
        ("?[]?", "([)]", 0.0),
        ("?[]?", ")[](", 0.0),
        ("?[]?", "?[]?", 0.0),
        ("????", "[()]", 1.0),
        ("????", "([)]", 0.0),
        ("??", "([", 0.0),
        ("??", "ab", 0.0),
    ],
)
def test_brackets_takes_any_balanced_string_that_fills_the_gaps(shown: str, text: str, reward: float) -> None:
    assert TASKS["brackets"].reward(Example(f"{shown}=", None), text) == reward


HOSTILE = [
    "(" * 10_000_000,
    "9" * 10_000_000,
    "9" * LONGEST_TEXT,
    "(" * (LONGEST_TEXT // 2 - 1) + "2" + ")" * (LONGEST_TEXT // 2 - 1),
    "(" * LONGEST_TEXT,
    ")" * LONGEST_TEXT,
    "9**9**9**9**9**9",
    "2*" * 499 + "2",
    "1/0",
    "2/(3-3)",
    "-" * LONGEST_TEXT,
    "__import__('os').getcwd()",
    "1e9",
    "0x10",
    "1_0",
    "\u0663+\u0664",  # digits of another script, which int() reads
    "\uff11\uff12",
    "\u00b2",
    "\ud800",
    "\x00",
    "(\u202e)",
    "🙂" * LONGEST_TEXT,
    "",
]


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: f"{len(text)} of {text[:1]!r}")
def test_hostile_texts_are_not_rewarded(task: Task, text: str) -> None:
    for difficulty in (1, 4, MAX_DIFFICULTY):
        assert task.reward(task.example(0, 0, difficulty), text) == 0.0


def test_deep_parentheses_are_read_without_recursion() -> None:
    depth = LONGEST_TEXT // 2 - 2
    text = "(" * depth + "2*3" + ")" * depth
    assert TASKS["countdown"].reward(Example("2,3:6=", None), text) == 1.0


def test_no_verifier_sees_a_text_that_is_too_long() -> None:
    lengths = []
    task = Task("any", lambda draw, difficulty: Example("=", None), lambda _, text: not lengths.append(len(text)))
    assert [task.reward(Example("=", None), "1" * (LONGEST_TEXT + more)) for more in (0, 1)] == [1.0, 0.0]
    assert lengths == [LONGEST_TEXT]


def test_prompts_that_are_not_of_the_task_and_unknown_answers_are_refused() -> None:
    with pytest.raises(ValueError, match="countdown: the prompt is '1\\+1='; accepted: prompts such as"):
        TASKS["countdown"].reward(Example("1+1=", None), "2")
    with pytest.raises(ValueError, match="addition: no answer is known for the prompt '1\\+1='"):
        TASKS["addition"].solution(Example("1+1=", None))
