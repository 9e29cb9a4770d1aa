"""The exchange between devices that hold different experts of a layer: each token's results are added at its home.

Every device has the hidden states of all tokens, as in all other parts, so no token travels to its experts: a device
computes the rows of all tokens that chose its own experts. Only results travel. Each device is the home of some tokens.
It receives their results from all devices (`all_to_all`) and adds them as a single device would, in ascending order of
experts. So no number is added across devices.

The buffers have room for the case that all results of a token come from one device, so no token is ever dropped.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from detjax.models.parts.sharding import (
    EXPERT,
    ShardGroup,
    all_gathered,
    devices,
    indivisible_shards,
    refusing_gradients,
)
from detjax.operands.numerics import ceil_div


def whole_experts(experts: int, sharing: int) -> ShardGroup:
    """Returns the shards of whole experts with consecutive ids over the devices of `EXPERT`."""
    return ShardGroup(experts, indivisible_shards(experts, sharing))


def first_local(experts: ShardGroup) -> Int32[Array, ""] | None:
    """Returns the first of this device's experts; None if it has all of them."""
    if experts.shards == 1:
        return None
    return experts.shard_of(lax.axis_index(EXPERT), _sharing()) * experts.length


def local_ids(ids: Int32[Array, "N k"], experts: ShardGroup) -> Int32[Array, "N k"]:
    """Returns each expert's index among this device's experts, and their number for experts of other devices."""
    first = first_local(experts)
    if first is None:
        return ids
    is_local = (ids >= first) & (ids < first + experts.length)
    return jnp.where(is_local, ids - first, jnp.int32(experts.length))


def results_at_home(
    results: Float[Array, "N k D"], ids: Int32[Array, "N k"], experts: ShardGroup
) -> Float[Array, "n k D"]:
    """Returns all results of the tokens whose home is this device.

    `results` are this device's for all tokens, undefined for experts of other devices, and `ids` all tokens' experts.
    """
    everything = refusing_gradients(_sent_home)(_with_homes(results))
    owner = at_home(ids) // experts.length * (_sharing() // experts.shards)  # the first device that has the expert
    return jnp.take_along_axis(everything, owner[None, ..., None], axis=0, mode="clip")[0]


def at_home(x: Array) -> Array:
    """Returns the rows `[n, ...]` of the tokens whose home is this device, from the rows of all tokens `[N, ...]`."""
    tokens = ceil_div(len(x), _sharing())
    return lax.dynamic_slice_in_dim(_with_homes(x), lax.axis_index(EXPERT) * tokens, tokens)


def from_homes(x: Float[Array, "n D"], tokens: int) -> Float[Array, "N D"]:
    """Returns the rows of all tokens, gathered from the tokens' homes."""
    return all_gathered(x.reshape(1, -1), (EXPERT,)).reshape(-1, x.shape[-1])[:tokens]


def _sent_home(results: Array) -> Array:
    """Results `[devices, n, k, D]` of this device's tokens, by the device that computed them."""
    by_device = lax.all_to_all(results, EXPERT, split_axis=0, concat_axis=0, tiled=True)
    return by_device.reshape(_sharing(), -1, *results.shape[1:])


def _with_homes(x: Array) -> Array:
    """Pads the rows of tokens with zeros, so that every device is the home of equally many."""
    missing = -len(x) % _sharing()
    return jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1)))


def _sharing() -> int:
    """The number of devices that share the experts."""
    return devices((EXPERT,))
