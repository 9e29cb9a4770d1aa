"""Load balancing between replicas. No bit depends on it."""

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
"""Samples by which a replica that has a prompt's prefix may exceed the least loaded one and still be preferred."""
_PAGES: Final = 64
"""First pages of a prompt to compare. Digests of more would block all streams for milliseconds."""
_REMEMBERED: Final = 1 << 16
"""Maximum number of pages whose last replica is remembered."""


def first_pages(request: Request, config: DecoderConfig) -> list[Digest]:
    """Returns the digests of a prompt's first full pages, as in an engine's prefix cache.

    Text prompts that are not encoded yet, and images without patches, have no digests.
    """
    if isinstance(request.prompt, str):
        return []
    prompt, spans = request.prompt, list[tuple[int, int, bytes]]()
    if len(request.images):
        shown = [image for image in request.images if isinstance(image, ImagePatches | VideoPatches)]
        if len(shown) < len(request.images):
            return []
        runs = image_runs(prompt, config.placeholders)
        # If their numbers differ, the replica rejects the request.
        spans = [(*run, image.digest) for run, image in zip(runs, places(shown), strict=False)]
    return digests(prompt[: _PAGES * KV_BLOCK], root=prefix_root(request.cache_salt), images=spans)


class ReplicaChoice:
    """Chooses a replica for each call: the one that has the prompt's prefix, or the least loaded one.

    The preferred replica is the last one that got a prompt with the longest common run of first pages. It is chosen
    unless it has too many more samples in flight than the least loaded one. At equal load, the first replica is chosen.

    Attributes:
        in_flight: number of samples in flight on each replica.
    """

    def __init__(self, replicas: int, excess: int = EXCESS) -> None:
        """A choice between idle replicas; see `EXCESS`."""
        self.in_flight = [0] * replicas
        self._excess = excess
        self._last: OrderedDict[Digest, int] = OrderedDict()
        """The last replica of each page, least recently used page first."""

    def choose(self, ready: Collection[int], pages: Sequence[Digest]) -> int:
        """Returns one of the `ready` replicas, and records that it has the pages of a prompt."""
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
        """Forgets a replica's pages when its process is lost."""
        for page in [page for page, last in self._last.items() if last == replica]:
            del self._last[page]
