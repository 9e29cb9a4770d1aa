"""What the documentation of client packages shows, run against a server.

`python tests/server/client_scenarios.py URL` runs every scenario whose package is installed against the server at URL,
such as http://localhost:8000/v1, whose model has to be called "little".

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
from typing import Any

MODEL = "little"
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]


def openai(url: str) -> None:
    """The second turn sends the answer's message back as an object, as OpenAI's documentation has it."""
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    messages: list[Any] = [*QUESTION]
    for _ in range(2):
        answer = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=3)
        messages += [answer.choices[0].message, {"role": "user", "content": "And then?"}]
    messages[-2] = answer.choices[0].message.model_dump()
    client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=3, store=False, metadata={"a": "b"}, user="someone", logit_bias={}
    )
    options: Any = {"include_usage": True}
    list(
        client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=3, stream=True, stream_options=options
        )
    )
    client.completions.create(model=MODEL, prompt="Once", max_tokens=3, stop=None)
    list(client.completions.create(model=MODEL, prompt=["Once", "Twice"], max_tokens=3, stream=True))


def langchain_openai(url: str) -> None:
    from langchain_openai import ChatOpenAI, OpenAI

    chat = ChatOpenAI(base_url=url, api_key="none", model=MODEL, max_tokens=3, max_retries=0)  # type: ignore
    answer = chat.invoke([("system", "Be brief."), ("human", "Who?")])
    chat.invoke([("human", "Who?"), answer, ("human", "And then?")])
    list(chat.stream("Who?"))
    text = OpenAI(base_url=url, api_key="none", model=MODEL, max_tokens=3, max_retries=0)  # type: ignore
    text.invoke("Once")
    list(text.stream("Once"))


def litellm(url: str) -> None:
    import litellm

    given: Any = {"model": f"openai/{MODEL}", "api_base": url, "api_key": "none", "max_tokens": 3, "num_retries": 0}
    messages: list[Any] = [*QUESTION]
    message = litellm.completion(messages=messages, **given).choices[0].message  # type: ignore
    for answer in (message, message.model_dump()):
        litellm.completion(messages=[*messages, answer, {"role": "user", "content": "And then?"}], **given)
    list(litellm.completion(messages=messages, stream=True, **given))
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
    """The mode that needs no more than text. Answers that do not fit the model are no concern of the server's."""
    import instructor
    import openai
    from instructor.core import IncompleteOutputException, InstructorRetryException
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str

    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=instructor.Mode.MD_JSON)
    try:
        client.create(model=MODEL, messages=QUESTION, response_model=Person, max_retries=0, max_tokens=3)
    except (IncompleteOutputException, InstructorRetryException) as error:
        if isinstance(error.__cause__, openai.APIError):
            raise


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
    "lm_eval": lm_eval,
}
"""The scenario of each package, by the package's name."""


# --- recording --------------------------------------------------------------------------------------------------------


def _answer(path: str, streamed: bool) -> dict[str, Any]:
    is_chat = path.endswith("chat/completions")
    message = {"role": "assistant", "content": '{"name": "He"}', "refusal": None}
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "logprobs": None}
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
    return {"id": "x", "object": kind, "created": 1, "model": MODEL, "choices": [choice], "usage": usage}


@contextlib.contextmanager
def recorder() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server with fixed answers: its base URL, and the requests that it gets, each with a path and a body."""
    recorded: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            recorded.append({"path": self.path, "body": body})
            answer = json.dumps(_answer(self.path, bool(body.get("stream")))).encode()
            if body.get("stream"):
                answer = b"data: " + answer + b"\n\ndata: [DONE]\n\n"
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


def _installed() -> dict[str, Callable[[str], None]]:
    """The scenarios whose packages are installed, by name and version of the package."""
    scenarios = {}
    for package, scenario in SCENARIOS.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            scenarios[f"{package} {importlib.metadata.version(package)}"] = scenario
    return scenarios


def record(file: Path) -> None:
    """Adds the requests of every package that is installed to a file."""
    payloads = json.loads(file.read_text()) if file.exists() else []
    for client, scenario in _installed().items():
        with recorder() as (url, recorded):
            scenario(url)
        payloads = [old for old in payloads if old["client"] != client]
        payloads += [{"client": client, **request} for request in recorded]
    file.write_text("[\n" + ",\n".join(map(json.dumps, payloads)) + "\n]\n")


def run(url: str) -> None:
    """Runs the scenario of every package that is installed against a server."""
    for client, scenario in _installed().items():
        scenario(url)
        print(f"{client} works")


if __name__ == "__main__":
    (run if sys.argv[1].startswith("http") else lambda file: record(Path(file)))(sys.argv[1])
