"""Checks the prose of docstrings, comments, messages and pages: `python tools/lint_prose.py detjax docs README.md`.

proselint does the reading, with the checks of its own that suit technical prose and the project's list of phrases,
`tools/prose.toml`. Of a Python file it reads comments and string literals of several words, of a page the text outside
of code and link targets, and of a notebook the Markdown cells.

docs/develop/glossary.md states the rules. `.prose_cache` remembers clean files by their content and the rules.
"""

import ast
import hashlib
import io
import itertools
import json
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from proselint.checks import __register__
from proselint.config import Config
from proselint.registry import CheckRegistry
from proselint.registry.checks import Check, types
from proselint.registry.checks.engine import Fancy
from proselint.tools import LintFile

_RULES_FILE: Final = Path(__file__).with_name("prose.toml")
RULES: Final[Mapping[str, Any]] = tomllib.loads(_RULES_FILE.read_text())

CACHE: Final = Path(".prose_cache")

_NOT_PROSE: Final = re.compile(r"(?s:```.*?```)|`[^`\n]+`|\]\([^)]*\)|<[^>\n]+>|https?://\S+")
"""Parts of a page that are not prose: code, targets of links, tags."""

_QUOTED: Final = re.compile(r"`+[^`]+`+|^\s*(>>>|\.\.\.) .*$", re.MULTILINE)
"""Parts of a docstring or a comment that are code."""

_CODE: Final = "\u00b7"
"""Stands for code, so that no phrase begins in one sentence and ends in another."""


def phrase_checks() -> tuple[Check, ...]:
    """The project's list of words as checks of proselint."""
    return tuple(
        Check(
            types.ExistenceSimple(rf"\b(?:{phrase})\b".replace(" ", r"\s+")),
            Fancy(),
            path="detjax.phrases",
            message=f"'{{}}': {instead}",
        )
        for phrase, instead in RULES["phrases"].items()
    )


def blanked(text: str, pattern: re.Pattern[str]) -> str:
    """Returns a text of the same lines with spaces in place of what a pattern matches."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def prose_of_python(source: str) -> str:
    """Returns a text of the same lines and columns that has only the comments and the sentences of string literals."""
    lines = source.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]
    prose = list(re.sub(r"\S", _CODE, source))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        begin, end = (starts[line - 1] + column for line, column in (token.start, token.end))
        match token.type:
            case tokenize.COMMENT:
                prose[begin:end] = " " + blanked(token.string[1:], _QUOTED)
            case tokenize.STRING | tokenize.FSTRING_MIDDLE if len(token.string.split()) > 2:
                # Escaped braces are one character of the token and two of the source, so columns may be off by them.
                prose[begin:end] = blanked(source[begin:end], _QUOTED)
    return "".join(prose).replace('"', " ")


def prose_of(text: str, suffix: str) -> str:
    """Returns the prose of a file's text, each word in its line."""
    match suffix:
        case ".py":
            return prose_of_python(text)
        case ".ipynb":
            cells = json.loads(text)["cells"]
            return blanked("\n\n".join("".join(x["source"]) for x in cells if x["cell_type"] == "markdown"), _NOT_PROSE)
        case _:
            return blanked(text, _NOT_PROSE)


def docstring_violations(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the line and the description of each docstring that opens with a word from the list."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            words = node.value.value.split(maxsplit=1)
            if words and words[0].rstrip(".,:;") in RULES["docstring_openings"]:
                yield node.lineno, f"the docstring opens with '{words[0]}'; open with a noun phrase or a verb"


def name_violations(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the line and the description of each function word that a file uses as a name."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                pass
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                pass
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                pass
            case _:
                continue
        if (bare := name.strip("_")) in RULES["function_words"] or bare.startswith("of_"):
            yield node.lineno, f"the name '{name}' is a function word; use the noun for what it holds"


def register_checks() -> None:
    """Registers the checks of proselint and the project's."""
    CheckRegistry().register_many((*__register__, *phrase_checks()))


def violations(file: Path) -> list[tuple[int, str]]:
    """Returns the lines and the descriptions of the violations in a file, sorted by line."""
    text, checks = file.read_text(), dict.fromkeys(RULES["proselint"], True) | {"detjax": True}
    results = LintFile(str(file), prose_of(text, file.suffix) or "\n").lint(Config(max_errors=10_000, checks=checks))
    entries = [(result.pos[0], " ".join(result.check_result.message.split())) for result in results]
    if file.suffix == ".py":
        tree = ast.parse(text)
        entries += [*docstring_violations(tree), *name_violations(tree)]
    return sorted(entries)


def _key(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def main(arguments: list[str]) -> int:
    """Prints every violation in the folders and files named, and returns 1 if there is one."""
    register_checks()
    paths = [Path(argument) for argument in arguments]
    files = sorted(
        file
        for path in paths
        for file in (path.rglob("*") if path.is_dir() else [path])
        if file.suffix in (".py", ".md", ".ipynb")
        and str(file) not in RULES["excluded"]
        and not any(part.startswith(".") for part in file.parts)
    )
    clean = set(CACHE.read_text().split()) if CACHE.exists() else set[str]()
    rules = _key(_RULES_FILE.read_text(), Path(__file__).read_text(), version("proselint"))
    count, still_clean = 0, set[str]()
    for file in files:
        key = _key(rules, str(file), file.read_text())
        refused = [] if key in clean else violations(file)
        if not refused:
            still_clean.add(key)
        for line, text in refused:
            print(f"{file}:{line}: {text}")
        count += len(refused)
    CACHE.write_text("\n".join(sorted(still_clean)))
    print(f"Prose: {count} violations in {len(files)} files" if count else f"Prose: {len(files)} files are clean")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
