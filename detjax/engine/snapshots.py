"""Snapshots: copies of slots at the ends of prefixes, kept in host memory for requests that begin alike.

A layer with state in slots keeps nothing in pages. A request's slot is a function of its tokens so far, so a copy
serves every request that begins with them, exactly as if the request had computed the tokens itself.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, Final, NamedTuple

MAX_PER_STEP: Final = 2
"""Maximum number of snapshots that a step takes, and that it restores; each needs as much device memory as a slot."""
SLOTS_IN_TRANSIT: Final = 8
"""Slots' worth of memory that an engine reserves for copies: three steps take snapshots while one restores them."""


class Snapshot:
    """A copy of a slot at one position.

    Attributes:
        rows: the slot's rows of each array, on the device or on the host; None until the step that computes them is
            launched, which happens before any step that needs them.
    """

    def __init__(self) -> None:
        self.rows: Any = None


class SnapshotCache:
    """An LRU cache of snapshots, by the digest of the page before them. No bit depends on its content.

    Attributes:
        capacity: maximum number of snapshots.
        bytes_of_snapshot: the bytes of one snapshot.
        fewest_tokens: minimum number of tokens that a snapshot must save over the previous one.
        hits: number of times a sequence resumed from a snapshot.
    """

    def __init__(self, capacity: int, bytes_of_snapshot: int = 0, fewest_tokens: int = 1) -> None:
        if capacity < 1:
            raise ValueError(f"SnapshotCache: capacity is {capacity}; accepted: at least 1")
        self.capacity = capacity
        self.bytes_of_snapshot = bytes_of_snapshot
        self.fewest_tokens = fewest_tokens
        self.hits = 0
        self._kept: OrderedDict[Hashable, Snapshot] = OrderedDict()  # the least recently used comes first

    def __len__(self) -> int:
        """Returns the number of snapshots. It may be called from any thread."""
        return len(self._kept)

    def __contains__(self, digest: Hashable) -> bool:
        """Returns whether there is a snapshot after the page of a digest."""
        return digest in self._kept

    def newest(self, prefix: Sequence[Hashable]) -> tuple[int, Snapshot | None]:
        """Returns the number of pages before the last snapshot of a prefix, and the snapshot; otherwise 0 and None."""
        for pages in range(len(prefix), 0, -1):
            if (snapshot := self._kept.get(prefix[pages - 1])) is not None:
                self._kept.move_to_end(prefix[pages - 1])
                return pages, snapshot
        return 0, None

    def add(self, digest: Hashable) -> Snapshot:
        """Returns a new snapshot after the page of a digest, which must not have one."""
        assert digest not in self._kept
        if len(self._kept) == self.capacity:
            self._kept.popitem(last=False)
        snapshot = self._kept[digest] = Snapshot()
        return snapshot

    def clear(self) -> None:
        """Removes all snapshots, as is needed after a change of weights."""
        self._kept.clear()


class SlotCopies(NamedTuple):
    """Copies between slots and snapshots in one step.

    Attributes:
        restored: slots and the snapshots to restore to them before the step.
        taken: slots and the snapshots to fill from them after the step.
    """

    restored: list[tuple[int, Snapshot]]
    taken: list[tuple[int, Snapshot]]
