"""Snapshots: what slots held at the ends of prefixes, kept in the host's memory for requests that begin alike.

A layer whose state lies in slots has nothing of a prefix in pages. What a request has in its slot is a function of its
tokens so far, so a copy of it serves every request that begins with them: it goes on as if it had computed them itself.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, Final, NamedTuple

MAX_PER_STEP: Final = 2
"""Snapshots that a step takes at most, and restores at most: each needs as much of the device's memory as a slot."""
SLOTS_IN_TRANSIT: Final = 8
"""Slots' worth of memory that an engine leaves free for copies: those that three steps take, and that one restores."""


class Snapshot:
    """What a slot held at one position.

    Attributes:
        rows: the slot's rows of each array, on the device or on the host; None until the device has been given the step
            that computes them. That comes before every step that needs them.
    """

    def __init__(self) -> None:
        self.rows: Any = None


class SnapshotCache:
    """Snapshots by the digests of the pages before them. The one that has been unused the longest is dropped first.

    No bit depends on which ones are there.

    Attributes:
        capacity: how many snapshots there may be.
        bytes_of_snapshot: the bytes of one of them.
        fewest_tokens: how many tokens a snapshot must spare those who go on from it, over the snapshot before it.
        hits: how often a sequence has gone on from one.
    """

    def __init__(self, capacity: int, bytes_of_snapshot: int = 0, fewest_tokens: int = 1) -> None:
        if capacity < 1:
            raise ValueError(f"SnapshotCache: capacity is {capacity}; accepted: at least 1")
        self.capacity = capacity
        self.bytes_of_snapshot = bytes_of_snapshot
        self.fewest_tokens = fewest_tokens
        self.hits = 0
        self._kept: OrderedDict[Hashable, Snapshot] = OrderedDict()  # the one unused the longest comes first

    def __len__(self) -> int:
        """Returns how many snapshots there are. It may be called from any thread."""
        return len(self._kept)

    def __contains__(self, digest: Hashable) -> bool:
        """Returns whether there is a snapshot behind the page of a digest."""
        return digest in self._kept

    def newest(self, prefix: Sequence[Hashable]) -> tuple[int, Snapshot | None]:
        """Returns how many pages of a prefix stand before its last snapshot, and that one; 0 and None without."""
        for pages in range(len(prefix), 0, -1):
            if (snapshot := self._kept.get(prefix[pages - 1])) is not None:
                self._kept.move_to_end(prefix[pages - 1])
                return pages, snapshot
        return 0, None

    def add(self, digest: Hashable) -> Snapshot:
        """Returns a new snapshot behind the page of a digest, which has none yet."""
        assert digest not in self._kept
        if len(self._kept) == self.capacity:
            self._kept.popitem(last=False)
        snapshot = self._kept[digest] = Snapshot()
        return snapshot

    def drop(self, digest: Hashable) -> None:
        """Forgets a snapshot."""
        del self._kept[digest]

    def clear(self) -> None:
        """Forgets all snapshots, as is needed after a change of weights."""
        self._kept.clear()


class SlotCopies(NamedTuple):
    """What a step copies between slots and snapshots.

    Attributes:
        restored: before the step, each slot and the snapshot that it gets.
        taken: after the step, each slot and the snapshot that its rows become.
    """

    restored: list[tuple[int, Snapshot]]
    taken: list[tuple[int, Snapshot]]
