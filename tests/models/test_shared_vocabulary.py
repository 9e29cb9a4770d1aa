"""A vocabulary that devices share: tokens and logprobs have the bits of one device, and logits are not gathered."""

import dataclasses
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import detjax
from detjax import models
from detjax.contract import SOFTMAX_BLOCK
from detjax.engine import sampling_programs
from detjax.engine.program import Parameters
from detjax.engine.sampling_programs import SampledRows, SlotState
from detjax.engine.sampling_variant import SamplingVariant
from detjax.engine.token_masks import all_allowed
from detjax.models.network import split
from detjax.models.parts.logits import vocabulary_sharding
from detjax.models.parts.sharding import OutputSharding
from detjax.operands.options import Distribution
from detjax.operands.sampling_arrays import LogitAdjustments, SamplingArrays
from detjax.runtime import compilation
from tests.support.bits import assert_same_bits, same_bits
from tests.support.simulated_devices import ALL_HOLD, run_on_devices

FIXTURE: Final = Path(__file__).parents[1] / "fixtures" / "qwen3"
VOCABULARY: Final = 4 * SOFTMAX_BLOCK + 300
ROWS: Final = 6
COLLECTIVE: Final = re.compile(r"= (\(?[^=]*?) (all-gather|all-to-all|all-reduce|collective-permute)(-start)?\(")
VARIANTS: Final = (
    SamplingVariant(False, 3, distribution=True),
    SamplingVariant(False, 3, adjusted=True, constrained=True, distribution=True),
    SamplingVariant(True, 3, constrained=True),
)


@pytest.mark.parametrize(
    ("vocabulary", "devices", "shards", "blocks"),
    [
        (151936, 2, 2, 19),
        (151936, 8, 8, 5),
        (128256, 8, 8, 4),
        (VOCABULARY, 8, 8, 1),
        (VOCABULARY, 4, 4, 2),
        (2 * SOFTMAX_BLOCK, 8, 2, 1),
    ],
)
def test_devices_have_whole_blocks_of_the_vocabulary(vocabulary: int, devices: int, shards: int, blocks: int) -> None:
    sharding = vocabulary_sharding(vocabulary, devices)
    (group,) = sharding.groups
    assert (group.shards, group.length) == (shards, blocks * SOFTMAX_BLOCK)
    check_pieces(sharding, devices)


def test_a_vocabulary_of_one_block_is_not_cut() -> None:
    assert not vocabulary_sharding(SOFTMAX_BLOCK, 8).is_sharded


def check_pieces(sharding: OutputSharding, devices: int) -> None:
    """Checks that the parts of all devices make up the whole and are zeros otherwise."""
    x = np.arange(1, 2 * sharding.size + 1).reshape(sharding.size, 2)
    parts = [sharding.shards(x, device, devices) for device in range(devices)]
    assert {part.shape for part in parts} == {(sharding.length, 2)}
    assert_same_bits(sharding.whole(parts), x)
    repeated = devices // sharding.groups[0].shards
    assert sum(int((part > 0).sum()) for part in parts) == x.size * repeated


@pytest.mark.parametrize("devices", [4, *(pytest.param(devices, marks=pytest.mark.nightly) for devices in (2, 8))])
def test_tokens_and_logprobs_have_the_bits_of_one_device(devices: int) -> None:
    run_on_devices(__name__, str(devices))


def main(devices: int) -> None:
    """Compares programs on one device and on several."""
    model = model_with_ties()
    mesh = models.mesh_of(devices)
    assert mesh is not None
    shared = models.sharded(model, mesh)
    assert models.digest(shared) == models.digest(model)
    compare_given_tokens(model, shared)
    compare_scores(model, shared)
    for variant in VARIANTS[:2] if devices == 4 else VARIANTS:  # filters sort, and compile for long
        compare_samples(model, shared, variant)
    print(ALL_HOLD)


def compare_given_tokens(model: models.Decoder, shared: models.Decoder) -> None:
    """Logits and logprobs of tokens, with an embedding that is cut. A gradient is refused."""
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, VOCABULARY, (2, 3)))
    hidden, _ = model.hidden(tokens)
    assert_same_bits(shared.hidden(tokens)[0], hidden)
    assert_same_bits(shared.logits(hidden), model.logits(hidden))
    for distribution in (Distribution(), Distribution(temperature=0.7), Distribution(top_k=5)):
        actual = shared.logprobs(hidden, tokens, distribution)
        assert_same_bits(actual, model.logprobs(hidden, tokens, distribution))
    with pytest.raises(NotImplementedError, match="would be added across devices; accepted: a model that each device"):
        jax.grad(lambda hidden: shared.logprobs(hidden, tokens).sum())(hidden)


def model_with_ties() -> models.Decoder:
    """A model whose likeliest tokens are equal, and lie in several blocks."""
    config = models.load(FIXTURE, dtype="float32", progress=False)[0].config
    model = models.Decoder(dataclasses.replace(config, vocab_size=VOCABULARY, layers=1), rngs=nnx.Rngs(0))
    table = np.array(model.embedding.weight[...])
    tied = [3 * SOFTMAX_BLOCK + 7, 2 * SOFTMAX_BLOCK - 1, SOFTMAX_BLOCK + 9, VOCABULARY - 1]
    table[tied] = 3 * table[tied[0]]
    model.embedding.weight[...] = jnp.asarray(table)
    return model


def compare_samples(model: models.Decoder, shared: models.Decoder, variant: SamplingVariant) -> None:
    """A sampling program of the engine, and what its devices exchange."""
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((ROWS, model.config.hidden_size)).astype(np.float32)
    hidden[0] = 50 * np.asarray(model.embedding.weight[3 * SOFTMAX_BLOCK + 7])
    hidden[1] = np.nan
    arguments = sample_arguments(variant)
    expected = run_program(model, hidden, *arguments, variant=variant)
    actual, text = run_compiled(shared, hidden, *arguments, variant=variant)
    assert_same_bits(actual, expected)
    sizes = list(exchanged(text))
    if variant.filtered:
        assert max(sizes) >= ROWS * VOCABULARY  # what is counted is there where logits are gathered
    else:
        assert sizes and max(sizes) < ROWS * SOFTMAX_BLOCK / 16
    if not variant.constrained:
        # Of equal tokens the lowest one is taken, and other samples lie in several blocks.
        tokens = np.asarray(expected[1].token)
        assert tokens[0] == SOFTMAX_BLOCK + 9
        assert len({int(token) // SOFTMAX_BLOCK for token in tokens}) > 2


def sample_arguments(variant: SamplingVariant) -> tuple[Any, SampledRows]:
    """The slots' state and the rows of a step."""
    rng = np.random.default_rng(1)
    sampling = SamplingArrays(
        noise_key=rng.integers(0, 2**32, (ROWS, 4), np.uint32),
        position=np.arange(ROWS, dtype=np.int32),
        temperature=np.array([0, 1, 0.7, 1, 1.3, 0], np.float32),
        top_k=np.array([0, 0, 50, 0, 0, 3], np.int32),
        top_p=np.array([1, 1, 1, 0.9, 1, 1], np.float32),
        min_p=np.zeros(ROWS, np.float32),
    )
    seen, adjustments, allowed = None, None, None
    if variant.adjusted:
        counts = rng.integers(0, 3, (ROWS, VOCABULARY)).astype(np.uint16)
        seen = detjax.ops.SeenTokens(jnp.asarray(counts), jnp.asarray(rng.random((ROWS, VOCABULARY)) < 0.3))
        penalty = np.full(ROWS, 1.2, np.float32)
        biased = rng.integers(0, VOCABULARY, (ROWS, 4)).astype(np.int32)
        biased[:, 0] = 2 * SOFTMAX_BLOCK + 5
        bias = np.full((ROWS, 4), 0.5, np.float32)
        adjustments = LogitAdjustments(penalty, 1 / penalty, 0.1 * penalty, 0.3 * penalty, biased, bias)
    if variant.constrained:
        allowed = all_allowed(ROWS, VOCABULARY) & rng.integers(0, 2**32, (ROWS, -(-VOCABULARY // 32)), np.uint32)
    rows = SampledRows(np.arange(ROWS, dtype=np.int32), sampling, adjustments, allowed)
    return SlotState(jnp.zeros(ROWS, jnp.int32), seen), rows


def run_program(model: models.Decoder, hidden: Any, slots: SlotState, rows: SampledRows, **options: Any) -> Any:
    """Runs a sampling program, which overwrites the slots' state."""
    program = sampling_programs.sample_rows(rows, jnp.asarray(hidden), jax.tree.map(jnp.copy, slots), **options)
    network, weights = split(model)
    return program.fn(network, Parameters(weights), *program.args, **program.static)


def run_compiled(
    model: models.Decoder, hidden: Any, slots: SlotState, rows: SampledRows, **options: Any
) -> tuple[Any, str]:
    """Runs a sampling program, and returns its text too."""
    program = sampling_programs.sample_rows(rows, jnp.asarray(hidden), jax.tree.map(jnp.copy, slots), **options)
    network, weights = split(model)
    parameters = Parameters(weights)
    compiled: Any = compilation.compiled(program.fn, network, parameters, *program.args, **program.static)
    return compiled(parameters, *program.args), compiled.as_text()


def exchanged(text: str) -> Iterator[int]:
    """The amount of numbers that a device receives in each exchange of a compiled program."""
    for shapes, *_ in COLLECTIVE.findall(text):
        yield sum(math.prod(map(int, shape.split(","))) for shape in re.findall(r"\[([\d,]+)\]", shapes))


def compare_scores(model: models.Decoder, shared: models.Decoder) -> None:
    """Logprobs of prompts."""
    hidden = jnp.asarray(np.random.default_rng(3).standard_normal((9, model.config.hidden_size)), jnp.float32)
    program = sampling_programs.score(hidden, 2, np.array([5, VOCABULARY - 1, SOFTMAX_BLOCK], np.int32), 20)
    results = []
    for one in (shared, model):
        network, weights = split(one)
        results.append(program.fn(network, Parameters(weights), *program.args, **program.static))
    assert_same_bits(*results)
    logprob = results[0].packed.read().logprob
    assert not same_bits(logprob[:1], logprob[1:2])


if __name__ == "__main__":
    main(int(sys.argv[1]))
