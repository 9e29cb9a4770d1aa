"""Group-limited ranks of experts, under contract."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from detjax.ops.checks import check_shape
from detjax.portable.tiles import each_row
from detjax.runtime import compilation


@compilation.jit(static_argnames=("groups", "kept"))
def group_limited_ranks(
    scores: Float32[Array, "N E"], correction: Float32[Array, "E"], *, groups: int, kept: int
) -> Float32[Array, "N E"]:
    """Returns the ranks by which a token chooses experts: `scores + correction` in its groups, -inf in the others.

    A group has `E / groups` consecutive experts, and its count is the sum of its two highest ranks. A token keeps the
    groups with the highest counts; among equals, the lower number wins (DeepSeek-AI 2024, DeepSeek-V3, section 2.1.2).
    Every sum has two terms and is rounded. There are no gradients.

    Args:
        scores: each token's score of each expert, float32.
        correction: added to the scores for the choice only, float32.
        groups: number of groups.
        kept: number of groups that a token keeps.

    Raises:
        TypeError: a dtype is not float32.
        ValueError: shapes do not fit together, groups have fewer than 2 experts, or `kept` exceeds `groups`.

    Example:
        >>> scores = jnp.array([[0.1, 0.2, 0.8, 0.9]])
        >>> ops.group_limited_ranks(scores, jnp.zeros(4), groups=2, kept=1).shape
        (1, 4)
    """
    name, experts = "group_limited_ranks", scores.shape[1]
    for argument, array in {"scores": scores, "correction": correction}.items():
        if array.dtype != jnp.float32:
            raise TypeError(f"{name}: {argument} has dtype {array.dtype}; accepted: float32. Convert it first.")
    check_shape(name, "correction", correction, (experts,), f"scores being {scores.shape}")
    if groups < 1 or experts % groups or experts // groups < 2:
        raise ValueError(f"{name}: groups is {groups}; accepted: divisors of {experts} that leave 2 experts each")
    if not 1 <= kept <= groups:
        raise ValueError(f"{name}: kept is {kept}; accepted: 1 to {groups}, the number of groups")

    def tile(scores: Array, correction: Array) -> Array:
        ranks = scores + correction[None]
        if kept == groups:
            return ranks
        by_group = ranks.reshape(len(ranks), groups, -1)
        best = lax.top_k(by_group, 2)[0]
        # Among equal groups the lower number comes first.
        chosen = lax.top_k(best[..., 0] + best[..., 1], kept)[1]
        is_kept = (chosen[:, :, None] == jnp.arange(groups, dtype=chosen.dtype)[None, None]).any(axis=1)
        return jnp.where(is_kept[..., None], by_group, -jnp.inf).reshape(ranks.shape)

    return each_row(tile, *lax.stop_gradient((scores, correction)))
