"""Examples from the documentation of client packages, run against a server.

`python tests/server/client_scenarios.py URL` runs every scenario whose package is installed against the server at URL,
such as http://localhost:8000/v1, whose model has to be called "little". With `reasoning` after the URL, it runs the
scenarios about reasoning.

`python tests/server/client_scenarios.py FILE` runs every scenario whose package is installed against a server with
fixed answers, and adds the requests that the package sent to FILE, in place of older ones of the same package and
version. That is how `client_payloads.json` was made, each package in an environment of its own, because some exclude
each other.
"""

import contextlib
import importlib.metadata
import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

MODEL = "little"
FEW: Any = {"max_tokens": 200}
WEATHER: Any = {
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Verona", "Mantua"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOLS: Any = [{"type": "function", "function": WEATHER}]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]


def openai(url: str) -> None:
    """The second turn sends the answer's message back as an object, as OpenAI's documentation has it."""
    import openai

    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        messages: list[Any] = [*QUESTION]
        for _ in range(2):
            answer = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=3)
            messages += [answer.choices[0].message, {"role": "user", "content": "And then?"}]
        messages[-2] = answer.choices[0].message.model_dump()
        client.chat.completions.create(
            model=MODEL,
            messages=messages,
            max_tokens=3,
            store=False,
            metadata={"a": "b"},
            user="someone",
            logit_bias={},
        )
        options: Any = {"include_usage": True}
        list(
            client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=3, stream=True, stream_options=options
            )
        )
        client.completions.create(model=MODEL, prompt="Once", max_tokens=3, stop=None)
        list(client.completions.create(model=MODEL, prompt=["Once", "Twice"], max_tokens=3, stream=True))
        _openai_tools(client)
        if hasattr(client, "responses"):
            _openai_responses(client)


def _openai_tools(client: Any) -> None:
    asked: Any = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, **FEW}
    message = client.chat.completions.create(tool_choice=NAMED, **asked).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Verona", "Mantua")
    results: Any = [message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny"}]
    client.chat.completions.create(**asked | {"messages": [*QUESTION, *results], "max_tokens": 3})
    arguments = ""
    for chunk in client.chat.completions.create(tool_choice="required", stream=True, **asked):
        for choice in chunk.choices:
            arguments += "".join(call.function.arguments for call in choice.delta.tool_calls or ())
    assert "city" in arguments
    answer = client.chat.completions.parse(model=MODEL, messages=QUESTION, response_format=_person(), **FEW)
    assert answer.choices[0].message.parsed.name in ("Romeo", "Juliet")


def _openai_responses(client: Any) -> None:
    """The second turn sends the answer's items back as objects, as OpenAI's documentation has it."""
    assert client.responses.create(model=MODEL, input="Who?", instructions="Be brief.", max_output_tokens=16).output
    tools: Any = [{"type": "function", "strict": True} | WEATHER]
    asked: Any = {"model": MODEL, "tools": tools, "max_output_tokens": 200}
    answer = client.responses.create(input=QUESTION, tool_choice={"type": "function", "name": "weather"}, **asked)
    (call,) = answer.output
    assert json.loads(call.arguments)["city"] in ("Verona", "Mantua")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"}
    client.responses.create(input=[*QUESTION, *answer.output, result], **asked | {"max_output_tokens": 16})
    with client.responses.stream(input=QUESTION, tool_choice="required", extra_body={"seed": 1}, **asked) as stream:
        kinds = [event.type for event in stream]
        assert kinds[0] == "response.created"
        assert stream.get_final_response().output[0].type == "function_call"
    parsed = client.responses.parse(model=MODEL, input=QUESTION, text_format=_person(), max_output_tokens=200)
    assert parsed.output_parsed.name in ("Romeo", "Juliet")


def _person() -> Any:
    """A model of answers that a model which writes nonsense can give too."""
    from pydantic import BaseModel

    class Person(BaseModel):
        name: Literal["Romeo", "Juliet"]

    return Person


def langchain_openai(url: str) -> None:
    from langchain_openai import ChatOpenAI, OpenAI

    chat = ChatOpenAI(base_url=url, api_key="none", model=MODEL, max_tokens=3, max_retries=0)  # type: ignore
    answer = chat.invoke([("system", "Be brief."), ("human", "Who?")])
    chat.invoke([("human", "Who?"), answer, ("human", "And then?")])
    list(chat.stream("Who?"))
    text = OpenAI(base_url=url, api_key="none", model=MODEL, max_tokens=3, max_retries=0)  # type: ignore
    text.invoke("Once")
    list(text.stream("Once"))
    longer = ChatOpenAI(base_url=url, api_key="none", model=MODEL, max_tokens=200, max_retries=0)  # type: ignore
    calling = longer.bind_tools(TOOLS, tool_choice="weather")
    called = calling.invoke("How is it?")
    (call,) = called.tool_calls
    assert call["args"]["city"] in ("Verona", "Mantua")
    longer.bind_tools(TOOLS, tool_choice="none").invoke(
        [("human", "How is it?"), called, {"role": "tool", "content": "Sunny", "tool_call_id": call["id"]}]
    )
    assert any(chunk.tool_call_chunks for chunk in calling.stream("How is it?"))
    for method in ("json_schema", "function_calling"):
        person: Any = longer.with_structured_output(_person(), method=method).invoke("Who?")
        assert person.name in ("Romeo", "Juliet")
    responses = ChatOpenAI(
        base_url=url, api_key="none", model=MODEL, max_tokens=200, max_retries=0, use_responses_api=True
    )  # type: ignore
    (call,) = responses.bind_tools(TOOLS, tool_choice="weather").invoke("How is it?").tool_calls
    assert call["args"]["city"] in ("Verona", "Mantua")
    list(responses.stream("Who?"))


def litellm(url: str) -> None:
    import litellm

    given: Any = {"model": f"openai/{MODEL}", "api_base": url, "api_key": "none", "max_tokens": 3, "num_retries": 0}
    messages: list[Any] = [*QUESTION]
    message = litellm.completion(messages=messages, **given).choices[0].message  # type: ignore
    for answer in (message, message.model_dump()):
        litellm.completion(messages=[*messages, answer, {"role": "user", "content": "And then?"}], **given)
    list(litellm.completion(messages=messages, stream=True, **given))
    tools: Any = given | {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 200}
    called = litellm.completion(messages=messages, **tools).choices[0].message  # type: ignore
    (call,) = called.tool_calls  # type: ignore
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny"}
    litellm.completion(messages=[*messages, called, result], **given, tools=TOOLS)
    list(litellm.completion(messages=messages, stream=True, **tools))
    litellm.text_completion(prompt="Once", **given | {"model": f"text-completion-openai/{MODEL}"})


def llama_index(url: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    given: Any = {"model": MODEL, "api_base": url, "api_key": "none", "max_tokens": 3, "max_retries": 0}
    chat = OpenAILike(is_chat_model=True, **given)
    question = ChatMessage(role="user", content="Who?")
    answer = chat.chat([question]).message
    chat.chat([question, answer, question])
    list(chat.stream_chat([question]))
    text = OpenAILike(is_chat_model=False, **given)
    text.complete("Once")
    list(text.stream_complete("Once"))


def instructor(url: str) -> None:
    """The mode that needs no more than text, and those that need a tool or a form.

    If only the prompt asks for JSON, the server does not check that answers fit the model.
    """
    import instructor
    import openai
    from instructor.core import IncompleteOutputException, InstructorRetryException
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str

    with openai.OpenAI(base_url=url, api_key="none") as client:
        loose = instructor.from_openai(client, mode=instructor.Mode.MD_JSON)
        try:
            loose.create(model=MODEL, messages=QUESTION, response_model=Person, max_retries=0, max_tokens=3)
        except (IncompleteOutputException, InstructorRetryException) as error:
            if isinstance(error.__cause__, openai.APIError):
                raise
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
            strict = instructor.from_openai(client, mode=mode)
            answer = strict.create(model=MODEL, messages=QUESTION, response_model=_person(), max_retries=0, **FEW)
            assert answer.name in ("Romeo", "Juliet")


def openai_agents(url: str) -> None:
    """An agent that has to call its tool first, and is free to call it again, by either endpoint."""
    import agents
    import openai

    @agents.function_tool
    def weather(city: Literal["Verona", "Mantua"]) -> str:
        """Tells the weather."""
        return f"Sunny in {city}"

    agents.set_tracing_disabled(True)
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        settings = agents.ModelSettings(tool_choice="required", max_tokens=100, temperature=1)
        agent = agents.Agent("Friar", instructions="Be brief.", tools=[weather], model_settings=settings)
        agent.model = kind(MODEL, client)
        with contextlib.suppress(agents.MaxTurnsExceeded, agents.ModelBehaviorError):  # what a model does in a turn
            agents.Runner.run_sync(agent, "How is the weather?", max_turns=2)


def lm_eval(url: str) -> None:
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    settings: Any = {"until": ["\n"], "max_gen_toks": 3, "temperature": 0, "do_sample": False}
    chat = LocalChatCompletion(base_url=f"{url}/chat/completions", model=MODEL)
    assert chat.model_call([chat.apply_chat_template(QUESTION)], generate=True, gen_kwargs={**settings})  # type: ignore
    text = LocalCompletionsAPI(base_url=f"{url}/completions", model=MODEL, tokenizer_backend=None)  # type: ignore
    assert text.model_call(["Once"], generate=True, gen_kwargs={**settings})


SCENARIOS: dict[str, Callable[[str], None]] = {
    "openai": openai,
    "langchain-openai": langchain_openai,
    "litellm": litellm,
    "llama-index-llms-openai-like": llama_index,
    "instructor": instructor,
    "openai-agents": openai_agents,
    "lm_eval": lm_eval,
}
"""The scenario of each package, by the package's name."""

THOUGHT, SAID = "He is a Montague", "Romeo."
"""The reasoning and the content of every answer of the server for scenarios about reasoning."""


def openai_reasoning(url: str) -> None:
    """The second turn sends the reasoning back, as agents do between calls of tools."""
    import openai

    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        messages: list[Any] = [*QUESTION]
        answer: Any = client.chat.completions.create(model=MODEL, messages=messages)
        assert (answer.choices[0].message.reasoning, answer.choices[0].message.content) == (THOUGHT, SAID)
        assert answer.usage.completion_tokens_details.reasoning_tokens >= 0
        messages += [answer.choices[0].message, {"role": "user", "content": "And then?"}]
        client.chat.completions.create(model=MODEL, messages=messages)
        reasoning, content = "", ""
        for chunk in client.chat.completions.create(model=MODEL, messages=messages, stream=True):
            delta: Any = chunk.choices[0].delta
            reasoning += getattr(delta, "reasoning", None) or ""
            content += delta.content or ""
        assert (reasoning, content) == (THOUGHT, SAID)
        response = client.responses.create(model=MODEL, input="Who?")
        assert [item.type for item in response.output] == ["reasoning", "message"]
        assert response.output_text == SAID
        with client.responses.stream(model=MODEL, input=[*response.output, *QUESTION]) as stream:  # type: ignore
            thought = "".join(event.delta for event in stream if event.type == "response.reasoning_text.delta")
        assert thought == THOUGHT


def litellm_reasoning(url: str) -> None:
    import litellm

    given: Any = {"model": f"openai/{MODEL}", "api_base": url, "api_key": "none", "num_retries": 0}
    message: Any = litellm.completion(messages=[*QUESTION], **given).choices[0].message  # type: ignore
    assert (message.reasoning_content, message.content) == (THOUGHT, SAID)
    litellm.completion(messages=[*QUESTION, message, *QUESTION[1:]], **given)
    chunks: Any = litellm.completion(messages=[*QUESTION], stream=True, **given)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == SAID
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == THOUGHT


REASONING: dict[str, Callable[[str], None]] = {"openai": openai_reasoning, "litellm": litellm_reasoning}
"""The scenarios about reasoning, which need a server whose model reasons."""


# --- recording --------------------------------------------------------------------------------------------------------


def _answer(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """An answer, or the chunks of one that is streamed."""
    streamed, named = bool(body.get("stream")), body.get("tool_choice")
    calls = body.get("tools") and named not in (None, "auto", "none")
    if path.endswith("/responses"):
        return _response(body, streamed, calls)
    is_chat = path.endswith("chat/completions")
    text = '{"name": "Romeo"}'
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "logprobs": None}
    if calls:
        tool = body["tools"][0]["function"]["name"]
        arguments = '{"city": "Verona"}' if tool == "weather" else text
        call = {"id": "call_1", "type": "function", "function": {"name": tool, "arguments": arguments}}
        message |= {"content": None, "tool_calls": [({"index": 0} if streamed else {}) | call]}
        choice["finish_reason"] = "tool_calls"
    if is_chat:
        choice["delta" if streamed else "message"] = message
    else:
        choice["text"] = "He"
        choice["logprobs"] = {
            "tokens": ["H"],
            "token_logprobs": [0.0],
            "top_logprobs": [{"H": 0.0}],
            "text_offset": [0],
        }
    kind = ("chat.completion.chunk" if streamed else "chat.completion") if is_chat else "text_completion"
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return [{"id": "x", "object": kind, "created": 1, "model": MODEL, "choices": [choice], "usage": usage}]


def _response(body: dict[str, Any], streamed: bool, calls: object) -> list[dict[str, Any]]:
    part = {"type": "output_text", "text": '{"name": "Romeo"}', "annotations": [], "logprobs": []}
    item: dict[str, Any] = {"id": "msg_1", "status": "completed", "type": "message", "role": "assistant"}
    item |= {"content": [part]}
    if calls:
        item = {"id": "fc_1", "status": "completed", "type": "function_call", "call_id": "call_1", "name": "weather"}
        item |= {"arguments": '{"city": "Verona"}'}
    counted = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    counted |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    response = {"id": "resp_1", "object": "response", "created_at": 1, "status": "completed", "model": MODEL}
    response |= {"output": [item], "usage": counted, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
    if not streamed:
        return [response]
    added = item | {"content": []} if "content" in item else item | {"arguments": ""}
    events = [
        {"type": "response.created", "response": response | {"output": [], "status": "in_progress"}},
        {"type": "response.output_item.added", "output_index": 0, "item": added},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": response},
    ]
    return [event | {"sequence_number": number} for number, event in enumerate(events)]


@contextlib.contextmanager
def recorder() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server with fixed answers: its base URL, and the requests that it gets, each with a path and a body."""
    recorded: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            recorded.append({"path": self.path, "body": body})
            chunks = [json.dumps(chunk).encode() for chunk in _answer(self.path, body)]
            answer = chunks[0]
            if body.get("stream"):
                answer = b"".join(b"data: " + chunk + b"\n\n" for chunk in [*chunks, b"[DONE]"])
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream" if body.get("stream") else "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1", recorded
        finally:
            server.shutdown()


def _installed(known: dict[str, Callable[[str], None]]) -> dict[str, Callable[[str], None]]:
    """The scenarios whose packages are installed, by name and version of the package."""
    scenarios = {}
    for package, scenario in known.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            scenarios[f"{package} {importlib.metadata.version(package)}"] = scenario
    return scenarios


def record(file: Path) -> None:
    """Adds the requests of every package that is installed to a file."""
    payloads = json.loads(file.read_text()) if file.exists() else []
    for client, scenario in _installed(SCENARIOS).items():
        with recorder() as (url, recorded):
            scenario(url)
        payloads = [old for old in payloads if old["client"] != client]
        payloads += [{"client": client, **request} for request in recorded]
    file.write_text("[\n" + ",\n".join(map(json.dumps, payloads)) + "\n]\n")


def run(url: str, known: dict[str, Callable[[str], None]]) -> None:
    """Runs the scenario of every package that is installed against a server."""
    for client, scenario in _installed(known).items():
        scenario(url)
        print(f"{client} works")


if __name__ == "__main__":
    if sys.argv[1].startswith("http"):
        run(sys.argv[1], REASONING if sys.argv[2:] == ["reasoning"] else SCENARIOS)
    else:
        record(Path(sys.argv[1]))
