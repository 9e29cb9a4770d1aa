"""Sequences: what ends them, and the text that streams tell."""

import functools
from pathlib import Path

import pytest

from detjax import SamplingParams
from detjax.engine.sequence import Sequence, TextStream, samples
from detjax.engine.validation import end_tokens
from detjax.models import GenerationDefaults, Tokenizer

FIXTURE = Path(__file__).parents[1] / "fixtures" / "qwen3"
TEXT = "He said: no, no and no! Grüße, 東京 🙂, no more."


@functools.cache
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.load(FIXTURE)
    assert tokenizer is not None
    return tokenizer


def streamed(text: str, *stop: str) -> tuple[list[str], str, bool]:
    """Returns what a stream tells at each token of a text, the whole text, and whether a stop string ended it."""
    tokens, stream, pieces = tokenizer().encode(text), TextStream(tokenizer(), stop), []
    for index, token in enumerate(tokens):
        is_stopped = stream.add(token)
        pieces.append(stream.take_new(is_last=is_stopped or index == len(tokens) - 1))
        if is_stopped:
            return pieces, stream.text, True
    return pieces, stream.text, False


@pytest.mark.parametrize(
    "stop", [(), ("no!",), ("no, no and", "never"), ("o m", "no m"), ("ße, 東",), ("🙂",), ("not", "no more?"), ("e.",)]
)
def test_a_stream_tells_the_text_before_the_first_stop_string_and_never_more(stop: tuple[str, ...]) -> None:
    expected = min((TEXT.partition(end)[0] for end in stop), key=len, default=TEXT)
    pieces, text, is_stopped = streamed(TEXT, *stop)
    assert text == expected
    assert is_stopped == (expected != TEXT)
    received = ""
    for piece in pieces:
        received += piece
        assert expected.startswith(received), "the stream told text that a stop string then took back"
    assert received == expected


def test_a_stream_tells_text_as_soon_as_no_stop_string_can_begin_there() -> None:
    pieces, _, _ = streamed("aaaa bbbb cccc dddd", "zz")
    assert all(pieces)


@pytest.mark.parametrize("stop", ["bc", "cde", "abcdefgh", "h"])
def test_stop_strings_across_borders_of_tokens_end_the_text(stop: str) -> None:
    stream = TextStream(tokenizer(), (stop,))
    for letter in "abcdefghij":
        (token,) = tokenizer().encode(letter)
        if stream.add(token):
            break
    assert stream.text == "abcdefghij".partition(stop)[0]


@pytest.mark.parametrize(("last", "tokens"), [(11, [5, 11]), (12, [5, 12]), (13, [5, 13]), (14, [5, 14, 6])])
def test_every_end_token_ends_a_sequence(last: int, tokens: list[int]) -> None:
    params = SamplingParams(max_tokens=3, stop_token_ids=(13,))
    defaults = GenerationDefaults(eos_token_ids=(11, 12))
    sequence = Sequence((1, 2), params, end_tokens=end_tokens(defaults, params))
    for token in (5, last, 6):
        if sequence.finish_reason is None:
            sequence.add(token, -1.0, (), batch=1)
    assert sequence.generated == tokens
    assert sequence.finish_reason == ("length" if last == 14 else "stop")


def test_only_the_first_sample_leads_and_has_the_prompts_logprobs() -> None:
    first, *others = samples((1, 2), SamplingParams(n=3, prompt_logprobs=True), end_tokens=frozenset(), tokenizer=None)
    assert (first.leader, first.index, first.params.prompt_logprobs) == (None, 0, True)
    assert [(one.leader, one.index, one.params.prompt_logprobs) for one in others] == [
        (first, 1, False),
        (first, 2, False),
    ]
