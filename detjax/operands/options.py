"""Options of operations, as the ops hand them to the kernels of every backend."""

import dataclasses
from typing import Final, Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

WeightLayout = Literal["kn", "nk"]

KVQuantization = Literal["int8", "fp8_e4m3", "q4_0"]

Aggregation = Literal["contract", "hf_eager_float32", "hf_eager", "hf_grouped", "finalize", "deepep"]
"""How what experts give is added. All but "contract" have the roundings and the order of other implementations."""

type AxisName = str | tuple[str, ...]
"""A mesh axis, or several of them, the first of which varies slowest."""


@dataclasses.dataclass(frozen=True)
class Distribution:
    """The distribution that tokens are drawn from, given a model's logits.

    Attributes:
        temperature: what logits are divided by; 0 takes the likeliest token.
        top_k: how many of the likeliest tokens are kept; 0: all.
        top_p: the likeliest tokens whose probability reaches this number are kept; 1: all.
        min_p: tokens of at least this share of the likeliest one's probability are kept; 0: all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def filtered(self) -> bool:
        """Whether some tokens may be removed."""
        return self.temperature != 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def is_model(self) -> bool:
        """Whether it is the model's own distribution."""
        return self.temperature == 1 and not self.filtered


MODEL_DISTRIBUTION: Final = Distribution()
"""The distribution that a model's logits give without temperature and filters."""


@dataclasses.dataclass(frozen=True)
class Clamp:
    """The bounds of a gated activation's two sums, as gpt-oss has them (OpenAI 2025).

    With `g = min(z_gate, limit)` and `u` being `z_up` within `-limit` and `limit`, the gated result is
    `(u + 1) * (activation(slope * g) * (1 / slope))`; with silu that is `(u + 1) * g * sigmoid(slope * g)`.

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
    `activation(z_gate) * z_up` if the epilogue is gated; see `Clamp` for gated ones with bounds. The residual is added
    to it before the one rounding.

    Attributes:
        activation: the activation function; None leaves `z` as it is.
        gated: whether there are two sums, of a gate and of an up projection.
        soft_cap: the bound of the result; None: no bound.
        clamp: the bounds of both sums of a gated epilogue; None: no bounds.
    """

    activation: Activation | None = None
    gated: bool = False
    soft_cap: float | None = None
    clamp: Clamp | None = None


@dataclasses.dataclass(frozen=True)
class Masking:
    """The keys that a query row sees and the shape of its scores, the same in every phase.

    A query at absolute position `i` sees the keys `j < kv_length`. With `causal`, it sees only those with `j <= i`, and
    with a window, only those with `j > i - window`.

    Attributes:
        scale: the factor of a score, `s * scale`.
        causal: whether a query sees no key after its own.
        window: how many keys a query sees at most, the last ones, its own included; None: all of them.
        soft_cap: the bound of a score, which becomes `soft_cap * tanh(s * scale / soft_cap)`; None: no bound.
        alibi_slopes: a slope for each head (Press et al. 2022); `slope * (j - i)` is added to the score.
    """

    scale: float
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
