"""What one device does in a step of a model that devices share: weights it reads, operations, and what it exchanges.

Nothing is measured here: cuts say what a device has, and the program of a device says what it gathers.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from detjax import backends, ops
from detjax.bench import presets
from detjax.contract import KV_BLOCK
from detjax.kv_pages import Queries
from detjax.models import Decoder, DecoderConfig
from detjax.models.cache import declarations
from detjax.models.mesh import cuts_of, empty_state_of_a_device
from detjax.models.network import abstract, parameters, part_with, split
from detjax.models.parts.cuts import AXES
from detjax.models.parts.experts import Experts
from detjax.models.parts.latent_attention import LatentAttention
from detjax.models.parts.state import StateSize

DENSE_KERNELS: Final = 5
"""Kernels of a layer beside its products: two norms, rotation and append, attention, merge."""
EXPERT_KERNELS: Final = 4
"""Kernels more where there are experts: choice, groups, rows, combination."""
LATENT_KERNELS: Final = 4
"""Kernels more of latent attention: two norms, rotation, joined queries."""
_ACTIVATION_PASSES: Final = 8
"""How often a layer reads or writes the hidden states of a token beside its products: norms and residuals."""


class Product(NamedTuple):
    """A matrix product of a device.

    Attributes:
        outputs: the rows of the weight that the device has.
        inputs: its columns.
        experts: how many such weights there are.
        chosen: how many of them a token meets.
        rows: "tokens", or "answers" where the last token of a request alone has it.
    """

    outputs: int
    inputs: int
    experts: int = 1
    chosen: int = 1
    rows: str = "tokens"


class Gather(NamedTuple):
    """What a device sends to all others for each token.

    Attributes:
        bytes: bytes of a token.
        rows: as in `Product`.
    """

    bytes: int
    rows: str = "tokens"


@dataclasses.dataclass(frozen=True)
class Work:
    """What one of so many devices does in a step.

    Attributes:
        devices: how many share the model.
        layers: its layers.
        products: the products of all layers and of the head.
        gathers: what it gathers, each of all devices.
        kernels: kernels beside products and gathers.
        weight_bytes: the bytes of the weights that it has.
        key_bytes: the bytes of keys and values of a token that it has.
        attention_flops: operations of attention for a query and a key.
        activation_bytes: the bytes that norms and residuals move for a token.
        hidden_bytes: the bytes of a token's hidden state, which the usual cut adds across devices.
    """

    devices: int
    layers: int
    products: tuple[Product, ...]
    gathers: tuple[Gather, ...]
    kernels: int
    weight_bytes: int
    key_bytes: int
    attention_flops: int
    activation_bytes: int
    hidden_bytes: int


def work(config: DecoderConfig, devices: int) -> Work:
    """Returns what one of the devices does that share a model in bfloat16."""
    mesh = AbstractMesh((devices, 1), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    model = _abstract_model(config)
    weights = _weights_of_a_device(model, mesh)
    attention = [layer.attention for layer in model.layers]
    experts = sum(isinstance(getattr(layer, "mlp", None), Experts) for layer in model.layers)
    latents = sum(isinstance(one, LatentAttention) for one in attention)
    hidden = config.hidden_size * 2
    return Work(
        devices=devices,
        layers=config.layers,
        products=tuple(_products(model, weights)),
        gathers=tuple(_gathers(model, weights, mesh)),
        kernels=config.layers * DENSE_KERNELS + experts * EXPERT_KERNELS + latents * LATENT_KERNELS,
        weight_bytes=sum(x.size * x.dtype.itemsize for x in weights),
        key_bytes=_bytes_of_keys(config, mesh),
        attention_flops=sum(_attention_flops(one, devices) for one in attention),
        activation_bytes=config.layers * _ACTIVATION_PASSES * hidden,
        hidden_bytes=hidden,
    )


@functools.lru_cache
def _abstract_model(config: DecoderConfig) -> Decoder:
    return abstract(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))


def _weights_of_a_device(model: Decoder, mesh: AbstractMesh) -> list[jax.ShapeDtypeStruct]:
    weights = []
    for x, cut in zip(split(model)[1], cuts_of(model, mesh), strict=True):
        shape = x.shape
        if cut is not None:
            axis = x.ndim + cut.axis
            shape = (*shape[:axis], cut.length, *shape[axis + 1 :])
        weights.append(jax.ShapeDtypeStruct(shape, x.dtype))
    return weights


def _products(model: Decoder, weights: list[jax.ShapeDtypeStruct]) -> Iterator[Product]:
    head = "embedding" if model.lm_head is None else "lm_head"
    for path, weight in zip(parameters(model), weights, strict=True):
        *levels, name = path
        if len(weight.shape) < 2 or (levels[0] == "embedding" != head):
            continue
        outputs = math.prod(weight.shape[:-1])
        if levels[0] == head:
            yield Product(outputs, weight.shape[-1], rows="answers")
            continue
        part = part_with(model, path)
        if isinstance(part, Experts) and name in ("gate_up", "down"):
            options = part.options
            yield Product(outputs // options.experts, weight.shape[-1], options.experts, options.chosen)
        else:
            yield Product(outputs, weight.shape[-1])


def _gathers(model: Decoder, weights: list[jax.ShapeDtypeStruct], mesh: AbstractMesh) -> Iterator[Gather]:
    """The gathers of a token, as the program of a device has them."""
    network, config = split(model)[0], model.config

    def hidden(weights: Any, tokens: Any) -> Any:
        decoder = network.with_weights(weights)
        size = StateSize(1, jnp.bfloat16, slots=1)
        state = empty_state_of_a_device(mesh, declarations(config), size)
        one = jnp.ones(1, jnp.int32)
        queries = Queries(ops.contiguous_page_table(1, KV_BLOCK), 0 * one, one, one)
        return decoder._hidden_states(tokens, queries, state, None, rematerialized=False)[0]

    def logits(weights: Any, x: Any) -> Any:
        return network.with_weights(weights)._logits(x)

    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    x = jax.ShapeDtypeStruct((1, 1, config.hidden_size), jnp.bfloat16)
    # On the backends with kernels a device computes its outputs alone, and so it does with XLA's own operations, which
    # any machine can trace.
    with backends.use_backend(backends.STOCK):
        for fn, given, rows in ((hidden, tokens, "tokens"), (logits, x, "answers")):
            shared = jax.shard_map(fn, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
            program = jax.make_jaxpr(shared)(tuple(weights), given)
            yield from (Gather(size, rows) for size in _gathered_bytes(program.jaxpr))


def _gathered_bytes(program: Any) -> Iterator[int]:
    """What each gather of a program sends, those of programs that it calls included."""
    for equation in program.eqns:
        if equation.primitive.name == "all_gather":
            (given,) = equation.invars
            yield given.aval.size * given.aval.dtype.itemsize
        for called in jaxprs_in_params(equation.params):
            yield from _gathered_bytes(called)


def _bytes_of_keys(config: DecoderConfig, mesh: AbstractMesh) -> int:
    """The bytes of a token's keys and values in all layers, those of a device."""
    size = StateSize(1, jnp.bfloat16, slots=1)
    state = jax.eval_shape(lambda: empty_state_of_a_device(mesh, declarations(config), size))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) // KV_BLOCK


def _attention_flops(part: Any, devices: int) -> int:
    """The operations of a layer's attention for a query and a key on a device."""
    options = part.options
    if isinstance(part, LatentAttention):
        heads = options.heads // part.cuts(devices)["q_up"].groups[0].pieces
        return 2 * heads * (options.latent.kv_rank + options.rope.head_dim + options.latent.kv_rank)
    return 4 * options.q_width // options.pieces(devices)[0]


@functools.lru_cache
def preset_work(name: str, devices: int) -> Work:
    """Returns the work of a preset's model; see `work`."""
    return work(presets.config(name), devices)
