"""Plans of products of codes: which tokens and weights a CTA has, its stages, and the registers of its threads."""

import dataclasses
import math
from typing import Final, Self

import jax.numpy as jnp

from detjax.contract import FP8_BLOCK
from detjax.operands.numerics import round_up
from detjax.pallas.hopper import device
from detjax.pallas.hopper.matmul.plan import MATRIX_ROWS, Plan
from detjax.pallas.hopper.quantized.rows import E4M3
from detjax.pallas.hopper.quantized.widening import SCALE_BYTES

_SCALE_UNIT: Final = 32
"""Scales of tokens in shared memory are a multiple: the copy engine writes to multiples of 128 bytes."""

_STAGES_WITH_PROLOGUE: Final = 4
"""Fewest stages of a product with a prologue."""

_LOOP_REGISTERS: Final = 168
"""Registers of a consumer for sums, products and scales of tokens; the rest are for addresses and temporaries."""

_LOOP_REGISTERS_WITH_LATE_SCALES: Final = 192
"""The same for sums and products alone, where scales are loaded when products are there."""


@dataclasses.dataclass(frozen=True)
class CodesPlan(Plan):
    """A plan of a product of codes, whose stages have whole blocks and their scales."""

    scale_dtype: jnp.dtype
    """Dtype of the weight's scales."""
    by_rows: bool = False
    """True if rows and weights have one scale each, not one for each block."""
    has_prologue: bool = False
    """True if the kernel computes the codes of the tokens, which then all stay in shared memory."""

    def with_prologue(self) -> Self | None:
        """Returns this plan with a prologue, or None if shared memory does not hold all tokens and enough stages.

        Stages become smaller until there are enough of them. Experts' products and scales of whole rows have none.
        """
        if not self.weights_on_rows or self.by_rows or self.problem.experts:
            return None
        lines = self.schedule.lines
        while lines >= 1:
            schedule = dataclasses.replace(self.schedule, lines=lines)
            plan = dataclasses.replace(self, schedule=schedule, has_prologue=True)
            if not plan.unmet_requirements() and plan.stages >= _STAGES_WITH_PROLOGUE:
                return plan
            lines //= 2
        return None

    @property
    def column_stages(self) -> int:
        """Stages of the column operand in shared memory: all of them after a prologue."""
        return self.k_steps if self.has_prologue else super().column_stages

    @property
    def reserved_bytes(self) -> int:
        """Bytes of shared memory for the codes and scales that a prologue computes."""
        return self.k_steps * self.token_bytes if self.has_prologue else super().reserved_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of the codes and scales of tokens in a stage."""
        return self.columns * self.tile_k + self.scaled_blocks * self.token_scales * 4

    @property
    def scale_unit(self) -> int:
        """Scales of a row of weights that are loaded together: a stage's, and as many as the copy engine addresses."""
        return max(SCALE_BYTES // self.scale_dtype.itemsize, self.scaled_blocks)

    @property
    def token_scales(self) -> int:
        """Scales of tokens in a block's buffer."""
        return round_up(self.schedule.tile_m, _SCALE_UNIT)

    @property
    def sharing_weights(self) -> int:
        """Neighbouring weights of a tile that share scales if all weights in a block of the checkpoint do."""
        return math.gcd(self.schedule.tile_n, FP8_BLOCK)

    @property
    def scaled_blocks(self) -> int:
        """Blocks of a stage that have scales of their own."""
        return 1 if self.by_rows else self.schedule.lines

    @property
    def loads_per_stage(self) -> int:
        """Copies that fill a stage: codes of both operands, the scales of each part, and the tokens' of each block."""
        loads = super().loads_per_stage + self.problem.parts
        return loads - self.column_parts if self.has_prologue else loads + self.scaled_blocks

    @property
    def bytes_per_stage(self) -> int:
        """Bytes of a stage in shared memory."""
        scales = self.problem.parts * self.schedule.tile_n * self.scale_unit * self.scale_dtype.itemsize
        stage = super().bytes_per_stage + scales + self.scaled_blocks * self.token_scales * 4
        return stage - self.token_bytes if self.has_prologue else stage

    @property
    def registers_of_a_product(self) -> int:
        """Registers of a thread for the products of a block and part, and as many for their sums."""
        return self.padded_rows * self.columns // device.WARPGROUP

    @property
    def at_once(self) -> int:
        """Products of blocks and parts that a warpgroup has in flight."""
        sums = self.registers_of_sums
        jobs, product = self.schedule.lines * self.problem.parts, self.registers_of_a_product
        if not self.weights_on_rows:
            return min(2, jobs, (_LOOP_REGISTERS_WITH_LATE_SCALES - sums) // product)
        return max(1, min(jobs, (_LOOP_REGISTERS - sums) // (product + self.columns // 4)))

    @property
    def registers_of_sums(self) -> int:
        """Registers of a thread for the sums of all parts."""
        return self.problem.parts * self.registers_of_a_product

    def unmet_requirements(self) -> list[str]:
        """Returns the requirements that this plan does not meet; an empty list if the kernel can be built."""
        held = self.registers_of_sums + self.registers_of_a_product + self.columns // 4
        requirements = {
            "whole tiles of the matrix unit's rows, if these are tokens": self.weights_on_rows
            or self.rows == MATRIX_ROWS,
            "e4m3 codes": self.problem.dtype == E4M3,
            "K in whole stages": self.problem.k % self.tile_k == 0 and self.line == FP8_BLOCK,
            "64 rows or fewer for each warpgroup": self.rows <= MATRIX_ROWS,
            "stages that divide a unit of scales": self.scale_unit % self.scaled_blocks == 0,
            "sums, products and scales that leave registers": (
                held <= _LOOP_REGISTERS if self.weights_on_rows else self.at_once >= self.problem.parts
            ),
        }
        return [text for text, holds in requirements.items() if not holds] or super().unmet_requirements()
