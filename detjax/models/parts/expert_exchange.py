"""What devices exchange that have different experts of a layer: results, which are added at the home of their token.

Every device has the hidden states of all tokens, as it has in all other parts. So no token travels to its experts: a
device computes the rows of all tokens that chose experts of its own. The results travel. Each device is the home of
some tokens, is sent their results by all devices (`all_to_all`), and adds them as a single device does, in ascending
order of experts. So no number is added across devices.

All results of a token may come from one device. The buffers have room for that, so no token is ever dropped.
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
    """Returns how so many experts are cut over the devices of `EXPERT`: whole ones, with successive ids."""
    return ShardGroup(experts, indivisible_shards(experts, sharing))


def local_ids(ids: Int32[Array, "N k"], experts: ShardGroup) -> Int32[Array, "N k"]:
    """Returns the numbers of experts among those of this device, and their number for experts of other devices."""
    if experts.shards == 1:
        return ids
    first = experts.shard_of(lax.axis_index(EXPERT), _sharing()) * experts.length
    is_local = (ids >= first) & (ids < first + experts.length)
    return jnp.where(is_local, ids - first, jnp.int32(experts.length))


def results_at_home(
    results: Float[Array, "N k D"], ids: Int32[Array, "N k"], experts: ShardGroup
) -> Float[Array, "n k D"]:
    """Returns all results of the tokens whose home is this device.

    Args:
        results: those of this device's experts for all tokens; anything in the places of others.
        ids: the experts of all tokens.
        experts: how they are cut.
    """
    everything = refusing_gradients(_sent_home)(_with_homes(results))
    owner = at_home(ids) // experts.length * (_sharing() // experts.shards)  # the first device that has the expert
    return jnp.take_along_axis(everything, owner[None, ..., None], axis=0, mode="clip")[0]


def at_home(x: Array) -> Array:
    """Returns the rows `[n, ...]` of tokens whose home is this device, given those of all tokens, `[N, ...]`."""
    tokens = ceil_div(len(x), _sharing())
    return lax.dynamic_slice_in_dim(_with_homes(x), lax.axis_index(EXPERT) * tokens, tokens)


def from_homes(x: Float[Array, "n D"], tokens: int) -> Float[Array, "N D"]:
    """Returns the rows of all tokens, of which this device has those of the tokens whose home it is."""
    return all_gathered(x.reshape(1, -1), (EXPERT,)).reshape(-1, x.shape[-1])[:tokens]


def _sent_home(results: Array) -> Array:
    """Results `[devices, n, k, D]` of this device's tokens, by the device that computed them."""
    by_device = lax.all_to_all(results, EXPERT, split_axis=0, concat_axis=0, tiled=True)
    return by_device.reshape(_sharing(), -1, *results.shape[1:])


def _with_homes(x: Array) -> Array:
    """Rows of tokens, and zeros behind them, so that every device is the home of as many."""
    missing = -len(x) % _sharing()
    return jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1)))


def _sharing() -> int:
    """How many devices share the experts."""
    return devices((EXPERT,))
