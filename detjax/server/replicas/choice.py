"""The choice of the replica that answers a call. No bit depends on it."""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Final

from detjax.contract import KV_BLOCK
from detjax.engine import Request
from detjax.engine.page_pool import Digest, digests, prefix_root
from detjax.models import DecoderConfig
from detjax.models.vision.images import ImagePatches, VideoPatches
from detjax.models.vision.prompt_images import image_runs, places

EXCESS: Final = 8
"""Samples that a replica preferred for a prompt's prefix may have beyond the least loaded replica."""
_PAGES: Final = 64
"""First pages of a prompt that are looked at. Digests of more would take milliseconds, in which no stream goes on."""
_REMEMBERED: Final = 1 << 16
"""Pages whose last replica is remembered."""


def first_pages(request: Request, config: DecoderConfig) -> list[Digest]:
    """Returns the digests of a prompt's first full pages, as an engine's prefix cache knows them.

    A text that a replica has yet to encode has no digests, nor have images without patches.
    """
    if isinstance(request.prompt, str):
        return []
    prompt, spans = request.prompt, list[tuple[int, int, bytes]]()
    if len(request.images):
        shown = [image for image in request.images if isinstance(image, ImagePatches | VideoPatches)]
        if len(shown) < len(request.images):
            return []
        runs = image_runs(prompt, config.placeholders)
        # Where their numbers differ, the replica refuses the request.
        spans = [(*run, image.digest) for run, image in zip(runs, places(shown), strict=False)]
    return digests(prompt[: _PAGES * KV_BLOCK], root=prefix_root(request.cache_salt), images=spans)


class ReplicaChoice:
    """Chooses replicas for calls: the least loaded one, or the one that knows the beginning of the prompt.

    A prompt's replica is the last one that got a prompt with the longest run of the same first pages. It is
    chosen unless it has too many more samples in flight than the least loaded one. Of those with the same load the
    first one is chosen.

    Attributes:
        in_flight: samples of each replica.
    """

    def __init__(self, replicas: int, excess: int = EXCESS) -> None:
        """A choice between replicas that have nothing to do.

        Args:
            replicas: their number.
            excess: see `EXCESS`.
        """
        self.in_flight = [0] * replicas
        self._excess = excess
        self._last: OrderedDict[Digest, int] = OrderedDict()
        """The last replica of each page; the page that has been unused the longest comes first."""

    def choose(self, ready: Collection[int], pages: Sequence[Digest]) -> int:
        """Returns one of the replicas that are ready, and remembers that it knows the pages.

        Args:
            ready: replicas, one at least.
            pages: digests of the prompt's first pages.
        """
        chosen = least = min(ready, key=lambda replica: (self.in_flight[replica], replica))
        last = next((last for page in reversed(pages) if (last := self._last.get(page)) in ready), None)
        if last is not None and self.in_flight[last] <= self.in_flight[least] + self._excess:
            chosen = last
        for page in pages:
            self._last[page] = chosen
            self._last.move_to_end(page)
        while len(self._last) > _REMEMBERED:
            self._last.popitem(last=False)
        return chosen

    def forget(self, replica: int) -> None:
        """Forgets what a replica knows, as is needed when another process takes its place."""
        for page in [page for page, last in self._last.items() if last == replica]:
            del self._last[page]
