"""Checks of a finished site: entries of the API, working links, alternative texts, and no network access."""

import posixpath
import re
import urllib.parse
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

from tools.site import api

LOADED: Final = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""The attributes whose targets a browser loads by itself."""

RELATIONS_NOT_LOADED: Final = frozenset(("canonical", "prev", "next", "alternate", "edit"))


_ATTRIBUTES: Final = re.compile(r"(?:\S+=&quot;&quot; ){3}")
_STYLES: Final = re.compile(r"<code>\s*&lt;style&gt;")


class _Page(HTMLParser):
    """The anchors and the targets of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.images_without_text: list[str] = []
        self.shows_attributes = _ATTRIBUTES.search(text) is not None
        self.shows_styles = _STYLES.search(text) is not None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.anchors |= {attributes[name] for name in ("id", "name") if name in attributes}
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        if tag == "img" and not attributes.get("alt"):
            self.images_without_text.append(attributes.get("src", "")[:80])
        if tag in LOADED and not set(attributes.get("rel", "").split()) & RELATIONS_NOT_LOADED:
            self.loaded.append(attributes.get(LOADED[tag], ""))


def faults(site: Path) -> list[str]:
    """Returns a site's faults, a line for each."""
    pages = {str(path.relative_to(site)): _Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    return [f"{name}: {fault}" for name, page in pages.items() for fault in _faults(site, name, page, pages)] + [
        f"{page}: no entry for {anchor}"
        for page, anchors in api.expected_anchors().items()
        for anchor in sorted(anchors - pages[_built(page)].anchors)
    ]


def _built(page: str) -> str:
    return (
        page.removesuffix("index.md") + "index.html"
        if page.endswith("index.md")
        else f"{page.removesuffix('.md')}/index.html"
    )


def _faults(site: Path, name: str, page: _Page, pages: dict[str, _Page]) -> Iterator[str]:
    for target in page.loaded:
        if urllib.parse.urlsplit(target).scheme in ("http", "https") or target.startswith("//"):
            yield f"the browser would load {target} from a network"
    for source in page.images_without_text:
        yield f"the image {source} has no alternative text"
    # A formula such as `j<n` opens a tag, which takes the following words for attributes.
    if page.shows_attributes:
        yield "the text shows words as attributes of a tag; accepted in formulas: < followed by a space"
    if page.shows_styles:
        yield "the text shows the styles of a notebook"
    # The error page is shown at any address, so its links are absolute.
    if name == "404.html" or name.startswith("files/"):
        return
    for target in [*page.links, *page.loaded]:
        parts = urllib.parse.urlsplit(target)
        if parts.scheme or parts.netloc or target.startswith("//"):
            continue
        path = urllib.parse.unquote(parts.path)
        place = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
        if path and (site / place).is_dir():
            place = posixpath.normpath(f"{place}/index.html")
        if not (site / place).is_file():
            yield f"the link {target} leads nowhere"
        elif parts.fragment and place in pages and urllib.parse.unquote(parts.fragment) not in pages[place].anchors:
            yield f"the link {target} leads to no place of its page"
