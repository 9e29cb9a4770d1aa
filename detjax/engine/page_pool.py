"""The page pool: free, referenced and cached pages of the KV cache, with a prefix cache of full pages."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from detjax.contract import KV_BLOCK
from detjax.engine.snapshots import SnapshotCache

_DIGEST_BYTES: Final = 32

type Digest = bytes
"""A hash of the tokens of a page and of all pages before it. Pages with the same digest hold the same bits."""


def prefix_root(cache_salt: str | None, adapter: bytes | None = None) -> Digest:
    """Returns the root of a request's page digests. Requests of different salts or adapters share no pages.

    Args:
        cache_salt: see `Request.cache_salt`.
        adapter: the digest of the content of the request's adapter.
    """
    if cache_salt is None and adapter is None:
        return b""
    # Personalized, so that no salt can give the digest of a page. JSON allows lone surrogates, which UTF-8 does not.
    salt = b"" if cache_salt is None else cache_salt.encode(errors="surrogatepass")
    root = hashlib.blake2b(salt, digest_size=_DIGEST_BYTES, person=b"cache_salt").digest()
    if adapter is None:
        return root
    known = b"" if cache_salt is None else root
    return hashlib.blake2b(adapter + known, digest_size=_DIGEST_BYTES, person=b"adapter").digest()


def digests(
    tokens: Sequence[int],
    known: Sequence[Digest] = (),
    root: Digest = b"",
    images: Sequence[tuple[int, int, bytes]] = (),
) -> list[Digest]:
    """Returns the digest of each full page of a sequence of tokens.

    The hash is cryptographic, because prefixes with equal digests share keys and values.

    Args:
        tokens: token ids, from position 0 on.
        known: digests of the leading pages, which are not computed again.
        root: see `prefix_root`.
        images: for each image, the start and end of its tokens and a digest of its content. The digests of its pages
            depend on it, because all image tokens are alike.
    """
    result = list(known[: len(tokens) // KV_BLOCK])
    for page in range(len(result), len(tokens) // KV_BLOCK):
        before = result[-1] if result else root
        first, end = page * KV_BLOCK, (page + 1) * KV_BLOCK
        page_tokens = np.asarray(tokens[first:end], np.int64).tobytes()
        shown = b"".join(content for start, stop, content in images if start < end and stop > first)
        person = b"images" if shown else b""
        hashed = hashlib.blake2b(before + page_tokens + shown, digest_size=_DIGEST_BYTES, person=person)
        result.append(hashed.digest())
    return result


class PagePool:
    """The pages of a cache, by their ids.

    A page is free, or sequences refer to it, or the pool keeps it for later sequences with the same prefix. When no
    page is free, the pool evicts the least recently used kept page.
    """

    def __init__(self, num_pages: int, *, keeps_prefixes: bool = True, snapshots: SnapshotCache | None = None) -> None:
        """A pool of free pages, with `snapshots` of prefixes for models with state in slots."""
        if num_pages < 1:
            raise ValueError(f"PagePool: num_pages is {num_pages}; accepted: at least 1")
        self.num_pages = num_pages
        self.keeps_prefixes = keeps_prefixes
        self.snapshots = snapshots
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._kept: OrderedDict[int, None] = OrderedDict()  # the least recently used page comes first
        self._page_by_digest: dict[Digest, int] = {}
        self._digest_by_page: dict[int, Digest] = {}

    @property
    def available(self) -> int:
        """Pages that `take` can still return."""
        return len(self._free) + len(self._kept)

    @property
    def in_use(self) -> int:
        """Pages that sequences refer to."""
        return self.num_pages - self.available

    def take(self) -> int | None:
        """Returns a page with one reference, or None if sequences refer to all pages."""
        if self._free:
            page = self._free.pop()
        elif self._kept:
            page, _ = self._kept.popitem(last=False)
            self._forget(page)
        else:
            return None
        self._references[page] = 1
        return page

    def known(self, prefix: Sequence[Digest]) -> int:
        """Returns the number of pages that `share` would return."""
        return next((pages for pages, name in enumerate(prefix) if name not in self._page_by_digest), len(prefix))

    def share(self, prefix: Iterable[Digest]) -> list[int]:
        """Returns the pages of the longest known part of a prefix, and adds a reference to each of them."""
        pages = []
        for digest in prefix:
            page = self._page_by_digest.get(digest)
            if page is None:
                break
            self._kept.pop(page, None)
            self._references[page] += 1
            pages.append(page)
        return pages

    def name(self, page: int, digest: Digest) -> None:
        """Makes a full page in use available to `share`. If several pages have the digest, the first one counts."""
        if self.keeps_prefixes and digest not in self._page_by_digest and page not in self._digest_by_page:
            self._page_by_digest[digest] = page
            self._digest_by_page[page] = digest

    def release(self, pages: Sequence[int]) -> None:
        """Removes one reference to each page of a sequence, given in the order of the sequence's tokens."""
        for page in reversed(pages):  # the end of a prefix is evicted before its beginning
            self._references[page] -= 1
            assert self._references[page] >= 0, f"page {page} is released more often than it was taken"
            if self._references[page]:
                continue
            if page in self._digest_by_page:
                self._kept[page] = None
            else:
                self._free.append(page)

    def forget_prefixes(self) -> None:
        """Clears the prefix cache, as is needed after a change of weights."""
        for page in list(self._digest_by_page):
            self._forget(page)
        self._free += self._kept
        self._kept.clear()
        if self.snapshots is not None:
            self.snapshots.clear()

    def _forget(self, page: int) -> None:
        del self._page_by_digest[self._digest_by_page.pop(page)]
