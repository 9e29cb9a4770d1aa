"""Which page of the KV cache belongs to whom: reference counts, and a cache of prefixes on whole pages."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from detjax.contract import KV_BLOCK

type Digest = bytes
"""Names the tokens of a page and all before it: pages of one digest hold the same bits."""


def digests(tokens: Sequence[int], known: Sequence[Digest] = ()) -> list[Digest]:
    """The digest of each full page of a sequence of tokens, of which the first ones may be `known` already.

    A cryptographic hash, since two prefixes of one digest would silently share their keys and values.
    """
    found = list(known)
    for page in range(len(found), len(tokens) // KV_BLOCK):
        before = found[-1] if found else b""
        own = np.asarray(tokens[page * KV_BLOCK : (page + 1) * KV_BLOCK], np.int64).tobytes()
        found.append(hashlib.blake2b(before + own, digest_size=32).digest())
    return found


class PagePool:
    """The pages of a cache. A page is free, or some sequences refer to it, or it is kept for whoever comes with the
    same prefix: kept pages are given away, the one longest out of use first, where no page is free."""

    def __init__(self, pages: int, *, keeps_prefixes: bool = True) -> None:
        if pages < 1:
            raise ValueError(f"PagePool: pages is {pages}; accepted: at least 1")
        self.pages = pages
        self.keeps_prefixes = keeps_prefixes
        self._free = list(range(pages - 1, -1, -1))
        self._references = [0] * pages
        self._kept: OrderedDict[int, None] = OrderedDict()  # of no references, longest out of use first
        self._page_of: dict[Digest, int] = {}
        self._digest_of: dict[int, Digest] = {}

    @property
    def available(self) -> int:
        """Pages that `take` has left to give."""
        return len(self._free) + len(self._kept)

    @property
    def in_use(self) -> int:
        """Pages that some sequence refers to."""
        return self.pages - self.available

    def take(self) -> int | None:
        """A page for one sequence; None where all are in use."""
        if self._free:
            page = self._free.pop()
        elif self._kept:
            page, _ = self._kept.popitem(last=False)
            self._forget(page)
        else:
            return None
        self._references[page] = 1
        return page

    def share(self, wanted: Iterable[Digest]) -> list[int]:
        """Pages of the longest known part of a prefix, each with a reference more."""
        found = []
        for digest in wanted:
            page = self._page_of.get(digest)
            if page is None:
                break
            self._kept.pop(page, None)
            self._references[page] += 1
            found.append(page)
        return found

    def name(self, page: int, digest: Digest) -> None:
        """Lets others find a full page that is in use. Of two pages of one digest the first one is found."""
        if self.keeps_prefixes and digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def release(self, pages: Sequence[int]) -> None:
        """Takes back a sequence's reference to each of its pages, in the order of its tokens."""
        for page in reversed(pages):  # so that a prefix's end is given away before its beginning
            self._references[page] -= 1
            assert self._references[page] >= 0, f"page {page} is released more often than it was taken"
            if self._references[page]:
                continue
            if page in self._digest_of:
                self._kept[page] = None
            else:
                self._free.append(page)

    def forget_prefixes(self) -> None:
        """Nothing that is in a page now will be found: the weights have changed, say."""
        for page in list(self._digest_of):
            self._forget(page)
        self._free += self._kept
        self._kept.clear()

    def _forget(self, page: int) -> None:
        del self._page_of[self._digest_of.pop(page)]
