"""Keeps the figures of README.md and docs/ equal to the measured results: nobody types a figure.

    python -m tools.figures --check [FILE ...]
    python -m tools.figures --write [FILE ...]

A figure is a Markdown link. Its label is the number, its target is a result file, and the fragment locates the value in
the file:

    [7.66 s](benchmarks/results/serve-h200.json#/runs/order%201/seconds)

The fragment is an expression of `benchmarks/expressions.py`.

Results are in SI units without prefixes. A unit in the label scales the value: `4.35 ms` shows 0.00435. If a file has
another unit, the unit follows the link. A label must be the value rounded to the label's precision: to its decimals, or
to its digits if a fraction's integer label ends in zeros (at least three digits). `--write` rounds again.

Numbers without such a link are reported too if they look measured: numbers with a unit of time, size, speed or share,
fractions, powers of ten, numbers with a comma between thousands, and bare numbers in a table's cell other than the
first of its row. `tools/typed_numbers.toml` lists numbers that were not measured: limits, defaults, examples, versions.
Code and formulas are not read.
"""

import argparse
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal
from pathlib import Path
from typing import Final

from benchmarks.expressions import UNITS, evaluate

ROOT: Final = Path(__file__).resolve().parents[1]
TYPED_NUMBERS: Final = ROOT / "tools" / "typed_numbers.toml"


_LINK = re.compile(
    r"(?<!!)\[(?P<label>[^\[\]]+)\]\((?P<file>[^()\s#]+\.json)#(?P<expression>(?:[^()\s]|\([^()\s]*\))+)\)"
)
_LABEL = re.compile(r"(?P<sign>[-+−]?)(?P<digits>\d[\d,]*(?:\.\d+)?)(?P<exponent>e-?\d+)?\s?(?P<unit>\D.*)?")
_NUMBER = r"(?<![\w.,-])\d(?:[\d,]*\d)?(?:\.\d+)?(?:e-?\d+)?"
_WITH_UNIT = (
    rf"{_NUMBER}\s?(?:%|×(?!\s*\d)|(?:m|µ|u|n)?s\b|seconds?\b|minutes?\b|hours?\b|[kKMGT]i?B(?:/s|\b)|[GT]?FLOP/s"
    r"|tokens(?:/s| a second)\b|microseconds\b)"
)
# A fraction, a power of ten, thousands with a comma, but no version such as 0.11.2.
_WITHOUT_UNIT = r"(?<![\w.,-])(?:\d+\.\d+(?:e-?\d+)?|\d+e-?\d+|\d{1,3}(?:,\d{3})+)(?![\w.,]*\d)"
_MEASURED = re.compile(f"{_WITH_UNIT}|{_WITHOUT_UNIT}")
_BARE_CELL = re.compile(rf"{_NUMBER}")


@dataclass(frozen=True)
class Fault:
    """A place where a page contradicts a result file, or whose source is missing."""

    file: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{os.path.relpath(self.file, ROOT)}:{self.line}: {self.message}"


def without_code(text: str) -> str:
    """Blanks all code and comments of Markdown, so that offsets and lines do not change."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    text = re.sub(r"<!--.*?-->", blank, text, flags=re.DOTALL)
    text = re.sub(r"^( *)(```+|~~~+).*?^ *\2 *$", blank, text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"(?<=\n\n)(?: {4}.*\n)+", blank, text)
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", blank, text, flags=re.DOTALL)


def label_of(value: Decimal, label: str) -> str:
    """Formats a value with the unit and precision of a label.

    Raises:
        ValueError: the label is not a number with a known unit.
    """
    match = _LABEL.fullmatch(label)
    if match is None or (match["unit"] or "").strip() not in UNITS:
        accepted = ", ".join(unit for unit in UNITS if unit)
        raise ValueError(f"the label {label!r} is not a number with one of the units {accepted}")
    scaled = value * UNITS[(match["unit"] or "").strip()]
    digits, exponent = match["digits"].replace(",", ""), match["exponent"]
    decimals = len(digits.partition(".")[2])
    if exponent:
        mantissa, _, power = f"{scaled:.{decimals}e}".partition("e")
        text = f"{mantissa}e{int(power)}"
    elif "." not in digits and not _is_whole(value):
        significant = max(3, len(digits.rstrip("0")))
        text = str(_rounded(scaled, max(0, len(digits) - significant)))
    else:
        text = str(scaled.quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_EVEN))
    if "," in match["digits"] or (not exponent and abs(scaled) >= 100_000):
        text = f"{Decimal(text):,}"
    if text.startswith("-"):
        text = ("−" if match["sign"] == "−" else "-") + text[1:]
    elif match["sign"] == "+":
        text = "+" + text
    return text + label[len(match["sign"] + match["digits"] + (exponent or "")) :]


def _is_whole(value: Decimal) -> bool:
    return value == value.to_integral_value()


def _rounded(value: Decimal, zeros: int) -> Decimal:
    return Decimal(int((value / 10**zeros).quantize(Decimal(1), ROUND_HALF_EVEN)) * 10**zeros)


def figures(text: str) -> Iterator[re.Match[str]]:
    """Yields the links of a page to values in result files, with the groups `label`, `file` and `expression`."""
    yield from _LINK.finditer(without_code(text))


def checked(file: Path, text: str) -> tuple[str, list[Fault]]:
    """Returns a page with correct labels, and the faults of its current labels."""
    faults, pieces, end, documents = [], [], 0, {}
    for figure in figures(text):
        line = text.count("\n", 0, figure.start()) + 1
        label, source = figure["label"], (file.parent / figure["file"]).resolve()
        pieces.append(text[end : figure.start("label")])
        end = figure.end("label")
        shown = label
        try:
            if source not in documents:
                documents[source] = json.loads(source.read_text())
            value = evaluate(documents[source], figure["expression"])
            shown = label_of(value, label)
            if shown != label:
                faults.append(
                    Fault(file, line, f"the label is {label!r}, and {figure['file']} has {float(value)!r}: {shown}")
                )
        except (LookupError, OSError, ValueError, ArithmeticError) as error:
            faults.append(Fault(file, line, f"{label!r}: {figure['file']}#{figure['expression']}: {error}"))
        pieces.append(shown)
    return "".join([*pieces, text[end:]]), faults


def typed(text: str) -> Iterator[tuple[int, str]]:
    """Yields the line and text of each number of a page that looks measured but does not link to a result."""
    # Targets of links are not prose; labels are, except for links to values.
    prose = _LINK.sub(lambda match: re.sub(r"[^\n]", "_", match[0]), without_code(text))
    prose = re.sub(r"\$\$.+?\$\$|\$[^$\n]+\$", lambda match: re.sub(r"[^\n]", " ", match[0]), prose, flags=re.DOTALL)
    prose = re.sub(r"(?<=\])\([^()\s]*\)", lambda match: " " * len(match[0]), prose)
    for number, line in enumerate(prose.split("\n"), 1):
        yield from ((number, match[0]) for match in _MEASURED.finditer(line))
        if line.lstrip().startswith("|"):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            yield from ((number, cell) for cell in cells[1:] if _BARE_CELL.fullmatch(cell))


def allowed() -> dict[str, list[str]]:
    """Returns the listed unmeasured numbers, by page."""
    return {page: entry["numbers"] for page, entry in tomllib.loads(TYPED_NUMBERS.read_text()).items()}


def pages() -> list[Path]:
    """Returns README.md and every page of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def faults_of(file: Path) -> list[Fault]:
    """Returns the faults of a page: wrong labels, and typed numbers."""
    text = file.read_text()
    exceptions = allowed().get(os.path.relpath(file, ROOT), [])
    if exceptions == ["*"]:
        return checked(file, text)[1]
    return checked(file, text)[1] + [
        Fault(file, line, f"{number!r} is typed; accepted: a link to a value, or a line of tools/typed_numbers.toml")
        for line, number in typed(text)
        if number not in exceptions
    ]


def main() -> None:
    """Checks or rewrites pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true", help="report faults; exit code 1 if there are any")
    mode.add_argument("--write", action="store_true", help="rewrite labels from the results")
    parser.add_argument("files", nargs="*", type=Path, help="pages (default: README.md and docs)")
    arguments = parser.parse_args()
    faults = []
    for file in [file.resolve() for file in arguments.files] or pages():
        if arguments.write:
            text = file.read_text()
            if (shown := checked(file, text)[0]) != text:
                file.write_text(shown)
        faults += faults_of(file)
    for fault in faults:
        print(fault, file=sys.stderr)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
