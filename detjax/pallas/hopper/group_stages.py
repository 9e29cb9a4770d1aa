"""Where the tokens of groups lie for `group_sums`: in steps, whose places make stages, which are worked on in pieces.

A step has up to `WEIGHT_GRADIENT_TOKENS` rows of one sequence, as the contract says. It takes as many places, the rest
of which are filled with zeros, and a group's steps are filled up to whole stages. How many steps there are depends on
how sequences meet groups, and is known on the device alone. So there are as many pieces as it takes, of one size each:
a group that begins in one piece goes on in the next one, as if this was another microbatch.
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
    """The stages of every group, int32 `[G]` each, in an order in which groups without stages come last.

    Attributes:
        group: the group.
        first: its first stage.
        number: how many stages it has.
    """

    group: Any
    first: Any
    number: Any

    @property
    def table(self) -> Array:
        """What kernels read: the number of groups that have stages, and the three numbers of each group."""
        return jnp.concatenate([jnp.sum(self.number > 0, dtype=jnp.int32)[None], *self])

    @staticmethod
    def at(table: Any, groups: int, index: Array) -> "Stages":
        """The three numbers at an index of a table in a kernel's memory."""
        return Stages(*(table[1 + field * groups + index] for field in range(3)))


@dataclasses.dataclass(frozen=True, eq=False)
class StagedSteps:
    """The steps of all groups, and their places.

    Attributes:
        row: the first row of each step, int32 `[M]`.
        rows: how many rows it has.
        first: the first step of each group, int32 `[G]`.
        number: how many steps it has.
        ends: the end of its places, counted in steps.
        size: the places of a piece, counted in steps.
    """

    row: Array
    rows: Array
    first: Array
    number: Array
    ends: Array
    size: int

    @classmethod
    def from_sizes(cls, group_sizes: Array, rows: int, sequences: Array | None) -> "StagedSteps":
        """The steps of groups of so many rows, `[G]`, which belong to these sequences, `[M]`.

        One piece has room for groups that many sequences do not meet.
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
        """How many pieces there are, an int32 scalar."""
        return -(-self.ends[-1] // self.size)

    def piece(self, index: Array) -> tuple[Array, Stages]:
        """Returns the row at each place of a piece, int32, M where there is none; and the groups' stages in it."""
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
        # Groups with many stages come first, so that no worker begins a long tile when the others end.
        order = jnp.argsort(first - end, stable=True).astype(jnp.int32)
        return rows.reshape(-1), Stages(order, first[order], (end - first)[order])
