"""Options of operations, as the ops hand them to the kernels of every backend."""

import dataclasses
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

WeightLayout = Literal["kn", "nk"]

type AxisName = str | tuple[str, ...]
"""A mesh axis, or several of them, the first of which varies slowest."""


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What a matmul does to its float32 accumulator `z` before the one rounding.

    `z + bias`; then `activation(z)`, or `activation(z_gate) * z_up` if `gated`; then `soft_cap * tanh(z / soft_cap)`
    where there is one; then `+ residual`.
    """

    activation: Activation | None = None
    gated: bool = False
    soft_cap: float | None = None


@dataclasses.dataclass(frozen=True)
class Masking:
    """Which keys a query row sees and how its scores are shaped, the same in every phase.

    A query at absolute position `i` sees the keys `j < kv_length`, of these `j <= i` if `causal`, and `j > i - window`
    if there is a window. A score is `s * scale`; `soft_cap * tanh(s * scale / soft_cap)` with a soft cap; plus
    `slope[head] * (j - i)` with ALiBi (Press et al. 2022).
    """

    scale: float
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None


KVQuantization = Literal["int8", "fp8_e4m3", "q4_0"]
