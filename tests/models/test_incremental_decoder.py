"""Incremental decoding of tokens, against decoding all of them again."""

import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detjax.models import Tokenizer


def decoded_again(tokenizer: Tokenizer, tokens: Sequence[int]) -> Iterator[str]:
    """The text after each token. All tokens since the last whole character are decoded with each that follows."""
    settled, known, unsettled = "", list[int](), list[int]()
    for token in tokens:
        unsettled.append(token)
        before, after = tokenizer.decode(known), tokenizer.decode(known + unsettled)
        text = settled + after[len(before) :]
        if len(after) > len(before) and not after.endswith("\ufffd"):
            settled, known, unsettled = text, unsettled, []
        yield text


def byte_tokens(tokenizer: Tokenizer) -> dict[int, int]:
    """The token of each byte that has one."""
    return {
        tokenizer.token_bytes(token)[0]: token
        for token in reversed(range(len(tokenizer)))
        if len(tokenizer.token_bytes(token)) == 1
    }


def check(tokenizer: Tokenizer, tokens: Sequence[int]) -> None:
    stream = tokenizer.stream()
    length, text = 0, ""
    for count, (token, expected) in enumerate(zip(tokens, decoded_again(tokenizer, tokens), strict=True), 1):
        assert stream.add(token) == stream.text == expected, (tokens[:count], length)
        assert stream.text[:length] == text[:length], "finished text has changed"
        assert stream.finished == len(stream.text.rstrip("\ufffd")) >= length
        length, text = stream.finished, stream.text


def runs(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Tokens with long runs of bytes that are not valid text, some of them nearly characters."""
    tokens = byte_tokens(tokenizer)
    # Where bytes have tokens of their own, a run in which U+FFFD is spelled out has a test of its own.
    alphabet = sorted(set(b"A\x80\xbf\xc3\xa9\xe6\x97\xa5\xf0\x9f\xa6\x80\xc0\xed\xff") & set(tokens))
    byte = st.sampled_from([tokens[value] for value in alphabet])
    run = st.one_of(
        st.lists(byte, max_size=40),
        st.builds(lambda token, count: [token] * count, byte, st.integers(1, 60)),
        st.builds(
            lambda characters, value: [tokens[b] for b in characters.encode()] + [value],
            st.text("é日🦀A", max_size=12),
            byte,
        ),
        st.lists(st.integers(0, len(tokenizer) + 5), max_size=8),
    )
    return st.lists(run, max_size=5).map(lambda parts: [token for part in parts for token in part])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_stream_has_the_text_that_it_has_where_nothing_is_settled_early(
    some_tokenizer: Tokenizer, data: st.DataObject
) -> None:
    check(some_tokenizer, data.draw(runs(some_tokenizer)))


def test_a_stream_has_the_text_of_all_tokens_so_far(tokenizer: Tokenizer) -> None:
    """Tokens at random, so that characters begin that never end, and special ones lie between."""
    draw = random.Random(0)
    ids = [draw.randrange(len(tokenizer)) for _ in range(300)]
    ids += tokenizer.encode("Zwölf Boxkämpfer 🦀🦀 日本語 \ufffd end")
    stream = tokenizer.stream()
    for count, token in enumerate(ids, 1):
        assert stream.add(token) == stream.text == tokenizer.decode(ids[:count])


def test_spelled_out_replacement_characters_are_kept(some_tokenizer: Tokenizer) -> None:
    tokens = byte_tokens(some_tokenizer)
    text = "\ufffd" * 50 + "A日" + "\ufffd" * 7
    stream = some_tokenizer.stream()
    for byte in text.encode():
        stream.add(tokens[byte])
    assert stream.text == text


LONG_RUNS = {
    "words": b"as many as there are words " * 50,
    "bytes that are not text": b"\xff" * 1000,
    "continuations": b"\x80" * 1000,
    "characters that do not end": b"\xe6\x97" * 500,
    "one bad byte and text": b"\xff" + b"A" * 1000,
    "replacement characters": "\ufffd".encode() * 300,
}


@pytest.mark.parametrize("run", LONG_RUNS.values(), ids=LONG_RUNS)
def test_a_stream_looks_at_few_tokens_again(
    some_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, run: bytes
) -> None:
    seen, decode, tokens = [], some_tokenizer.decode, byte_tokens(some_tokenizer)
    monkeypatch.setattr(some_tokenizer, "decode", lambda ids: seen.append(len(ids)) or decode(ids))
    stream = some_tokenizer.stream()
    for byte in run:
        stream.add(tokens[byte])
    assert max(seen) < 60
    assert len(seen) <= 2 * len(run)


def test_a_stream_keeps_no_tokens_without_text(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    (end,) = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    seen, decode = [], tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: seen.append(len(ids)) or decode(ids))
    stream = tokenizer.stream()
    for token in [*tokenizer.encode("x"), *[end, 10**6] * 500]:
        stream.add(token)
    assert (stream.text, stream.finished) == ("x", 1)
    assert sum(seen) < 10
