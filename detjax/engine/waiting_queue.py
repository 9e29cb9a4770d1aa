"""The queue of sequences that wait for a slot."""

import bisect
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator

from detjax.engine.sequence import Sequence


class WaitingQueue:
    """Sequences that wait for a slot, in round-robin order of clients.

    A turn gives a slot to the earliest sequence of a client, and then the client goes to the end of the queue. So a
    client waits for at most one sequence of each other client, however many they have.

    Preempted sequences have had their turn. They come before all others, in the order of their turns.
    """

    def __init__(self) -> None:
        # By client, in the order of turns; then by the first sample of the request, which the others may wait for.
        self._clients: OrderedDict[str | None, dict[Sequence, dict[Sequence, None]]] = OrderedDict()
        self._preempted: list[Sequence] = []
        self._length = 0
        self._turns = 0

    def __len__(self) -> int:
        """Returns the number of sequences. It may be called from any thread."""
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """Yields the sequences, in no particular order."""
        yield from self._preempted
        for requests in self._clients.values():
            for sequences in requests.values():
                yield from sequences

    @property
    def has_preempted(self) -> bool:
        """True if a preempted sequence waits."""
        return bool(self._preempted)

    def append(self, sequence: Sequence) -> None:
        """Adds a sequence that has never had a slot."""
        requests = self._clients.setdefault(sequence.context.client, {})
        requests.setdefault(sequence.leader or sequence, {})[sequence] = None
        self._length += 1

    def put_back(self, sequence: Sequence) -> None:
        """Adds a sequence that has been preempted."""
        bisect.insort(self._preempted, sequence, key=operator.attrgetter("turn"))
        self._length += 1

    def first(self, is_ready: Callable[[Sequence], bool]) -> Sequence | None:
        """Returns the sequence that gets the next slot, or None if no sequence is ready.

        `is_ready` is the same for all samples of a request that had no turn, so it is called for the earliest one.
        """
        for sequence in self._preempted:
            if is_ready(sequence):
                return sequence
        for requests in self._clients.values():
            for sequences in requests.values():
                if is_ready(sequence := next(iter(sequences))):
                    return sequence
        return None

    def take(self, sequence: Sequence) -> None:
        """Removes a sequence that gets a slot, and records its turn."""
        self.remove(sequence)
        if sequence.turn is None:
            sequence.turn, self._turns = self._turns, self._turns + 1
            if sequence.context.client in self._clients:
                self._clients.move_to_end(sequence.context.client)

    def remove(self, sequence: Sequence) -> None:
        self._length -= 1
        if sequence.turn is not None:
            self._preempted.remove(sequence)
            return
        client, leader = sequence.context.client, sequence.leader or sequence
        del self._clients[client][leader][sequence]
        if not self._clients[client][leader]:
            del self._clients[client][leader]
        if not self._clients[client]:
            del self._clients[client]
