"""Rounds in which the leaves of a model are updated, so that one program serves many of them."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax


def update_groups(leaves: Sequence[Any]) -> list[tuple[int, ...]]:
    """Returns the indices of a model's leaves by rounds, each of which has about as many leaves of every shape.

    There are as many rounds as most shapes have leaves, so a round is about a layer. As layers have the same shapes, a
    program that takes the leaves of a round serves nearly all rounds, and the time of compilation does not grow with
    the number of layers. What a program needs memory for is a round, not the model.

    Args:
        leaves: pytrees of arrays, or of shapes and dtypes.
    """
    kinds: dict[Any, list[int]] = defaultdict(list)
    for index, leaf in enumerate(leaves):
        arrays, structure = jax.tree.flatten(leaf)
        kinds[structure, tuple((x.shape, x.dtype) for x in arrays)].append(index)
    rounds = max(statistics.multimode(map(len, kinds.values())), default=0)
    return [
        tuple(
            index
            for indices in kinds.values()
            for index in indices[number * len(indices) // rounds : (number + 1) * len(indices) // rounds]
        )
        for number in range(rounds)
    ]
