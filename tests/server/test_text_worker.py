"""The two sides of the text work: what a worker answers, and which job goes where. No process is started."""

import array
import asyncio
import functools
import io
import json
from collections.abc import Callable
from typing import Any, Final
from unittest import mock

import pytest

from detjax.models import Tokenizer
from detjax.server.text import frames, texts, worker
from detjax.server.text.texts import TextRefused, Texts, TextTooLong
from detjax.server.text.token_texts import TokenTexts, json_number
from detjax.server.text.worker import Refusal, Worker

MESSAGES: Final = [{"role": "user", "content": "Hi"}]


def answer(tokenizer: Tokenizer, job: dict[str, Any], *parts: bytes) -> tuple[Any, list[bytes]]:
    """The outcome of a job, and the other frames of its answer."""
    outcome, *rest = Worker(tokenizer).answer(job, [*parts])
    return json.loads(outcome), rest


def numbers(frame: bytes) -> list[int]:
    return array.array("I", frame).tolist()


def with_special_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, whose texts begin with token 40."""
    content = json.loads(tokenizer.files["tokenizer.json"])
    single = [{"SpecialToken": {"id": "I", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"I": {"id": "I", "ids": [40], "tokens": ["I"]}}
    content["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special}
    return Tokenizer(tokenizer.files | {"tokenizer.json": json.dumps(content).encode()}, "the test")


def test_texts_are_encoded_up_to_the_limit(words: Tokenizer) -> None:
    job = {"operation": "encode", "add_special_tokens": False}
    longest = max(len(text.encode()) for text in json.loads(words.files["tokenizer.json"])["model"]["vocab"])
    longest = max(longest, *(len(one["content"]) for one in json.loads(words.files["tokenizer.json"])["added_tokens"]))
    two, three = "\n\0", "\n\0\n"
    outcome, tokens = answer(words, job | {"limit": 2}, two.encode(), three.encode(), "é".encode())
    assert outcome == {
        "texts": [{"bytes": 2, "count": 2}, {"bytes": 3, "count": 3}, {"bytes": 2, "count": len(words.encode("é"))}]
    }
    assert [numbers(frame) for frame in tokens] == [words.encode(two), words.encode("é")]
    bound = Worker(words)._bytes_per_token
    assert bound is not None and bound >= longest
    outcome, tokens = answer(words, job | {"limit": 2}, b"x" * (2 * bound), b"x" * (2 * bound + 1))
    assert [text["bytes"] for text in outcome["texts"]] == [2 * bound, 2 * bound + 1]
    assert outcome["texts"][0]["count"] is not None
    assert (outcome["texts"][1]["count"], tokens) == (None, [])


def test_special_tokens_are_added_where_the_job_says(words: Tokenizer) -> None:
    tokenizer = with_special_tokens(words)
    for adds in (True, False):
        job = {"operation": "encode", "limit": 9, "add_special_tokens": adds}
        _, (frame,) = answer(tokenizer, job, b"Hi")
        assert numbers(frame) == [40] * adds + words.encode("Hi")
        chat = {"operation": "chat", "limit": 99, "add_generation_prompt": True, "variables": {}}
        _, (frame,) = answer(tokenizer, chat | {"add_special_tokens": adds}, json.dumps(MESSAGES).encode())
        text = words.apply_chat_template(MESSAGES)
        assert numbers(frame) == [40] * adds + words.encode(text, add_special_tokens=False)


def test_messages_of_all_parts_and_variables_reach_the_template(words: Tokenizer) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ x }}{% if add_generation_prompt %}!{% endif %}"
    tokenizer = words.with_chat_template(template)
    job = {"operation": "chat", "limit": 99, "add_special_tokens": False, "variables": {"x": "?"}}
    parts = [json.dumps([{"role": "user", "content": text} for text in part]).encode() for part in ("ab", "c")]
    for prompts in (True, False):
        _, (frame,) = answer(tokenizer, job | {"add_generation_prompt": prompts}, *parts)
        assert tokenizer.decode(numbers(frame)) == "abc?" + "!" * prompts


def test_tokens_are_decoded_with_special_ones_where_the_job_says(words: Tokenizer) -> None:
    tokens = [array.array("I", ids).tobytes() for ids in ([511, 40], [])]
    for skips, text in ((True, b"I"), (False, b"<|im_start|>I")):
        outcome, decoded = answer(words, {"operation": "decode", "skip_special_tokens": skips}, *tokens)
        assert (outcome, decoded) == ({}, [text, b""])


def test_what_goes_wrong_is_said_without_the_checkpoints_directory(words: Tokenizer) -> None:
    job = {"operation": "chat", "limit": 9, "add_generation_prompt": True, "add_special_tokens": False, "variables": {}}
    refusing = words.with_chat_template("{{ raise_exception('no user') }}")
    outcome, rest = answer(refusing, job, json.dumps(MESSAGES).encode())
    assert (outcome, rest) == ({"refused": "the chat template refuses these messages: no user"}, [])
    for error, key, says in (
        (MemoryError(), "refused", "needs too much memory; send a shorter text"),
        (Refusal("why"), "refused", "why"),
        (KeyError("a bug"), "failed", "a bug"),
    ):
        with mock.patch.object(Tokenizer, "encode", side_effect=error):
            encode = {"operation": "encode", "limit": 9, "add_special_tokens": True}
            outcome, rest = answer(words, encode, b"x")
        assert [*outcome] == [key] and says in outcome[key] and rest == []
    full = ValueError("the checkpoint: damaged")
    full.__cause__ = MemoryError()
    with mock.patch.object(Tokenizer, "apply_chat_template", side_effect=full):
        outcome, _ = answer(words, job, json.dumps(MESSAGES).encode())
    assert outcome == {"refused": "the chat template refuses these messages: it needs too much memory"}


# --- frames -----------------------------------------------------------------------------------------------------------


def test_frames_come_back_as_they_were_sent() -> None:
    messages = [[b"", b"abc", b"\0" * 300], [], [b"x"]]
    pipe = io.BytesIO()
    for message in messages:
        frames.send(pipe, iter(message))
    sent = pipe.getvalue()
    pipe.seek(0)
    assert [frames.receive(pipe) for _ in messages] == messages
    with pytest.raises(EOFError, match="the other end of the pipe was closed"):
        frames.receive(pipe)
    for length in range(len(sent) - 1):
        cut = io.BytesIO(sent[:length])
        with pytest.raises(EOFError):
            for _ in messages:
                frames.receive(cut)
    assert sent[:8] == (0).to_bytes(8, "little")
    assert sent[-8:] == (-1).to_bytes(8, "little", signed=True)


# --- the server's side ------------------------------------------------------------------------------------------------


class Answered:
    """Stands in for a worker: keeps its jobs, and answers as a worker in this process does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.jobs: list[dict[str, Any]] = []
        self.outcome: dict[str, Any] | None = None
        self._worker = Worker(tokenizer)

    def run(self, make: Callable[[], Any]) -> list[bytes]:
        header, *parts = make()
        self.jobs.append(json.loads(header) | {"parts": len(parts)})
        if self.outcome is not None:
            return [json.dumps(self.outcome).encode()]
        return self._worker.answer(json.loads(header), parts)


async def _run(worker: Answered, use: Callable[[Any], Any]) -> Any:
    return await asyncio.to_thread(use, worker)


@pytest.fixture
def served(words: Tokenizer) -> Any:
    """The text work of a server: its workers for short and for long jobs are in this process."""
    made = Texts(words)
    short, long = Answered(words), Answered(words)
    for lane, stands_in in ((made._short, short), (made._long, long)):
        lane.run = functools.partial(_run, stands_in)  # pyright: ignore[reportAttributeAccessIssue]
    yield made, short, long
    made.close()


def test_a_job_goes_to_the_worker_of_its_size(served: Any, words: Tokenizer) -> None:
    made, short, long = served

    def places(work: Any) -> tuple[int, int]:
        before = len(short.jobs), len(long.jobs)
        asyncio.run(work)
        return len(short.jobs) - before[0], len(long.jobs) - before[1]

    limit = 1 << 20
    here, here_not, far = 4096, 4097, 1 << 17
    assert places(made.encode(["x" * (here - 1)], limit=limit)) == (0, 0)
    assert places(made.encode(["x" * (here - 3), "x"], limit=limit)) == (0, 0)
    assert places(made.encode(["x" * (here_not - 1)], limit=limit)) == (1, 0)
    assert places(made.encode(["x" * (here - 2), "x"], limit=limit)) == (1, 0)
    assert places(made.encode(["x" * (far - 1)], limit=limit)) == (1, 0)
    assert places(made.encode(["x" * far], limit=limit)) == (0, 1)
    assert places(made.decode([[5] * (here - 1)], skip_special_tokens=True)) == (0, 0)
    assert places(made.decode([[5] * here], skip_special_tokens=True)) == (1, 0)
    assert places(made.decode([[5] * (far // 4 - 1)], skip_special_tokens=True)) == (1, 0)
    assert places(made.decode([[5] * (far // 4)], skip_special_tokens=True)) == (0, 1)
    assert short.jobs[0] == {"operation": "encode", "limit": limit, "add_special_tokens": True, "parts": 1}
    lists = [[511, 40] * 3000, [5]]
    for skips in (True, False):
        assert asyncio.run(made.decode(lists, skip_special_tokens=skips)) == [words.decode(one, skips) for one in lists]
        assert short.jobs[-1] == {"operation": "decode", "skip_special_tokens": skips, "parts": 2}


class Said:
    """A message of a conversation."""

    def __init__(self, content: str) -> None:
        self.content = content

    def for_template(self) -> dict[str, str]:
        return {"role": "user", "content": self.content}


def test_conversations_are_sent_in_parts_of_five_hundred_messages(served: Any, words: Tokenizer) -> None:
    made, short, _ = served
    with mock.patch.object(Tokenizer, "apply_chat_template", lambda _, messages, *__, **___: str(len(messages))):
        for messages, parts in ((1, 1), (500, 1), (501, 2)):
            tokens = asyncio.run(made.encode_chat([Said("é")] * messages, {"a": 1}, limit=9))
            assert words.decode(tokens) == str(messages)
            assert short.jobs[-1] == {
                "operation": "chat",
                "limit": 9,
                "add_generation_prompt": True,
                "continue_final_message": False,
                "add_special_tokens": False,
                "variables": {"a": 1},
                "parts": parts,
            }
        asyncio.run(made.encode_chat([Said("x")], {}, limit=9, add_generation_prompt=False, add_special_tokens=True))
        assert (short.jobs[-1]["add_generation_prompt"], short.jobs[-1]["add_special_tokens"]) == (False, True)


def test_what_a_worker_says_becomes_an_error(served: Any, words: Tokenizer) -> None:
    made, short, _ = served
    two = "\n\0"

    def error_of(texts: list[str], limit: int) -> TextTooLong:
        with pytest.raises(TextTooLong) as raised:
            asyncio.run(made.encode(texts, limit=limit))
        return raised.value

    assert asyncio.run(made.encode([two], limit=2)) == [words.encode(two)]
    assert asyncio.run(made.encode([two * 3000], limit=6000)) == [words.encode(two * 3000)]
    for texts_, limit, number, size in (
        ([two], 1, 0, "2 tokens"),
        (["\n", two], 1, 1, "2 tokens"),
        ([two * 3000], 5999, 0, "6000 tokens"),
        (["\n" * 4000, two * 3000], 5999, 1, "6000 tokens"),
        (["x" * 50_000], 9, 0, "50000 bytes, more than 9 tokens have"),
    ):
        error = error_of(texts_, limit)
        assert (error.number, error.size, str(error)) == (number, size, f"text {number} has {size}")
    short.outcome = {"refused": "why"}
    with pytest.raises(TextRefused, match=r"^why$"):
        asyncio.run(made.encode([two * 3000], limit=6000))
    short.outcome = {"failed": "a bug"}
    with pytest.raises(RuntimeError, match="a text worker failed: a bug"):
        asyncio.run(made.encode([two * 3000], limit=6000))


def test_limits_of_workers_are_those_of_the_documentation() -> None:
    assert (worker.MEMORY, texts._WORKERS) == (4 << 30, 2)


# --- texts of tokens --------------------------------------------------------------------------------------------------


def test_tokens_have_their_texts_in_each_format(words: Tokenizer) -> None:
    one = TokenTexts(words)
    half, other = (token for token in range(512) if words.token_bytes(token) in (b"\xc3", b"\xe4"))
    assert one.text(half) == one.text(other) == "\ufffd"
    top = ((half, -0.5), (other, -1.0), (40, -2.0))
    assert one.by_text(top, 41, -3.0) == {"\ufffd": -0.5, "I": -2.0, "J": -3.0}
    assert one.by_text(top[:1], other, -1.0) == {"\ufffd": -0.5}
    assert one.by_text((), 41, float("-inf")) == {"J": -9999.0}
    assert one.by_token(top[2:], 41, -3.0) == {
        "41": {"logprob": -3.0, "decoded_token": "J"},
        "40": {"logprob": -2.0, "rank": 1, "decoded_token": "I"},
    }
    assert one.by_token(((40, -1.0), (41, -3.0)), 41, -3.0)["41"]["rank"] == 2
    entry = {"token": "\ufffd", "logprob": -1.0, "bytes": [0xC3]}
    if words.token_bytes(half) != b"\xc3":
        entry["bytes"] = [0xE4]
    assert one.chat_json(half, -1.0, top[2:]) == entry | {
        "top_logprobs": [{"token": "I", "logprob": -2.0, "bytes": [ord("I")]}]
    }
    assert [json_number(value) for value in (-1.5, float("-inf"), float("nan"))] == [-1.5, -9999.0, -9999.0]
