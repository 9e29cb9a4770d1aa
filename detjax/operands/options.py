"""Options of operations, as passed to the kernels of all backends."""

import dataclasses
from typing import Final, Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

WeightLayout = Literal["kn", "nk"]

KVQuantization = Literal["int8", "fp8_e4m3", "q4_0"]

Aggregation = Literal["contract", "hf_eager_float32", "hf_eager", "hf_grouped", "finalize", "deepep"]
"""The sum of experts' results. All but "contract" have the roundings and the order of other implementations."""

type AxisName = str | tuple[str, ...]
"""A mesh axis, or several in row-major order."""


@dataclasses.dataclass(frozen=True)
class Distribution:
    """The distribution that tokens are drawn from, given a model's logits.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: number of likeliest tokens to keep; 0: all.
        top_p: keep the smallest set of likeliest tokens whose probabilities reach this sum; 1: all.
        min_p: keep tokens with at least this share of the likeliest token's probability; 0: all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def filtered(self) -> bool:
        """True if tokens may be removed."""
        return self.temperature != 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def is_model(self) -> bool:
        """True if it is the model's own distribution."""
        return self.temperature == 1 and not self.filtered


MODEL_DISTRIBUTION: Final = Distribution()
"""The distribution of a model's logits without temperature and filters."""


@dataclasses.dataclass(frozen=True)
class Clamp:
    """Bounds of the two sums of a gated activation, as in gpt-oss (OpenAI 2025).

    With `g = min(z_gate, limit)` and `u = clip(z_up, -limit, limit)`, the gated result is
    `(u + 1) * (activation(slope * g) * (1 / slope))`; with silu this is `(u + 1) * g * sigmoid(slope * g)`.

    Attributes:
        limit: the bound of both sums.
        slope: the factor of the activation's argument.
    """

    limit: float
    slope: float


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """The steps of a matmul between its biased float32 sums `z` and the residual.

    The result is `soft_cap * tanh(y / soft_cap)`, or `y` without a soft cap, where `y` is `activation(z)`, or
    `activation(z_gate) * z_up` if gated; see `Clamp` for gated ones with bounds. The residual is added before the only
    rounding.

    Attributes:
        activation: the activation function; None: identity.
        gated: whether there are two sums, for gate and up projection.
        soft_cap: bound of the result; None: no bound.
        clamp: bounds of both sums of a gated epilogue; None: no bounds.
    """

    activation: Activation | None = None
    gated: bool = False
    soft_cap: float | None = None
    clamp: Clamp | None = None


@dataclasses.dataclass(frozen=True)
class Masking:
    """The keys that a query row sees and the transformation of its scores, the same in all phases.

    A query at absolute position `i` sees the keys `j < kv_length`; with `causal`, only keys with `j <= i`, and with a
    window, only keys with `j > i - window`.

    Attributes:
        scale: the factor of a score, `s * scale`.
        causal: a query sees no key after its own.
        window: maximum number of last keys that a query sees, including its own; None: all.
        soft_cap: bound of a score, which becomes `soft_cap * tanh(s * scale / soft_cap)`; None: no bound.
        alibi_slopes: a slope per head (Press et al. 2022); `slope * (j - i)` is added to the score.
    """

    scale: float
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
