"""Objects of Python that a command line names, and trees that it spells as JSON."""

import functools
import importlib
import json
import sys
from pathlib import Path
from typing import Any


def named_object(option: str, name: str) -> Any:
    """Returns the object that `module:name` names; modules of the working directory are found.

    Args:
        option: where the name comes from, as errors call it.
        name: a module, and in it a name, or several joined by dots.

    Raises:
        ValueError: the name has another form, or there is no such object, or its module cannot be imported.
    """
    module, _, path = name.partition(":")
    if not module or not path:
        raise ValueError(f"{option} is {name!r}; accepted: module:name, such as my_models.bert:forward")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except Exception as error:  # whatever the module raises
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{option} is {name!r}, which cannot be imported: {reason}; "
            "accepted: module:function, or another name in a module"
        ) from error


def axes_of(option: str, text: str) -> Any:
    """Returns axes that are spelled as JSON: an integer, null, or lists of them.

    Raises:
        ValueError: the text is something else.
    """
    try:
        return _as_tuples(json.loads(text))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{option} is {text!r}; accepted: an integer, null, or lists of them, as [null, 0]") from error


def sizes_of(option: str, text: str) -> tuple[int, ...]:
    """Returns numbers that commas separate.

    Raises:
        ValueError: the text is something else.
    """
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError as error:
        raise ValueError(f"{option} is {text!r}; accepted: numbers with commas between them, as 1,2,17") from error


def _as_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_as_tuples, value))
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError(f"{value!r} is no axis")
    return value
