"""Writes the project's address everywhere it is stated: `make address ADDRESS=https://github.com/OWNER/detjax`.

pyproject.toml has it as `[project.urls]`; the clone line of README.md, CITATION.cff and the site's source link follow.
Workflows need no address, since GitHub provides the repository's.
"""

import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
UNKNOWN: Final = "<this repository>"
"""The clone line's placeholder while the project has no address."""


def written(texts: Mapping[str, str], address: str) -> dict[str, str]:
    """Replaces the address in the files' texts.

    Args:
        texts: the texts of the files in `FILES` by name.
        address: the address, without a slash at its end.

    Raises:
        ValueError: the address is not an HTTPS URL, or a file has no place for it.
    """
    if not re.fullmatch(r"https://[\w.-]+/[\w./-]*[\w-]", address):
        raise ValueError(f"{address!r} is not an address; accepted: https://HOST/OWNER/NAME")
    return {name: _replaced(name, texts[name], *rule) for name, rule in _rules(address).items()}


def _rules(address: str) -> dict[str, tuple[str, str]]:
    """Each file's place for the address as a regular expression, and what it is replaced by."""
    table = f'[project.urls]\nRepository = "{address}"\nDocumentation = "{address}/tree/main/docs"\n'
    table += f'Changelog = "{address}/blob/main/CHANGELOG.md"\nIssues = "{address}/issues"\n'
    return {
        "pyproject.toml": (r"(?:\[project\.urls\]\n(?:.+\n)*\n)?(\[project\.optional-dependencies\])", f"{table}\n\\1"),
        "README.md": (r"(?<=git clone )(?:<this repository>|https://\S+?)(?=\s)", address),
        "CITATION.cff": (r"(?:repository-code: .*\n)?(license: )", f"repository-code: {address}\n\\1"),
        "mkdocs.yml": (r"(?:repo_url: .*\n)?(docs_dir: )", f"repo_url: {address}\n\\1"),
    }


FILES: Final = tuple(_rules(""))


def _replaced(name: str, text: str, pattern: str, replacement: str) -> str:
    result, count = re.subn(pattern, replacement, text)
    if count != 1:
        raise ValueError(f"{name} has {count} places for the address; accepted: one, {pattern}")
    return result


def address_of(pyproject: str) -> str | None:
    """Returns the address in pyproject.toml, or None."""
    return tomllib.loads(pyproject)["project"].get("urls", {}).get("Repository")


def main(arguments: Sequence[str]) -> None:
    """Writes the address, or nothing if a file has no place for it."""
    (address,) = arguments
    texts = {name: (ROOT / name).read_text() for name in FILES}
    for name, text in written(texts, address.rstrip("/").removesuffix(".git")).items():
        (ROOT / name).write_text(text)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"make address: {error}")
