"""MoonViT, the vision tower of Kimi K2.5 (Kimi Team 2026): it sees the frames of a clip together, and averages them.

A patch is a part of a single frame. All patches of a clip attend to one another; an image is a clip of one frame.
Learned positions of a square table are resampled to the clip's rows and columns, frames have fixed positions in
addition, and queries and keys are rotated by a patch's row and column.
"""

import dataclasses
import functools
from fractions import Fraction
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Float32, Int32

from detjax import ops
from detjax.models.network import split
from detjax.models.parts.mlp import MLP, MLPOptions
from detjax.models.parts.norm import LayerNorm
from detjax.models.parts.parameters import Tensors, random_weight
from detjax.models.parts.vision import (
    Keys,
    PatchEmbedding,
    Patches,
    PatchMerger,
    VisionAttention,
    VisionOptions,
    VisionTower,
    run_block,
)
from detjax.operands.rounding import rounded
from detjax.ops.rotary import RotaryEmbedding

_EPS: Final = 1e-5
"""Epsilon of all norms of the tower, but for the projector's."""
_ROWS_AT_ONCE: Final = 8
"""Rows of a sum that kernels hold at the same time."""
_FRAME_THETA: Final = 10000.0
"""The base of the frequencies of frames' positions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoonViTOptions(VisionOptions):
    """The shape and options of a MoonViT.

    Attributes:
        most_frames: frames of the longest clip.
        projector_eps: epsilon of the norm before patches are joined.
    """

    most_frames: int
    projector_eps: float

    @property
    def tower(self) -> type[VisionTower]:
        """The class of the tower."""
        return MoonViT

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Channels, rows and columns of a patch."""
        return self.channels, self.patch_size, self.patch_size

    @property
    def clip_frames(self) -> int:
        """Frames that the tower may see together."""
        return self.most_frames


class MoonViT(VisionTower):
    """Blocks of attention among the patches of a clip, the mean over its frames, and a projector.

    Each clip is a separate sequence: its keys are divided into blocks of `contract.KV_BLOCK` from its first patch on.
    So no bit of a clip's rows depends on the other clips.
    """

    CHECKPOINT_NAMES = {  # noqa: RUF012
        "patches": "patch_embed",
        "positions": "patch_embed.pos_emb",
        "blocks": "blocks",
        "final_norm": "final_norm",
        "merger": "merger",
    }

    def __init__(self, options: MoonViTOptions, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        assert options.positions is not None
        width = options.width
        self.options = options
        self.patches = PatchEmbedding(options, rngs=rngs, dtype=dtype)
        self.positions = ResampledPositions(options.positions, width, options.most_frames, rngs=rngs, dtype=dtype)
        self.blocks = nnx.List([_Block(options, rngs=rngs, dtype=dtype) for _ in range(options.blocks)])
        self.final_norm = LayerNorm(width, eps=_EPS, dtype=dtype)
        self.merger = Projector(options, rngs=rngs, dtype=dtype)

    def __call__(self, patches: Patches) -> Float[Array, "W U R"]:
        """Returns a row for each token of each window."""
        assert patches.taps is not None and patches.frames is not None
        x = self.patches(jnp.asarray(patches.pixels), residual=self.positions(*map(jnp.asarray, patches.taps)))
        coordinates, keys = jnp.asarray(patches.coordinates), Keys(*map(jnp.asarray, patches.image_keys))
        for block in self.blocks:
            x = run_block(*split(block), x, coordinates, keys)
        x = self.final_norm(x).reshape(-1, self.options.width)
        index, weight = map(jnp.asarray, patches.frames)
        return self.merger(ops.weighted_sum(x[index], weight))


class ResampledPositions(nnx.Module):
    """A square table of positions, and the fixed positions of frames, which follow the table's rows."""

    def __init__(self, rows: int, width: int, frames: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.side, self.frames = round(rows**0.5), frames
        self.weight = random_weight(rngs, (self.side, self.side, width), dtype)

    def __call__(self, index: Int32[Array, "W T n"], weight: Float32[Array, "W T n"]) -> Float[Array, "W T D"]:
        """Returns the weighted sum of rows: in float32, the sums of eight rows each, and then these sums."""
        table = self.weight[...]
        frames = rounded(jnp.asarray(frame_positions(self.frames, table.shape[-1])), table.dtype)
        rows = jnp.concatenate([table.reshape(-1, table.shape[-1]), frames])

        def summed(window: tuple[Array, Array]) -> Array:
            parts = []
            for first in range(0, index.shape[-1], _ROWS_AT_ONCE):
                some, factors = (x[:, first : first + _ROWS_AT_ONCE] for x in window)
                parts.append(ops.weighted_sum(ops.embed(some, rows).astype(jnp.float32), factors))
            whole = jnp.stack(parts, axis=-2)
            return ops.weighted_sum(whole, jnp.ones(whole.shape[:-1], jnp.float32))

        # One window after another: all rows of a large image together would take much memory.
        return rounded(jax.lax.map(summed, (index, weight)), table.dtype)

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        return {"weight": Tensors(("weight",))}


@functools.cache
def frame_positions(frames: int, width: int) -> Float32[np.ndarray, "F D"]:
    """Returns sines, then cosines, of the product of each frame's number and each frequency (Vaswani et al. 2017).

    Products are rounded to float32, as in the code that checkpoints are trained with, and so are sines and cosines,
    which are computed exactly otherwise: they do not depend on the processor's functions.
    """
    frequencies = RotaryEmbedding(width, _FRAME_THETA).inverse_frequencies
    angles = (np.arange(frames, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
    rows = [[_sine_and_cosine(angle) for angle in row] for row in angles.tolist()]
    return np.array(rows).swapaxes(1, 2).reshape(frames, width).astype(np.float32)


def _sine_and_cosine(angle: float) -> tuple[float, float]:
    """Returns the sums of Taylor's series, in integers that count multiples of 2^-160."""
    unit = 1 << 160
    x = int(Fraction(angle) * unit)
    sums, term, power = [0, 0], unit, 0
    while term:
        sums[power % 2] += term if power % 4 < 2 else -term
        power += 1
        term = term * x // (unit * power)
    cosine, sine = (float(Fraction(total, unit)) for total in sums)
    return sine, cosine


class _Block(nnx.Module):
    """Attention and an MLP, each after a norm and added to the residual stream."""

    # The attention's tensors lie next to the norms'.
    CHECKPOINT_NAMES: Final = {"attention_norm": "norm0", "attention": "", "mlp_norm": "norm1", "mlp": "mlp"}

    def __init__(self, options: MoonViTOptions, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        mlp = MLPOptions(inner_width=options.inner_width, activation=options.activation, bias=True)
        self.attention_norm = LayerNorm(options.width, eps=_EPS, dtype=dtype)
        self.attention = _Attention(options, rngs=rngs, dtype=dtype)
        self.mlp_norm = LayerNorm(options.width, eps=_EPS, dtype=dtype)
        self.mlp = _MLP(options.width, mlp, rngs=rngs, dtype=dtype)

    def __call__(
        self, x: Float[Array, "W T D"], coordinates: Int32[Array, "W T 2"], keys: Keys
    ) -> Float[Array, "W T D"]:
        """Returns the residual stream after this block."""
        x = self.attention(self.attention_norm(x), coordinates, keys, residual=x)
        return self.mlp(self.mlp_norm(x), residual=x)


class _Attention(VisionAttention):
    """Attention whose tensors have the columns of heads in another order.

    The parameter has the first columns of all pairs, then the second ones; among pairs, those that turn by the row are
    first, then those that turn by the column, with descending frequencies. In checkpoints, pairs alternate, first one
    that turns by the column. Published checkpoints have the two columns of a pair side by side; checkpoints of
    transformers' network have the first columns of all pairs first, and separate tensors.
    """

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        width, head_dim = self.options.width, self.options.head_dim
        pair = [2 * turn + 1 - axis for axis in range(2) for turn in range(head_dim // 4)]
        side_by_side = tuple(2 * number + column for column in range(2) for number in pair)
        apart = tuple(column * (head_dim // 2) + number for column in range(2) for number in pair)

        def qkv(kind: str) -> Tensors:
            names = tuple(f"attn.{part}_proj.{kind}" for part in "qkv")
            converted = Tensors(names, rows=(width,) * 3, head_order=apart, ordered=2 * width)
            return Tensors((f"wqkv.{kind}",), head_order=side_by_side, ordered=2 * width, other_form=converted)

        return {
            "qkv": qkv("weight"),
            "qkv_bias": qkv("bias"),
            "output": Tensors(("wo.weight",)),
            "output_bias": Tensors(("wo.bias",)),
        }


class _MLP(MLP):
    """Two linear maps under other names."""

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        return {
            "up": Tensors(("fc0.weight",)),
            "up_bias": Tensors(("fc0.bias",)),
            "down": Tensors(("fc1.weight",)),
            "down_bias": Tensors(("fc1.bias",)),
        }


class Projector(PatchMerger):
    """An MLP that merges a square of adjacent patches into one row, after a norm of each."""

    def __init__(self, options: MoonViTOptions, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        super().__init__(options, rngs=rngs, dtype=dtype)
        self.norm = LayerNorm(options.width, eps=options.projector_eps, dtype=dtype)

    @property
    def CHECKPOINT_NAMES(self) -> dict[str, str]:
        """The parts' names in checkpoints."""
        return {"norm": "pre_norm"}

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        return {
            "inner": Tensors(("proj.0.weight",)),
            "inner_bias": Tensors(("proj.0.bias",)),
            "output": Tensors(("proj.2.weight",)),
            "output_bias": Tensors(("proj.2.bias",)),
        }
