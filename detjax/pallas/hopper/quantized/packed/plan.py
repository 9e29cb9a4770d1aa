"""Plans of the matmul with packed weights: a schedule, the meaning of the codes, and whether warpgroups take turns."""

import dataclasses
import math
from typing import ClassVar, Final

from detjax.pallas.hopper import device
from detjax.pallas.hopper.device import SWIZZLE_BYTES
from detjax.pallas.hopper.matmul.plan import MATRIX_ROWS, Plan
from detjax.pallas.hopper.quantized.fragments import FEW_ROWS, Fill
from detjax.pallas.hopper.quantized.widening import LINE, Codes

REGISTERS: Final = {1: 240, 2: 232, 3: 152, 4: 104}
"""Registers per thread of a consumer, by the number of consumers."""
_OTHER_REGISTERS: Final = 38
"""Registers of a consumer that hold neither accumulators, words nor operands."""
_OPERAND_REGISTERS: Final = 32
"""Registers of two lines of the row operand: one in flight, and one that is being widened."""
_BATCH_LINES: Final = {1: 4, 2: 4, 3: 2, 4: 1}
"""Most lines whose words a consumer loads at once, by the number of consumers."""
_SUMS_AND_WORDS: Final = {1: 152, 2: 152, 3: 80, 4: 40}
"""Registers of a consumer for accumulators and words, by the number of consumers."""
_MAX_SPREAD_COLUMNS: Final = 64
"""Most columns of sums whose rows are brought in order through shared memory."""


@dataclasses.dataclass(frozen=True)
class PackedPlan(Plan):
    """A plan whose row operand is packed weights."""

    codes: Codes
    takes_turns: bool = False
    """True if the warpgroups have the same rows, take the stages of a tile in turn, and hand the sums on."""

    max_warpgroups: ClassVar[int] = max(REGISTERS)

    @property
    def row_shares(self) -> int:
        """Shares into which the consumers divide the rows of a tile."""
        return 1 if self.takes_turns else self.schedule.warpgroups

    @property
    def rows(self) -> int:
        """Rows of a tile that one warpgroup computes."""
        return self.row_tile // self.row_shares

    @property
    def fill(self) -> Fill:
        """The rows of codes that fill a warpgroup's row operand."""
        is_spread = self.rows <= FEW_ROWS and self.columns <= _MAX_SPREAD_COLUMNS
        if self.takes_turns:  # a whole stage is widened before the sums arrive
            k = self.tile_k
            return Fill(self.codes, k, k, k, self.rows, is_spread, is_early=True)
        accumulators = 1 if is_spread else self.problem.parts
        # Two operands in a stage, or one of a single line. With four, the compiler waits for each product before it
        # writes the next operand.
        width = max(1, accumulators * self.schedule.lines // 2)
        batch = max(width, min(self.schedule.lines, _BATCH_LINES[self.schedule.warpgroups]))
        fill = Fill(self.codes, self.tile_k, batch * LINE, width * LINE, self.rows, is_spread)
        # Sums come first: what they leave is for words.
        for_words = _SUMS_AND_WORDS[self.schedule.warpgroups] - accumulators * self.columns // 2
        while fill.batch > fill.width and fill.words(self.problem.parts) > for_words:
            fill = dataclasses.replace(fill, batch=fill.batch // 2)
        return fill

    @property
    def operands_in_flight(self) -> int:
        """Row operands that the matrix unit may still read while the next one is widened.

        One, if a stage has several. A single operand has the same registers in the next stage, which must not be
        written while they are read: that gave wrong bits on an H200, though not in every run.
        """
        return 1 if self.accumulators * self.tile_k > self.fill.width else 0

    @property
    def accumulators(self) -> int:
        """Accumulators of a warpgroup: one for each part, or one for the spread rows of all parts."""
        return 1 if self.fill.is_spread else self.problem.parts

    @property
    def extra_bytes(self) -> int:
        """Bytes of a stage's scales and zero points for each row."""
        size = self.codes.scale_dtype.itemsize
        zeros = self.codes.box(self.tile_k, 1) if self.codes.has_zeros else 0
        return self.codes.box(self.tile_k, size) * size + zeros

    @property
    def handed_bytes(self) -> int:
        """Bytes of the sums that are handed on."""
        return self.schedule.warpgroups * self.padded_rows * self.columns * 4 if self.takes_turns else 0

    @property
    def loads_per_stage(self) -> int:
        """Copies that fill a stage: codes, scales and zero points of each part, and tokens."""
        return self.problem.parts * (3 if self.codes.has_zeros else 2) + 1

    @property
    def bytes_per_stage(self) -> int:
        """Bytes of a stage's codes, scales, zero points and tokens in shared memory."""
        row = self.codes.row_bytes(self.tile_k) + self.extra_bytes
        return self.problem.parts * self.row_tile * row + self.columns * self.tile_k * self.problem.dtype.itemsize

    @property
    def spread_bytes(self) -> int:
        """Bytes of the buffers by which warpgroups bring the sums of spread rows in order."""
        return self.schedule.warpgroups * 2 * FEW_ROWS * self.columns * 4 if self.fill.is_spread else 0

    @property
    def stages(self) -> int:
        """Stages of codes and tokens: as many as shared memory holds, up to 24, and a multiple of the warpgroups that
        take them in turn."""
        chunk = self.schedule.warpgroups * self.slots * math.prod(self.staged_shape)
        free = device.SHARED_MEMORY - device.SHARED_MEMORY_RESERVED
        free -= chunk * self.problem.out_dtype.itemsize
        free -= 0 if self.problem.residual_dtype is None else chunk * self.problem.residual_dtype.itemsize
        if self.problem.bias_dtype is not None:
            free -= 4 * self.schedule.warpgroups * self.problem.parts * self.bias_size
        free -= self.spread_bytes + self.handed_bytes
        turns = self.schedule.warpgroups if self.takes_turns else 1
        # A power of two takes fewer instructions where sums wait for them.
        most = 16 if self.takes_turns and 16 % turns == 0 else 24
        return min(most, free // self.bytes_per_stage) // turns * turns

    def unmet_requirements(self) -> list[str]:
        """Returns the requirements that this plan does not meet; an empty list if the kernel can be built."""
        s, codes, k, fill = self.schedule, self.codes, self.problem.k, self.fill
        operands = (_OPERAND_REGISTERS // 2 if self.takes_turns else _OPERAND_REGISTERS) * fill.width // LINE
        held = self.accumulators * self.padded_rows * self.columns // device.WARPGROUP
        held += fill.words(self.problem.parts) + operands + _OTHER_REGISTERS
        requirements = {
            "weights on the rows": self.weights_on_rows,
            "clusters of one CTA": self.cluster_size == 1,
            "numbers of the codes' dtype": codes.dtype == self.problem.dtype.name,
            "1, 2 or 4 lines": s.lines in (1, 2, 4),
            f"rows of codes of up to {SWIZZLE_BYTES} bytes in a stage": codes.row_bytes(self.tile_k) <= SWIZZLE_BYTES,
            "K in whole lines": k % LINE == 0,
            # The copy engine swizzles whole lines of an array.
            f"rows of codes in whole lines of {SWIZZLE_BYTES} bytes": codes.row_bytes(self.tile_k) < SWIZZLE_BYTES
            or codes.row_bytes(k) % SWIZZLE_BYTES == 0,
            "N in eights": self.problem.n % 8 == 0,
            # A stage begins with a group or lies within one.
            "groups and stages that divide each other": codes.group >= k
            or (codes.group % 8 == 0 and max(codes.group, self.tile_k) % min(codes.group, self.tile_k) == 0),
            "64 rows or fewer for each warpgroup": self.rows <= MATRIX_ROWS,
            "one accumulator for operands in 256s": s.lines * self.accumulators <= 4,
            "several warpgroups that share one accumulator, in rounds of whole stages, to take turns": (
                not self.takes_turns
                or (s.warpgroups > 1 and self.accumulators == 1 and self.k_steps % s.warpgroups == 0)
            ),
            # The compiler allots the registers of one instruction from those with which a thread starts.
            "columns of one `wgmma` that leave registers": self.columns // 2 + 32
            <= device.registers_at_start(self.all_warpgroups),
            "accumulators that leave registers": held <= REGISTERS[s.warpgroups],
        }
        # Those that take turns each compute the whole tile, as one alone would.
        alone = dataclasses.replace(s, warpgroups=1) if self.takes_turns else s
        unmet = [text for text, holds in requirements.items() if not holds]
        unmet = unmet or Plan.unmet_requirements(dataclasses.replace(self, schedule=alone, takes_turns=False))
        if not unmet and self.stages < 2:
            unmet.append("2 stages of codes in shared memory")
        return unmet

    def check(self) -> None:
        """Raises ValueError, with the unmet requirements, if a kernel of this plan cannot be built."""
        if unmet := self.unmet_requirements():
            raise ValueError(f"quantized_matmul: {self}; accepted: {'; '.join(unmet)}")
