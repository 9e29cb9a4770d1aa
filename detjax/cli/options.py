"""Command-line options, each declared once: as a field of the dataclass that it sets, or as a parameter of the command.

cyclopts parses them and prints the help. It imports a command only when it runs, and can split the options of one
dataclass into several help panels.
"""

import contextlib
import dataclasses
import datetime
import functools
import inspect
import os
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import docstring_parser
from cyclopts import App, CycloptsError, Group, Parameter, UnknownCommandError

_SHOWN: Final = ("bytes", "seconds", "dir", "directory", "model", "plots")
"""Last words of names that the help shows instead of N, X or FILE."""
_ACCEPTED: Final = {int: "an integer", float: "a number", datetime.date: "a date, such as 2026-01-31"}


class UsageError(ValueError):
    """An invalid command line."""


@dataclasses.dataclass(frozen=True)
class Option:
    """Properties of an option that do not follow from its name, its type and its documentation.

    Attributes:
        help: the help text. Default: the first sentence of the documentation.
        name: the name, such as "--port"; "--shared/--separate" also names the negating flag.
        default: the help's description of the default. Default: the documentation's text after "Default:".
        panel: the help panel.
        minimum: the minimum value.
        accepted: the accepted names. A repeatable option defaults to all of them.
        takes_several: whether a repeatable option may have several values at once. No value may begin with "-" then.
    """

    help: str = ""
    name: str = ""
    default: str = ""
    panel: str = ""
    minimum: float | None = None
    accepted: Collection[str] = ()
    takes_several: bool = False


@dataclasses.dataclass(frozen=True)
class Fields:
    """The annotation of a parameter whose options are the fields of a dataclass.

    The parameter receives an instance, or, if it is annotated as a dictionary, only the fields that the command line
    sets. Its own default, if it has one, overrides the dataclass's defaults.

    Attributes:
        source: the dataclass.
        panel: the help panel for fields whose option names none.
        without: fields that do not become options.
        positional: fields that become positional arguments.
        options: additional properties of options, by field.
    """

    source: type
    panel: str = ""
    without: Collection[str] = ()
    positional: Collection[str] = ()
    options: Mapping[str, Option] = dataclasses.field(default_factory=dict)

    def parameters(self, default: Any) -> Iterator[inspect.Parameter]:
        """Yields a parameter for each option. `default` is an instance with the defaults, or `Parameter.empty`."""
        documented, hints = _documented(self.source), get_type_hints(self.source, include_extras=True)
        for field in dataclasses.fields(self.source):
            if field.name in self.without:
                continue
            is_positional = field.name in self.positional
            kind = inspect.Parameter.POSITIONAL_ONLY if is_positional else inspect.Parameter.KEYWORD_ONLY
            given = field.default if default is inspect.Parameter.empty else getattr(default, field.name)
            if given is dataclasses.MISSING:
                given = inspect.Parameter.empty
            option = self.options.get(field.name, Option())
            option = dataclasses.replace(option, panel=option.panel or ("" if is_positional else self.panel))
            parameter = inspect.Parameter(field.name, kind, default=given, annotation=hints[field.name])
            yield _parameter(parameter, documented.get(field.name, ""), option)


def command(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """Returns a command's function with one parameter per option, in place of parameters annotated with `Fields`.

    The function returns the exit code, None for 0.
    """
    signature, documented = inspect.signature(function, eval_str=True), _documented(function)
    flat, plain, groups = list[inspect.Parameter](), dict[str, Any](), dict[str, tuple[Fields, list[str], Any]]()
    for parameter in signature.parameters.values():
        notes = get_args(parameter.annotation)[1:] if get_origin(parameter.annotation) is Annotated else ()
        note = notes[-1] if notes else Option()
        if isinstance(note, Fields):
            is_partial = get_origin(get_args(parameter.annotation)[0]) is dict
            added = list(note.parameters(parameter.default))
            default = dict if is_partial else parameter.default
            groups[parameter.name] = note, [one.name for one in added], default
            flat += added
        else:
            flat.append(_parameter(parameter, documented.get(parameter.name, ""), note))
            if flat[-1].default is not parameter.empty:
                plain[parameter.name] = flat[-1].default
    flat.sort(key=lambda parameter: (parameter.kind, parameter.default is not parameter.empty))

    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> int | None:
        given = plain | inspect.Signature(flat).bind_partial(*arguments, **options).arguments
        for name, (fields, names, default) in groups.items():
            values = {field: given.pop(field) for field in names if field in given}
            with usage_errors():
                if default is dict:
                    given[name] = values
                elif default is inspect.Parameter.empty:
                    given[name] = fields.source(**values)
                else:
                    given[name] = dataclasses.replace(default, **values)
        bound = signature.bind_partial()
        bound.arguments |= given
        return function(*bound.args, **bound.kwargs)

    run.__signature__ = inspect.Signature(flat)  # pyright: ignore[reportAttributeAccessIssue]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return run


def unwrapped(text: str) -> str:
    """Returns a text with each paragraph on one line, for the terminal to wrap."""
    return re.sub(r"(?<=\S)\n(?=\S)", " ", text)


def new_app(name: str, **options: Any) -> App:
    """Returns an application without commands. `options` go to cyclopts."""
    groups: Any = {"group_parameters": Group.create_default_parameters("Options")}
    return App(name, help_flags="--help", help_format="plaintext", **groups, **options)


def run(app: App, arguments: Sequence[str] | None, expected: tuple[type[Exception], ...]) -> NoReturn:
    """Runs a command and exits with its exit code. `arguments` defaults to the process's command line.

    Errors that a user can cause, those in `expected`, print one line and exit with code 2. Any other error is a bug and
    prints a traceback.
    """
    options: Any = {"print_error": False, "exit_on_error": False, "result_action": "return_value"}
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if not arguments:
            app.help_print([])
            sys.exit(2)
        sys.exit(app(arguments, **options))
    except BrokenPipeError:  # the reader, such as head, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except UnknownCommandError:
        commands = ", ".join(name for name in app if not name.startswith("-"))
        _fail(f"{arguments[0]!r} is not a command; accepted: {commands}")
    except CycloptsError as error:
        _fail(str(error.__cause__ if isinstance(error.__cause__, ValueError) else error))
    except expected as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(message: str) -> NoReturn:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turns ValueErrors into errors of the command line."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def _parameter(parameter: inspect.Parameter, documented: str, option: Option) -> inspect.Parameter:
    """Returns the parameter, annotated for cyclopts."""
    hint = parameter.annotation
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
        if option == Option():
            option = next((note for note in notes if isinstance(note, Option)), option)
    is_positional = parameter.kind is inspect.Parameter.POSITIONAL_ONLY
    kind, container, words = _kind(hint)
    is_repeatable = container is not None and not words
    if container is not None and is_repeatable and option.accepted and parameter.default is parameter.empty:
        parameter = parameter.replace(default=container(option.accepted))
        option = dataclasses.replace(option, default="all")
    word = (parameter.name.removesuffix("s") if is_repeatable else parameter.name).replace("_", "-")
    name, _, negative = (option.name or f"--{word}").partition("/")
    last = name.rpartition("-")[2]
    shown = {int: "N", float: "X", Path: "FILE"}.get(kind, "NAME" if get_origin(kind) is Literal else last.upper())
    metavar = last.upper() if last in _SHOWN else shown
    text, said = _help(documented)
    if kind is bool:
        flags: dict[str, Any] = {"negative": negative or (None if parameter.default else ())}
    else:
        flags = {
            "converter": _converter(name if not is_positional else metavar, hint, option),
            "metavar": " ".join([metavar] * (words or 1)),
            "allow_leading_hyphen": not is_positional and not option.takes_several,
            "consume_multiple": option.takes_several,
            "negative_iterable": (),
            "allow_repeating": True,
        }
    if option.panel:
        flags["group"] = _panel(option.panel)
    text = option.help or text
    text = f"{text.rstrip('.')}: {', '.join(option.accepted)}." if option.accepted else text
    note = Parameter(
        name=name.lstrip("-") if is_positional else name,
        help=f"{text} Repeatable." if is_repeatable and not is_positional else text,
        show_default=_shown_default(option.default, said, parameter.default),
        **flags,
    )
    return parameter.replace(annotation=Annotated[hint, note])


@functools.cache
def _panel(name: str) -> Group:
    """Returns the panel with this name. Panels appear in the order of their first use."""
    return Group.create_ordered(name)


def _shown_default(text: str, said: str, default: Any) -> Any:
    if text or (said and default in (None, ())):
        return lambda _: text or said
    if isinstance(default, bool):
        return (lambda _: "on") if default else False
    return default is not None and default != ()


def _kind(hint: Any) -> tuple[Any, Any, int]:
    """Returns the type of each word of a value, their container, if any, and their number, or 0 if repeatable."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (one for one in get_args(hint) if one is not type(None))
    container, parts = get_origin(hint), get_args(hint)
    if container in (list, Sequence) or (container is tuple and parts[-1] is ...):
        return parts[0], tuple if container is Sequence else container, 0
    return (parts[0], tuple, len(parts)) if container is tuple else (hint, None, 1)


def _converter(name: str, hint: Any, option: Option) -> Callable[[Any, Sequence[Any]], Any]:
    """Returns a function that parses words. cyclopts' own names no accepted values, and rounds 1.5 to an integer."""
    kind, container, _ = _kind(hint)

    def convert(_: Any, tokens: Sequence[Any]) -> Any:
        values = [_value(name, kind, token.value, option) for token in tokens]
        return container(values) if container else values[0]

    return convert


def _value(name: str, kind: Any, word: str, option: Option) -> Any:
    """Parses a word, and checks it against the accepted values."""
    accepted = get_args(kind) if get_origin(kind) is Literal else option.accepted
    if accepted and word not in accepted:
        raise ValueError(f"{name} is {word!r}; accepted: {', '.join(accepted)}")
    if get_origin(kind) is Literal or kind is str:
        return word
    try:
        value: Any = datetime.date.fromisoformat(word) if kind is datetime.date else kind(word)
    except ValueError:
        raise ValueError(f"{name} is {word!r}; accepted: {_ACCEPTED[kind]}") from None
    if option.minimum is not None and not value >= option.minimum:
        raise ValueError(f"{name} is {word}; accepted: at least {option.minimum}")
    return value


def _documented(source: Any) -> dict[str, str]:
    """Returns the entries of a docstring's `Attributes:` and `Args:` sections, by name."""
    parsed = docstring_parser.parse(inspect.getdoc(source) or "", docstring_parser.DocstringStyle.GOOGLE)
    return {entry.arg_name: " ".join((entry.description or "").split()) for entry in parsed.params}


def _help(documented: str) -> tuple[str, str]:
    """Returns the first sentence of an entry, and its text after "Default:"."""
    default = re.search(r"Default: (.+?)\.(?= |$)", documented)
    first, *_ = re.split(r"(?<=\.) (?=[A-Z])", documented.replace("`", ""))
    return first[:1].upper() + first[1:], default[1] if default else ""
