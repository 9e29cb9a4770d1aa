"""A server whose model pools: embeddings, classes, scores and reranking over HTTP, as vLLM has them."""

import base64
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from starlette.testclient import TestClient

from detjax.audit import Origin
from detjax.engine import Completion, Engine, EngineConfig, Generation, Pooling, Request, classify, embed, score
from detjax.models import ModelMetadata, load
from detjax.server import Settings
from detjax.server.api.api_calls import ServedModel
from detjax.server.api.pooling_calls import EmbeddingCall
from detjax.server.api.pooling_fields import EmbeddingRequest
from detjax.server.app import app_of
from detjax.server.http.errors import ApiError
from detjax.server.replicated_engine import Batch, ReplicatedEngine
from detjax.server.text.token_texts import TokenTexts
from tests.server.running_server import FIXTURE, MODEL, Running, serving
from tests.support.bits import assert_same_bits, same_bits

POOLING = FIXTURE.parent / "pooling"
ANSWERS = {"classifier_from_token": ["a", "b"], "is_original_qwen3_reranker": True}
TEMPLATE = "{{ messages[0].content if messages[0].role == 'query' }}?{{ messages[1].content if 'document' }}="


@contextlib.contextmanager
def serving_of(folder: Path, template: str | None = None, **overrides: Any) -> Iterator[Running]:
    model, tokenizer = load(folder, dtype="float32", progress=False, overrides=overrides)
    assert tokenizer is not None
    if template is not None:
        tokenizer = tokenizer.with_chat_template(template)
    with (
        Engine(model, tokenizer, max_samples=3, token_budget=48, max_length=300, num_pages=9) as engine,
        serving(engine, (model, tokenizer)) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def embeddings() -> Iterator[Running]:
    with serving_of(POOLING / "embedding") as running:
        yield running


@pytest.fixture(scope="module")
def reranker() -> Iterator[Running]:
    with serving_of(FIXTURE, TEMPLATE, **ANSWERS) as running:
        yield running


def post(server: Running, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(server: Running, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def bits(numbers: list[float]) -> np.ndarray:
    return np.array(numbers, np.float32)


# --- embeddings -------------------------------------------------------------------------------------------------------


def test_openais_client_gets_the_engines_bits(embeddings: Running) -> None:
    texts = ["A sum?", "An order of additions"]
    expected = embed(embeddings.engine, texts)
    with embeddings.client() as client:
        answer = client.embeddings.create(model=MODEL, input=texts)  # it asks for base64
        floats = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
        (one,) = client.embeddings.create(model=MODEL, input=texts[1], dimensions=16).data
    for given in (answer, floats):
        assert [item.index for item in given.data] == [0, 1]
        for item, wanted in zip(given.data, expected, strict=True):
            assert_same_bits(bits(item.embedding), wanted)
    assert_same_bits(bits(one.embedding), embed(embeddings.engine, texts[1:], dimensions=16)[0])
    tokenizer = embeddings.engine.tokenizer
    assert tokenizer is not None
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, map(tokenizer.encode, texts)))


def test_an_input_is_text_tokens_or_messages(embeddings: Running) -> None:
    engine, tokens = embeddings.engine, [5, 6, 7, 8]
    answer = post(embeddings, "/v1/embeddings", model=MODEL, input=tokens)
    assert answer["object"] == "list" and answer["id"].startswith("embd-") and answer["system_fingerprint"]
    assert_same_bits(bits(answer["data"][0]["embedding"]), embed(engine, [tokens])[0])
    both = post(embeddings, "/v1/embeddings", input=[tokens, tokens[:2]])["data"]
    assert_same_bits(bits(both[1]["embedding"]), embed(engine, [tokens[:2]])[0])
    cut = post(embeddings, "/v1/embeddings", input=tokens, truncate_prompt_tokens=2)["data"]
    assert_same_bits(bits(cut[0]["embedding"]), embed(engine, [tokens[2:]])[0])
    named = post(embeddings, "/v1/embeddings", input="A sum?", prompt_name="query", encoding_format="base64")["data"]
    raw = np.frombuffer(base64.b64decode(named[0]["embedding"]), "<f4")
    assert_same_bits(raw, embed(engine, ["A sum?"], prompt_name="query")[0])
    plain = post(embeddings, "/v1/embeddings", input="A sum?", use_activation=False)["data"][0]["embedding"]
    (pooled,) = engine.generate([Request("A sum?", pooling=Pooling(is_scored=False))])
    assert_same_bits(bits(plain), np.asarray(pooled.pooled))
    bare = post(embeddings, "/v1/embeddings", input="A sum?", add_special_tokens=False)["data"][0]["embedding"]
    assert not same_bits(bits(bare), embed(engine, ["A sum?"])[0])
    assert "chat template" in refused(embeddings, "/pooling", messages=[{"role": "user", "content": "a"}])["message"]


def test_pooling_gives_each_token_a_vector_if_asked(embeddings: Running) -> None:
    tokens = list(range(70))
    whole = post(embeddings, "/pooling", input=tokens)["data"][0]
    assert whole["object"] == "pooling"
    assert_same_bits(bits(whole["data"]), embed(embeddings.engine, [tokens])[0])
    rows = post(embeddings, "/pooling", input=tokens, task="token_embed")["data"][0]["data"]
    assert np.shape(rows) == (70, 56)
    assert_same_bits(bits(rows[-1]), bits(whole["data"]))
    encoded = post(embeddings, "/pooling", input=tokens, task="token_embed", encoding_format="base64")
    assert_same_bits(np.frombuffer(base64.b64decode(encoded["data"][0]["data"]), "<f4").reshape(70, 56), bits(rows))


def test_two_embeddings_are_scored_by_their_cosine(embeddings: Running) -> None:
    documents = ["A sum?", "An order"]
    answer = post(embeddings, "/score", queries="A sum?", documents=documents)
    scores = [item["score"] for item in answer["data"]]
    assert_same_bits(bits(scores), score(embeddings.engine, "A sum?", documents))
    assert scores[0] == 1
    ranked = post(embeddings, "/v2/rerank", query="A sum?", documents=documents[::-1])
    assert [item["index"] for item in ranked["results"]] == [1, 0]
    assert (
        "is their cosine" in refused(embeddings, "/score", queries="a", documents="b", use_activation=False)["message"]
    )


# --- scores -----------------------------------------------------------------------------------------------------------


def test_pairs_have_the_engines_scores_under_all_names(reranker: Running) -> None:
    expected = score(reranker.engine, "A sum", ["An order", "A row"])
    for names in (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2")):
        for path in ("/score", "/v1/score"):
            body: dict[str, Any] = dict(zip(names, ("A sum", ["An order", "A row"]), strict=True))
            answer = post(reranker, path, model=MODEL, encoding_format="float", **body)
            assert [item["object"] for item in answer["data"]] == ["score", "score"]
            assert_same_bits(bits([item["score"] for item in answer["data"]]), expected)
    single = post(reranker, "/score", text_1=["A sum"], text_2="A row")["data"]
    assert_same_bits(bits([single[0]["score"]]), expected[1:])
    logits = [
        item["score"] for item in post(reranker, "/score", text_1="A sum", text_2="A row", use_activation=False)["data"]
    ]
    assert_same_bits(bits(logits), score(reranker.engine, "A sum", ["A row"], is_scored=False))


def test_reranking_sorts_documents_by_their_scores(reranker: Running) -> None:
    documents = ["An order", "A row", "A column", "A row"]
    scores = score(reranker.engine, "A sum", documents)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = post(reranker, path, model=MODEL, query="A sum", documents=documents, top_n=3)
        given = [(item["index"], item["document"]["text"]) for item in answer["results"]]
        best = sorted(range(4), key=lambda index: (-scores[index], index))[:3]
        assert given == [(index, documents[index]) for index in best]
        assert_same_bits(bits([item["relevance_score"] for item in answer["results"]]), scores[best])
        assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > 0


def test_classes_have_labels_and_probabilities() -> None:
    overrides = {"classifier_from_token": ["a", "b", "c"], "method": "no_post_processing"}
    with serving_of(FIXTURE, **overrides) as server:
        expected = classify(server.engine, ["A sum", "An order"])
        answer = post(server, "/classify", input=["A sum", "An order"])
        for item, wanted in zip(answer["data"], expected, strict=True):
            assert_same_bits(bits(item["probs"]), wanted)
            assert (item["label"], item["num_classes"]) == ("abc"[wanted.argmax()], 3)
        chat = [{"role": "user", "content": "A sum"}]
        (item,) = post(server, "/classify", messages=chat, add_generation_prompt=True)["data"]
        tokenizer = server.engine.tokenizer
        assert tokenizer is not None
        tokens = tokenizer.encode(tokenizer.apply_chat_template(chat), add_special_tokens=False)
        assert_same_bits(bits(item["probs"]), classify(server.engine, [tokens])[0])
        tokens_of_text = post(server, "/pooling", input="A sum", task="token_classify", use_activation=False)
        assert np.shape(tokens_of_text["data"][0]["data"])[1] == 3
        message = refused(server, "/v1/completions", 404, model=MODEL, prompt="a")["message"]
        assert message.endswith("accepted: /classify, /pooling")
        message = refused(server, "/rerank", query="a", documents=["b"])["message"]
        assert message == "the request: the model has 3 classes; accepted: models with one"


class OneReplica:
    """A replica whose results are written."""

    failure, kept_files = None, ()

    def __init__(self) -> None:
        self.asked: list[Request] = []

    async def stream(self, requests: Sequence[Request], *, is_whole: bool) -> AsyncGenerator[Batch]:
        assert is_whole
        self.asked += requests
        ended = Completion((), (), (), None, "stop")
        yield [
            (index, Generation(tuple(map(int, one.prompt)), (ended,), pooled=np.float32([len(one.prompt), 0.5])))
            for index, one in enumerate(requests)
        ]

    async def command(self, command: Any) -> Any:
        raise NotImplementedError


def test_replicas_answer_like_the_engine(embeddings: Running) -> None:
    model, tokenizer = load(POOLING / "embedding", progress=False)
    replica, metadata = OneReplica(), ModelMetadata.from_model(model)
    engine = ReplicatedEngine(replica, metadata, tokenizer, EngineConfig(max_length=300))
    assert tokenizer is not None
    app = app_of(engine, metadata, tokenizer, Settings(MODEL), Origin())
    with contextlib.closing(app.state.texts), TestClient(app) as client:
        answer = client.post("/pooling", json={"input": [[5, 6, 7], [8]]}).json()
        assert [item["data"] for item in answer["data"]] == [[3, 0.5], [1, 0.5]]
        assert [one.pooling for one in replica.asked] == [Pooling()] * 2
        assert client.post("/v1/completions", json={"model": MODEL, "prompt": "a"}).status_code == 404


def test_an_aborted_call_says_so(embeddings: Running) -> None:
    call = EmbeddingCall(EmbeddingRequest(input=[1, 2]), served_by(embeddings))
    with pytest.raises(ApiError, match="the request was aborted"):
        call.response([Generation((1, 2), (Completion((), (), (), "", "abort"),))])


def served_by(server: Running) -> ServedModel:
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    return ServedModel(MODEL, server.engine, tokenizer, server.app.state.texts, {}, "", TokenTexts(tokenizer))


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_model_that_pools_does_not_generate(path: str, embeddings: Running) -> None:
    error = refused(embeddings, path, 404, model=MODEL, prompt="a")
    assert error["message"] == (
        "the model pools, so it does not serve this path; accepted: /v1/embeddings, /score, /rerank, /pooling"
    )


def test_a_model_that_generates_does_not_pool(server: Running) -> None:
    for path in ("/v1/embeddings", "/classify", "/v1/score", "/v2/rerank", "/pooling"):
        message = refused(server, path, 404, input="a")["message"]
        assert message == (
            "the model generates, so it does not serve this path; accepted: /v1/completions, /v1/chat/completions, "
            "/v1/responses"
        )


def test_the_model_says_what_it_does(embeddings: Running) -> None:
    (model,) = httpx.get(f"{embeddings.url}/v1/models").json()["data"]
    assert (model["tasks"], model["chat"]) == (["embed", "token_embed"], False)


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/embeddings", {}, None, "neither input nor messages is given; accepted: one of them"),
        ("/v1/embeddings", {"input": "a", "messages": [{"role": "user", "content": "a"}]}, None, "input and messages "),
        ("/v1/embeddings", {"input": "a", "dimensions": 17}, "dimensions", "dimensions is 17; accepted: 16, 40"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", "dimensions is 0"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "bytes"}, "encoding_format", "'float' or 'base64'"),
        ("/v1/embeddings", {"input": "a", "embed_dtype": "float16"}, "embed_dtype", 'accepted: "float32" or null'),
        ("/v1/embeddings", {"input": "a", "endianness": "big"}, "endianness", "because base64 is little-endian"),
        ("/v1/embeddings", {"input": "a", "truncation_side": "right"}, "truncation_side", "keeps the last tokens"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1, or -1"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "b"}, "prompt_name", "accepted: 'document', 'query'"),
        ("/v1/embeddings", {"input": "a", "add_generation_prompt": True}, "add_generation_prompt", "with messages"),
        ("/v1/embeddings", {"input": "a", "normalize": True}, None, "there is no field normalize"),
        ("/v1/embeddings", {"input": [1] * 301}, "input", "has 301 tokens; accepted: up to 300"),
        ("/v1/embeddings", {"input": "a" * 2000}, "input", "accepted: up to 300, the server's context length"),
        ("/v1/embeddings", {"input": [515]}, "input", "has token 515; accepted: ids 0 to 514"),
        ("/classify", {"input": "a"}, "task", "task is 'classify'; accepted: embed, token_embed, as the model has"),
        (
            "/pooling",
            {"input": "a", "task": "plugin"},
            "task",
            "'embed', 'classify', 'token_embed' or ",
        ),
        ("/score", {"queries": "a"}, None, "queries is given; accepted: queries and documents or queries and items"),
        (
            "/score",
            {"queries": ["a", "b"], "documents": ["a"]},
            "queries",
            "2 queries and 1 documents; accepted: ",
        ),
        ("/rerank", {"query": "a", "documents": []}, "documents", "at least 1 item"),
        (
            "/rerank",
            {"query": "a", "documents": ["b"], "return_documents": False},
            "return_documents",
            "results have ",
        ),
    ],
)
def test_other_values_are_refused(
    path: str, body: dict[str, Any], param: str | None, message: str, embeddings: Running
) -> None:
    error = refused(embeddings, path, **body)
    assert message in error["message"]
    assert error["param"] == param or param is None


def test_another_model_is_unknown(embeddings: Running) -> None:
    assert refused(embeddings, "/v1/embeddings", 404, model="other", input="a")["code"] == "model_not_found"
