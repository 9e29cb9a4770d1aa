"""Groups of a model's leaves that are updated together, so that one program serves many groups."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax


def update_groups(leaves: Sequence[Any]) -> list[tuple[int, ...]]:
    """Splits a model's leaves into groups with about the same shapes, and returns the leaves' indices by group.

    The number of groups is the number of leaves that most shapes have, so a group is about a layer. Layers have equal
    shapes, so one program serves nearly all groups: compile time does not grow with the number of layers, and a program
    needs memory for a group, not for the model.

    Args:
        leaves: pytrees of arrays, or of shapes and dtypes.
    """
    kinds: dict[Any, list[int]] = defaultdict(list)
    for index, leaf in enumerate(leaves):
        arrays, structure = jax.tree.flatten(leaf)
        kinds[structure, tuple((x.shape, x.dtype) for x in arrays)].append(index)
    groups = max(statistics.multimode(map(len, kinds.values())), default=0)
    return [
        tuple(
            index
            for indices in kinds.values()
            for index in indices[number * len(indices) // groups : (number + 1) * len(indices) // groups]
        )
        for number in range(groups)
    ]
