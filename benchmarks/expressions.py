"""Expressions that name a number in a result file, used by figures of the documentation and performance goals.

An expression within a file is one of these:

| expression | value |
|---|---|
| `/runs/0/seconds` | the number at this JSON pointer (RFC 6901) |
| `/rows/name=rope&tokens=8/seconds` | the same; `key=value` selects the item of a list whose key has this value |
| `/a/seconds:/b/seconds` | the first number divided by the second |
| `median(/runs/*/seconds)` | a reduction of all matching numbers; `*` selects all items of a list or an object |
| `mean(/reward/0..9)` | the same; `first..last` selects these items of a list, both included |
| `geomean(/runs/*/a:/runs/*/b)` | a reduction of ratios |

The reductions are `count`, `distinct`, `geomean`, `max`, `mean`, `median`, `min` and `sum`; `key=value` may match
several items there. `count` and `distinct` take values of any kind and return the number of all or of different
values.
Spaces, parentheses, colons and percent signs within a key are percent-encoded, as in URLs.

A number in a named file is `serve-h200.json#/runs/order%201/seconds`; two of them separated by ` / ` are a ratio.
"""

import json
import math
import re
import statistics
import urllib.parse
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).parent / "results"
"""The folder of the repository's results."""

UNITS: Final[dict[str, Decimal]] = {
    "": Decimal(1),
    "h": Decimal(1) / 3600,
    "minutes": Decimal(1) / 60,
    "s": Decimal(1),
    "seconds": Decimal(1),
    "ms": Decimal("1e3"),
    "us": Decimal("1e6"),
    "µs": Decimal("1e6"),
    "ns": Decimal("1e9"),
    "%": Decimal(100),
    "×": Decimal(1),
    "times": Decimal(1),
    "MB": Decimal("1e-6"),
    "GB": Decimal("1e-9"),
    "MiB": Decimal(1) / 2**20,
    "GiB": Decimal(1) / 2**30,
    "GB/s": Decimal("1e-9"),
    "TB/s": Decimal("1e-12"),
    "TFLOP/s": Decimal("1e-12"),
    "tokens/s": Decimal(1),
    "tokens a second": Decimal(1),
}
"""Factors of values whose label has the unit."""

REDUCTIONS: Final[dict[str, Callable[[list[Any]], Decimal]]] = {
    "count": lambda values: Decimal(len(values)),
    "distinct": lambda values: Decimal(len(set(map(json.dumps, values)))),
    "geomean": lambda values: Decimal(math.exp(statistics.fmean(math.log(value) for value in values))),
    "max": max,
    "mean": statistics.mean,
    "median": statistics.median,
    "min": min,
    "sum": lambda values: sum(values, Decimal(0)),
}


def select(document: Any, pointer: str) -> list[Any]:
    """Returns the values that a JSON pointer with `*` and `key=value` selects.

    Raises:
        LookupError: nothing matches the pointer. The message names the segment and the available keys.
    """
    if not pointer.startswith("/"):
        raise LookupError(f"{pointer!r} is not a JSON pointer; accepted: text that begins with '/'")
    values = [document]
    for segment in pointer[1:].split("/"):
        name = urllib.parse.unquote(segment).replace("~1", "/").replace("~0", "~")
        values = [item for value in values for item in _children(value, name)]
    return values


def _children(value: Any, name: str) -> list[Any]:
    match value:
        case dict() if name in value:
            return [value[name]]
        case dict() if name == "*":
            return list(value.values())
        case list() if name == "*":
            return value
        case list() if name.isdecimal() and int(name) < len(value):
            return [value[int(name)]]
        case list() if match := re.fullmatch(r"(\d+)\.\.(\d+)", name):
            first, last = int(match[1]), int(match[2])
            if not first <= last < len(value):
                raise LookupError(f"there are no items {name!r}; there are {len(value)}")
            return value[first : last + 1]
        case list() if "=" in name:
            wanted = dict(condition.split("=", 1) for condition in name.split("&"))
            if items := [item for item in value if all(str(item.get(key)) == wanted[key] for key in wanted)]:
                return items
            there_are = [{key: item.get(key) for key in wanted} for item in value][:20]
            raise LookupError(f"no item has {name!r}; there are {there_are}")
        case dict():
            raise LookupError(f"there is no {name!r}; there are {list(value)[:20]}")
        case list():
            raise LookupError(f"there is no {name!r}; there are {len(value)} items")
        case _:
            raise LookupError(f"there is no {name!r} in {value!r}")


def evaluate(document: Any, expression: str) -> Decimal:
    """Returns the value of an expression in a result file; see the module's documentation.

    Raises:
        LookupError: the expression matches nothing, several numbers, or something other than a number.
    """
    terms = re.split(r":(?![^()]*\))", expression)
    if len(terms) > 2:
        raise LookupError(f"{expression!r} has {len(terms)} terms; accepted: one, or two with a colon between them")
    values = [_term(document, term) for term in terms]
    return values[0] / values[1] if len(values) == 2 else values[0]


def _term(document: Any, term: str) -> Decimal:
    if match := re.fullmatch(r"(\w+)\((.*)\)", term):
        if match[1] not in REDUCTIONS:
            raise LookupError(f"unknown reduction {match[1]!r}; accepted: {', '.join(REDUCTIONS)}")
        if match[1] in ("count", "distinct"):
            return REDUCTIONS[match[1]](select(document, match[2]))
        columns = [[_number(value) for value in select(document, pointer)] for pointer in match[2].split(":")]
        counts = [len(column) for column in columns]
        if len(set(counts)) > 1 or not counts[0]:
            raise LookupError(f"{term!r} selects {counts} numbers; accepted: at least one, and the same count of each")
        return REDUCTIONS[match[1]]([row[0] / math.prod(row[1:]) for row in zip(*columns, strict=True)])
    values = select(document, term)
    if len(values) != 1:
        raise LookupError(f"{term!r} selects {len(values)} values; accepted: one, or a reduction, as in median({term})")
    return _number(values[0])


def _number(value: Any) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise LookupError(f"{value!r} is not a number")
    return Decimal(value)


def number(expression: str, results: Path = RESULTS) -> Decimal:
    """Returns the value of an expression with file names.

    Raises:
        LookupError: the expression matches nothing, or something other than a number.
        OSError: a file cannot be read.
        ValueError: a file is not JSON.
    """
    first, *rest = [_file_number(term, results) for term in expression.split(" / ")]
    return first / math.prod(rest)


def sources(expression: str) -> list[str]:
    """Returns the names of the files that an expression reads."""
    return list(dict.fromkeys(term.partition("#")[0] for term in expression.split(" / ")))


def _file_number(term: str, results: Path) -> Decimal:
    name, _, pointer = term.partition("#")
    return evaluate(json.loads((results / name).read_text()), pointer)
