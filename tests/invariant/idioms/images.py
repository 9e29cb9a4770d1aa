"""Convolutions, pools and norms over images."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax import Array, lax

from tests.invariant.idioms.layers import IMAGES, applied
from tests.invariant.idioms.registry import Function, accepted

GROUP = "Images"


@accepted(GROUP, "`nnx.Conv`", "", "images")
def convolution() -> nnx.Module:
    return nnx.Conv(3, 4, (3, 3), strides=2, rngs=nnx.Rngs(0))


@accepted(GROUP, "depthwise convolutions (`feature_group_count`)", "", "images")
def depthwise_convolution() -> nnx.Module:
    return nnx.Conv(3, 6, (3, 3), feature_group_count=3, rngs=nnx.Rngs(0))


@accepted(GROUP, "dilated convolutions", "", "images")
def dilated_convolution() -> nnx.Module:
    return nnx.Conv(3, 4, (3, 3), kernel_dilation=2, rngs=nnx.Rngs(0))


@accepted(GROUP, "transposed convolutions", "", "images")
def transposed_convolution() -> nnx.Module:
    return nnx.ConvTranspose(3, 4, (3, 3), strides=(2, 2), rngs=nnx.Rngs(0))


@accepted(GROUP, "`GroupNorm`, `InstanceNorm`", "", "images")
def group_norm() -> nnx.Module:
    return nnx.Sequential(nnx.GroupNorm(3, 3, rngs=nnx.Rngs(0)), nnx.InstanceNorm(3, rngs=nnx.Rngs(0)))


@accepted(GROUP, "average pools", "", "images")
def average_pool() -> Function:
    return lambda x: nn.avg_pool(x, (3, 3), strides=(2, 2), padding="SAME")


@accepted(GROUP, "maximum pools", "", "images")
def maximum_pool() -> Function:
    return lambda x: nn.max_pool(x, (2, 2), strides=(2, 2))


@accepted(GROUP, "pools over the whole image", "", "images")
def global_pools() -> Function:
    return lambda x: jnp.concatenate([jnp.max(x, (1, 2)), jnp.mean(x, (1, 2))], axis=-1)


@accepted(GROUP, "`lax.reduce_window`", "", "images")
def windows() -> Function:
    return lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "VALID")


class _UNet(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        top = nn.relu(nn.Conv(4, (3, 3))(x))
        low = nn.relu(nn.Conv(8, (3, 3))(nn.max_pool(top, (2, 2), strides=(2, 2))))
        up = jax.image.resize(low, (*low.shape[:1], 8, 8, 8), "bilinear")
        return nn.Conv(2, (3, 3))(jnp.concatenate([top, up], axis=-1))


@accepted(GROUP, "a U-Net: pools, `jax.image.resize` and skip connections", "", "images")
def u_net() -> Function:
    return applied(_UNet(), IMAGES)
