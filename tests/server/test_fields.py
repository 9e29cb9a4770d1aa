"""Fields of answers that vLLM has: token ids, logprobs of prompts, cached tokens, usage in every chunk; and offsets."""

import asyncio
import random
import unittest.mock
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import openai
import pytest

from detjax.engine import Completion, Engine, Generation, Request, SamplingParams, Token
from detjax.models import Decoder, Tokenizer
from detjax.server.api.api_calls import ServedModel
from detjax.server.api.chat_calls import ChatCall
from detjax.server.api.completion_calls import CompletionCall
from detjax.server.api.schemas import ChatRequest, CompletionRequest
from detjax.server.http.json_pieces import parts
from detjax.server.text.texts import Texts
from detjax.server.text.token_texts import TextOffsets, TokenTexts
from tests.server.running_server import MODEL, Running, serving

PROMPT = "A prompt of some length, "
MESSAGES: Any = [{"role": "user", "content": "Who?"}]


@pytest.fixture(scope="module")
def tokenizer(loaded: tuple[Decoder, Tokenizer]) -> Tokenizer:
    return loaded[1]


def test_completions_report_token_ids(client: openai.OpenAI, engine: Engine, tokenizer: Tokenizer) -> None:
    prompts = [PROMPT, "Two"]
    asked: Any = {"model": MODEL, "prompt": prompts, "n": 2, "max_tokens": 5, "extra_body": {"return_token_ids": True}}
    whole = client.completions.create(**asked)
    params = SamplingParams(temperature=1.0, n=2, max_tokens=5)
    expected = [c.tokens for one in engine.generate([Request(p, params) for p in prompts]) for c in one.completions]
    assert [tuple(choice.token_ids) for choice in whole.choices] == expected
    assert [choice.prompt_token_ids for choice in whole.choices] == [
        tokenizer.encode(prompts[i // 2]) for i in range(4)
    ]
    streamed, prompt_ids = [[], [], [], []], {}
    for chunk in client.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        streamed[choice.index] += choice.token_ids  # pyright: ignore[reportAttributeAccessIssue]
        if hasattr(choice, "prompt_token_ids"):
            prompt_ids[choice.index] = choice.prompt_token_ids  # pyright: ignore[reportAttributeAccessIssue]
    assert [tuple(tokens) for tokens in streamed] == expected
    assert prompt_ids == {choice.index: choice.prompt_token_ids for choice in whole.choices}
    plain = client.completions.create(**asked | {"extra_body": {}})
    assert not hasattr(plain.choices[0], "token_ids")


def test_chats_report_token_ids(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 5, "extra_body": {"return_token_ids": True}}
    whole = client.chat.completions.create(**asked)
    text = tokenizer.apply_chat_template(MESSAGES)
    assert whole.prompt_token_ids == tokenizer.encode(text, add_special_tokens=False)
    first, *chunks = client.chat.completions.create(**asked, stream=True)
    assert first.prompt_token_ids == whole.prompt_token_ids  # pyright: ignore[reportAttributeAccessIssue]
    streamed = [token for chunk in chunks for token in chunk.choices[0].token_ids]  # pyright: ignore[reportAttributeAccessIssue]
    assert streamed == whole.choices[0].token_ids


@pytest.mark.parametrize("k", [0, 2])
def test_logprobs_of_prompts_have_vllms_form(
    client: openai.OpenAI, engine: Engine, tokenizer: Tokenizer, k: int
) -> None:
    extra: Any = {"extra_body": {"prompt_logprobs": k}, "max_tokens": 2}
    (generation,) = engine.generate([Request(PROMPT, SamplingParams(prompt_logprobs=True, top_logprobs=k))])
    reported = client.completions.create(model=MODEL, prompt=PROMPT, logprobs=1, **extra).choices[0]
    assert [len(top) for top in reported.logprobs.top_logprobs if len(top) > 2] == []  # no more than were asked for
    assert reported.prompt_logprobs[0] is None
    assert generation.prompt is not None
    tokens = tokenizer.encode(PROMPT)[1:]
    scored = zip(tokens, generation.prompt.logprobs, generation.prompt.top_logprobs, strict=True)
    for entry, (token, logprob, top) in zip(reported.prompt_logprobs[1:], scored, strict=True):
        ranks = {other: rank for rank, (other, _) in enumerate(top, 1)}
        assert entry == {
            str(other): {"logprob": value}
            | ({"rank": ranks[other]} if other in ranks else {})
            | {"decoded_token": tokenizer.token_bytes(other).decode(errors="replace")}
            for other, value in (*top, (token, logprob))
        }
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, **extra)
    assert chat.prompt_logprobs[0] is None
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="stream and prompt_logprobs are given"):
        client.completions.create(model=MODEL, prompt=PROMPT, stream=True, **extra)


def test_clients_may_have_prefixes_of_their_own(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> None:
    asked: Any = {"model": MODEL, "prompt": [*range(1, 300)], "max_tokens": 1}

    def cached(server: Running, key: str) -> int:
        with server.client(api_key=key) as client:
            return client.completions.create(**asked).usage.prompt_tokens_details.cached_tokens

    for separate in (True, False):
        engine.forget_prefixes()
        with serving(engine, loaded, api_keys=("one", "two"), separate_prefixes=separate) as server:
            assert [cached(server, key) > 0 for key in ("one", "two", "one")] == [False, not separate, True]


def test_usage_tells_the_cached_tokens(client: openai.OpenAI, engine: Engine) -> None:
    engine.forget_prefixes()
    asked: Any = {"model": MODEL, "prompt": [7] * 300, "max_tokens": 1}
    cached = [client.completions.create(**asked).usage.prompt_tokens_details.cached_tokens for _ in range(2)]
    assert cached[0] == 0
    assert cached[1] > 0
    *_, last = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert last.usage.prompt_tokens_details.cached_tokens == cached[1]
    other = client.completions.create(**asked, extra_body={"cache_salt": "mine"})
    assert other.usage.prompt_tokens_details.cached_tokens == 0


def test_every_chunk_tells_the_usage_so_far_if_asked(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": [[1, 2, 3], [4]], "max_tokens": 4, "extra_body": {"ignore_eos": True}}
    asked |= {"stream": True, "logprobs": 0}  # with logprobs there is a chunk for every token
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = client.completions.create(**asked, stream_options=options)  # pyright: ignore[reportCallIssue]
    assert [chunk.usage.completion_tokens for chunk in chunks] == list(range(1, 9))
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {4}
    assert last.usage == chunks[-1].usage
    for chunk in client.completions.create(**asked, stream_options={"continuous_usage_stats": True}):  # pyright: ignore[reportCallIssue]
        assert chunk.usage is None


def test_the_key_says_whose_turn_it_is(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> None:
    asked: list[Request] = []

    async def generate_async(requests: Sequence[Request]) -> list[Generation]:
        asked.extend(requests)
        return [Generation((1,), (Completion((5,), (-1.0,), ((),), "x", "length"),))]

    with unittest.mock.patch.object(engine, "generate_async", generate_async):
        with serving(engine, loaded, api_keys=["one", "two"]) as running:
            for key in ("one", "one", "two"):
                with running.client(api_key=key) as client:
                    client.completions.create(model=MODEL, prompt="x")
        with serving(engine, loaded) as running, running.client(api_key="one") as client:
            client.completions.create(model=MODEL, prompt="x", extra_body={"cache_salt": "s"})
    first, again, other, nobody = (request.client for request in asked)
    assert first == again != other
    assert "one" not in (first or "one")
    assert nobody is None
    assert [request.cache_salt for request in asked] == [None, None, None, "s"]


def test_adjustments_of_logits_reach_the_engine(server: Running, engine: Engine) -> None:
    asked: list[Request] = []

    async def generate_async(requests: Sequence[Request]) -> list[Generation]:
        asked.extend(requests)
        return [Generation((1,), (Completion((5,), (-1.0,), ((),), "x", "length"),))]

    fields: Any = {"presence_penalty": 0.5, "frequency_penalty": -0.5}
    extra = {"repetition_penalty": 1.25, "min_tokens": 3}
    body: Any = fields | {"model": MODEL, "max_tokens": 4, "logit_bias": {"7": -100, "8": 2.5}, "extra_body": extra}
    with unittest.mock.patch.object(engine, "generate_async", generate_async), server.client() as client:
        client.completions.create(prompt="x", **body)
        client.chat.completions.create(messages=MESSAGES, **body)
    for request in asked:
        given = {name: getattr(request.sampling, name) for name in (*fields, *extra)}
        assert given == fields | extra
        assert sorted(request.sampling.logit_bias) == [(7, -100), (8, 2.5)]
    assert len(asked) == 2


# --- offsets of tokens in their text ----------------------------------------------------------------------------------


def test_offsets_are_those_of_the_characters_that_tokens_begin_in(tokenizer: Tokenizer) -> None:
    text = "é你 words, \U0001f600\U0001f600 and 你你你é <|im_end|>."
    tokens = tokenizer.encode(text)
    assert any(len(tokenizer.token_bytes(token).decode(errors="ignore").encode()) == 0 for token in tokens)
    begins_at, begun = 0, []
    starts = [len(text[:index].encode()) for index in range(len(text) + 1)]
    for token in tokens:
        begun.append(max(index for index, start in enumerate(starts) if start <= begins_at))
        begins_at += len(tokenizer.token_bytes(token))
    offsets = TextOffsets(tokenizer, prompt=text)
    assert [offsets.add(token) for token in tokens] == begun
    visible = text.replace("<|im_end|>", "")  # an answer's text has no special tokens
    offsets = TextOffsets(tokenizer, start=7)
    shown = [offsets.add(token) for token in tokens]
    assert max(shown) < 7 + len(visible)
    assert shown[-1] == 7 + len(visible) - 1


def test_offsets_never_run_past_the_text(tokenizer: Tokenizer) -> None:
    draw = random.Random(0)
    for _ in range(30):
        tokens = [draw.randrange(len(tokenizer)) for _ in range(40)]
        offsets = TextOffsets(tokenizer)
        text = tokenizer.decode(tokens)
        shown = [offsets.add(token) for token in tokens]
        assert shown == sorted(shown)
        assert shown[-1] <= len(text)


def test_special_tokens_that_the_prompts_text_lacks_have_no_length(tokenizer: Tokenizer) -> None:
    special = tokenizer.token_id("eos_token")
    assert special is not None
    offsets = TextOffsets(tokenizer, prompt="ab")
    assert [offsets.add(token) for token in (special, *tokenizer.encode("a"), *tokenizer.encode("b"))] == [0, 0, 1]


def test_offsets_of_an_echo_follow_one_another_and_end_within_the_text(client: openai.OpenAI) -> None:
    text = "é你"
    response = client.completions.create(model=MODEL, prompt=text, max_tokens=4, echo=True, logprobs=0)
    (choice,) = response.choices
    offsets = choice.logprobs.text_offset
    assert len(offsets) == len(choice.logprobs.tokens)
    assert offsets == sorted(offsets)
    assert max(offsets) <= len(choice.text)
    assert offsets[response.usage.prompt_tokens] == len(text)  # where the answer begins


def test_offsets_of_a_text_that_a_stop_string_cut_stay_within_it(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 0}
    text = client.completions.create(**asked).choices[0].text
    choice = client.completions.create(**asked, stop=text[2:9]).choices[0]
    assert choice.text == text[:2]
    assert max(choice.logprobs.text_offset) <= 2


# --- work of many tokens ----------------------------------------------------------------------------------------------


@pytest.fixture
def served(engine: Engine, tokenizer: Tokenizer) -> Iterator[ServedModel]:
    texts = Texts(tokenizer)
    yield ServedModel(MODEL, engine, tokenizer, texts, {}, "fingerprint", TokenTexts(tokenizer))
    texts.close()


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_large_answer_is_made_as_it_is_sent(served: ServedModel, kind: str) -> None:
    """The first part needs the logprobs of a few tokens only, however many there are."""
    top = tuple((token, -1.0) for token in range(20))
    length = 500
    completion = Completion((5,) * length, (-1.0,) * length, (top,) * length, "x" * length, "length")
    common: Any = {"model": MODEL, "n": 32}
    if kind == "chat":
        body = ChatRequest(messages=MESSAGES, logprobs=True, top_logprobs=20, **common)
        call = ChatCall(body, served)
    else:
        call = CompletionCall(CompletionRequest(prompt="x", logprobs=20, **common), served)
    call.requests = [Request([1], SamplingParams(n=32))]
    seen = 0

    def text(token: int) -> str:
        nonlocal seen
        seen += 1
        return f"<{token}>"

    with unittest.mock.patch.object(served.token_texts, "text", text):
        made = parts(call.full_response([Generation((1,), (completion,) * 32)]))
        next(made)
        assert 0 < seen < 5000
        assert sum(map(len, made)) > 3 * 10**6
        assert seen > 32 * length


def test_others_have_turns_while_a_stream_has_many_tokens_at_once(server: Running, engine: Engine) -> None:
    """Tokens that wait already are a burst, which the server sends without a pause unless it makes one."""
    top = tuple((token, -1.0) for token in range(20))

    async def stream_all(requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Token]]:
        for index in range(2000):
            yield 0, Token(0, 5, -1.0, top, "x", "length" if index == 1999 else None, 1)

    slept = 0
    sleep = asyncio.sleep

    async def counted(delay: float, *rest: Any) -> Any:
        nonlocal slept
        slept += delay == 0
        return await sleep(delay, *rest)

    with (
        unittest.mock.patch.object(engine, "stream_all", stream_all),
        unittest.mock.patch("detjax.server.app.asyncio.sleep", counted),
        server.client() as client,
    ):
        chunks = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=20, stream=True, max_tokens=300
        )
        assert sum(1 for _ in chunks) == 2001
    assert slept > 50
