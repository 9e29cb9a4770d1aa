"""Shared code of the kernels of attention gradients on Hopper: operands, turns, and a tile's arithmetic.

Both kernels keep 64 rows in shared memory per warpgroup and stream blocks of 64 rows of the other side through slots.
Copies into a slot complete its two `loaded` barriers, one per operand, so that the first product need not wait for the
second operand. Both warpgroups read every slot, and release it at a named barrier that the loading warp awaits.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from detjax.contract import ACCUMULATOR
from detjax.operands.options import Masking
from detjax.pallas.hopper.attention.backward_rows import KeyPages
from detjax.pallas.hopper.attention.backward_schedule import Problem, Schedule
from detjax.pallas.hopper.attention.mask import load_words
from detjax.pallas.hopper.attention.online_softmax import exponent_scale, soft_cap_tanh
from detjax.pallas.hopper.attention.prefill_schedule import Tiles
from detjax.pallas.hopper.attention.queries_on_rows import splat
from detjax.pallas.hopper.attention.warpgroups import (
    FIRST_BARRIER,
    LOADING_REGISTERS,
    MULTIPLYING_REGISTERS,
    WARPGROUPS,
    arrive_for_loader,
    pass_turn,
    sync_with_consumers,
    take_turn,
)
from detjax.pallas.hopper.mosaic.layouts import PER_ROW, ROWS
from detjax.pallas.hopper.mosaic.tiles import fma, mask_bits

_FREE: Final = FIRST_BARRIER
"""First of the named barriers of slots, one each."""
SQUARE: Final = (ROWS, ROWS)
"""Shape of a tile of scores. Both of its products, scores and `dP`, take 64 registers of a thread, next to 128 for sums
of 256 columns. With 128 keys they would take 128, and a thread has 240."""
SUMS: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


class Operands(NamedTuple):
    """Input arrays of both kernels. The one for queries has `tiles` and `o`, the one for keys `pages` and `delta`.

    Rows of queries are laid out by `backward_rows.RequestRows`.
    """

    q: Any
    do: Any
    normalizers: Any
    k_pages: Any
    v_pages: Any
    page_table: Any
    q_start: Any
    kv_length: Any
    slopes: Any | None
    mask: Any | None
    tiles: Tiles | None = None
    o: Any = None
    pages: KeyPages | None = None
    delta: Any = None


def everywhere(value: Array | int) -> Array:
    """Repeats an integer in every row."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.int32), PER_ROW)


def quotient(x: Array, divisor: int, *, up: bool = False) -> Array:
    """Returns `x / divisor`, at least 0, rounded down or up."""
    return lax.div(lax.max(x + (divisor - 1 if up else 0), jnp.int32(0)), jnp.int32(divisor))


class Tile(NamedTuple):
    """Operands of a tile's scores, in the scores' orientation: functions, called where needed, to save registers.

    Attributes:
        normalizers: returns the query's normalizer at every element.
        delta: returns the query's delta at every element.
        distances: returns the distance of each key from its query, int32.
        mask: sets scores to -inf where a query does not see a key; None if it sees all.
    """

    normalizers: Callable[[], Array]
    delta: Callable[[], Array]
    distances: Callable[[], Array]
    mask: Callable[[Array], Array] | None


def combined_mask(by_position: Callable[[Array], Array] | None, words: list[Array]) -> Callable[[Array], Array] | None:
    """Returns a function that masks scores by positions and by the words of the call's mask; None without either."""
    if not words:
        return by_position
    return lambda s: mask_bits(s if by_position is None else by_position(s), *words)


class Kernel:
    """Base of both kernels' CTAs."""

    def __init__(
        self, problem: Problem, schedule: Schedule, masking: Masking, operands: Operands, scratch: dict[str, Any]
    ) -> None:
        self.problem, self.schedule, self.masking = problem, schedule, masking
        self.operands, self.scratch = operands, scratch
        self.warpgroup = lax.axis_index("warpgroup")
        self.cta = lax.axis_index("cta")
        self.stages = jnp.int32(schedule.stages)
        self.rows = pl.ds(self.warpgroup * ROWS, ROWS)

    def await_free(self, slot: Array) -> None:
        """Waits, in a loading warp, until a slot is free."""
        sync_with_consumers(_FREE + slot)

    def free(self, slot: Array | int) -> None:
        """Releases a slot."""
        arrive_for_loader(_FREE + slot)

    def mask_words(self, request: Array, head: Array, row: Array, column: Array) -> list[Array]:
        """Loads the words of the call's mask for a tile; none without a mask."""
        mask = self.operands.mask
        return [] if mask is None else [load_words(mask, request, head, row, column)]

    def head_slope(self, head: Array) -> Array | None:
        """Returns the ALiBi slope at every element of a tile, or None."""
        slopes = self.operands.slopes
        return None if slopes is None else splat(slopes[head], SQUARE)

    def probabilities(self, s: Array, tile: Tile, slopes: Array | None) -> tuple[Array, Array | None]:
        """Returns the probabilities of a tile of scores, and the derivative of the soft cap."""
        cap, cap_slope = self.masking.soft_cap, None
        if cap is not None or slopes is not None:
            s = s * np.float32(self.masking.scale)
        if cap is not None:
            tanh = soft_cap_tanh(s, cap)
            s, cap_slope = np.float32(cap) * tanh, fma(-tanh, tanh, splat(1.0, SQUARE))
        if slopes is not None:
            s = fma(slopes, tile.distances().astype(ACCUMULATOR), s)
        if tile.mask is not None:
            s = tile.mask(s)
        return jnp.exp2(fma(s, splat(exponent_scale(self.masking), SQUARE), -tile.normalizers())), cap_slope

    def score_gradients(self, p: Array, dp: Array, tile: Tile, cap_slope: Array | None) -> Array:
        """Returns the gradients of the scaled scores before the soft cap, in the operands' dtype."""
        ds = p * (dp - tile.delta())
        return (ds if cap_slope is None else ds * cap_slope).astype(self.problem.dtype)

    def run_roles(self, multiply: Callable[[], None], load: Callable[[], None]) -> None:
        """Runs the warpgroup's role: `multiply` in two of them, `load` in one warp of the third."""

        def multiply_all() -> None:
            plgpu.set_max_registers(MULTIPLYING_REGISTERS, action="increase")
            # Slots are free at first: the loader awaits a release before every copy, also the first one into a slot.
            for slot in range(self.schedule.stages):
                self.free(slot)
            pl.when(self.warpgroup == 1)(lambda: pass_turn(self.warpgroup))
            multiply()
            pl.when(self.warpgroup == 0)(lambda: take_turn(self.warpgroup))
            plgpu.wait_smem_to_gmem(0)

        def load_all() -> None:
            plgpu.set_max_registers(LOADING_REGISTERS, action="decrease")

            @plgpu.warp_map
            def _(warp: Array) -> None:
                pl.when(warp == 0)(load)

        lax.cond(self.warpgroup < WARPGROUPS, multiply_all, load_all)
