"""Logprobs of the distribution that tokens are drawn from: the engine reports the bits that a trainer computes."""

import asyncio
import dataclasses
import functools
import random
from collections import Counter
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import SamplingParams, generate, ops
from detjax.engine import Completion, Constraint, Engine, Generation, Request, SamplingVariant, Token
from detjax.engine.constraints import ModelConstraints
from tests.contract import emulation
from tests.support.bits import assert_same_bits, same_bits
from tests.support.small_loops import small_engine, small_model, small_tokenizer

VOCABULARY = 515
LENGTH = 208
"""Tokens of the trainer's forward pass, prompt and padding included."""
TOKENS = 6
"""Tokens of a sample."""
ADJUSTMENTS = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "presence_penalty": -0.3,
    "logit_bias": ((7, 2.5), (11, -3.0), (514, 1.5)),
    "min_tokens": 4,
    "stop_token_ids": (7, 40, 41),
}
FILTERS = ({}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05, "top_k": 100})


@functools.cache
def requests() -> list[Request]:
    """Every temperature with every filter; some with adjustments, some that begin alike."""
    draw = random.Random(0)
    prefix = [draw.randrange(VOCABULARY) for _ in range(130)]
    result = []
    for index in range(16):
        prompt = [*(prefix if index % 5 == 0 else []), *(draw.randrange(VOCABULARY) for _ in range(1 + 4 * index))]
        params = SamplingParams(
            max_tokens=TOKENS,
            temperature=(0.0, 0.6, 1.0, 1.5)[index % 4],
            seed=index,
            ignore_eos=True,
            sampling_logprobs=True,
            **FILTERS[index // 4],
            **(ADJUSTMENTS if index % 3 == 2 else {}),
        )
        result.append(Request(prompt, params))
    return result


def others() -> list[Request]:
    """Requests that do not ask for these logprobs."""
    fields = ({}, {"temperature": 1.0, "top_logprobs": 2}, {"temperature": 0.8, "presence_penalty": 1.0})
    return [Request([5, 6, 7 + index], SamplingParams(max_tokens=14, **some)) for index, some in enumerate(fields)]


@functools.cache
def alone() -> list[Generation]:
    """Each request's answer from an engine without a prefix cache that serves one request at a time."""
    with small_engine(prefix_cache=False) as one:
        return [one.generate([request])[0] for request in requests()]


def reported(generations: list[Generation]) -> list[np.ndarray]:
    return [np.float32(c.sampling_logprobs) for generation in generations for c in generation.completions]


@functools.cache
def _forward() -> Any:
    model = small_model()
    return detjax.jit(lambda tokens: model(tokens))


def logits_before(prompt: list[int], tokens: tuple[int, ...]) -> np.ndarray:
    """The model's logits for each generated token, `[tokens, V]`, from one forward pass of the whole sequence."""
    padded = np.zeros((1, LENGTH), np.int32)
    padded[0, : len(prompt) + len(tokens)] = (*prompt, *tokens)
    logits = np.asarray(_forward()(jnp.asarray(padded)))[0]
    return logits[len(prompt) - 1 : len(prompt) - 1 + len(tokens)]


def adjusted(logits: np.ndarray, prompt: list[int], tokens: tuple[int, ...], params: SamplingParams) -> np.ndarray:
    """The logits that tokens were chosen by."""
    rows = []
    for index, row in enumerate(logits):
        request = emulation.Adjustments(
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
            dict(params.logit_bias),
            frozenset(params.stop_token_ids if index < params.min_tokens else ()),
        )
        rows.append(emulation.adjusted(row, prompt, Counter(tokens[:index]), request))
    return np.stack(rows)


def trainers(logits: np.ndarray, tokens: tuple[int, ...], params: SamplingParams) -> np.ndarray:
    """Computes logprobs from adjusted logits as a trainer does, which knows neither noise nor positions."""
    rows = len(tokens)
    ids = jnp.zeros(rows, jnp.int32)
    arrays = ops.SamplingArrays(
        jnp.zeros((rows, 4), jnp.uint32),
        ids,
        jnp.full(rows, params.temperature, jnp.float32),
        jnp.full(rows, params.top_k, jnp.int32),
        jnp.full(rows, params.top_p, jnp.float32),
        jnp.full(rows, params.min_p, jnp.float32),
    )
    return np.asarray(ops.sampling_logprobs(jnp.asarray(logits), jnp.asarray(tokens, jnp.int32), arrays))


def expected(request: Request, completion: Completion) -> np.ndarray:
    assert not isinstance(request.prompt, str)
    prompt = [*request.prompt]
    logits = logits_before(prompt, completion.tokens)
    return trainers(adjusted(logits, prompt, completion.tokens, request.sampling), completion.tokens, request.sampling)


def test_the_engine_reports_the_bits_that_a_trainer_computes_from_whole_sequences() -> None:
    for request, generation in zip(requests(), alone(), strict=True):
        (completion,) = generation.completions
        assert len(completion.sampling_logprobs) == len(completion.tokens)
        assert_same_bits(np.float32(completion.sampling_logprobs), expected(request, completion))


def test_temperature_and_filters_are_what_makes_them_differ_from_the_models_logprobs() -> None:
    for request, generation in zip(requests(), alone(), strict=True):
        (completion,), params = generation.completions, request.sampling
        models, sampled = np.float32(completion.logprobs), np.float32(completion.sampling_logprobs)
        assert same_bits(models, sampled) == (params.temperature == 1 and not params.filtered and not params.adjusted)
        assert np.isfinite(sampled).all()
        assert (not sampled.any()) == (params.temperature == 0)


@pytest.mark.parametrize("options", [{}, {"token_budget": 1}], ids=["defaults", "a token a step"])
def test_requests_alone_and_in_a_crowd_have_the_same_bits(options: dict[str, Any]) -> None:
    count = 6 if options else 16
    order = random.Random(1).sample(range(16), 16)[:count]
    with small_engine(**options) as one:
        together = one.generate([*others(), *(requests()[i] for i in order)])
        again = one.generate([requests()[i] for i in order])
    assert together[len(others()) :] == again == [alone()[i] for i in order]
    assert_same_bits(reported(together)[len(others()) :], reported([alone()[i] for i in order]))
    assert all(generation.completions[0].sampling_logprobs == () for generation in together[: len(others())])


@pytest.mark.parametrize("index", [6, *(pytest.param(index, marks=pytest.mark.nightly) for index in (2, 9))])
def test_a_program_of_one_request_gives_the_same_bits(index: int) -> None:
    request = requests()[index]
    (made,) = generate(small_model(), [request.prompt], request.sampling, tokenizer=small_tokenizer())
    assert made.completions == alone()[index].completions


def test_nothing_else_depends_on_asking() -> None:
    silent = [dataclasses.replace(one.sampling, sampling_logprobs=False) for one in requests()]
    with small_engine() as one:
        without = one.generate([dataclasses.replace(r, sampling=p) for r, p in zip(requests(), silent, strict=True)])
    for generation, asked in zip(without, alone(), strict=True):
        assert generation.completions[0] == dataclasses.replace(asked.completions[0], sampling_logprobs=())


def test_preempted_requests_have_the_same_bits() -> None:
    # Each of these requests needs one more page for the tokens that it generates.
    params = SamplingParams(temperature=0.6, top_p=0.9, max_tokens=14, ignore_eos=True, sampling_logprobs=True)
    crowd = [Request([index] * (121 + index), dataclasses.replace(params, seed=index)) for index in range(4)]
    with small_engine(pages=4) as one:
        crowded = one.generate([*crowd, *requests()[:4]])
        assert one.stats().preemptions > 0
    for request, generation in zip(crowd, crowded, strict=False):
        (completion,) = generation.completions
        assert len(completion.sampling_logprobs) == 14
        assert_same_bits(np.float32(completion.sampling_logprobs), expected(request, completion))
    assert_same_bits(reported(crowded[4:]), reported(alone()[:4]))


def test_each_sample_of_a_request_has_its_own() -> None:
    request = Request(list(range(150)), SamplingParams(temperature=1.5, top_k=50, n=3, max_tokens=6, ignore_eos=True))
    request = dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, sampling_logprobs=True))
    with small_engine() as one:
        (generation,) = one.generate([request])
    for completion in generation.completions:
        assert_same_bits(np.float32(completion.sampling_logprobs), expected(request, completion))
    assert len({completion.sampling_logprobs for completion in generation.completions}) == 3


def test_constraints_are_part_of_the_distribution() -> None:
    model, tokenizer = small_model(), small_tokenizer()
    prompt, constraint = [5, 9, 300], Constraint("regex", "[a-z ]{3,12}[.]")
    params = SamplingParams(temperature=0.6, max_tokens=20, constraint=constraint, sampling_logprobs=True, seed=3)
    with small_engine() as one:
        (completion,) = one.generate([Request(prompt, params)])[0].completions
    compiled = ModelConstraints(model.config, model.generation_defaults, tokenizer).compile(constraint)
    assert compiled is not None
    matcher, masks = compiled.matcher(), []
    for index in range(len(completion.tokens)):
        accepted = [(matcher, token) for token in completion.tokens[max(index - 1, 0) : index]]
        masks.append(np.asarray(compiled.compiler.start_masks(1, {0: matcher}, lambda a=accepted: a).result().allowed))
    logits = logits_before(prompt, completion.tokens)
    allowed = ops.constrain_logits(jnp.asarray(logits), jnp.asarray(np.concatenate(masks)))
    result = np.float32(completion.sampling_logprobs)
    assert_same_bits(result, trainers(np.asarray(allowed), completion.tokens, params))
    assert not same_bits(result, trainers(logits, completion.tokens, params))


def test_streams_report_them_token_by_token() -> None:
    async def tokens(one: Engine, request: Request) -> list[Token]:
        return [token async for token in one.stream(request)]

    with small_engine() as one:
        asked, silent = (asyncio.run(tokens(one, request)) for request in (requests()[1], others()[1]))
    assert tuple(token.sampling_logprob for token in asked) == alone()[1].completions[0].sampling_logprobs
    assert {token.sampling_logprob for token in silent} == {None}


def test_stock_xla_fails_the_test_of_engine_and_trainer() -> None:
    some = requests()[1:4]
    with detjax.use_backend("stock"), small_engine(max_samples=8, token_budget=64) as one:
        completions = [generation.completions[0] for generation in one.generate([*some, *others()])[:3]]
        trained = [expected(request, completion) for request, completion in zip(some, completions, strict=True)]
    sampled = [np.float32(completion.sampling_logprobs) for completion in completions]
    assert all(np.allclose(*pair, atol=0.2) for pair in zip(sampled, trained, strict=True))
    assert not same_bits(sampled, trained)


def test_only_requests_that_ask_are_served_by_programs_that_report() -> None:
    variants = SamplingVariant.for_serving(20)
    assert len(variants) == len({*variants}) == 10
    for request in (*requests(), *others()):
        needed = SamplingVariant.needed_by([request.sampling])
        serving = next(variant for variant in variants if variant.serves(needed))
        assert serving.distribution == needed.distribution == request.sampling.sampling_logprobs
    # The usual case of RL has no filters: it need not sort.
    plain = SamplingVariant.needed_by([requests()[1].sampling])
    assert next(variant for variant in variants if variant.serves(plain)) == plain
    assert all(variants[-1].serves(variant) for variant in variants)
