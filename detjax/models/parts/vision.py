"""The vision tower: turns the patches of images into rows that take the place of tokens of a prompt.

There are two designs. Qwen2.5-VL's has RMS norms, gated MLPs, and windowed attention in most blocks (Bai et al. 2025).
Qwen3.5's has layer norms, MLPs without a gate, and a table of learned positions (Qwen Team 2026); Qwen3-VL's has rows
of inner blocks in addition (Bai et al. 2025, "DeepStack").
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Final, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Float32, Int32

from detjax import ops
from detjax.contract import KV_BLOCK
from detjax.models.network import Network, Weights, split
from detjax.models.parts.mlp import MLP, GatedMLP, MLPOptions
from detjax.models.parts.norm import LayerNorm, RMSNorm
from detjax.models.parts.parameters import Tensors, optional, random_weight, zero_bias
from detjax.operands.kv_pages import KVPages, Queries
from detjax.operands.options import Activation
from detjax.operands.rounding import rounded
from detjax.operands.sampling_arrays import Arrays
from detjax.ops.rotary import RotaryEmbedding
from detjax.runtime import compilation

_EPS: Final = 1e-6
"""Epsilon of all norms of the tower, whatever the decoder's is."""
_HEAD_UNIT: Final = 16
"""Attention kernels take head sizes that are a multiple of this number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionOptions:
    """The shape and options of a vision tower.

    Attributes:
        width: the width of hidden states.
        inner_width: the width between the projections of an MLP.
        blocks: the number of blocks.
        heads: heads of queries, of keys and of values.
        activation: the activation function of an MLP's gate.
        channels: colours of a pixel.
        patch_size: rows and columns of pixels of a patch.
        temporal_patch_size: frames of a patch. An image is repeated in all of them.
        merge_size: rows and columns of patches that make one token.
        window_size: rows and columns of pixels of a window; None: no windows, all blocks see whole images.
        full_blocks: the blocks in which a patch sees its whole image instead of just its window.
        output_width: the width of the output rows, which is the decoder's.
        theta: the base of the frequencies of the rotary embedding.
        tokens_per_second: the rate of time positions in videos; None: each frame's time is written in the prompt.
        positions: rows of the table of learned positions, a square number; None: no table. With a table, the tower has
            Qwen3.5's design.
        deepstack_blocks: blocks, in ascending order, whose outputs become further rows of each token. The rows of the
            first of them join the output of the decoder's first layer, and so on.
    """

    width: int
    inner_width: int
    blocks: int
    heads: int
    activation: Activation
    channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    window_size: int | None
    full_blocks: tuple[int, ...]
    output_width: int
    theta: float
    tokens_per_second: int | None
    positions: int | None = None
    deepstack_blocks: tuple[int, ...] = ()

    def __repr__(self) -> str:
        """Returns the fields, the last two only if set: digests of models depend on this text."""
        fields = [(field.name, getattr(self, field.name), field.default) for field in dataclasses.fields(self)]
        used = [f"{name}={value!r}" for name, value, default in fields if value != default]
        return f"VisionOptions({', '.join(used)})"

    @property
    def tower(self) -> "type[VisionTower]":
        """The class of the tower."""
        return VisionTower

    @property
    def clip_frames(self) -> int:
        """Frames that the tower may see together."""
        return 1

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return self.width // self.heads

    @property
    def rope(self) -> RotaryEmbedding:
        """The rotary embedding: half of the columns encode the patch's row, the others its column."""
        quarter = self.head_dim // 4
        return RotaryEmbedding(self.head_dim, self.theta, sections=(quarter, quarter), axial=True)

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Channels, frames, rows and columns of a patch."""
        return self.channels, self.temporal_patch_size, self.patch_size, self.patch_size

    @property
    def merged(self) -> int:
        """Patches that make one token."""
        return self.merge_size**2

    @property
    def row_width(self) -> int:
        """The width of all rows of a token side by side: one in place of its embedding, and one of each inner block."""
        return self.output_width * (1 + len(self.deepstack_blocks))

    @property
    def has_learned_positions(self) -> bool:
        """True if the tower has Qwen3.5's design."""
        return self.positions is not None

    @property
    def window_side(self) -> int | None:
        """Rows and columns of tokens of a whole window; None: no windows."""
        return None if self.window_size is None else self.window_size // self.merge_size // self.patch_size

    @property
    def window_patches(self) -> int:
        """Patches of a whole window, or of a chunk of an image without windows."""
        side = self.window_side
        return KV_BLOCK // self.merged * self.merged if side is None else side**2 * self.merged


class Keys(NamedTuple):
    """The patches that each window's patches see.

    Attributes:
        patch: the patch in each slot of each page, as an index into all windows' patches.
        page_table: the pages that each window's patches see.
        length: the number of these patches; 0 for padding windows.
    """

    patch: Int32[Arrays, "P S"]
    page_table: Int32[Arrays, "W p"]
    length: Int32[Arrays, "W"]


class Taps(NamedTuple):
    """Some rows for each patch, such as learned positions around it in a table, and their weights in a sum."""

    index: Int32[Arrays, "W T n"]
    weight: Float32[Arrays, "W T n"]


class Patches(NamedTuple):
    """The patches of some images, by window. Padding is undefined.

    Attributes:
        pixels: the numbers of each patch.
        coordinates: its row and its column in its image.
        taps: its position relative to the learned positions; None without them.
        window_keys: for blocks with windows, the patches of the window.
        image_keys: for the other blocks, the patches of the image, in the order of its windows.
        frames: for each patch of the first frame of a clip, the patches in its place in all frames, as indices into all
            windows' patches; None if the tower sees single frames.
    """

    pixels: Float[Arrays, "W T P"]
    coordinates: Int32[Arrays, "W T 2"]
    taps: Taps | None
    window_keys: Keys
    image_keys: Keys
    frames: Taps | None = None


class VisionTower(nnx.Module):
    """Blocks of attention among patches, and a merger. Some or all of the blocks see whole images.

    Each image is a separate sequence, and so is each window: its keys are divided into blocks of `contract.KV_BLOCK`
    from its first patch on. So no bit of an image's rows depends on the other images.
    """

    CHECKPOINT_NAMES: ClassVar[Mapping[str, str]] = {
        "patches": "patch_embed",
        "positions": "pos_embed",
        "blocks": "blocks",
        "merger": "merger",
        "deepstack": "deepstack_merger_list",
    }

    def __init__(self, options: VisionOptions, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.options = options
        self.patches = PatchEmbedding(options, rngs=rngs, dtype=dtype)
        rows = options.positions
        self.positions = None if rows is None else LearnedPositions(rows, options.width, rngs=rngs, dtype=dtype)
        self.blocks = nnx.List([VisionBlock(options, rngs=rngs, dtype=dtype) for _ in range(options.blocks)])
        self.merger = PatchMerger(options, rngs=rngs, dtype=dtype)
        mergers = [PatchMerger(options, rngs=rngs, dtype=dtype, joins_first=True) for _ in options.deepstack_blocks]
        self.deepstack = nnx.List(mergers) if mergers else None

    def __call__(self, patches: Patches) -> Float[Array, "W U R"]:
        """Returns the rows of each token of each window, side by side; see `VisionOptions.row_width`."""
        learned = None
        if self.positions is not None:
            assert patches.taps is not None
            learned = self.positions(*map(jnp.asarray, patches.taps))
        x = self.patches(jnp.asarray(patches.pixels), residual=learned)
        coordinates = jnp.asarray(patches.coordinates)
        mergers, inner = iter(self.deepstack or ()), []
        for index, block in enumerate(self.blocks):
            keys = patches.image_keys if index in self.options.full_blocks else patches.window_keys
            x = run_block(*split(block), x, coordinates, Keys(*map(jnp.asarray, keys)))
            if index in self.options.deepstack_blocks:
                inner.append(next(mergers)(x))
        rows = self.merger(x)
        return jnp.concatenate([rows, *inner], axis=-1) if inner else rows


@functools.partial(compilation.jit, static_argnums=0)
def run_block(
    network: Network[Any], weights: Weights, x: Float[Array, "W T D"], coordinates: Array, keys: Keys
) -> Float[Array, "W T D"]:
    """Runs a block as a separate program, so that blocks that differ only in their weights are traced once."""
    return network.with_weights(weights)(x, coordinates, keys)


class PatchEmbedding(nnx.Module):
    """A linear map of a patch's numbers. The weight has the shape of the equivalent convolution."""

    def __init__(self, options: VisionOptions, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.weight = random_weight(rngs, (options.width, *options.patch_shape), dtype)
        self.bias = zero_bias(options.has_learned_positions, (options.width,), dtype)

    def __call__(
        self, pixels: Float[Array, "*N P"], *, residual: Float[Array, "*N D"] | None = None
    ) -> Float[Array, "*N D"]:
        """Returns the patches' hidden states in the weight's dtype, after rounding the pixels to it."""
        weight = self.weight[...].reshape(self.weight.shape[0], -1)
        pixels = rounded(pixels, weight.dtype)
        return ops.matmul(pixels, weight, layout="nk", bias=optional(self.bias), residual=residual)

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        return {"weight": Tensors(("proj.weight",)), "bias": Tensors(("proj.bias",))}


class LearnedPositions(nnx.Module):
    """A square table of positions that patches interpolate between."""

    def __init__(self, rows: int, width: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.weight = random_weight(rngs, (rows, width), dtype)

    def __call__(self, index: Int32[Array, "*N n"], weight: Float32[Array, "*N n"]) -> Float[Array, "*N D"]:
        """Returns the weighted sum of some rows."""
        return ops.weighted_sum(ops.embed(index, self.weight[...]), weight)

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        return {"weight": Tensors(("weight",))}


def _norm(options: VisionOptions, dtype: DTypeLike, patches: int = 1) -> RMSNorm | LayerNorm:
    """Makes a norm of the tower's kind, over the columns of a number of patches together."""
    return (LayerNorm if options.has_learned_positions else RMSNorm)(options.width * patches, eps=_EPS, dtype=dtype)


class VisionBlock(nnx.Module):
    """Bidirectional attention and an MLP, each after a norm and added to the residual stream."""

    CHECKPOINT_NAMES: Final = {"attention_norm": "norm1", "attention": "attn", "mlp_norm": "norm2", "mlp": "mlp"}

    def __init__(self, options: VisionOptions, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        mlp = MLPOptions(inner_width=options.inner_width, activation=options.activation, bias=True)
        kind = MLP if options.has_learned_positions else GatedMLP
        self.attention_norm = _norm(options, dtype)
        self.attention = VisionAttention(options, rngs=rngs, dtype=dtype)
        self.mlp_norm = _norm(options, dtype)
        self.mlp = kind(options.width, mlp, rngs=rngs, dtype=dtype)

    def __call__(
        self, x: Float[Array, "W T D"], coordinates: Int32[Array, "W T 2"], keys: Keys
    ) -> Float[Array, "W T D"]:
        """Returns the residual stream after this block."""
        x = self.attention(self.attention_norm(x), coordinates, keys, residual=x)
        return self.mlp(self.mlp_norm(x), residual=x)


class VisionAttention(nnx.Module):
    """Attention of patches to all patches of their window or image."""

    def __init__(self, options: VisionOptions, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        width = options.width
        self.options = options
        self.qkv = random_weight(rngs, (3 * width, width), dtype)
        self.qkv_bias = nnx.Param(jnp.zeros(3 * width, dtype))
        self.output = random_weight(rngs, (width, width), dtype)
        self.output_bias = nnx.Param(jnp.zeros(width, dtype))

    def __call__(
        self,
        x: Float[Array, "W T D"],
        coordinates: Int32[Array, "W T 2"],
        keys: Keys,
        *,
        residual: Float[Array, "W T D"],
    ) -> Float[Array, "W T D"]:
        """Returns the attention, added to the residual stream."""
        heads, head_dim = self.options.heads, self.options.head_dim
        qkv = ops.matmul(x, self.qkv[...], layout="nk", bias=self.qkv_bias[...])
        qkv = qkv.reshape(*x.shape[:-1], 3 * heads, head_dim)
        q, k = ops.qk_rope(qkv, coordinates, self.options.rope, heads=heads, kv_heads=heads)
        # Kernels take only some head sizes. Padding heads with zeros changes no score.
        pad_to = [(0, 0)] * x.ndim + [(0, -head_dim % _HEAD_UNIT)]
        q, k, v = (jnp.pad(y, pad_to) for y in (q, k, qkv[..., 2 * heads :, :]))
        kv = KVPages(*(y.reshape(-1, *y.shape[2:])[keys.patch].swapaxes(1, 2) for y in (k, v)))
        queries = Queries(keys.page_table, jnp.zeros_like(keys.length), keys.length)
        o = ops.attention(q, kv, queries, scale=1 / math.sqrt(head_dim), causal=False)
        o = o[..., :head_dim].reshape(x.shape)
        return ops.matmul(o, self.output[...], layout="nk", bias=self.output_bias[...], residual=residual)

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        return {
            "qkv": Tensors(("qkv.weight",)),
            "qkv_bias": Tensors(("qkv.bias",)),
            "output": Tensors(("proj.weight",)),
            "output_bias": Tensors(("proj.bias",)),
        }


class PatchMerger(nnx.Module):
    """An MLP that merges a square of adjacent patches into one row."""

    def __init__(self, options: VisionOptions, *, rngs: nnx.Rngs, dtype: DTypeLike, joins_first: bool = False) -> None:
        """Makes a merger; `joins_first`: the norm covers the joined patches, instead of each patch separately."""
        width = options.width * options.merged
        self.options, self.joins_first = options, joins_first
        self.norm = _norm(options, dtype, options.merged if joins_first else 1)
        self.inner = random_weight(rngs, (width, width), dtype)
        self.inner_bias = nnx.Param(jnp.zeros(width, dtype))
        self.output = random_weight(rngs, (options.output_width, width), dtype)
        self.output_bias = nnx.Param(jnp.zeros(options.output_width, dtype))

    def __call__(self, x: Float[Array, "W T D"]) -> Float[Array, "W U O"]:
        """Returns a row for each `merged` patches of a window."""
        joined = len(x), -1, self.options.width * self.options.merged
        x = self.norm(x.reshape(joined)) if self.joins_first else self.norm(x).reshape(joined)
        x = ops.matmul(x, self.inner[...], layout="nk", bias=self.inner_bias[...], activation="gelu")
        return ops.matmul(x, self.output[...], layout="nk", bias=self.output_bias[...])

    @property
    def CHECKPOINT_NAMES(self) -> dict[str, str]:
        """The parts' names in checkpoints."""
        return {"norm": "norm" if self.options.has_learned_positions else "ln_q"}

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        inner, output = ("linear_fc1", "linear_fc2") if self.options.has_learned_positions else ("mlp.0", "mlp.2")
        return {
            "inner": Tensors((f"{inner}.weight",)),
            "inner_bias": Tensors((f"{inner}.bias",)),
            "output": Tensors((f"{output}.weight",)),
            "output_bias": Tensors((f"{output}.bias",)),
        }
