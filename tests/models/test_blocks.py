"""Blocks of a decoder's layers: which models have them, and that they compute what all layers do."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from detjax.bench import presets
from detjax.models import Decoder, sharded
from detjax.models.blocks import Blocks, equal_blocks
from detjax.models.network import abstract, split


def decoder(preset: str, layers: int | None = None) -> Decoder:
    """A decoder without numbers."""
    return abstract(lambda: Decoder(presets.config(preset, layers), rngs=nnx.Rngs(0), dtype=jnp.bfloat16))


def bounds(blocks: Blocks | None) -> list[tuple[int, int]]:
    return [] if blocks is None else [block.layers for block in blocks.blocks]


@pytest.mark.parametrize(
    ("preset", "layers", "most", "expected"),
    [
        ("Qwen3-8B", None, 16, [(0, 12), (12, 24), (24, 36)]),
        ("Qwen3-8B", 32, 16, [(0, 16), (16, 32)]),
        ("Qwen3-8B", 16, 16, []),  # one program is small enough
        ("Qwen3-8B", 31, 16, []),  # only blocks of one layer would be equal
        ("Qwen3-8B", 34, 3, [(first, first + 2) for first in range(0, 34, 2)]),
        ("gpt-oss-20b", None, 16, [(0, 12), (12, 24)]),
        ("gpt-oss-20b", 6, 3, [(0, 2), (2, 4), (4, 6)]),  # every other layer has a window, so three differ
        ("DeepSeek-V3", None, 16, []),  # the first layers have no experts
        ("gemma-4-E2B", None, 16, []),  # layers have inputs of their own
    ],
)
def test_blocks_are_equal_and_as_few_as_possible(
    preset: str, layers: int | None, most: int, expected: list[tuple[int, int]]
) -> None:
    assert bounds(equal_blocks(decoder(preset, layers), most)) == expected


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize(("preset", "layers", "most"), [("tiny", 6, 2), ("tiny-experts", 4, 1)])
def test_blocks_compute_what_all_layers_do(preset: str, layers: int, most: int, is_shared: bool) -> None:
    model = presets.decoder(preset, layers)
    if is_shared:
        model = sharded(model, jax.make_mesh((1, 1), ("tensor", "expert")))
    blocks = equal_blocks(model, most)
    assert blocks is not None and len(blocks.blocks) == layers // most
    tokens = jnp.arange(3, 14)[None]
    cache = model.empty_cache(1, 16)
    queries = cache.next_queries(jnp.full(1, tokens.shape[1], jnp.int32))
    weights = split(model)[1]

    @jax.jit
    def at_once(weights: Any, tokens: Any, state: Any) -> Any:
        return split(model)[0].with_weights(weights).hidden_states(tokens, queries, state)

    @jax.jit
    def embedded(weights: Any, tokens: Any) -> Any:
        return blocks.embedding.with_weights(weights).embedded(tokens)

    @jax.jit
    def one(weights: Any, tokens: Any, state: Any, x: Any, is_first: Any) -> Any:
        return blocks.network.with_weights(weights).block(tokens, queries, state, x, is_first)

    def all_blocks(x: Any, flags: list[Any]) -> Any:
        state, hidden = list[Any](), None
        for block, is_first in zip(blocks.blocks, flags, strict=True):
            part = tuple(weights[index] for index in block.weights)
            hidden, x, written = one(part, tokens, block.part(cache.state), x, is_first)
            state += written
        return hidden, tuple(state)

    expected = at_once(weights, tokens, cache.state)
    embeddings = embedded(tuple(weights[index] for index in blocks.embedding_weights), tokens)
    later = len(blocks.blocks) - 1
    for x, flags in (
        (jnp.full_like(embeddings, jnp.nan), [jnp.asarray(True), *[jnp.asarray(False)] * later]),
        (embeddings, [None] * (1 + later)),
    ):
        jax.tree.map(np.testing.assert_array_equal, all_blocks(x, flags), expected)
