"""OpenAI's client gets the responses that it expects, with the bits that the engine gives."""

import codecs
import dataclasses
import datetime
import json
import math
import unittest.mock
import urllib.request
from collections.abc import Callable, Sequence

import jax
import openai
import pytest
from flax import nnx

import detjax
from detjax.engine import Completion, Engine, EngineConfig, Generation, Request, SamplingParams
from detjax.models import Decoder, GenerationDefaults, Tokenizer
from detjax.server import system_fingerprint
from tests.server.running_server import MODEL, Running, serving, wait_until

PROMPT = "A prompt of some length, "
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Who?"}]}]


@pytest.fixture(scope="module")
def tokenizer(loaded: tuple[Decoder, Tokenizer]) -> Tokenizer:
    return loaded[1]


def expected(engine: Engine, prompt: str | list[int], **fields) -> Generation:
    return engine.generate([Request(prompt, SamplingParams(**{"temperature": 1.0} | fields))])[0]


def offsets_of(tokens: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """The offset of each token's first character in the text of all, by the bytes of the tokens before it."""
    offsets = []
    for index, token in enumerate(tokens):
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        whole = decoder.decode(b"".join(map(tokenizer.token_bytes, tokens[:index])))
        continues = 0x80 <= tokenizer.token_bytes(token)[0] < 0xC0
        offsets.append(len(whole) + bool(decoder.getstate()[0] and not continues))
    return offsets


def test_a_completion_is_the_engines(client: openai.OpenAI, engine: Engine, tokenizer: Tokenizer) -> None:
    response = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, seed=3, logprobs=2)
    (completion,) = expected(engine, PROMPT, max_tokens=6, seed=3, top_logprobs=2).completions
    (choice,) = response.choices
    assert (choice.text, choice.finish_reason) == (completion.text, completion.finish_reason)
    assert tuple(choice.logprobs.token_logprobs) == completion.logprobs
    texts = [tokenizer.token_bytes(token).decode(errors="replace") for token in completion.tokens]
    assert choice.logprobs.tokens == texts
    assert choice.logprobs.text_offset == offsets_of(completion.tokens, tokenizer)
    sampled = zip(completion.tokens, completion.logprobs, strict=True)
    for pair, top, reported in zip(sampled, completion.top_logprobs, choice.logprobs.top_logprobs, strict=True):
        likeliest_last = [*reversed([*top, pair])]  # of tokens with the same text, such as half characters
        expected_top = {tokenizer.token_bytes(token).decode(errors="replace"): value for token, value in likeliest_last}
        assert reported == expected_top
    # The sampled token is reported where it is not among the likeliest.
    tops = zip(completion.tokens, completion.top_logprobs, strict=True)
    assert any(token not in dict(top) for token, top in tops)
    prompt = len(tokenizer.encode(PROMPT))
    generated = len(completion.tokens)
    assert response.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert (response.object, response.model) == ("text_completion", MODEL)


def test_prompts_are_texts_or_tokens_one_or_several(client: openai.OpenAI, engine: Engine) -> None:
    tokens = [[5, 6, 7], [8]]
    response = client.completions.create(model=MODEL, prompt=tokens, max_tokens=3, n=2, temperature=1)
    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in response.choices] == [
        completion.text
        for prompt in tokens
        for completion in expected(engine, prompt, max_tokens=3, n=2, temperature=1.0).completions
    ]
    one = client.completions.create(model=MODEL, prompt=tokens[0], max_tokens=3, temperature=1)
    assert one.choices[0].text == response.choices[0].text
    texts = client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=1)
    assert len(texts.choices) == 2


def test_with_fixed_seeds_an_answer_without_a_seed_is_the_same_and_with_others_it_is_not(client: openai.OpenAI) -> None:
    def text(**seed: int) -> str:
        return (
            client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=1, **seed).choices[0].text  # pyright: ignore[reportCallIssue]
        )

    assert text() == text() == text(seed=0)
    assert len({text(seed=seed) for seed in range(4)}) > 1


def test_the_checkpoints_settings_hold_where_a_request_is_silent(
    engine: Engine, loaded: tuple[Decoder, Tokenizer]
) -> None:
    graph, state = nnx.split(loaded[0])
    model = nnx.merge(graph, state)
    model.generation_defaults = GenerationDefaults(
        do_sample=True, temperature=0.6, top_k=3, eos_token_ids=(509,), unread='{"repetition_penalty": 1.5}'
    )
    with serving(engine, (model, loaded[1])) as running, running.client() as client:
        for given in ({}, {"temperature": 1.3}):
            response = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, logprobs=0, **given)
            fields = {"temperature": 0.6, "top_k": 3, "repetition_penalty": 1.5} | given
            (completion,) = expected(engine, PROMPT, max_tokens=6, **fields).completions
            assert tuple(response.choices[0].logprobs.token_logprobs) == completion.logprobs


def test_echo_tells_the_prompts_logprobs(client: openai.OpenAI, engine: Engine, tokenizer: Tokenizer) -> None:
    response = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2, echo=True, logprobs=1, temperature=0)
    generation = expected(engine, PROMPT, max_tokens=2, temperature=0.0, prompt_logprobs=True, top_logprobs=1)
    (completion,), scored = generation.completions, generation.prompt
    assert scored is not None
    (choice,) = response.choices
    assert choice.text == PROMPT + completion.text
    assert choice.logprobs.token_logprobs == [None, *scored.logprobs, *completion.logprobs]
    assert choice.logprobs.top_logprobs[0] is None
    alone = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    assert alone.choices[0].text == PROMPT
    assert alone.choices[0].logprobs.token_logprobs == [None, *scored.logprobs]
    assert alone.usage.completion_tokens == 0


def test_a_chat_follows_the_template(client: openai.OpenAI, engine: Engine, tokenizer: Tokenizer) -> None:
    response = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=5, seed=1, n=2, logprobs=True, top_logprobs=3
    )
    plain = [MESSAGES[0], {"role": "user", "content": "Who?"}]
    prompt = tokenizer.encode(tokenizer.apply_chat_template(plain), add_special_tokens=False)
    generation = expected(engine, prompt, max_tokens=5, seed=1, n=2, top_logprobs=3)
    for choice, completion in zip(response.choices, generation.completions, strict=True):
        assert (choice.message.role, choice.message.content) == ("assistant", completion.text)
        assert choice.finish_reason == completion.finish_reason
        scored = choice.logprobs.content
        assert tuple(one.logprob for one in scored) == completion.logprobs
        assert [bytes(one.bytes) for one in scored] == [tokenizer.token_bytes(token) for token in completion.tokens]
        assert [[top.logprob for top in one.top_logprobs] for one in scored] == [
            [value for _, value in top] for top in completion.top_logprobs
        ]
    assert response.usage.prompt_tokens == len(prompt)


def test_a_chat_may_take_all_the_room_there_is(client: openai.OpenAI, engine: Engine) -> None:
    response = client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body={"ignore_eos": True})
    assert response.choices[0].finish_reason == "length"
    assert response.usage.total_tokens == engine.max_length


def test_streams_add_up_to_whole_answers(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 12, "n": 2, "logprobs": True, "seed": 5}
    whole = client.chat.completions.create(**asked)
    texts, logprobs, reasons = ["", ""], [[], []], [None, None]
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
        reasons[choice.index] = reasons[choice.index] or choice.finish_reason  # pyright: ignore[reportCallIssue]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert texts == [choice.message.content for choice in whole.choices]
    assert logprobs == [choice.logprobs.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint}


def test_streamed_completions_of_several_prompts(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": ["One", "Two"], "max_tokens": 5, "echo": True, "temperature": 0}
    whole = client.completions.create(**asked)
    texts = ["", ""]
    for chunk in client.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_stream_is_a_sequence_of_events_that_ends_with_done(server: Running, path: str) -> None:
    prompt = {"messages": MESSAGES} if path.startswith("chat") else {"prompt": PROMPT}
    body = {"model": MODEL, "max_tokens": 2, "temperature": 0, "stream": True, "ignore_eos": True} | prompt
    request = urllib.request.Request(
        f"{server.url}/v1/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["Cache-Control"] == "no-cache"
        *events, done, rest = response.read().decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    assert not any("usage" in chunk or "batch" in chunk for chunk in chunks)


def test_usage_counts_all_prompts_and_all_samples(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": [[1, 2, 3], [4]], "n": 2, "max_tokens": 3, "extra_body": {"ignore_eos": True}}
    expected_usage = {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}
    expected_usage |= {"prompt_tokens_details": {"cached_tokens": 0}}
    response = client.completions.create(**asked)
    assert response.usage.model_dump(exclude_none=True) == expected_usage
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.model_dump(exclude_none=True) == expected_usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_chunks_of_several_prompts_and_samples_have_the_index_of_their_choice(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": ["One", "Two"], "n": 2, "max_tokens": 5, "logprobs": 0, "temperature": 1}
    whole = client.completions.create(**asked)
    logprobs: list[list[float]] = [[], [], [], []]
    offsets: list[list[int]] = [[], [], [], []]
    for chunk in client.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        logprobs[choice.index] += choice.logprobs.token_logprobs
        offsets[choice.index] += choice.logprobs.text_offset
    assert logprobs == [choice.logprobs.token_logprobs for choice in whole.choices]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices]
    assert len({tuple(values) for values in logprobs}) == 4


def test_logprobs_of_minus_infinity_are_numbers_in_json(server: Running, engine: Engine) -> None:
    completion = Completion((5,), (-math.inf,), (((5, -math.inf),),), "x", "length")

    async def generate_async(requests: object) -> list[Generation]:
        return [Generation((1,), (completion,))]

    with unittest.mock.patch.object(engine, "generate_async", generate_async), server.client() as client:
        (choice,) = client.completions.create(model=MODEL, prompt=[1], logprobs=1).choices
        assert choice.logprobs.token_logprobs == [-9999.0]
        assert [*choice.logprobs.top_logprobs[0].values()] == [-9999.0]


def test_chunks_tell_the_batch_if_asked(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3, "n": 3, "temperature": 0}
    options = {"stream_options": {"include_batch": True}}
    batches = [chunk.batch for chunk in client.completions.create(**asked, stream=True, extra_body=options)]  # pyright: ignore[reportAttributeAccessIssue]
    assert max(batches) == 3


def test_stop_strings_and_tokens_end_an_answer(client: openai.OpenAI, engine: Engine) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    text = client.completions.create(**asked).choices[0].text
    stop = text[3:5]
    for stops in (stop, [stop, "never there"]):
        choice = client.completions.create(**asked, stop=stops).choices[0]
        assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
        streamed = [chunk.choices[0] for chunk in client.completions.create(**asked, stop=stops, stream=True)]
        assert "".join(one.text for one in streamed) == choice.text
        assert streamed[-1].finish_reason == "stop"
    (greedy,) = expected(engine, PROMPT, temperature=0.0, max_tokens=1).completions
    ends = {"stop_token_ids": [*greedy.tokens]}
    response = client.completions.create(**asked, extra_body=ends)
    assert (response.choices[0].finish_reason, response.usage.completion_tokens) == ("stop", 1)


def test_models_are_listed(client: openai.OpenAI, engine: Engine) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == (MODEL, engine.max_length)  # pyright: ignore[reportAttributeAccessIssue]
    assert client.models.retrieve(MODEL) == model


def test_the_fingerprint_tells_models_settings_and_environments_apart(
    client: openai.OpenAI, engine: Engine, loaded: tuple[Decoder, Tokenizer]
) -> None:
    model, tokenizer = loaded
    served = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1).system_fingerprint
    assert served == system_fingerprint(model, tokenizer, engine.config)
    fingerprints = [served, system_fingerprint(model, tokenizer, dataclasses.replace(engine.config, max_length=200))]
    quantized = dataclasses.replace(engine.config, kv_cache_dtype="int8")
    fingerprints.append(system_fingerprint(model, tokenizer, quantized))
    dated = tokenizer.with_template_date(datetime.date(2026, 1, 31))
    fingerprints.append(system_fingerprint(model, dated, engine.config))
    with detjax.use_backend("stock"):
        fingerprints.append(system_fingerprint(model, tokenizer, engine.config))
    assert len(set(fingerprints)) == 5
    # It excludes settings that requests do not see.
    smaller = dataclasses.replace(engine.config, max_samples=2, token_budget=40, prefix_cache=False, num_pages=9)
    assert system_fingerprint(model, tokenizer, dataclasses.replace(smaller, runs_of=5)) == served
    # The most that the model takes is what it is if nobody says so.
    whole = EngineConfig(max_length=model.config.max_positions)
    assert system_fingerprint(model, tokenizer) == system_fingerprint(model, tokenizer, whole)


def test_the_fingerprint_changes_with_every_weight(loaded: tuple[Decoder, Tokenizer]) -> None:
    model, tokenizer = loaded
    graph, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)
    expected_fingerprint = system_fingerprint(model, tokenizer)
    for index in range(0, len(leaves), 3):
        changed = [*leaves]
        changed[index] = leaves[index].at[(0,) * leaves[index].ndim].add(1)
        other = nnx.merge(graph, jax.tree.unflatten(structure, changed))
        other.generation_defaults = model.generation_defaults
        assert system_fingerprint(other, tokenizer) != expected_fingerprint


def test_health_metrics_and_the_document(server: Running, client: openai.OpenAI) -> None:
    def get(path: str) -> str:
        with urllib.request.urlopen(f"{server.url}{path}") as answer:
            return answer.read().decode()

    assert json.loads(get("/health")) == {"status": "ok"}
    before = _numbers(get("/metrics"))
    client.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=4, extra_body={"ignore_eos": True})
    after = _numbers(get("/metrics"))
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["detjax_prompt_tokens_total"] == 3
    assert grown["detjax_generated_tokens_total"] == 4
    assert grown['detjax_requests_total{path="/v1/completions",status="200"}'] == 1
    assert after["detjax_pages_in_use"] == 0
    assert after["detjax_pages"] == server.engine.stats().num_pages
    assert after["detjax_drafts_proposed_total"] == after["detjax_drafts_accepted_total"] == 0
    _check_metrics_of_streams(client, lambda: _numbers(get("/metrics")))
    assert set(json.loads(get("/openapi.json"))["paths"]) >= {"/v1/completions", "/v1/chat/completions"}


def _check_metrics_of_streams(client: openai.OpenAI, metrics: Callable[[], dict[str, float]]) -> None:
    before = metrics()
    extra = {"ignore_eos": True}
    for _ in client.completions.create(model=MODEL, prompt=[1, 2], n=2, max_tokens=3, stream=True, extra_body=extra):
        pass

    def grown() -> dict[str, float]:
        after = metrics()
        return {name: after[name] - before.get(name, 0) for name in after}

    request = 'detjax_requests_total{path="/v1/completions",status="200"}'
    wait_until(lambda: grown().get(request) == 1)  # it is counted after the client has read the last event
    growth = grown()
    assert growth["detjax_prompt_tokens_total"] == 2
    assert growth["detjax_generated_tokens_total"] == 6
    assert growth["detjax_first_token_seconds_count"] == 1
    assert growth["detjax_next_token_seconds_count"] == 4
    assert growth['detjax_request_seconds_count{path="/v1/completions"}'] == 1


def _numbers(metrics: str) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def test_keys_are_asked_for(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> None:
    with serving(engine, loaded, api_keys=["one-key", "another"]) as running:
        for key in ("one-key", "another"):
            with running.client(api_key=key) as client:
                assert client.models.list().data
        for key in ("One-key", "one", "none"):
            with running.client(api_key=key) as client, pytest.raises(openai.AuthenticationError, match="API key"):
                client.models.list()
        with running.client() as client, pytest.raises(openai.AuthenticationError):
            client.completions.create(model=MODEL, prompt="x")
        with urllib.request.urlopen(f"{running.url}/health") as answer:
            assert answer.status == 200
