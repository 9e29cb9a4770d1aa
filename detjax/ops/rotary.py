"""Frequencies of rotary position embeddings, plain or scaled to longer contexts."""

import dataclasses
import decimal
import functools
import math
from typing import Final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int

from detjax.operands.kv_pages import Queries


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): every frequency divided by `factor`.

    Example:
        >>> ops.RotaryEmbedding(64, 10000.0, scaling=ops.LinearScaling(factor=2.0)).scaling.factor
        2.0
    """

    factor: float


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: low frequencies are divided by `factor`, high ones kept, with a ramp between.

    Example:
        >>> ops.Llama3Scaling(8.0, 1.0, 4.0, 8192).original_max_position_embeddings
        8192
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): interpolation by parts, and a factor on the embedding that sharpens attention.

    The default `attention_factor` is `0.1 * ln(factor) + 1`, with DeepSeek's two multipliers if both are given.

    Example:
        >>> ops.YarnScaling(4.0, 32768).beta_fast
        32.0
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclasses.dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024): a divisor for each frequency, and a factor on the embedding that sharpens attention.

    The divisors are `long_factor` if the model was made for more positions than the original ones, else `short_factor`.
    The choice is the same for every sequence, so a token's numbers do not change as its sequence grows.

    With `s` being `factor`, or by default the ratio of positions to original positions, the default `attention_factor`
    is `sqrt(1 + ln(s) / ln(original positions))`, or 1 if `s` is at most 1.

    Example:
        >>> ops.LongRopeScaling((1.0, 1.0), (1.5, 4.0), 4096, 131072).factors
        (1.5, 4.0)
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    max_position_embeddings: int
    factor: float | None = None
    attention_factor: float | None = None

    @property
    def factors(self) -> tuple[float, ...]:
        """The divisors of the frequencies."""
        is_long = self.max_position_embeddings > self.original_max_position_embeddings
        return self.long_factor if is_long else self.short_factor

    @property
    def embedding_scale(self) -> float:
        """The factor on cosine and sine."""
        if self.attention_factor is not None:
            return self.attention_factor
        ratio = self.factor or self.max_position_embeddings / self.original_max_position_embeddings
        return 1.0 if ratio <= 1 else math.sqrt(1 + _log(ratio) / _log(float(self.original_max_position_embeddings)))


type Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling
"""A scaling of frequencies to longer contexts."""


@dataclasses.dataclass(frozen=True)
class RotaryEmbedding:
    """Frequencies of a rotary embedding (Su et al. 2021) over heads of `head_dim`, an even number.

    With `rotary_dim`, only `rotary_dim` columns of a head rotate: half of them at its beginning, the other half from
    its middle on. They have the frequencies of a head of size `rotary_dim` or, if `proportional`, the highest ones of a
    whole head (p-RoPE, Barbero et al. 2024). With 0, positions do not matter.

    With `sections`, a position has several coordinates, such as time, row and column (Wang et al. 2024, Qwen2-VL). The
    first `sections[0]` pairs of columns rotate by the first coordinate, the next `sections[1]` pairs by the second, and
    so on. If also `axial`, each section has the frequencies of a head of its width, the highest first. If
    `interleaved`, coordinates alternate: with A coordinates, pair `i` rotates by coordinate `i % A` until that
    coordinate has `sections[i % A]` pairs, and otherwise by the first coordinate.

    Example:
        >>> ops.RotaryEmbedding(head_dim=64, theta=10000.0).head_dim
        64
    """

    head_dim: int
    theta: float
    scaling: Scaling | None = None
    rotary_dim: int | None = None
    sections: tuple[int, ...] | None = None
    axial: bool = False
    interleaved: bool = False
    proportional: bool = False

    def __repr__(self) -> str:
        """Returns the fields, the last five only if set, because digests of models depend on this text."""
        used = f"head_dim={self.head_dim!r}, theta={self.theta!r}, scaling={self.scaling!r}"
        used += "" if self.rotary_dim is None else f", rotary_dim={self.rotary_dim!r}"
        used += "" if self.sections is None else f", sections={self.sections!r}"
        used += "".join(f", {name}=True" for name in ("axial", "interleaved", "proportional") if getattr(self, name))
        return f"RotaryEmbedding({used})"

    def __post_init__(self) -> None:
        if self.rotary_dim is not None:
            if self.rotary_dim < 0 or self.rotary_dim % 2 or self.rotary_dim >= self.head_dim:
                raise ValueError(
                    f"RotaryEmbedding: rotary_dim is {self.rotary_dim}; accepted: even numbers from 0 to below "
                    f"{self.head_dim}, the head_dim, or None if all columns rotate"
                )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"RotaryEmbedding: head_dim is {self.head_dim}; accepted: even numbers >= 2")
        factors = self.scaling.factors if isinstance(self.scaling, LongRopeScaling) else None
        if factors is not None and len(factors) != self.turning // 2:
            raise ValueError(
                f"RotaryEmbedding: scaling has {len(factors)} factors; accepted: {self.turning // 2}, one for each "
                "pair of columns that rotate"
            )
        if not 0 < self.theta < math.inf:
            raise ValueError(f"RotaryEmbedding: theta is {self.theta}; accepted: finite numbers > 0")
        if self.sections is not None and (min(self.sections) < 1 or sum(self.sections) != self.turning // 2):
            raise ValueError(
                f"RotaryEmbedding: sections is {self.sections}; accepted: numbers >= 1 that add up to "
                f"{self.turning // 2}, the pairs of columns that rotate"
            )
        if self.axial and (self.sections is None or self.scaling is not None or self.rotary_dim is not None):
            raise ValueError(
                f"RotaryEmbedding: axial is True with sections {self.sections}, scaling {self.scaling} and rotary_dim "
                f"{self.rotary_dim}; accepted: sections without scaling and rotary_dim"
            )
        if self.interleaved and (self.sections is None or self.axial):
            raise ValueError(
                f"RotaryEmbedding: interleaved is True with sections {self.sections} and axial {self.axial}; accepted: "
                "sections, and not axial"
            )
        if self.proportional and (not self.rotary_dim or not isinstance(self.scaling, LinearScaling | None)):
            raise ValueError(
                f"RotaryEmbedding: proportional is True with rotary_dim {self.rotary_dim} and scaling {self.scaling}; "
                "accepted: a rotary_dim of at least 2, and linear scaling or none"
            )

    @property
    def turning(self) -> int:
        """The number of columns of a head that rotate."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @functools.cached_property
    def inverse_frequencies(self) -> Float32[np.ndarray, "half"]:
        """Radians per position of each pair of columns; 0 for pairs that do not rotate.

        Exponents, powers and their inverses are each rounded to float32, as in the code that checkpoints are trained
        with: with exact frequencies, angles of far positions would differ. The arithmetic between is float64, and
        powers and logarithms are correctly rounded, so the result does not depend on the processor's `pow` and `log`.
        """
        if self.axial and self.sections is not None:
            heads = [RotaryEmbedding(2 * section, self.theta) for section in self.sections]
            return np.concatenate([head.inverse_frequencies for head in heads])
        width = self.head_dim if self.proportional else self.turning
        exponents = np.arange(0, self.turning, 2, dtype=np.float32) / np.float32(width)
        powers = np.array([_power(self.theta, exponent) for exponent in exponents.tolist()]).astype(np.float32)
        base = (np.float32(1) / powers).astype(np.float64)
        match self.scaling:
            case None:
                scaled = base
            case LinearScaling(factor):
                scaled = base / factor
            case Llama3Scaling() as s:
                periods_in_context = s.original_max_position_embeddings * base / (2 * np.pi)
                keep = (periods_in_context - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
                keep = np.clip(keep, 0.0, 1.0)
                scaled = base * (keep + (1 - keep) / s.factor)
            case YarnScaling() as s:
                keep = 1 - self._yarn_ramp(s)
                scaled = base * (keep + (1 - keep) / s.factor)
            case LongRopeScaling() as s:
                scaled = np.float32(1) / (np.array(s.factors, np.float32) * powers)
        still = np.zeros((self.head_dim - self.turning) // 2, np.float32)
        return np.concatenate([scaled.astype(np.float32), still])

    def positions_of(self, queries: Queries, tokens: int) -> Int[Array, "B T"] | Int[Array, "B T A"]:
        """Returns the positions, or with sections the coordinates, of `tokens` tokens of each of rectangular
        queries."""
        if self.sections is not None and queries.coordinates is not None:
            return jnp.asarray(queries.coordinates)
        start = jnp.asarray(queries.start)
        return self.all_coordinates(start[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None])

    def all_coordinates(self, positions: Int[Array, "*N"]) -> Int[Array, "*N"] | Int[Array, "*N A"]:
        """Returns the positions, repeated as equal coordinates if there are sections."""
        if self.sections is None:
            return positions
        return jnp.broadcast_to(positions[..., None], (*positions.shape, len(self.sections)))

    def pair_positions(self, positions: Array) -> Array:
        """Returns the position of each pair of columns: `[*N, 1]`, or with sections `[*N, half]`.

        Args:
            positions: `[*N]`, or with sections `[*N, A]`. Columns that do not rotate get the last coordinate.
        """
        if self.sections is None:
            return positions[..., None]
        return positions[..., self._pair_axes]

    @property
    def _pair_axes(self) -> Int[np.ndarray, "half"]:
        """The coordinate by which each pair of columns rotates."""
        assert self.sections is not None
        pairs, axes = np.arange(self.head_dim // 2), len(self.sections)
        if self.interleaved:
            sections = np.array(self.sections)[pairs % axes]
            return np.where(pairs // axes < sections, pairs % axes, 0).astype(np.int32)
        return np.minimum(np.searchsorted(np.cumsum(self.sections), pairs, side="right"), axes - 1).astype(np.int32)

    @property
    def embedding_scale(self) -> float:
        """The factor on cosine and sine of rotating columns; 1 except for YaRN and LongRoPE."""
        s = self.scaling
        if isinstance(s, LongRopeScaling):
            return s.embedding_scale
        if not isinstance(s, YarnScaling):
            return 1.0
        if s.attention_factor is not None:
            return s.attention_factor
        if s.mscale and s.mscale_all_dim:
            return _yarn_mscale(s.factor, s.mscale) / _yarn_mscale(s.factor, s.mscale_all_dim)
        return _yarn_mscale(s.factor, 1.0)

    @property
    def pair_scales(self) -> Float32[np.ndarray, "half"]:
        """The factor on cosine and sine of each pair of columns; 1 for pairs that do not rotate."""
        turns = np.arange(self.head_dim // 2) < self.turning // 2
        return np.where(turns, self.embedding_scale, 1.0).astype(np.float32)

    @property
    def score_scale(self) -> float:
        """The factor of DeepSeek's models on attention scores; 1 except for YaRN with `mscale_all_dim`."""
        s = self.scaling
        if not isinstance(s, YarnScaling) or not s.mscale_all_dim:
            return 1.0
        multiplier = _yarn_mscale(s.factor, s.mscale_all_dim)
        return multiplier * multiplier

    def _yarn_ramp(self, s: YarnScaling) -> np.ndarray:
        """Returns 0 for pairs that are kept, 1 for pairs that are interpolated, and numbers between on the ramp."""

        def pair_of(rotations: float) -> float:
            """Returns the pair that rotates `rotations` times within the original context."""
            per_rotation = s.original_max_position_embeddings / (rotations * 2 * math.pi)
            return self.turning * _log(per_rotation) / (2 * _log(self.theta))

        low, high = pair_of(s.beta_fast), pair_of(s.beta_slow)
        if s.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.turning - 1)
        pairs = np.arange(self.turning // 2, dtype=np.float64)
        return np.clip((pairs - low) / max(high - low, 0.001), 0.0, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * _log(factor) + 1.0


_FORTY_DIGITS: Final = decimal.Context(prec=40)


def _power(base: float, exponent: float) -> float:
    """Returns a correctly rounded power; the last bit of the host's `pow` depends on processor and C library."""
    return float(_FORTY_DIGITS.power(decimal.Decimal(base), decimal.Decimal(exponent)))


def _log(x: float) -> float:
    """Returns the correctly rounded natural logarithm."""
    return float(_FORTY_DIGITS.ln(decimal.Decimal(x)))
