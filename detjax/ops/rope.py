"""Rotary position embedding: `rope`, and `qk_rope` with a preceding norm."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from detjax.contract import ACCUMULATOR
from detjax.operands.accumulated_weight import Weight, value_and_sum, weight_cotangent
from detjax.ops.checks import check_dtype, check_integers, check_not_empty, check_shape
from detjax.ops.dispatch import Operation, backend_modules, with_vmap_rule
from detjax.ops.norm import rms_norm
from detjax.ops.rotary import RotaryEmbedding
from detjax.portable.tiles import map_rows
from detjax.runtime import backends, compilation, fusions

_MODULES = backend_modules("rope", kernels=["hopper"], mma="hopper")
_ROPE = Operation("rope", _MODULES)
_QK_ROPE = Operation("qk_rope", _MODULES)


@dataclasses.dataclass(frozen=True)
class Rotation:
    """The normalization and rotation of a projection's heads.

    Attributes:
        embedding: the frequencies.
        heads: the number of heads in each group of heads, first to last. Further heads are ignored.
        norm_eps: added to the mean square in the RMS norm before the rotation; None without a norm.
        norm_offset: added to the norm's weights.
    """

    embedding: RotaryEmbedding
    heads: tuple[int, ...]
    norm_eps: float | None = None
    norm_offset: float = 0.0


@compilation.jit(static_argnames="embedding")
def rope(
    x: Float[Array, "*B T H K"], positions: Int[Array, "*B T"] | Int[Array, "*B T A"], embedding: RotaryEmbedding
) -> Float[Array, "*B T H K"]:
    """Returns the heads of `x` rotated by their tokens' absolute positions, in float32, rounded once.

    Column `i` is paired with column `i + K / 2`, the order of Hugging Face's checkpoints.

    Args:
        x: queries or keys; bfloat16, float16 or float32.
        positions: positions in the request, below 2^24. With an embedding that has sections, a coordinate per section,
            or one position for all sections.
        embedding: frequencies; its head_dim is K.

    Raises:
        TypeError: a dtype is not under contract.
        ValueError: shapes do not fit together.

    Example:
        >>> x = jnp.ones((1, 2, 1, 4))
        >>> ops.rope(x, jnp.array([[0, 1]]), ops.RotaryEmbedding(4, 10000.0))[0, 0, 0]
        Array([1., 1., 1., 1.], dtype=float32)
    """
    positions = _checked("rope", "x", x, positions, embedding)
    return _ROPE.call(_rope, x, positions, embedding=embedding)


@compilation.jit(static_argnames=("embedding", "heads", "kv_heads", "norm_eps", "norm_offset"))
def qk_rope(  # noqa: PLR0913
    qkv: Float[Array, "*B T N K"],
    positions: Int[Array, "*B T"] | Int[Array, "*B T A"],
    embedding: RotaryEmbedding,
    *,
    heads: int,
    kv_heads: int,
    q_norm: Weight | None = None,
    k_norm: Weight | None = None,
    norm_eps: float | None = None,
    norm_offset: float = 0.0,
) -> tuple[Float[Array, "*B T heads K"], Float[Array, "*B T kv_heads K"]]:
    """Returns queries and keys, the first heads of a fused projection, RMS normalized and rotated by `rope`.

    The bits are the same as from `rms_norm` and then `rope`.

    Args:
        qkv: `heads` query heads, `kv_heads` key heads, and further heads such as values, which are ignored; bfloat16,
            float16 or float32.
        positions: see `rope`.
        embedding: frequencies; its head_dim is K.
        heads: number of query heads.
        kv_heads: number of key heads.
        q_norm: the norm's weight for queries, `[K]`, or an `AccumulatedWeight`; default: no norms.
        k_norm: the norm's weight for keys; required with `q_norm`.
        norm_eps: added to the mean square; required with the weights.
        norm_offset: the number added to both weights; 1.0 for models that store `weight - 1`, such as Gemma 3.

    Raises:
        TypeError: a dtype is not under contract.
        ValueError: shapes do not fit together, one of q_norm, k_norm and norm_eps is given without the others, or
            norm_offset is given without them.

    Example:
        >>> qkv = jnp.ones((1, 2, 4, 8))  # 2 query heads, 1 key head, 1 value head
        >>> q, k = ops.qk_rope(qkv, jnp.array([[0, 1]]), ops.RotaryEmbedding(8, 10000.0), heads=2, kv_heads=1)
        >>> q.shape, k.shape
        ((1, 2, 2, 8), (1, 2, 1, 8))
    """
    positions = _checked("qk_rope", "qkv", qkv, positions, embedding)
    if heads < 1 or kv_heads < 1 or heads + kv_heads > qkv.shape[-2]:
        raise ValueError(
            f"qk_rope: heads is {heads} and kv_heads {kv_heads}; accepted: at least 1 each and, qkv being {qkv.shape}, "
            f"at most {qkv.shape[-2]} together"
        )
    weights = norm_weights("qk_rope", qkv, q_norm, k_norm, norm_eps, norm_offset)
    weights = tuple(map(_QK_ROPE.taking, weights))
    rotation = Rotation(embedding, (heads, kv_heads), norm_eps, norm_offset)
    return _QK_ROPE.call(norm_and_rotate, qkv, positions, weights, rotation=rotation)


def norm_weights(
    operation: str,
    qkv: Array,
    q_norm: Weight | None,
    k_norm: Weight | None,
    norm_eps: float | None,
    norm_offset: float,
) -> tuple[Weight, ...]:
    """Validates and returns the weights of both norms, or an empty tuple without norms.

    Raises:
        TypeError: a weight's dtype is not under contract.
        ValueError: a shape does not fit, one of q_norm, k_norm and norm_eps is given without the others, or norm_offset
            is given without them.
    """
    given = {"q_norm": q_norm, "k_norm": k_norm, "norm_eps": norm_eps}
    if q_norm is None or k_norm is None or norm_eps is None:
        if any(value is not None for value in given.values()):
            missing = ", ".join(name for name, value in given.items() if value is None)
            raise ValueError(
                f"{operation}: {missing} not given; accepted: {', '.join(given)} all together, or none of them"
            )
        if norm_offset:
            raise ValueError(f"{operation}: norm_offset is {norm_offset}; accepted: 0.0 without norms")
        return ()
    values = {"q_norm": value_and_sum(q_norm)[0], "k_norm": value_and_sum(k_norm)[0]}
    check_dtype(operation, **values)
    for name, weight in values.items():
        check_shape(operation, name, weight, qkv.shape[-1:], f"qkv being {qkv.shape}")
    return q_norm, k_norm


def _checked(operation: str, name: str, x: Array, positions: Array, embedding: RotaryEmbedding) -> Array:
    """Validates the arguments, and returns the positions with a coordinate per section of the embedding."""
    check_dtype(operation, **{name: x})
    check_integers(operation, positions=positions)
    check_not_empty(operation, **{name: x})
    if embedding.sections is not None and positions.ndim == x.ndim - 1:
        like = (*x.shape[:-2], len(embedding.sections))
        check_shape(
            operation, "positions", positions, like, f"{name} being {x.shape} and sections {embedding.sections}"
        )
    else:
        check_shape(operation, "positions", positions, x.shape[:-2], f"{name} being {x.shape}")
        positions = embedding.all_coordinates(positions)
    check_head_dim(operation, name, x, embedding)
    return positions


def check_head_dim(operation: str, name: str, x: Array, embedding: RotaryEmbedding) -> None:
    """Raises a ValueError unless the last axis of `x` has the embedding's size."""
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
    """Rotates `x`; `turn` -1 rotates back, which is also the transpose."""
    return _rotated_groups(Rotation(embedding, (x.shape[-2],)), x, positions, (), turn)[0]


_rope.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def norm_and_rotate(
    qkv: Array, positions: Array, weights: tuple[Weight, ...], rotation: Rotation
) -> tuple[Array, Array]:
    """Computes `qk_rope` of validated arguments, by a backend's kernel unless the fusion is off."""
    if fusions.is_unfused("qk_rope"):
        return _in_separate_steps(qkv, positions, weights, rotation)
    q, k = _rotated_groups(rotation, qkv, positions, weights, turn=1.0)
    return q, k


def _in_separate_steps(
    qkv: Array, positions: Array, weights: tuple[Weight, ...], rotation: Rotation
) -> tuple[Array, Array]:
    """Computes `rms_norm` and `rope`; their gradients are the operation's gradients."""
    heads, embedding = rotation.heads, rotation.embedding
    q, k = qkv[..., : heads[0], :], qkv[..., heads[0] : sum(heads), :]
    if weights:
        assert rotation.norm_eps is not None
        norm = functools.partial(rms_norm, eps=rotation.norm_eps, weight_offset=rotation.norm_offset)
        q, k = (norm(x, weight) for x, weight in zip((q, k), weights, strict=True))
    return rope(q, positions, embedding), rope(k, positions, embedding)


def _qk_forward(qkv: Array, positions: Array, weights: tuple[Weight, ...], rotation: Rotation):
    return norm_and_rotate(qkv, positions, weights, rotation), (qkv, positions, weights)


def _qk_backward(rotation: Rotation, saved, gradients):
    qkv, positions, weights = saved
    kernels = _QK_ROPE.kernels()
    fused = weights and not fusions.is_unfused("qk_rope")
    if fused and hasattr(kernels, "gradients") and kernels.serves_gradients(qkv, rotation.heads):
        return _gradients_in_one_step(rotation, saved, gradients)

    def steps(qkv: Array, weights: tuple[Weight, ...]) -> tuple[Array, Array]:
        return _in_separate_steps(qkv, positions, weights, rotation)

    dqkv, dweights = jax.vjp(steps, qkv, weights)[1](gradients)
    return dqkv, None, dweights


def _gradients_in_one_step(rotation: Rotation, saved, gradients):
    """Computes both gradients by one kernel, with the same bits as separate steps."""
    qkv, positions, weights = saved
    values, sums = zip(*map(value_and_sum, weights), strict=True)

    def backward(qkv: Array, positions: Array, *rest: Any) -> Any:
        values, gradients, starts = rest[:2], rest[2:4], rest[4:]
        angles = cos_and_sin(rotation.embedding, positions, turn=-1.0)
        before, totals = _QK_ROPE.kernels().gradients(
            qkv, angles, values, gradients, starts, eps=rotation.norm_eps, norm_offset=rotation.norm_offset
        )
        missing = qkv.shape[-2] - sum(rotation.heads)
        unread = jnp.zeros((*qkv.shape[:-2], missing, qkv.shape[-1]), qkv.dtype)
        return jnp.concatenate([*before, unread], axis=-2), *totals

    starts = [jnp.zeros(v.shape, ACCUMULATOR) if s is None else s for v, s in zip(values, sums, strict=True)]
    operands = qkv, positions, *values, *gradients, *starts
    dqkv, *totals = with_vmap_rule(backward, rows=(False,) * len(operands))(*operands)
    return dqkv, None, tuple(map(weight_cotangent, weights, totals))


norm_and_rotate.defvjp(_qk_forward, _qk_backward)


def _rotated_groups(
    rotation: Rotation, x: Array, positions: Array, weights: tuple[Weight, ...], turn: float
) -> tuple[Array, ...]:
    operation = _QK_ROPE if len(rotation.heads) > 1 else _ROPE
    options = {"heads": rotation.heads, "eps": rotation.norm_eps, "norm_offset": rotation.norm_offset}
    rotate = functools.partial(operation.kernels().forward, **options)

    def forward(x: Array, positions: Array, *weights: Array) -> tuple[Array, ...]:
        return rotate(x, cos_and_sin(rotation.embedding, positions, turn), *weights)

    values = [value_and_sum(weight)[0] for weight in weights]
    return with_vmap_rule(forward, rows=(True, True, *(False for _ in values)))(x, positions, *values)


def cos_and_sin(embedding: RotaryEmbedding, positions: Array, turn: float) -> tuple[Array, Array]:
    """Returns cosine and sine, float32 `[*B, T, K / 2]`, times the embedding's scales, for all backends under contract.

    Args:
        embedding: the frequencies.
        positions: absolute positions `[*B, T]`, or `[*B, T, A]` if the embedding has sections.
        turn: 1 for the rotation, -1 for the rotation back.
    """
    frequencies = jnp.asarray(np.float32(turn) * embedding.inverse_frequencies)
    positions = embedding.pair_positions(positions)

    scales = jnp.asarray(embedding.pair_scales)[None]

    def factors(positions: Array, frequencies: Array) -> tuple[Array, Array]:
        angles = positions.astype(ACCUMULATOR) * frequencies[None]
        return jnp.cos(angles) * scales, jnp.sin(angles) * scales

    tokens = positions.shape[:-1]
    operands = positions.reshape(-1, positions.shape[-1]), frequencies
    if backends.backend() == "portable":
        cos, sin = map_rows(factors, *operands)
    else:
        # An accelerator uses the same instructions for every element. The barriers prevent constant folding and fusion
        # into other kernels, which might compute the factors differently.
        cos, sin = lax.optimization_barrier(factors(*lax.optimization_barrier(operands)))
    return cos.reshape(*tokens, -1), sin.reshape(*tokens, -1)
