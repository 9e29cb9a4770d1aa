"""Options are declared once: in the dataclasses that they set, and in the commands."""

import dataclasses
import datetime
import inspect
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from benchmarks.__main__ import _command, studies
from detjax.bench.__main__ import app as bench_app
from detjax.cli import COMMANDS, app, options
from detjax.cli.generate import _SAMPLING
from detjax.cli.options import Fields, Option
from detjax.engine import EngineConfig, SamplingParams
from detjax.rl.runs.command import TrainingOptions
from detjax.server import ConnectionSettings, LogSettings, Settings
from tests.support import commands


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_is_there_once_and_explained(command: str) -> None:
    arguments = app[command].assemble_argument_collection(parse_docstring=True)
    names = Counter(name for argument in arguments for name in argument.names)
    assert names and set(names.values()) == {1}
    for argument in arguments:
        text = argument.parameter.help or ""
        assert text[:1].isupper() or not text[:1].isalpha(), (argument.name, text)
        assert text.endswith("."), (argument.name, text)


@pytest.mark.parametrize("command", ["tune", "serve", "run", "compile", "compare"])
def test_options_of_benchmarks_are_explained(command: str) -> None:
    for argument in bench_app[command].assemble_argument_collection(parse_docstring=True):
        assert (argument.parameter.help or "").endswith("."), argument.name


def test_options_of_studies_are_explained() -> None:
    for name in set(studies()) - {"peer_vllm", "tunix_learners"}:
        for parameter in inspect.signature(_command(name, ())).parameters.values():
            assert parameter.annotation.__metadata__[-1].help, (name, parameter.name)


@pytest.mark.parametrize(
    ("command", "source", "without", "named"),
    [
        ("serve", EngineConfig, (), {"speculative": "--speculative-config"}),
        ("serve", Settings, ("name", "more_names", "max_in_flight", "body_seconds"), {}),
        ("serve", ConnectionSettings, (), {"certificate": "--tls-certificate", "key": "--tls-key"}),
        ("serve", LogSettings, (), {"level": "--log-level", "format": "--log-format", "access": "--access-log"}),
        ("generate", SamplingParams, _SAMPLING.without, {}),
        ("train", TrainingOptions, ("directory",), {}),
    ],
)
def test_every_field_that_is_to_be_an_option_is_one(
    command: str, source: Any, without: tuple[str, ...], named: dict[str, str]
) -> None:
    """A tuple's option is called like one of its elements: --api-key adds to `api_keys`."""
    names = {name for argument in app[command].assemble_argument_collection() for name in argument.names}
    fields = {field.name for field in dataclasses.fields(source)} - set(without)
    for field in fields:
        option = "--" + field.replace("_", "-")
        assert {named.get(field, option), option.removesuffix("s")} & names, field


@dataclasses.dataclass(frozen=True)
class Inner:
    """Some options.

    Attributes:
        first: the first one, with `code`. It has a second sentence. Default: the best.
        many_dates: dates.
    """

    first: int | None = None
    many_dates: tuple[datetime.date, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError for 13."""
        if self.first == 13:
            raise ValueError("first is 13; accepted: others")


def ran(*arguments: object) -> commands.Result:
    """The result of a command that prints what it is given."""

    def show(
        paths: tuple[Path, ...] = (),
        /,
        *,
        inner: Annotated[Inner, Fields(Inner, "Panel")] = Inner(first=5),
        given: Annotated[dict[str, Any], Fields(Other)],
        kind: Literal["a", "b"] = "a",
        pair: tuple[int, int] | None = None,
        share: Annotated[float, Option("A share.", minimum=0.5)] = 1,
        some: Annotated[list[str], Option("Some", accepted=("x", "y"))],
        flag: Annotated[bool, Option(name="--flag/--bare")] = False,
    ) -> int:
        """Shows.

        Args:
            paths: files.
            kind: the kind.
        """
        print(paths, inner, given, kind, pair, share, some, flag)
        return len(paths)

    application = options.new_app("show")
    application.command(options.command(show), name="show")
    return commands.run(lambda words: options.run(application, words, (options.UsageError,)), "show", *arguments)


@dataclasses.dataclass(frozen=True)
class Other:
    """Others.

    Attributes:
        last: the last one.
    """

    last: str = "z"


def test_values_come_from_the_command_line_the_default_or_the_field() -> None:
    assert ran().stdout == f"() {Inner(first=5)} {{}} a None 1 ['x', 'y'] False\n"
    date = datetime.date(2026, 1, 31)
    arguments = ("--first", 6, "--many-date", date, "--many-date", date, "--last", "-v", "--some", "y", "--pair", 1, -2)
    result = ran("p", "q", *arguments, "--share", "1e1", "--kind", "a", "--kind", "b", "--flag")
    inner = Inner(6, (date, date))
    assert result.stdout == f"{(Path('p'), Path('q'))} {inner} {{'last': '-v'}} b (1, -2) 10.0 ['y'] True\n"
    assert result.exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--first", "1.5"), "--first is '1.5'; accepted: an integer"),
        (("--first", "13"), "first is 13; accepted: others"),
        (("--share", "x"), "--share is 'x'; accepted: a number"),
        (("--share", "nan"), "--share is nan; accepted: at least 0.5"),
        (("--many-date", "1.2.26"), "--many-date is '1.2.26'; accepted: a date, such as 2026-01-31"),
        (("--kind", "c"), "--kind is 'c'; accepted: a, b"),
        (("--some", "c"), "--some is 'c'; accepted: x, y"),
        (("--other", "c"), "Unknown option: --other"),
    ],
)
def test_a_word_that_is_not_accepted_is_said(arguments: tuple[str, ...], message: str) -> None:
    result = ran(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {message}") and result.stderr.count("\n") == 1


def test_the_help_has_first_sentences_and_defaults() -> None:
    shown = " ".join(ran("--help").stdout.split())
    assert "The first one, with code. [default: 5]" in shown and "second sentence" not in shown
    assert "--many-date DATE" in shown and "Dates. Repeatable." in shown
    assert "--pair N N" in shown and "Some: x, y. Repeatable. [default: all]" in shown
    assert "--flag --bare" in shown and "[choices: a, b]" in shown
    assert shown.index("Options ─") < shown.index("Panel ─")
