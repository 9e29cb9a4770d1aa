"""Tasks make the same prompts everywhere, and verifiers reward right answers and nothing else."""

import ast
import hashlib
import operator
from collections import Counter
from fractions import Fraction

import pytest

from detjax.rl.runs.characters import CHARACTERS
from detjax.rl.tasks import MAX_DIFFICULTY, TASKS, Example, Task, task_named
from detjax.rl.tasks.draw import Draw

every_task = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)


def examples(task: Task, count: int = 60, seed: int = 3) -> list[Example]:
    """Returns examples of rising difficulty."""
    return [task.example(seed, index, 1 + index // 6) for index in range(count)]


def is_right(task: Task, example: Example, text: str) -> bool:
    """Returns whether a text is right, by other means than the verifiers'."""
    shown = example.prompt.removesuffix("=")
    match task.name:
        case "addition" | "multiplication":
            left, right = map(int, shown.replace("*", "+").split("+"))
            return text == str(left * right if "*" in shown else left + right)
        case "sorting":
            return text == "".join(digit * shown.count(digit) for digit in "0123456789")
        case "brackets":
            remaining = text
            for _ in text:
                remaining = remaining.replace("()", "").replace("[]", "").replace("{}", "")
            agrees = all(old in ("?", new) for old, new in zip(shown, text, strict=False))
            return agrees and len(text) == len(shown) and not remaining
    numbers, target = shown.split(":")
    return value_by_python(text, Counter(numbers.split(","))) == int(target)


def value_by_python(text: str, unused: Counter[str]) -> Fraction | None:
    """Returns the value of an expression that Python's own parser has read."""
    operators = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.BinOp(left, sign, right):
                return operators[type(sign)](value(left), value(right))
            case ast.Constant(int() as number) if unused[str(number)]:
                unused[str(number)] -= 1
                return Fraction(number)
        raise KeyError(node)

    try:
        return value(ast.parse(text, mode="eval").body) if text else None
    except (SyntaxError, KeyError, ZeroDivisionError):
        return None


def mutations(text: str) -> set[str]:
    """Returns the text with a character replaced, left out, doubled or exchanged with the next one, and others."""
    made = {
        text[:-1],
        text[1:],
        text + text,
        text[::-1],
        f" {text}",
        f"{text} ",
        f"{text}=",
        f"{text}\n",
        f"{text}\u0663",
        "",
    }
    for index, character in enumerate(text):
        others = {"0", "1", "7", "+", "-", ")", "]", "?"} - {character}
        made |= {text[:index] + other + text[index + 1 :] for other in others}
        made |= {text[:index] + text[index + 1 :], text[:index] + 2 * character + text[index + 1 :]}
        made.add(text[:index] + text[index + 1 : index + 2] + character + text[index + 2 :])
    return made - {text}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("addition", ["6+1=7", "15+99=114", "17943+82834=100777"]),
        ("multiplication", ["5*4=20", "87*28=2436", "33419*39805=1330243295"]),
        ("sorting", ["98=89", "806=068", "405655=045556"]),
        ("countdown", ["16,15:240=16*15", "5,1,11:60=(1+11)*5", "3,13,2,13,8,20:200=(2+20+3)*13*8/13"]),
        ("brackets", ["[?=[]", "{??]={}[]", "(?[???({?)=()[]{}({})"]),
    ],
)
def test_examples_are_these_on_every_platform(name: str, expected: list[str]) -> None:
    made = [TASKS[name].example(seed=1, index=7, difficulty=difficulty) for difficulty in (1, 2, 5)]
    assert [f"{example.prompt}{example.answer}" for example in made] == expected


def test_all_examples_are_these_on_every_platform() -> None:
    text = "".join(f"{example.prompt}{example.answer};" for task in TASKS.values() for example in examples(task, 600))
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "05616044e61475a2626ac15545c3d94d7b9ea984ecc68c348290bbc525562040"
    )


def test_draws_are_uniform_within_their_limits() -> None:
    draw = Draw("a label")
    counts = Counter(draw.below(7) for _ in range(7000))
    assert sorted(counts) == list(range(7))
    assert all(850 < count < 1150 for count in counts.values())
    assert {draw.between(3, 5) for _ in range(100)} == {3, 4, 5}
    assert {draw.choice("ab") for _ in range(100)} == {"a", "b"}
    assert Counter(len(draw.positions(3, 8)) for _ in range(100)) == {3: 100}
    assert frozenset().union(*(draw.positions(3, 8) for _ in range(100))) == frozenset(range(8))
    with pytest.raises(ValueError, match="limit is 0; accepted: at least 1"):
        draw.below(0)


@every_task
def test_an_example_is_a_function_of_seed_index_and_difficulty(task: Task) -> None:
    assert examples(task) == examples(task)
    prompts = {task.example(seed, index, 8).prompt for seed in range(10) for index in range(20)}
    assert len(prompts) == 200


@every_task
def test_prompts_and_answers_use_the_characters_of_the_tasks(task: Task) -> None:
    for example in examples(task):
        assert example.prompt.endswith("=") and example.prompt.count("=") == 1
        assert set(example.prompt) | set(task.solution(example)) <= set(CHARACTERS)


def test_every_character_of_the_tasks_is_used() -> None:
    text = "".join(example.prompt + str(example.answer) for task in TASKS.values() for example in examples(task))
    assert set(text) == set(CHARACTERS)


@every_task
def test_prompts_and_answers_grow_with_the_difficulty(task: Task) -> None:
    def mean_length(difficulty: int) -> float:
        made = [task.example(0, index, difficulty) for index in range(50)]
        return sum(len(example.prompt + task.solution(example)) for example in made) / len(made)

    lengths = [mean_length(difficulty) for difficulty in (1, 2, 3, 5, 8, 13)]
    assert lengths == sorted(lengths) and len(set(lengths)) == len(lengths)


@every_task
@pytest.mark.parametrize("difficulty", [1, 2, 6, MAX_DIFFICULTY])
def test_every_solution_is_right_and_rewarded(task: Task, difficulty: int) -> None:
    for index in range(30):
        example = task.example(0, index, difficulty)
        assert is_right(task, example, task.solution(example))
        assert task.reward(example, task.solution(example)) == 1.0


@every_task
def test_changed_solutions_are_rewarded_if_they_are_right_and_not_otherwise(task: Task) -> None:
    right = wrong = 0
    for example in examples(task):
        for text in mutations(task.solution(example)):
            # Python's parser reads spaces, leading zeros and signs otherwise than the task does.
            expected = text.strip() == text and is_right(task, example, text)
            assert task.reward(example, text) == float(expected), (example, text)
            right, wrong = right + expected, wrong + (not expected)
    assert wrong > 1000
    assert (right > 0) == (task.name in ("countdown", "brackets"))


@every_task
def test_answers_of_other_examples_are_not_rewarded(task: Task) -> None:
    made = [task.example(0, index, 6) for index in range(40)]
    rewards = sum(task.reward(one, task.solution(other)) for one in made for other in made if one != other)
    assert rewards <= 2  # two prompts may have one answer


def test_numbers_of_digits_pairs_and_given_numbers_are_those_of_the_difficulty() -> None:
    for difficulty in range(1, 30):
        for index in range(5):
            for name in ("addition", "multiplication"):
                numbers = TASKS[name].example(0, index, difficulty).prompt.replace("*", "+")[:-1].split("+")
                assert [len(number) for number in numbers] == [difficulty, difficulty]
            assert len(TASKS["sorting"].example(0, index, difficulty).prompt) == difficulty + 2
            numbers, _, target = TASKS["countdown"].example(0, index, difficulty).prompt[:-1].partition(":")
            assert len(numbers.split(",")) == difficulty + 1
            assert all(1 <= int(number) <= 20 for number in numbers.split(","))
            assert 1 <= int(target) <= 999 and target not in numbers.split(",")
            shown = TASKS["brackets"].example(0, index, difficulty).prompt[:-1]
            assert (len(shown), shown.count("?")) == (2 * difficulty, difficulty)


def test_unknown_names_are_refused_with_the_names_there_are() -> None:
    assert task_named("sorting") is TASKS["sorting"]
    with pytest.raises(
        ValueError, match=r"'adition'; accepted: 'addition', 'multiplication', 'sorting', 'countdown', 'br"
    ):
        task_named("adition")


@every_task
def test_difficulties_and_indexes_outside_of_the_range_are_refused(task: Task) -> None:
    for difficulty in (0, MAX_DIFFICULTY + 1):
        with pytest.raises(ValueError, match=f"{task.name}: difficulty is {difficulty}; accepted: 1 to 100"):
            task.example(0, 0, difficulty)
    with pytest.raises(ValueError, match=f"{task.name}: index is -1; accepted: at least 0"):
        task.example(0, -1, 1)
