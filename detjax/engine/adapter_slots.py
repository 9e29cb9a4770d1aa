"""The adapters that the device holds: which slot has which, and which one leaves when another is needed."""

from collections import OrderedDict

from detjax.models.adapters.adapter import Adapter


class AdapterSlots:
    """Slots for adapters. Running sequences refer to theirs; others stay until their slot is needed.

    The least recently used adapter that no running sequence has leaves first. Adapters are the same if their contents
    are, whatever their names. No bit depends on slots.

    Attributes:
        count: the number of slots.
        loads: the number of times that an adapter was written to a slot.
    """

    def __init__(self, count: int) -> None:
        """Empty slots."""
        self.count = count
        self.loads = 0
        self._free = list(range(count - 1, -1, -1))
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        """The slot of each adapter that the device has or will have; the least recently used one comes first."""
        self._references: dict[bytes, int] = {}
        self._pending: list[tuple[int, Adapter]] = []

    def has_room_for(self, adapter: Adapter | None) -> bool:
        """Returns whether a sequence with this adapter could run now."""
        if adapter is None or self._free or adapter.digest in self._slots:
            return True
        return any(not self._references[digest] for digest in self._slots)

    def take(self, adapter: Adapter) -> int:
        """Returns the slot of an adapter for another running sequence. There must be room for it."""
        slot = self._slots.get(adapter.digest)
        if slot is None:
            slot = self._free.pop() if self._free else self._evict()
            self._references[adapter.digest] = 0
            self._pending.append((slot, adapter))
            self.loads += 1
        self._slots[adapter.digest] = slot
        self._slots.move_to_end(adapter.digest)
        self._references[adapter.digest] += 1
        return slot

    def release(self, adapter: Adapter) -> None:
        """Removes the reference of a sequence that does not run any more."""
        self._references[adapter.digest] -= 1
        assert self._references[adapter.digest] >= 0, "an adapter is released more often than it was taken"

    def take_pending(self) -> list[tuple[int, Adapter]]:
        """Returns the slots to write before the next step, with their adapters, in order."""
        pending, self._pending = self._pending, []
        return pending

    def forget(self) -> None:
        """Empties all slots, as the device has lost their contents. No sequence may be running."""
        assert not any(self._references.values())
        self._free += self._slots.values()
        self._free.sort(reverse=True)
        self._slots.clear()
        self._references.clear()
        self._pending.clear()

    def _evict(self) -> int:
        digest = next(digest for digest in self._slots if not self._references[digest])
        del self._references[digest]
        return self._slots.pop(digest)
