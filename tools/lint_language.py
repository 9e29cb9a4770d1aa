"""Checks the project's rules of language: `python tools/lint_language.py detjax benchmarks tests tools`.

The rules are stated in docs/develop/glossary.md. A docstring begins with a noun phrase or a sentence, never with a bare
relative clause ("Of the rows ...", "That which ..."), and no name is a function word where a noun exists.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

FRAGMENT_OPENINGS: Final = ("Of", "That", "Those", "As", "Likewise")
"""A docstring that begins with one of these words is a fragment whose subject the reader has to guess."""

FUNCTION_WORDS: Final = frozenset(
    ("each", "found", "mine", "news", "of", "own", "that", "those", "told", "where", "which", "whose")
)
"""Words that say how something relates to something else, but not what it is."""

FUNCTION_WORD_PREFIX: Final = "of_"


def violations(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the description of every violation in a Python file, in no particular order."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            words = node.value.value.split(maxsplit=1)
            if words and words[0].rstrip(".,:;") in FRAGMENT_OPENINGS:
                yield node.lineno, f"the docstring begins with {words[0]!r}; begin with the subject it describes"
        for line, name in _names_bound_by(node):
            bare = name.strip("_")
            if bare in FUNCTION_WORDS or bare.startswith(FUNCTION_WORD_PREFIX):
                yield line, f"the name {name!r} is a function word; use the noun for what it holds"


def _names_bound_by(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each name that a node introduces; names of other libraries are only read."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.lineno, node.name
        case ast.arg():
            yield node.lineno, node.arg
        case ast.Name(ctx=ast.Store()):
            yield node.lineno, node.id
        case ast.Attribute(ctx=ast.Store()):
            yield node.lineno, node.attr
        case ast.alias(asname=str(name)):
            yield node.lineno, name
        case ast.ExceptHandler(name=str(name)):
            yield node.lineno, name


def main(arguments: list[str]) -> int:
    """Prints every violation below the folders and files named, and returns 1 if there is one."""
    paths = [Path(argument) for argument in arguments]
    files = sorted(file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path]))
    count = 0
    for file in files:
        for line, text in sorted(violations(file.read_text())):
            count += 1
            print(f"{file}:{line}: {text}")
    print(f"Language: {count} violations in {len(files)} files" if count else f"Language: {len(files)} files are clean")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
