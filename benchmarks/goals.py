"""Performance goals: compares the repository's results with `benchmarks/goals.toml`."""

import dataclasses
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.expressions import RESULTS, UNITS, number

GOALS: Final = Path(__file__).parent / "goals.toml"

type Bound = Literal["at_most", "at_least"]


@dataclasses.dataclass(frozen=True)
class Goal:
    """A goal, and its value in the results.

    Attributes:
        name: the topic and the goal's name, separated by a dot.
        meaning: a one-line description of the value.
        expression: the value as an expression; see `benchmarks.expressions`.
        bound: whether `bar` is an upper or a lower bound.
        bar: the bound.
        unit: the unit of `bar` and `value`.
        value: the value; None if it cannot be read.
        problem: the reason why the value cannot be read.
        aim: the bound that was planned, where the results miss it; `bar` keeps what they reached. None: `bar` was.
    """

    name: str
    meaning: str
    expression: str
    bound: Bound
    bar: float
    unit: str
    value: float | None = None
    problem: str = ""
    aim: float | None = None

    @property
    def is_met(self) -> bool:
        """True if the value can be read and keeps its bound."""
        return self._keeps(self.bar)

    @property
    def misses_aim(self) -> bool:
        """True if the goal has an aim that its value does not reach."""
        return self.aim is not None and not self._keeps(self.aim)

    def _keeps(self, bar: float) -> bool:
        if self.value is None:
            return False
        return self.value <= bar if self.bound == "at_most" else self.value >= bar

    def shown(self, value: float | None) -> str:
        """Returns a value with the goal's unit."""
        return "–" if value is None else f"{value:.4g}{'' if self.unit == '%' else ' '}{self.unit}".strip()

    @property
    def shown_bar(self) -> str:
        """The bound, the bar and the aim."""
        aim = "" if self.aim is None else f" (aim: {self.shown(self.aim)})"
        return f"{self.bound.replace('_', ' ')} {self.shown(self.bar)}{aim}"


def read(file: Path = GOALS, results: Path = RESULTS) -> list[Goal]:
    """Returns the goals of a file with their values in a folder of results.

    Raises:
        ValueError: a goal has no single bound, an unknown unit, or unknown or missing fields.
    """
    return [
        _valued(_goal(f"{topic}.{name}", fields), results)
        for topic, goals in tomllib.loads(file.read_text()).items()
        for name, fields in goals.items()
    ]


def _goal(name: str, fields: Mapping[str, Any]) -> Goal:
    bounds: list[Bound] = [bound for bound in ("at_most", "at_least") if bound in fields]
    if len(bounds) != 1 or fields.keys() - {*bounds, "unit", "aim"} != {"meaning", "value"}:
        raise ValueError(f"{name} has {', '.join(fields)}; accepted: meaning, value, at_most or at_least, unit and aim")
    if (unit := fields.get("unit", "")) not in UNITS:
        raise ValueError(f"{name} has the unit {unit!r}; accepted: {', '.join(filter(None, UNITS))}")
    return Goal(name, fields["meaning"], fields["value"], bounds[0], fields[bounds[0]], unit, aim=fields.get("aim"))


def _valued(goal: Goal, results: Path) -> Goal:
    try:
        value = number(goal.expression, results) * UNITS[goal.unit]
    except (LookupError, OSError, ValueError, ArithmeticError) as error:
        return dataclasses.replace(goal, problem=f"{type(error).__name__}: {error}")
    return dataclasses.replace(goal, value=float(value))


def as_json(goals: list[Goal]) -> list[dict[str, Any]]:
    """Returns goals as JSON values."""
    return [dataclasses.asdict(goal) | {"is_met": goal.is_met} for goal in goals]


def shown(goals: list[Goal], console: Console) -> None:
    """Prints a line for each goal, and the reasons for unreadable values."""
    table = Table("goal", "meaning", "value", "bar", "", box=None)
    for goal in goals:
        met = Text("met") if goal.is_met else Text("MISSED", style="bold red")
        table.add_row(goal.name, goal.meaning, goal.shown(goal.value), goal.shown_bar, met)
    console.print(table)
    for line in _problems(goals):
        console.print(line, markup=False, soft_wrap=True)


def _problems(goals: list[Goal]) -> Iterator[str]:
    yield from (f"{goal.name} cannot be read: {goal.problem}" for goal in goals if goal.problem)
    missed = [goal.name for goal in goals if goal.misses_aim]
    aims = f"; aims that are missed: {', '.join(missed)}" if missed else ""
    yield f"{sum(goal.is_met for goal in goals)} of {len(goals)} goals are met{aims}"
