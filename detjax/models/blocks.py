"""A decoder's layers in equal blocks, which one program computes one after another.

Such a program compiles in less time than one of all layers. The host can also launch the next block while a device
computes the previous one: a program of all layers starts when all of its launches are known, which takes the host
milliseconds.
"""

import itertools
from typing import Final, NamedTuple

from flax import nnx

from detjax.models.cache import declarations
from detjax.models.decoder import Decoder
from detjax.models.network import Network, Path, split
from detjax.models.parts.state import PagesOfLayer

_LAYERS: Final = "layers"
_FEWEST: Final = 4
"""Blocks have at least this share of the layers that they may have, `1 / _FEWEST`: each one takes a launch."""


class Block(NamedTuple):
    """A block of a decoder's layers.

    Attributes:
        layers: the indices of its first layer, and of the layer after its last.
        weights: the numbers of its weights among the decoder's, in the order of the block's network.
    """

    layers: tuple[int, int]
    weights: tuple[int, ...]

    def part[T](self, layers: tuple[T, ...]) -> tuple[T, ...]:
        """Returns the items of its layers, given an item for each layer of the decoder."""
        return layers[slice(*self.layers)]


class Blocks(NamedTuple):
    """The blocks of a decoder's layers.

    Attributes:
        network: each of them: a decoder without the other layers; see `Decoder.block`.
        blocks: the blocks, in order.
        embedding: a decoder without layers, which embeds tokens.
        embedding_weights: the numbers of its weights among the decoder's.
    """

    network: Network[Decoder]
    blocks: tuple[Block, ...]
    embedding: Network[Decoder]
    embedding_weights: tuple[int, ...]


def equal_blocks(model: Decoder, most: int) -> Blocks | None:
    """Returns the fewest equal blocks of up to `most` layers; None if no blocks are equal, or one would be enough.

    Layers are equal if they differ in nothing but their weights. Layers that need more than the residual stream of the
    layer before have no blocks.
    """
    count = len(model.layers)
    has_others = any(isinstance(one, PagesOfLayer) for one in declarations(model.config))
    if count <= most or model.per_layer is not None or has_others:
        return None
    network = split(model)[0]
    for size in range(most, most // _FEWEST, -1):
        if count % size:
            continue
        bounds = list(itertools.pairwise(range(0, count + 1, size)))
        networks = [_network_of(model, *some) for some in bounds]
        if all(one is networks[0] for one in networks):
            blocks = tuple(_block(network, networks[0], *some) for some in bounds)
            embedding = _network_of(model, 0, 0)
            return Blocks(networks[0], blocks, embedding, _block(network, embedding, 0, 0).weights)
    return None


def _network_of(model: Decoder, first: int, end: int) -> Network[Decoder]:
    block = nnx.merge(*nnx.split(model))
    block.layers = nnx.List(list(block.layers)[first:end])
    return split(block)[0]


def _block(network: Network[Decoder], part: Network[Decoder], first: int, end: int) -> Block:
    def in_model(path: Path) -> Path:
        return (_LAYERS, path[1] + first, *path[2:]) if path[0] == _LAYERS else path

    numbers = {path: number for number, path in enumerate(network.paths)}
    return Block((first, end), tuple(numbers[in_model(path)] for path in part.paths))
