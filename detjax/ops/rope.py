"""Rotary position embedding: `rope`, `qk_rope` with the norm before it, and the frequencies of its scaled forms."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from detjax import backends, compilation
from detjax.contract import ACCUMULATOR
from detjax.ops.checks import check_dtype, check_integers, check_not_empty, check_shape
from detjax.ops.dispatch import Operation, with_vmap_rule
from detjax.ops.norm import rms_norm
from detjax.portable.tiles import map_rows

_MODULES = {
    "portable": "detjax.portable.rope",
    "hopper": "detjax.pallas.hopper.rope",
    "tpu": "detjax.portable.rope",
    "stock": "detjax.stock.rope",
}
_ROPE = Operation("rope", _MODULES)
_QK_ROPE = Operation("qk_rope", _MODULES)


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): every frequency divided by `factor`."""

    factor: float


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: long wavelengths are slowed by `factor`, short ones kept, with a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): interpolation by parts, and a factor on the embedding that sharpens attention.

    `attention_factor` None means `0.1 * ln(factor) + 1`, with DeepSeek's two multipliers where both are given.
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
class RotaryEmbedding:
    """Frequencies of a rotary embedding (Su et al. 2021) over heads of `head_dim`, an even number."""

    head_dim: int
    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None

    def __post_init__(self) -> None:
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"RotaryEmbedding: head_dim is {self.head_dim}; accepted: even numbers >= 2")

    @functools.cached_property
    def inverse_frequencies(self) -> Float32[np.ndarray, "half"]:
        """Radians per position of each pair of columns.

        Exponents, powers and their inverses are each rounded to float32, as in the code that checkpoints are trained
        with: exact frequencies would turn far positions by other angles. The arithmetic between is float64, so that no
        processor's float32 `pow` shows.
        """
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        powers = np.power(np.float64(self.theta), exponents.astype(np.float64)).astype(np.float32)
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
        return scaled.astype(np.float32)

    @property
    def embedding_scale(self) -> float:
        """The factor on cosine and sine (1 except for YaRN)."""
        s = self.scaling
        if not isinstance(s, YarnScaling):
            return 1.0
        if s.attention_factor is not None:
            return s.attention_factor
        if s.mscale and s.mscale_all_dim:
            return _yarn_mscale(s.factor, s.mscale) / _yarn_mscale(s.factor, s.mscale_all_dim)
        return _yarn_mscale(s.factor, 1.0)

    def _yarn_ramp(self, s: YarnScaling) -> np.ndarray:
        """0 for pairs that are kept, 1 for pairs that are interpolated."""

        def pair_of(rotations: float) -> float:
            """The pair that turns `rotations` times within the original context."""
            per_rotation = s.original_max_position_embeddings / (rotations * 2 * math.pi)
            return self.head_dim * math.log(per_rotation) / (2 * math.log(self.theta))

        low, high = pair_of(s.beta_fast), pair_of(s.beta_slow)
        if s.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.head_dim - 1)
        pairs = np.arange(self.head_dim // 2, dtype=np.float64)
        return np.clip((pairs - low) / max(high - low, 0.001), 0.0, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@compilation.jit(static_argnames="embedding")
def rope(
    x: Float[Array, "*B T H K"], positions: Int[Array, "*B T"], embedding: RotaryEmbedding
) -> Float[Array, "*B T H K"]:
    """Returns the heads of `x` rotated by their tokens' absolute positions, in float32, rounded once.

    Column `i` turns with column `i + K / 2`, the order of Hugging Face's checkpoints.

    Args:
        x: queries or keys; bfloat16, float16 or float32.
        positions: tokens from the start of the request, below 2^24.
        embedding: frequencies; its head_dim is K.

    Raises:
        TypeError: a dtype is not under contract.
        ValueError: shapes do not fit together.
    """
    _check("rope", "x", x, positions, embedding)
    return _ROPE.call(_rope, x, positions, embedding=embedding)


@compilation.jit(static_argnames=("embedding", "heads", "kv_heads", "norm_eps"))
def qk_rope(
    qkv: Float[Array, "*B T N K"],
    positions: Int[Array, "*B T"],
    embedding: RotaryEmbedding,
    *,
    heads: int,
    kv_heads: int,
    q_norm: Float[Array, "K"] | None = None,
    k_norm: Float[Array, "K"] | None = None,
    norm_eps: float | None = None,
) -> tuple[Float[Array, "*B T heads K"], Float[Array, "*B T kv_heads K"]]:
    """Returns queries and keys, the first heads of a fused projection, RMS normalized and rotated as by `rope`.

    The bits are those of the separate steps, `rms_norm` and then `rope`.

    Args:
        qkv: `heads` queries, `kv_heads` keys, and heads that are not read, as values; bfloat16, float16 or float32.
        positions: tokens from the start of the request, below 2^24.
        embedding: frequencies; its head_dim is K.
        heads: how many heads of queries there are.
        kv_heads: how many heads of keys there are.
        q_norm: the norm's weight for queries; default: they are not normalized, nor are keys.
        k_norm: the norm's weight for keys; given if and only if `q_norm` is.
        norm_eps: added to the mean square; given if and only if there are weights.

    Raises:
        TypeError: a dtype is not under contract.
        ValueError: shapes do not fit together, or one of q_norm, k_norm and norm_eps is given without the others.
    """
    _check("qk_rope", "qkv", qkv, positions, embedding)
    if heads < 1 or kv_heads < 1 or heads + kv_heads > qkv.shape[-2]:
        raise ValueError(
            f"qk_rope: heads is {heads} and kv_heads {kv_heads}; accepted: at least 1 each and, qkv being {qkv.shape}, "
            f"at most {qkv.shape[-2]} together"
        )
    weights = norm_weights("qk_rope", qkv, q_norm, k_norm, norm_eps)
    options = {"embedding": embedding, "heads": (heads, kv_heads), "eps": norm_eps}
    return _QK_ROPE.call(_qk_rope, qkv, positions, weights, **options)


def norm_weights(
    operation: str, qkv: Array, q_norm: Array | None, k_norm: Array | None, norm_eps: float | None
) -> tuple[Array, ...]:
    """Both norms' weights once they are known to fit, or none where none are given."""
    given = {"q_norm": q_norm, "k_norm": k_norm, "norm_eps": norm_eps}
    if q_norm is None or k_norm is None or norm_eps is None:
        if any(value is not None for value in given.values()):
            missing = ", ".join(name for name, value in given.items() if value is None)
            raise ValueError(
                f"{operation}: {missing} not given; accepted: {', '.join(given)} all together, or none of them"
            )
        return ()
    check_dtype(operation, q_norm=q_norm, k_norm=k_norm)
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        check_shape(operation, name, weight, qkv.shape[-1:], f"qkv being {qkv.shape}")
    return q_norm, k_norm


def _check(operation: str, name: str, x: Array, positions: Array, embedding: RotaryEmbedding) -> None:
    check_dtype(operation, **{name: x})
    check_integers(operation, positions=positions)
    check_not_empty(operation, **{name: x})
    check_shape(operation, "positions", positions, x.shape[:-2], f"{name} being {x.shape}")
    check_head_dim(operation, name, x, embedding)


def check_head_dim(operation: str, name: str, x: Array, embedding: RotaryEmbedding) -> None:
    """Returns if the last axis of `x` is the embedding's."""
    if x.shape[-1] != embedding.head_dim:
        raise ValueError(
            f"{operation}: {name} has shape {x.shape}; accepted: a last axis of {embedding.head_dim}, its embedding's"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rope(x: Array, positions: Array, embedding: RotaryEmbedding) -> Array:
    return _rotated(embedding, x, positions, turn=1.0)


def _forward(x: Array, positions: Array, embedding: RotaryEmbedding) -> tuple[Array, Array]:
    return _rope(x, positions, embedding), positions


def _backward(embedding: RotaryEmbedding, positions: Array, dy: Array) -> tuple[Array, None]:
    return _rotated(embedding, dy, positions, turn=-1.0), None


def _rotated(embedding: RotaryEmbedding, x: Array, positions: Array, turn: float) -> Array:
    """A rotation's transpose is the rotation back, so one kernel serves both directions."""
    return _rotated_groups(embedding, (x.shape[-2],), None, x, positions, (), turn)[0]


_rope.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _qk_rope(
    qkv: Array,
    positions: Array,
    weights: tuple[Array, ...],
    embedding: RotaryEmbedding,
    heads: tuple[int, int],
    eps: float | None,
) -> tuple[Array, Array]:
    q, k = _rotated_groups(embedding, heads, eps, qkv, positions, weights, turn=1.0)
    return q, k


def in_separate_steps(
    embedding: RotaryEmbedding,
    heads: tuple[int, int],
    eps: float | None,
    qkv: Array,
    positions: Array,
    weights: tuple[Array, ...],
) -> tuple[Array, Array]:
    """`qk_rope` of its checked arguments, by `rms_norm` and `rope`: what its gradients are taken of."""
    q, k = qkv[..., : heads[0], :], qkv[..., heads[0] : sum(heads), :]
    if weights:
        assert eps is not None
        q, k = (rms_norm(x, weight, eps=eps) for x, weight in zip((q, k), weights, strict=True))
    return rope(q, positions, embedding), rope(k, positions, embedding)


def _qk_forward(
    qkv: Array,
    positions: Array,
    weights: tuple[Array, ...],
    embedding: RotaryEmbedding,
    heads: tuple[int, int],
    eps: float | None,
):
    return _qk_rope(qkv, positions, weights, embedding, heads, eps), (qkv, positions, weights)


def _qk_backward(embedding: RotaryEmbedding, heads: tuple[int, int], eps: float | None, saved, gradients):
    qkv, positions, weights = saved

    def steps(qkv: Array, weights: tuple[Array, ...]) -> tuple[Array, Array]:
        return in_separate_steps(embedding, heads, eps, qkv, positions, weights)

    dqkv, dweights = jax.vjp(steps, qkv, weights)[1](gradients)
    return dqkv, None, dweights


_qk_rope.defvjp(_qk_forward, _qk_backward)


def _rotated_groups(
    embedding: RotaryEmbedding,
    heads: tuple[int, ...],
    eps: float | None,
    x: Array,
    positions: Array,
    weights: tuple[Array, ...],
    turn: float,
) -> tuple[Array, ...]:
    operation = _QK_ROPE if len(heads) > 1 else _ROPE
    rotate = functools.partial(operation.kernels().forward, heads=heads, eps=eps)

    def forward(x: Array, positions: Array, *weights: Array) -> tuple[Array, ...]:
        cos, sin = cos_and_sin(embedding, positions, turn)
        return rotate(x, cos, sin, *weights)

    return with_vmap_rule(forward, rows=(True, True, *(False for _ in weights)))(x, positions, *weights)


def cos_and_sin(embedding: RotaryEmbedding, positions: Array, turn: float) -> tuple[Array, Array]:
    """`[*B, T, K / 2]` float32 each, times the embedding's scale: what every backend under contract rotates by."""

    def of_rows(positions: Array, frequencies: Array) -> tuple[Array, Array]:
        angles = positions.astype(ACCUMULATOR)[:, None] * frequencies[None]
        return jnp.cos(angles) * embedding.embedding_scale, jnp.sin(angles) * embedding.embedding_scale

    operands = positions.reshape(-1), jnp.asarray(np.float32(turn) * embedding.inverse_frequencies)
    if backends.backend() == "portable":
        cos, sin = map_rows(of_rows, *operands)
    else:
        # On an accelerator every element goes through the same instructions, and behind the barriers none is computed
        # by the compiler's own arithmetic or by that of a kernel it is fused into.
        cos, sin = lax.optimization_barrier(of_rows(*lax.optimization_barrier(operands)))
    return cos.reshape(*positions.shape, -1), sin.reshape(*positions.shape, -1)
