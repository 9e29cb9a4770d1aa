"""The arrangement of grouped tokens for `group_sums`: rows in steps, steps in stages, stages in pieces of a fixed size.

A step has up to `WEIGHT_GRADIENT_TOKENS` rows of one sequence, as the contract says, and is padded to that size with
zeros; a group's steps are padded to whole stages. The number of steps depends on how sequences are spread over groups,
which only the device knows. So the work is a loop over pieces of a static size: a group that does not end in one piece
continues in the next, as it would in another microbatch.
"""

import dataclasses
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
from jax import Array

from detjax.contract import WEIGHT_GRADIENT_TOKENS
from detjax.operands.numerics import ceil_div, round_up
from detjax.portable.tiles import group_tiles

STAGE_TOKENS: Final = 64
"""Tokens of a stage."""

STAGE_STEPS: Final = STAGE_TOKENS // WEIGHT_GRADIENT_TOKENS
"""Steps of a stage."""


class Stages(NamedTuple):
    """The stages of every group, int32 `[G]` each; groups without stages come last.

    Attributes:
        group: the group.
        first: its first stage.
        number: its number of stages.
    """

    group: Any
    first: Any
    number: Any

    @property
    def table(self) -> Array:
        """The array that kernels read: the number of groups with stages, then the three numbers of each group."""
        return jnp.concatenate([jnp.sum(self.number > 0, dtype=jnp.int32)[None], *self])

    @staticmethod
    def at(table: Any, groups: int, index: Array) -> "Stages":
        """Reads the three numbers at an index of a table, in a kernel."""
        return Stages(*(table[1 + field * groups + index] for field in range(3)))


@dataclasses.dataclass(frozen=True, eq=False)
class StagedSteps:
    """The steps of all groups, and their positions in the padded sequence of steps.

    Attributes:
        row: the first row of each step, int32 `[M]`.
        rows: its number of rows.
        first: the first step of each group, int32 `[G]`.
        number: its number of steps.
        ends: the end of its padded steps.
        size: the padded steps of a piece.
    """

    row: Array
    rows: Array
    first: Array
    number: Array
    ends: Array
    size: int

    @classmethod
    def from_sizes(cls, group_sizes: Array, rows: int, sequences: Array | None) -> "StagedSteps":
        """Returns the steps of groups with these sizes `[G]`, whose rows belong to these sequences `[M]`.

        One piece suffices unless many sequences share groups.
        """
        groups = len(group_sizes)
        tiles = group_tiles(group_sizes, rows, WEIGHT_GRADIENT_TOKENS, sequences)
        group = jnp.where(jnp.arange(rows, dtype=jnp.int32) < tiles.number, tiles.group, jnp.int32(groups))
        bounds = jnp.searchsorted(group, jnp.arange(groups + 1, dtype=jnp.int32)).astype(jnp.int32)
        number = bounds[1:] - bounds[:-1]
        ends = jnp.cumsum(-(-number // STAGE_STEPS) * STAGE_STEPS, dtype=jnp.int32)
        size = round_up(ceil_div(rows, WEIGHT_GRADIENT_TOKENS) + groups, STAGE_STEPS)
        return cls(tiles.first, tiles.rows, bounds[:-1], number, ends, size)

    @property
    def pieces(self) -> Array:
        """The number of pieces, an int32 scalar."""
        return -(-self.ends[-1] // self.size)

    def piece(self, index: Array) -> tuple[Array, Stages]:
        """Returns the row at each position of a piece, int32, M for padding; and the groups' stages in the piece."""
        begins = jnp.concatenate([jnp.zeros(1, jnp.int32), self.ends[:-1]])
        place = index * self.size + jnp.arange(self.size, dtype=jnp.int32)
        group = jnp.minimum(jnp.searchsorted(self.ends, place, side="right").astype(jnp.int32), len(self.ends) - 1)
        within = place - begins[group]
        is_step = within < self.number[group]
        step = jnp.where(is_step, self.first[group] + within, 0)
        token = jnp.arange(WEIGHT_GRADIENT_TOKENS, dtype=jnp.int32)[None]
        is_row = (token < self.rows[step][:, None]) & is_step[:, None]
        rows = jnp.where(is_row, self.row[step][:, None] + token, jnp.int32(len(self.row)))

        first, end = (jnp.clip(x - index * self.size, 0, self.size) // STAGE_STEPS for x in (begins, self.ends))
        # Long groups come first, so that no worker starts a long tile when the others finish.
        order = jnp.argsort(first - end, stable=True).astype(jnp.int32)
        return rows.reshape(-1), Stages(order, first[order], (end - first)[order])
