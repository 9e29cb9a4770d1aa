"""The text of streams, and the stop strings that end it."""

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detjax.engine.text_stream import StopStrings, TextStream
from detjax.models import Tokenizer

FIXTURE = Path(__file__).parents[1] / "fixtures" / "qwen3"
TEXT = "He said: no, no and no! Grüße, 東京 🙂, no more."


@functools.cache
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.load(FIXTURE)
    assert tokenizer is not None
    return tokenizer


def stream_for(*stop: str) -> TextStream:
    return TextStream(tokenizer(), StopStrings(stop))


def streamed(text: str, *stop: str) -> tuple[list[str], str, bool]:
    """Returns the text that a stream sends at each token, the whole text, and whether a stop string ended it."""
    tokens, stream, pieces = tokenizer().encode(text), stream_for(*stop), []
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
        assert expected.startswith(received), "the stream sent text that a stop string then removed"
    assert received == expected


def test_a_stream_tells_text_as_soon_as_no_stop_string_can_begin_there() -> None:
    pieces, _, _ = streamed("aaaa bbbb cccc dddd", "zz")
    assert all(pieces)


@pytest.mark.parametrize("stop", ["bc", "cde", "abcdefgh", "h"])
def test_stop_strings_across_borders_of_tokens_end_the_text(stop: str) -> None:
    stream = stream_for(stop)
    for letter in "abcdefghij":
        (token,) = tokenizer().encode(letter)
        if stream.add(token):
            break
    assert stream.text == "abcdefghij".partition(stop)[0]


class Bytes(Tokenizer):
    """A tokenizer whose tokens are bytes, so that characters of several bytes are incomplete for a while."""

    def __init__(self) -> None:
        self.is_byte_level = True

    def is_left_out(self, token: int) -> bool:
        return False

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")


def defined_texts(tokens: bytes, stop: list[str]) -> tuple[list[str], bool]:
    """Returns the text that may be sent at each token, by definition, and whether a stop string ended it."""
    texts: list[str] = []
    for end in range(1, len(tokens) + 1):
        text = tokens[:end].decode(errors="replace")
        starts = [text.index(string) for string in stop if string in text]
        if starts:
            return [*texts, text[: min(starts)]], True
        if end == len(tokens):
            return [*texts, text], False
        text = text.rstrip("\ufffd")
        begun = [n for string in stop for n in range(len(string)) if text.endswith(string[:n])]
        texts.append(text[: len(text) - max(begun, default=0)])
    return texts, False


# Few different characters, so that stop strings often begin, overlap with themselves and with one another.
texts_and_stop_strings = st.sampled_from(["ab", "ab", "aé", "aé🙂", "a\ufffd"]).flatmap(
    lambda letters: st.tuples(
        st.text(letters, min_size=8, max_size=40).map(str.encode)
        | st.lists(st.sampled_from([*letters.encode(), 0xFF]), max_size=30).map(bytes),
        st.lists(st.text(letters, min_size=1, max_size=4) | st.text(letters, min_size=3, max_size=9), max_size=3),
    )
)


@settings(max_examples=1500, deadline=None, derandomize=True, database=None)
@given(texts_and_stop_strings)
def test_any_text_is_told_and_ended_as_defined(case: tuple[bytes, list[str]]) -> None:
    tokens, stop = case
    expected, is_stopped = defined_texts(tokens, stop)
    received, whole = TextStream(Bytes(), StopStrings(stop)), TextStream(Bytes(), StopStrings(stop))
    text, ended = "", False
    for index, token in enumerate(tokens[: len(expected)]):
        ended = received.add(token)
        assert whole.add(token) == ended
        text += received.take_new(is_last=index == len(expected) - 1)
        assert text == expected[index]
        assert ended == (is_stopped and index == len(expected) - 1)
    assert received.text == whole.text == text
    assert ended == is_stopped


class CountingString(str):
    """A string that counts the characters that are read from it."""

    reads = 0

    def __getitem__(self, index: int | slice) -> str:
        CountingString.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("text", ["abcdefgh" * 100, "a" * 800, "a" * 250 + "c" * 5 + "a" * 600])
def test_long_stop_strings_take_a_time_in_proportion_to_the_text(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = [CountingString("a" * (240 + number) + "b") for number in range(16)]
    monkeypatch.setattr(CountingString, "reads", 0)
    stream, received = TextStream(Bytes(), StopStrings(stop)), 0
    for token in text.encode():
        assert not stream.add(token)
        received += len(stream.take_new(is_last=False))
    assert received >= len(text) - 256
    # Each of them reads each character a few times at most, and its own beginnings once.
    assert CountingString.reads <= 6 * len(stop) * len(text)
