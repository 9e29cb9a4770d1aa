"""The site's addresses of the repository's files, so that links between files work both on GitHub and on the site."""

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from tools.figures import ROOT, without_code

PAGES: Final = {
    "CONTRIBUTING.md": "develop/contributing.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
    "notebooks/README.md": "lesson/index.md",
}
"""Pages of the site from outside of docs/, by path in the repository."""

SHOWN_AS_THEY_ARE: Final = frozenset((".csv", ".gif", ".html", ".jpg", ".json", ".pdf", ".png", ".svg", ".txt"))
"""Suffixes that browsers display. Other files get .txt appended, so that browsers do not download them."""

_TARGET = re.compile(r"(?<=\]\()(?P<path>[^()\s#:]+)(?P<fragment>#(?:[^()\s]|\([^()\s]*\))+)?(?=\))")


def address(path: str) -> str:
    """Returns the site's path of a file of the repository: docs/train.md is at train.md."""
    pure = PurePosixPath(path)
    if path in PAGES:
        return PAGES[path]
    if pure.parts[0] == "docs":
        return str(PurePosixPath(*pure.parts[1:]))
    if pure.parts[0] == "notebooks" and pure.suffix == ".ipynb":
        return f"lesson/{pure.name}"
    return f"files/{path}" if pure.suffix in SHOWN_AS_THEY_ARE else f"files/{path}.txt"


def targets(text: str, source: str) -> Iterator[tuple[re.Match[str], str]]:
    """Yields the links of a page to files of the repository that exist, with the files' paths in the repository.

    Args:
        text: Markdown.
        source: the page's path in the repository.
    """
    for match in _TARGET.finditer(without_code(text)):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match["path"]))
        if not path.startswith("..") and (ROOT / path).is_file():
            yield match, path


def on_the_site(text: str, source: str) -> str:
    """Rewrites a page's links to files of the repository to their addresses on the site."""
    folder, pieces, end = posixpath.dirname(address(source)), [], 0
    for match, path in targets(text, source):
        pieces += [text[end : match.start("path")], os.path.relpath(address(path), folder or ".")]
        end = match.end("path")
    return "".join([*pieces, text[end:]])


def linked_files(text: str, source: str) -> set[str]:
    """Returns the files, other than pages, that a page links to and the site must copy."""
    return {path for _, path in targets(text, source) if address(path).startswith("files/")}


def source_of(address_of_page: str) -> str:
    """Returns the path in the repository of a page of the site."""
    for path, page in PAGES.items():
        if page == address_of_page and not (ROOT / "docs" / page).is_file():
            return path
    if address_of_page.startswith("lesson/"):
        return f"notebooks/{Path(address_of_page).name}"
    return f"docs/{address_of_page}"
