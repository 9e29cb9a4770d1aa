"""Where the site has the files of the repository, so that links between files work on GitHub and on the site alike."""

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
"""Pages of the site that lie outside of docs/, by their paths in the repository."""

SHOWN_AS_THEY_ARE: Final = frozenset((".csv", ".gif", ".html", ".jpg", ".json", ".pdf", ".png", ".svg", ".txt"))
"""Suffixes that browsers show. Other files get .txt behind their names, so that they are shown and not saved."""

_TARGET = re.compile(r"(?<=\]\()(?P<path>[^()\s#:]+)(?P<fragment>#(?:[^()\s]|\([^()\s]*\))+)?(?=\))")


def address(path: str) -> str:
    """Returns where the site has a file of the repository, as a path of a source: docs/train.md is at train.md."""
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
        source: the page's own path in the repository.
    """
    for match in _TARGET.finditer(without_code(text)):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match["path"]))
        if not path.startswith("..") and (ROOT / path).is_file():
            yield match, path


def on_the_site(text: str, source: str) -> str:
    """Returns a page whose links to files of the repository lead to where the site has them."""
    folder, pieces, end = posixpath.dirname(address(source)), [], 0
    for match, path in targets(text, source):
        pieces += [text[end : match.start("path")], os.path.relpath(address(path), folder or ".")]
        end = match.end("path")
    return "".join([*pieces, text[end:]])


def linked_files(text: str, source: str) -> set[str]:
    """Returns the files that the site has to copy, because a page links to them and they are no pages."""
    return {path for _, path in targets(text, source) if address(path).startswith("files/")}


def source_of(address_of_page: str) -> str:
    """Returns the path in the repository of a page of the site."""
    for path, page in PAGES.items():
        if page == address_of_page and not (ROOT / "docs" / page).is_file():
            return path
    if address_of_page.startswith("lesson/"):
        return f"notebooks/{Path(address_of_page).name}"
    return f"docs/{address_of_page}"
