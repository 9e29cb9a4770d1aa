"""Requests of client packages are served as the packages send them."""

import importlib.util
import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from detjax.engine import Engine
from detjax.models import Decoder, ModelMetadata, Tokenizer
from tests.server.client_scenarios import REASONING, SCENARIOS
from tests.server.running_server import MODEL, Running, served, serving
from tests.server.scripted import Client, Script, scripted
from tests.server.tool_models import HERMES

ROOT: Final = Path(__file__).parents[2]
RECORDED: Final = json.loads((Path(__file__).parent / "client_payloads.json").read_text())
"""Requests of client packages, recorded by `client_scenarios`."""

COMPLETION: Final = {"model": MODEL, "prompt": "Once", "max_tokens": 3}
CHAT: Final = {"model": MODEL, "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 3}
ANSWER: Final = {"role": "assistant", "content": "He."}
COUNTED: Final = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
PARTS: Final = [{"role": "user", "content": [{"type": "text", "text": "Who?"}]}]

WRITTEN: Final[dict[str, dict[str, Any]]] = {
    # From sources: vllm/benchmarks/lib/endpoint_request_func.py at 02cfb534df56.
    "vllm bench serve, completions": COMPLETION
    | {"repetition_penalty": 1.0, "logprobs": None, "stream": True, "stream_options": {"include_usage": True}},
    "vllm bench serve, chat": {
        "model": MODEL,
        "messages": PARTS,
        "max_completion_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    },
    # From sources: guidellm/backends/openai/request_handlers.py at 003104ddc722.
    "guidellm, completions": COMPLETION | COUNTED | {"stop": None, "ignore_eos": True},
    "guidellm, chat": {"model": MODEL, "messages": PARTS, "max_completion_tokens": 3, "stop": None, "ignore_eos": True}
    | COUNTED,
    # From sources: sglang/bench_serving.py at 0033168f0f58.
    "sglang.bench_serving, completions": COMPLETION
    | {"temperature": 0.0, "best_of": 1, "stream": True, "ignore_eos": True},
    "sglang.bench_serving, chat": CHAT | {"temperature": 0.0, "stream": True},
    # From sources: genai_perf/inputs/converters/ at 053bdb77156c, and the extra inputs that its documentation shows.
    "genai-perf, chat": CHAT | {"stream": True},
    "genai-perf, chat with extra inputs": CHAT | {"stream": True, "min_tokens": 3, "ignore_eos": True},
    # From sources: lm_eval/models/openai_completions.py at 0064c3a03e5f. Older versions gave messages a type.
    "lm-eval, loglikelihood": COMPLETION
    | {"prompt": [[5, 6, 7]], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True},
    "lm-eval, chat": CHAT
    | {"messages": [{"role": "user", "content": "Who?", "type": "text"}], "temperature": 0, "stop": ["\n"]},
    # A second turn with the answer's message as packages write it.
    "openai, model_dump of a message": CHAT
    | {
        "messages": [
            *CHAT["messages"],
            ANSWER | dict.fromkeys(["refusal", "annotations", "audio", "function_call", "tool_calls"]),
            *CHAT["messages"],
        ]
    },
    "vllm's answer as a message": CHAT
    | {"messages": [*CHAT["messages"], ANSWER | {"reasoning_content": None, "tool_calls": []}, *CHAT["messages"]]},
    # litellm 1.110.2 sends the reasoning of an answer back by three names.
    "litellm's answer as a message": CHAT
    | {
        "messages": [
            *CHAT["messages"],
            ANSWER | {"reasoning_content": "So.", "provider_specific_fields": {"refusal": None, "reasoning": "So."}},
            *CHAT["messages"],
        ]
    },
    # Additional fields that agents and SDKs send.
    "no tools": CHAT | {"tools": [], "tool_choice": "none", "parallel_tool_calls": False, "functions": []},
    "automatic choice of no tools": CHAT | {"tools": None, "tool_choice": "auto", "function_call": "auto"},
    "defaults of OpenAI's fields": CHAT
    | {"store": True, "reasoning_effort": None, "modalities": ["text"], "service_tier": "auto", "verbosity": "medium"}
    | {"response_format": {"type": "text"}, "top_logprobs": 0, "logprobs": False, "logit_bias": {"5": 0}}
    | {"stream": True, "stream_options": {"include_obfuscation": False, "include_usage": None}},
    "defaults of vLLM's fields": COMPLETION
    | {"top_k": -1, "seed": -1, "min_p": 0.0, "min_tokens": 0, "repetition_penalty": 1.0, "length_penalty": 1.0}
    | {"skip_special_tokens": True, "spaces_between_special_tokens": True, "add_special_tokens": True}
    | {"include_stop_str_in_output": False, "ignore_eos": None, "use_beam_search": False, "stop_token_ids": []}
    | {"truncate_prompt_tokens": None, "prompt_logprobs": None, "guided_json": None, "priority": 0, "suffix": None},
    "defaults of vLLM's fields for chats": CHAT
    | {"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False, "echo": False}
    | {"include_reasoning": True, "documents": None, "chat_template": None, "chat_template_kwargs": None},
}
"""Requests that packages send, by what sends them. They were written down from sources."""


@pytest.fixture(scope="module")
def client(metadata: ModelMetadata, words: Tokenizer) -> Iterator[Client]:
    """A client of a server whose chat template has tools, and that computes nothing."""
    with scripted(metadata, words.with_chat_template(HERMES), is_strict=True) as one:
        yield one


@pytest.fixture(scope="module")
def server(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> Iterator[Running]:
    """A server whose chat template has tools."""
    with serving(engine, (loaded[0], loaded[1].with_chat_template(HERMES))) as running:
        yield running


def answer(server: Running, path: str, body: dict[str, Any]) -> Any:
    """The JSON of an answer, or of all its chunks."""
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        assert response.status == 200
        if not body.get("stream"):
            return json.load(response)
        *events, rest = response.read().decode().split("\n\n")
        assert rest == ""
        if path != "/v1/responses":
            assert events.pop() == "data: [DONE]"
        return [json.loads(event.rpartition("data: ")[2]) for event in events]


@pytest.mark.parametrize("payload", RECORDED, ids=lambda payload: f"{payload['client']} {payload['path']}")
def test_recorded_requests_are_served(client: Client, payload: dict[str, Any]) -> None:
    assert client.ask(payload["path"], **payload["body"])


@pytest.mark.parametrize("sender", WRITTEN)
def test_requests_that_stand_in_sources_are_served(client: Client, sender: str) -> None:
    body = WRITTEN[sender]
    assert client.ask("/v1/chat/completions" if "messages" in body else "/v1/completions", **body)


@pytest.mark.parametrize("sender", ["openai, model_dump of a message", "lm-eval, chat", "defaults of vLLM's fields"])
def test_fields_that_change_nothing_change_nothing(server: Running, sender: str) -> None:
    body = WRITTEN[sender] | {"temperature": 0}
    fields = ("model", "prompt", "messages", "max_tokens", "temperature", "stop")
    plain = {name: body[name] for name in fields if name in body}
    if "messages" in body:
        plain["messages"] = [{name: message[name] for name in ("role", "content")} for message in body["messages"]]
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    assert answer(server, path, body)["choices"] == answer(server, path, plain)["choices"]


def test_continuous_usage_counts_the_tokens_so_far_in_every_chunk(server: Running) -> None:
    *chunks, last = answer(server, "/v1/completions", WRITTEN["guidellm, completions"])
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[-1], last["usage"]["completion_tokens"], last["choices"]) == (3, 3, [])


@pytest.fixture(scope="module")
def thinking(metadata: ModelMetadata, words: Tokenizer) -> Iterator[str]:
    """The base URL of a server whose answers have reasoning. It computes nothing."""
    template = HERMES.replace("assistant: ", "assistant: <think>\n")
    script = Script((5, 6, 7, 8), ("He is a ", "Montague\n</th", "ink>\n\nRomeo", "."))
    script.reason = "stop"
    with scripted(metadata, words.with_chat_template(template), script) as client:
        with served(client.app) as url:
            yield f"{url}/v1"


@pytest.mark.parametrize("package", REASONING)
def test_packages_read_reasoning(thinking: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    REASONING[package](thinking)


PYTHON: Final = ROOT / os.environ.get("DETJAX_CLIENTS", "nothing") / "bin" / "python"


@pytest.mark.skipif(not PYTHON.exists(), reason="client packages have an environment of their own: make test-clients")
@pytest.mark.parametrize("kind", ["everything", "reasoning"])
def test_packages_in_an_environment_of_their_own_work(server: Running, thinking: str, kind: str) -> None:
    arguments = [thinking, "reasoning"] if kind == "reasoning" else [f"{server.url}/v1"]
    script = Path(__file__).with_name("client_scenarios.py")
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # otherwise it asks the network
    command = [str(PYTHON), str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    works = {line.split()[0] for line in done.stdout.splitlines() if line.endswith(" works")}
    known = REASONING if kind == "reasoning" else SCENARIOS
    assert works == {*known} & {"openai", "litellm", "langchain-openai", "instructor", "openai-agents"}


@pytest.mark.parametrize("package", SCENARIOS)
def test_packages_work_as_their_documentation_shows(server: Running, package: str) -> None:
    module = {"openai-agents": "agents"}.get(package, package.removesuffix("-llms-openai-like").replace("-", "_"))
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{package} is not installed")
    SCENARIOS[package](f"{server.url}/v1")
