"""Text work of requests is done by worker processes, which have limits and leave the event loop alone."""

import asyncio
import contextlib
import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from detjax.models import Tokenizer
from detjax.models.text.tokenizer import byte_alphabet
from detjax.server.text.bounds import bytes_per_token
from detjax.server.text.texts import TextRefused, Texts, TextTooLong
from tests.server.running_server import FIXTURE, wait_until


@dataclasses.dataclass
class Message:
    role: str
    content: str

    def for_template(self) -> dict[str, str]:
        return dataclasses.asdict(self)


MESSAGES = [Message("system", "Be brief."), Message("user", "Who is é你?")]
LOOP = "{% for _ in range(99999) %}"
ENDLESS = 3 * LOOP + 3 * "{% endfor %}"
UNINTERRUPTIBLE = "{% set x = (3 ** (3 ** 17)) %}{{ x }}"
HUGE = "{{ ('x' * (6 * 2 ** 30)) | length }}"


def with_template(path: Path, template: str | None) -> Tokenizer:
    """The fixture's tokenizer with another chat template."""
    shutil.copyfile(FIXTURE / "tokenizer.json", path / "tokenizer.json")
    config = {} if template is None else {"chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    loaded = Tokenizer.load(path)
    assert loaded is not None
    return loaded


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    loaded = Tokenizer.load(FIXTURE)
    assert loaded is not None
    return loaded


@pytest.fixture(scope="module")
def texts(tokenizer: Tokenizer) -> Iterator[Texts]:
    with contextlib.closing(Texts(tokenizer)) as one:
        yield one


def processes(texts: Texts) -> list[subprocess.Popen[bytes]]:
    return [worker._process for worker in texts._workers if worker._process is not None]


def test_workers_give_the_tokens_and_texts_of_the_tokenizer(texts: Texts, tokenizer: Tokenizer) -> None:
    some = ["Some é你 words. " * 500, "x", "<|im_end|> y " * 400]
    lists = asyncio.run(texts.encode(some, limit=10**6))
    assert lists == [tokenizer.encode(text) for text in some]
    decoded = asyncio.run(texts.decode(lists, skip_special_tokens=False))
    assert decoded == [tokenizer.decode(tokens, False) for tokens in lists]
    assert asyncio.run(texts.encode(["x"], limit=10)) == [tokenizer.encode("x")]
    plain = [message.for_template() for message in MESSAGES]
    for variables in ({}, {"enable_thinking": False}):
        text = tokenizer.apply_chat_template(plain, **variables)
        tokens = asyncio.run(texts.encode_chat(MESSAGES, variables, limit=1000))
        assert tokens == tokenizer.encode(text, add_special_tokens=False)


def test_the_event_loop_runs_while_a_long_text_is_encoded(texts: Texts) -> None:
    """It would hardly run in the meantime if this process made the list of tokens, which takes Python's lock."""

    async def turns_during(text: str) -> int:
        await texts.encode(["warm " * 30_000], limit=10**6)  # a worker that starts gives the loop time
        turns, encoding = 0, asyncio.create_task(texts.encode([text], limit=10**6))
        while not encoding.done():
            turns += 1
            await asyncio.sleep(0.001)
        await encoding
        return turns

    assert asyncio.run(turns_during("some words " * 60_000)) >= 20


def test_texts_that_cannot_fit_are_refused_before_they_are_encoded(tokenizer: Tokenizer) -> None:
    # Encoding so much would take far longer than the CPU time that there is.
    with contextlib.closing(Texts(tokenizer, cpu_seconds=1)) as texts:
        with pytest.raises(TextTooLong, match="16000000 bytes, more than 100 tokens have"):
            asyncio.run(texts.encode(["short", "a word. " * 2_000_000], limit=100))
        with pytest.raises(TextTooLong, match="bytes, more than 100 tokens have"):
            message = Message("user", "a word. " * 2_000_000)
            asyncio.run(texts.encode_chat([message], {}, limit=100))
        with pytest.raises(TextTooLong, match="text 0 has 1001 tokens"):
            asyncio.run(texts.encode(["\n\0" * 500 + "\n"], limit=1000))


@pytest.mark.parametrize("template", [ENDLESS, UNINTERRUPTIBLE], ids=["endless", "uninterruptible"])
def test_a_template_that_does_not_end_is_ended(tmp_path: Path, template: str) -> None:
    tokenizer = with_template(tmp_path, template)
    with contextlib.closing(Texts(tokenizer, cpu_seconds=0.5)) as texts:
        with pytest.raises(TextRefused, match=r"took more than 0\.5 s of CPU time"):
            asyncio.run(texts.encode_chat(MESSAGES, {}, limit=10))
        assert asyncio.run(texts.encode(["x" * 5000], limit=10**6)) == [tokenizer.encode("x" * 5000)]


def test_a_template_that_takes_all_memory_is_refused(tmp_path: Path) -> None:
    with contextlib.closing(Texts(with_template(tmp_path, HUGE))) as texts:
        with pytest.raises(TextRefused, match="memory"):
            asyncio.run(texts.encode_chat(MESSAGES, {}, limit=10))


def test_a_template_that_refuses_is_quoted_without_the_checkpoints_directory(tmp_path: Path) -> None:
    with contextlib.closing(Texts(with_template(tmp_path, "{{ raise_exception('no user') }}"))) as texts:
        with pytest.raises(TextRefused) as raised:
            asyncio.run(texts.encode_chat(MESSAGES, {}, limit=10))
    assert str(raised.value) == "the chat template refuses these messages: no user"


def test_a_worker_that_is_killed_is_replaced(texts: Texts, tokenizer: Tokenizer) -> None:
    for _ in range(3):
        assert asyncio.run(texts.encode(["x" * 5000], limit=10**6)) == [tokenizer.encode("x" * 5000)]
        for process in processes(texts):
            process.kill()


def test_a_long_job_leaves_workers_for_others(tmp_path: Path) -> None:
    """The template that does not end is only in the way of one worker."""
    endless = "{% if messages[0].content == 'x' %}x{% else %}" + ENDLESS + "{% endif %}"
    with contextlib.closing(Texts(with_template(tmp_path, endless), cpu_seconds=300)) as texts:

        async def both() -> None:
            blocked = asyncio.create_task(texts.encode_chat([Message("user", "y" * 200_000)], {}, limit=9))
            for _ in range(3):
                assert await texts.encode_chat([Message("user", "x")], {}, limit=10)
            assert not blocked.done()
            texts.close()
            with pytest.raises(RuntimeError, match="closed"):
                await blocked

        asyncio.run(both())


def test_a_worker_does_not_import_jax(texts: Texts) -> None:
    asyncio.run(texts.encode(["x" * 5000], limit=10**6))
    running = [process for process in processes(texts) if process.poll() is None]
    assert running
    for process in running:
        assert "jaxlib" not in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")


def test_workers_end_with_a_server_that_is_killed(tmp_path: Path) -> None:
    program = f"""
import asyncio, time
from pathlib import Path
from detjax.models import Tokenizer
from detjax.models.text.tokenizer import byte_alphabet
from detjax.server.text.texts import Texts
texts = Texts(Tokenizer.load(Path({str(FIXTURE)!r})))
asyncio.run(texts.encode(["x" * 5000], limit=10**6))
print(*(worker._process.pid for worker in texts._workers if worker._process is not None), flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        workers = [int(pid) for pid in server.stdout.readline().split()]
        assert workers
        server.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, workers)))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_workers_that_nobody_closed_are_ended(tokenizer: Tokenizer) -> None:
    texts = Texts(tokenizer)
    asyncio.run(texts.encode(["x" * 5000], limit=10**6))
    (process,) = processes(texts)
    del texts
    wait_until(lambda: not is_running(process.pid))


# --- how many bytes of text a token can stand for ---------------------------------------------------------------------


def test_no_token_stands_for_more_bytes_than_the_bound(tokenizer: Tokenizer) -> None:
    definition = json.loads(tokenizer.files["tokenizer.json"])
    bound = bytes_per_token(definition)
    assert bound is not None
    for text in ("x" * 1000, "é你" * 1000, "e\u0301" * 1000, "\u1112\u1161\u11ab" * 500, " " * 1000, "<|im_end|>" * 50):
        assert len(text.encode()) <= bound * len(tokenizer.encode(text))


@pytest.mark.parametrize("form", ["NFC", "NFKC", "lower"])
def test_normalizers_shrink_a_text_to_no_less_than_a_quarter(form: str) -> None:
    def normalized(text: str) -> str:
        return text.lower() if form == "lower" else unicodedata.normalize(form, text)

    def parts(text: str) -> str:
        return text.lower() if form == "lower" else unicodedata.normalize(form.replace("C", "D"), text)

    characters = [chr(code) for code in range(0x30000) if not 0xD800 <= code < 0xE000]
    longest: dict[str, int] = {}
    for character in characters:  # the most bytes that a text of one character can have before
        part = parts(character)
        longest[part] = max(longest.get(part, 0), len(character.encode()))
    for character in characters:
        if normalized(character) == character:
            whole, pieces = longest.get(parts(character), 0), sum(longest.get(c, 0) for c in parts(character))
            assert max(whole, pieces) <= 4 * len(character.encode()), character


def byte_level(**changes: Any) -> dict[str, Any]:
    model = {"type": "BPE", "vocab": dict.fromkeys([*byte_alphabet(), "abcdef"], 0)}
    return {"model": model, "pre_tokenizer": {"type": "ByteLevel"}, "added_tokens": []} | changes


def sequence(*steps: dict[str, Any], key: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", key: [*steps]}


REMOVING = {"type": "Split", "behavior": "Removed"}
BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}


@pytest.mark.parametrize(
    ("definition", "bound"),
    [
        (byte_level(), 6),
        (byte_level(added_tokens=[{"content": "<|long|>"}]), 8),
        (byte_level(normalizer={"type": "NFC"}), 24),
        (byte_level(normalizer=sequence({"type": "NFC"}, {"type": "Lowercase"})), 96),
        (byte_level(normalizer={"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}), 6),
        (byte_level(normalizer={"type": "Replace", "pattern": {"String": "  "}, "content": " "}), None),
        (byte_level(normalizer={"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}), None),
        (byte_level(normalizer=sequence({"type": "NFC"}, {"type": "Strip"})), None),
        (byte_level(added_tokens=[{"content": "<mask>", "lstrip": True}]), None),
        (byte_level(pre_tokenizer=sequence(REMOVING, {"type": "ByteLevel"}, key="pretokenizers")), None),
        (byte_level(pre_tokenizer={"type": "Whitespace"}), None),
        (byte_level(pre_tokenizer=None), None),
        (byte_level(model={"type": "BPE", "vocab": {"a": 0}}), None),
        (byte_level(model={"type": "BPE", "vocab": BYTES, "byte_fallback": True}, pre_tokenizer=None), 6),
        (byte_level(model={"type": "BPE", "vocab": {"a": 0}, "byte_fallback": True}, pre_tokenizer=None), None),
        (byte_level(model={"type": "Unigram", "vocab": [["a", 0]]}), None),
        ({}, None),
    ],
)
def test_the_bound_exists_where_nothing_of_a_text_can_vanish(definition: dict[str, Any], bound: int | None) -> None:
    assert bytes_per_token(definition) == bound
