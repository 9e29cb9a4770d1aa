"""The queue of waiting sequences: clients take turns, and nobody waits for ever."""

import random
from collections import Counter

from detjax import SamplingParams
from detjax.engine.sequence import RequestContext, Sequence, samples
from detjax.engine.waiting_queue import WaitingQueue


def waiting(queue: WaitingQueue, client: str | None, n: int = 1) -> list[Sequence]:
    sequences = samples((1,), SamplingParams(n=n), RequestContext(client=client))
    for sequence in sequences:
        queue.append(sequence)
    return sequences


def is_ready(_: Sequence) -> bool:
    return True


def taken(queue: WaitingQueue) -> Sequence:
    sequence = queue.first(is_ready)
    assert sequence is not None
    queue.take(sequence)
    return sequence


def test_clients_take_turns_and_within_a_client_the_earliest_comes_first() -> None:
    queue = WaitingQueue()
    a, (b,), c, (d,) = waiting(queue, "a", 3), waiting(queue, "b"), waiting(queue, None, 2), waiting(queue, "a")
    assert (len(queue), {*queue}) == (7, {*a, b, *c, d})
    expected = [a[0], b, c[0], a[1], c[1], a[2], d]
    assert [taken(queue) for _ in expected] == expected
    assert [sequence.turn for sequence in expected] == list(range(7))
    assert (len(queue), [*queue], queue.first(is_ready)) == (0, [], None)


def test_a_client_that_always_has_more_waits_for_the_others_and_they_for_one_of_its_sequences() -> None:
    queue, draw = WaitingQueue(), random.Random(0)
    arrived: dict[Sequence, int] = {}
    waiting(queue, "crowd", 960)
    for step in range(200):
        for client in draw.sample("abc", draw.randint(0, 2)):
            if not any(sequence.context.client == client for sequence in queue):
                arrived |= dict.fromkeys(waiting(queue, client), step)
        sequence = taken(queue)
        # At most one of each other client comes before.
        assert step - arrived.pop(sequence, step) <= 3
    assert Counter(sequence.context.client for sequence in queue)["crowd"] < 960 - 200 // 4


def test_samples_that_are_not_ready_lose_neither_their_place_nor_their_clients_turn() -> None:
    queue = WaitingQueue()
    a, (b,) = waiting(queue, "a", 2), waiting(queue, "b")
    queue.take(a[0])
    (c,) = waiting(queue, "c")
    queue.take(b)
    assert queue.first(lambda sequence: sequence is not a[1]) is c
    assert queue.first(is_ready) is a[1]


def test_preempted_sequences_come_first_in_the_order_of_their_turns_and_keep_them() -> None:
    queue = WaitingQueue()
    a, (b,), (c,) = waiting(queue, "a", 3), waiting(queue, "b"), waiting(queue, "c")
    queue.take(a[0])
    queue.take(b)
    for sequence in (b, a[0]):
        queue.put_back(sequence)
    assert len(queue) == 5
    assert [taken(queue) for _ in range(5)] == [a[0], b, c, a[1], a[2]]
    assert (a[0].turn, b.turn, c.turn) == (0, 1, 2)


def test_removed_sequences_leave_nothing_behind() -> None:
    queue = WaitingQueue()
    a, (b,) = waiting(queue, "a", 3), waiting(queue, "b")
    queue.take(a[0])
    queue.put_back(a[0])
    for sequence in (a[1], b, a[0], a[2]):
        queue.remove(sequence)
    assert (len(queue), [*queue], len(queue._clients), queue._preempted) == (0, [], 0, [])


def test_a_sequence_alone_is_one_of_no_client() -> None:
    queue = WaitingQueue()
    alone, other = (
        Sequence((1,), SamplingParams()),
        Sequence((1,), SamplingParams(), context=RequestContext(client="x")),
    )
    queue.append(alone)
    queue.append(other)
    assert [taken(queue), taken(queue)] == [alone, other]
