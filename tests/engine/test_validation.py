"""Requests at the limits of a model and of an engine, and one beyond: which are served, and which field is at fault."""

import dataclasses
from typing import Any

import pytest

from detjax.engine import EngineConfig, FieldError, Request, SamplingParams
from detjax.engine.request_reader import RequestReader
from detjax.engine.validation import check_arrays, encode_prompt, end_tokens, given_tokens
from detjax.models import DecoderConfig, GenerationDefaults, Tokenizer
from tests.support.small_loops import FIXTURE, small_model

POSITIONS, VOCABULARY = 512, 515
"""Sizes of the small checkpoint."""


@pytest.fixture(scope="module")
def config() -> DecoderConfig:
    config = small_model().config
    assert (config.max_positions, config.vocab_size) == (POSITIONS, VOCABULARY)
    return config


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    read = Tokenizer.load(FIXTURE)
    assert read is not None
    return read


def fault(encode: Any) -> tuple[str, str]:
    """Returns the message and the field of an error."""
    with pytest.raises(ValueError) as raised:
        encode()
    return str(raised.value), getattr(raised.value, "field", "no field")


# --- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "max_tokens"), [(POSITIONS - 1, 1), (1, POSITIONS - 1), (500, 12)])
def test_prompt_and_answer_may_fill_the_positions_of_a_model_and_no_more(
    config: DecoderConfig, length: int, max_tokens: int
) -> None:
    prompt, params = [1] * length, SamplingParams(max_tokens=max_tokens)
    assert encode_prompt("it", config, prompt, params, None) == (1,) * length
    message, field = fault(
        lambda: encode_prompt("it", config, prompt, dataclasses.replace(params, max_tokens=max_tokens + 1), None)
    )
    assert f"it has {length} tokens and asks for {max_tokens + 1} more; accepted: {POSITIONS} in all" in message
    assert field == "max_tokens"


def test_a_prompt_without_room_for_a_token_is_at_fault_itself(config: DecoderConfig) -> None:
    for length, field in ((POSITIONS - 1, "max_tokens"), (POSITIONS, "prompt"), (POSITIONS + 1, "prompt")):
        assert (
            fault(lambda length=length: encode_prompt("it", config, [1] * length, SamplingParams(2), None))[1] == field
        )


def test_every_id_of_the_vocabulary_is_a_token_and_no_other(config: DecoderConfig) -> None:
    prompt = [0, VOCABULARY - 1]
    tokens = encode_prompt("it", config, prompt, SamplingParams(1), None)
    assert tokens == (0, VOCABULARY - 1)
    for prompt, unknown in (([1, VOCABULARY], VOCABULARY), ([-1, 1], -1), ([VOCABULARY + 7, -1], VOCABULARY + 7)):
        message, field = fault(lambda prompt=prompt: encode_prompt("it", config, prompt, SamplingParams(1), None))
        assert (message, field) == (f"it has token {unknown}; accepted: ids 0 to {VOCABULARY - 1}", "prompt")


def test_ids_of_parameters_and_numbers_of_logprobs_are_those_of_the_vocabulary(config: DecoderConfig) -> None:
    most = SamplingParams(1, top_logprobs=VOCABULARY, logit_bias=((0, 1.0), (VOCABULARY - 1, 1.0)))
    assert encode_prompt("it", config, [1], most, None) == (1,)
    for change, field in (
        ({"top_logprobs": VOCABULARY + 1}, "top_logprobs"),
        ({"logit_bias": ((0, 1.0), (VOCABULARY, 1.0))}, "logit_bias"),
    ):
        params = dataclasses.replace(most, **change)
        assert fault(lambda params=params: encode_prompt("it", config, [1], params, None))[1] == field


def test_texts_and_stop_strings_need_a_tokenizer_and_tokens(config: DecoderConfig, tokenizer: Tokenizer) -> None:
    text = "a text"
    assert encode_prompt("it", config, text, SamplingParams(1), tokenizer) == tuple(tokenizer.encode(text))
    stopped = SamplingParams(1, stop=("x",))
    assert encode_prompt("it", config, [1], stopped, tokenizer) == (1,)
    for prompt, params, words, field in (
        (text, SamplingParams(1), "it is text and there is no tokenizer", "prompt"),
        (text, stopped, "it is text and there is no tokenizer", "prompt"),
        ([1], stopped, "it has stop strings and there is no tokenizer", "stop"),
        ([], SamplingParams(1), "it has no tokens", "prompt"),
        ((), SamplingParams(1), "it has no tokens", "prompt"),
    ):
        message, at_fault = fault(
            lambda prompt=prompt, params=params: encode_prompt("it", config, prompt, params, None)
        )
        assert message.startswith(words) and at_fault == field


# --- tokens that end or continue a sample -----------------------------------------------------------------------------


def test_ends_are_those_of_the_model_unless_ignored_and_those_of_the_request() -> None:
    defaults, params = GenerationDefaults(eos_token_ids=(3, 5)), SamplingParams(1, stop_token_ids=(5, 9))
    assert end_tokens(defaults, params) == {3, 5, 9}
    assert end_tokens(defaults, dataclasses.replace(params, ignore_eos=True)) == {5, 9}
    assert end_tokens(None, params) == {5, 9}
    assert end_tokens(defaults, SamplingParams(1)) == {3, 5}


def test_given_tokens_are_at_most_those_that_the_request_asks_for(config: DecoderConfig) -> None:
    params = SamplingParams(3, n=2)
    assert given_tokens("it", config, params, [[0, 1, VOCABULARY - 1]]) == [(0, 1, VOCABULARY - 1)]
    assert given_tokens("it", config, params, [[], [2]]) == [(), (2,)]
    for generated, words in (
        ([[], [], []], "generated tokens of 3 samples; accepted: up to n, which is 2"),
        ([[], [1, 1, 1, 1]], "4 generated tokens for sample 1; accepted: up to 3"),
        ([[], [VOCABULARY]], f"generated token {VOCABULARY} for sample 1; accepted: ids 0 to {VOCABULARY - 1}"),
        ([[-1]], "generated token -1 for sample 0"),
    ):
        assert words in fault(lambda generated=generated: given_tokens("it", config, params, generated))[0]
    scored = dataclasses.replace(params, prompt_logprobs=True)
    assert given_tokens("it", config, scored, [[], []]) == [(), ()]
    assert "asks for prompt_logprobs" in fault(lambda: given_tokens("it", config, scored, [[], [1]]))[0]


# --- arrays of a step -------------------------------------------------------------------------------------------------


def test_ends_that_are_held_back_and_biases_share_the_room_of_a_row() -> None:
    params = SamplingParams(8, min_tokens=1, logit_bias=tuple((token, 1.0) for token in range(300)))
    check_arrays("it", params, range(299, 512))  # one of these ends has a bias, too
    message, field = fault(lambda: check_arrays("it", params, range(299, 513)))
    assert message.startswith("it: 513 tokens have a bias or are held back by min_tokens; accepted: up to 512, the")
    assert field == "stop_token_ids"
    check_arrays("it", dataclasses.replace(params, min_tokens=0), range(10_000))  # nothing is held back


def test_numbers_that_no_array_holds_are_refused_by_name() -> None:
    for params in (SamplingParams(1, n=2**31 + 1), SamplingParams(1, min_tokens=1)):
        with pytest.raises(ValueError, match="it: its sampling parameters do not fit into a step"):
            check_arrays("it", params, [2**31])
    check_arrays("it", SamplingParams(1, n=2**31), [])
    check_arrays("it", SamplingParams(1, min_tokens=1), [2**31 - 1])


# --- the limits of an engine ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reader(tokenizer: Tokenizer) -> RequestReader:
    settings = EngineConfig(max_length=40, top_logprobs=3, num_pages=1)
    return RequestReader(small_model(), tokenizer, settings.resolved(small_model()))


def test_an_engine_takes_requests_up_to_its_limits(reader: RequestReader) -> None:
    def samples_of(length: int, **params: Any) -> list[Any]:
        return reader.samples_of("it", Request([1] * length, SamplingParams(**params)), is_streamed=False)

    assert len(samples_of(30, max_tokens=10, top_logprobs=3, n=2)) == 2
    for length, params, field in (
        (30, {"max_tokens": 11}, "max_tokens"),
        (39, {"max_tokens": 2}, "max_tokens"),
        (40, {"max_tokens": 1}, "prompt"),
        (30, {"max_tokens": 10, "top_logprobs": 4}, "top_logprobs"),
    ):
        with pytest.raises(FieldError, match=r"it.*; accepted: .*the engine's") as raised:
            samples_of(length, **params)
        assert raised.value.field == field


def test_the_fields_of_a_request_are_those_of_its_samples(reader: RequestReader) -> None:
    request = Request("a b", SamplingParams(4, n=2, stop_token_ids=(7,)), cache_salt="s", client="c", generated=[[3]])
    for is_streamed in (False, True):
        first, second = reader.samples_of("it", request, is_streamed=is_streamed)
        context = first.context
        assert second.context is context and context.is_streamed is is_streamed
        assert (context.client, context.images, context.constraint) == ("c", None, None)
        assert 7 in context.end_tokens and len(context.end_tokens) > 1
        assert len(context.prefix_root) == 32
        assert (first.generated, second.generated) == ([3], [])
    (plain,) = reader.samples_of("it", Request([1], SamplingParams(1)), is_streamed=False)
    assert (plain.context.client, plain.context.prefix_root) == (None, b"")
    with pytest.raises(
        ValueError, match=r"it: generated has 2 tokens for sample 0, which ends after 1 of them \(stop\)"
    ):
        reader.samples_of("it", dataclasses.replace(request, generated=[[7, 3]]), is_streamed=False)
