"""Parses the names of Python objects and the JSON trees of a command line."""

import functools
import importlib
import json
import sys
from pathlib import Path
from typing import Any


def named_object(option: str, name: str) -> Any:
    """Imports the object `module:name`, also from modules in the working directory.

    Args:
        option: the option's name in errors.
        name: a module, a colon, and a name within it, which may contain dots.

    Raises:
        ValueError: the name has another form, or the object cannot be imported.
    """
    module, _, path = name.partition(":")
    if not module or not path:
        raise ValueError(f"{option} is {name!r}; accepted: module:name, such as my_models.bert:forward")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except Exception as error:  # a module may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{option} is {name!r}, which cannot be imported: {reason}; "
            "accepted: module:function, or another name in a module"
        ) from error


def axes_of(option: str, text: str) -> Any:
    """Parses axes given as JSON: an integer, null, or lists of them.

    Raises:
        ValueError: the text has another form.
    """
    try:
        return _as_tuples(json.loads(text))
    except (ValueError, TypeError) as error:
        accepted = "an integer, null, or lists of them, such as [null, 0]"
        raise ValueError(f"{option} is {text!r}; accepted: {accepted}") from error


def sizes_of(option: str, text: str) -> tuple[int, ...]:
    """Parses numbers separated by commas.

    Raises:
        ValueError: the text has another form.
    """
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError as error:
        raise ValueError(f"{option} is {text!r}; accepted: numbers separated by commas, such as 1,2,17") from error


def _as_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_as_tuples, value))
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError(f"{value!r} is not an axis")
    return value
