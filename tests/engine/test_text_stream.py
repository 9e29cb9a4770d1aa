"""The text of streams, and the stop strings that end it."""

import functools
import itertools
from collections.abc import Iterator, Sequence
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


# --- stop strings that are included, and special tokens ---------------------------------------------------------------


def splits(text: str) -> Iterator[list[str]]:
    """Every split of a text into pieces."""
    for borders in itertools.product((False, True), repeat=len(text) - 1):
        pieces = [text[0]]
        for character, begins in zip(text[1:], borders, strict=True):
            if begins:
                pieces.append(character)
            else:
                pieces[-1] += character
        yield pieces


class Pieces(Tokenizer):
    """A tokenizer whose tokens are given pieces of text, the ones in brackets special."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces
        self.is_byte_level = True

    def is_left_out(self, token: int) -> bool:
        return self.pieces[token].startswith("[")

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token].encode()

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.pieces[i] for i in ids if not (skip_special_tokens and self.is_left_out(i)))


def received(pieces: Sequence[str], stop: Sequence[str], *, least: int = 0, **options: bool) -> tuple[str, str, int]:
    """The text that a stream sends, the whole text, and the number of tokens; stop strings count after `least`."""
    stream, sent = TextStream(Pieces(pieces), StopStrings(stop), **options), ""
    for index in range(len(pieces)):
        is_stopped = stream.add(index, may_stop=index >= least)
        sent += stream.take_new(is_last=is_stopped or index == len(pieces) - 1)
        assert stream.text.startswith(sent)
        if is_stopped:
            return sent, stream.text, index + 1
    return sent, stream.text, len(pieces)


@pytest.mark.parametrize("stop", [("cd",), ("bcd", "z"), ("abcdefgh",), ("h",), ("cde", "cdef"), ("aa",)])
def test_an_included_stop_string_ends_the_text_however_it_is_split(stop: tuple[str, ...]) -> None:
    text = "abcdefgh"
    before = min((text.find(one) for one in stop if one in text), default=len(text))
    after = min((text.find(one) + len(one) for one in stop if one in text), default=len(text))
    for pieces in splits(text):
        assert received(pieces, stop)[:2] == (text[:before],) * 2
        assert received(pieces, stop, includes_stop=True)[:2] == (text[:after],) * 2


def test_no_text_waits_for_a_stop_string_that_is_included() -> None:
    stream = TextStream(Pieces(["ab", "cd"]), StopStrings(["abcdef"]), includes_stop=True)
    stream.add(0)
    assert stream.take_new(is_last=False) == "ab"


@pytest.mark.parametrize("includes", [False, True])
def test_stop_strings_of_the_first_tokens_are_text(includes: bool) -> None:
    """A stop string counts if it ends after the minimum number of tokens, as in vLLM."""
    text = "nonononono"
    for least in range(6):
        for pieces in ([*text], ["no"] * 5, ["non", "on", "on", "ono"], [text]):
            lengths = [len("".join(pieces[:count])) for count in range(len(pieces) + 1)]
            known = lengths[min(least, len(pieces))]
            # The first "no" that ends after the text of these tokens.
            start = next((at for at in range(0, len(text), 2) if at + 2 > known), None)
            expected = text if start is None else text[: start + 2 * includes]
            assert received(pieces, ["no"], least=least, includes_stop=includes)[:2] == (expected,) * 2


def test_text_that_may_begin_a_stop_string_waits_also_after_one_that_did_not_count() -> None:
    for pieces in splits("ababab!"):
        sent, text, _ = received(pieces, ["abab"], least=len(pieces))
        assert sent == text == "ababab!"


def test_special_tokens_are_text_on_request_and_may_be_stop_strings() -> None:
    pieces = ["a", "[s]", "b", "[t]", "c"]
    assert received(pieces, [])[:2] == ("abc",) * 2
    assert received(pieces, [], skip_special_tokens=False)[:2] == ("a[s]b[t]c",) * 2
    assert received(pieces, ["[t]"], skip_special_tokens=False)[:2] == ("a[s]b",) * 2
    assert received(pieces, ["[t]"], skip_special_tokens=False, includes_stop=True)[:2] == ("a[s]b[t]",) * 2
    assert received(pieces, ["[t]"])[:2] == ("abc",) * 2
