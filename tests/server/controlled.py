"""A server with a control key and an engine of its own, and checkpoints to give it."""

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import httpx2

from detjax import models
from detjax.audit import Verifier, read_transcripts
from detjax.engine import Engine
from detjax.models import Decoder, Tokenizer
from detjax.server import system_fingerprint
from tests.server.running_server import FIXTURE, MODEL, Running, serving
from tests.support.one_layer import one_layer
from tests.support.waits import HANGS_AFTER

KEY: Final = "control-key"
SIZES: Final[dict[str, Any]] = {"max_samples": 16, "token_budget": 64, "max_length": 400}
HEADERS: Final = {"Authorization": f"Bearer {KEY}"}


class Trainer:
    """A client with the control key.

    Attributes:
        running: the server.
        http: sends any request.
    """

    def __init__(self, running: Running) -> None:
        self.running = running
        self.http = httpx2.Client(base_url=running.url, timeout=HANGS_AFTER)

    def control(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """The response of a control path."""
        return self.http.request(method, path, headers=HEADERS | options.pop("headers", {}), **options)

    def done(self, method: str, path: str, **options: Any) -> Any:
        """The JSON of a control path that succeeds."""
        response = self.control(method, path, **options)
        assert response.status_code == 200, response.text
        return response.json()

    def refusal(self, method: str, path: str, **options: Any) -> tuple[int, str]:
        """The status and the message of a control path that fails."""
        response = self.control(method, path, **options)
        return response.status_code, response.json()["error"]["message"]

    def ask(self, prompt: str = "A prompt", request_id: str | None = None, **body: Any) -> Any:
        """The JSON of a completion with receipts."""
        headers = {} if request_id is None else {"X-Request-Id": request_id}
        response = self.http.post("/v1/completions", json=question(prompt, **body), headers=headers)
        assert response.status_code == 200, response.text
        return response.json()

    def update(self, path: Path, mode: str = "wait") -> Any:
        return self.done("POST", "/update_weights_from_disk", json={"model_path": str(path), "mode": mode})


def question(prompt: str, **body: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 5, "ignore_eos": True, "receipt": True} | body


@contextlib.contextmanager
def controlled(directory: Path, name: str = "one", **settings: Any) -> Iterator[Trainer]:
    """A trainer of a server that begins with a checkpoint below `directory`, its directory of weights."""
    loaded: Any = models.load(directory / name, progress=False)
    given = {"control_key": KEY, "weights_directory": directory} | settings
    with Engine(*loaded, **SIZES) as engine, serving(engine, loaded, **given) as running:
        trainer = Trainer(running)
        with trainer.http:
            yield trainer


def saved(directory: Path, names: Sequence[str]) -> dict[str, tuple[Decoder, Tokenizer]]:
    """Models that differ only in their weights, by the names of their checkpoints below a directory."""
    loaded = {}
    for seed, name in enumerate(names):
        model, tokenizer = one_layer(FIXTURE, seed)
        models.save(model, directory / name, tokenizer=tokenizer)
        loaded[name] = models.load(directory / name, progress=False)
    return loaded


def fingerprint(loaded: tuple[Decoder, Tokenizer]) -> str:
    """The fingerprint of a server with a model."""
    with Engine(*loaded, **SIZES) as engine:
        return system_fingerprint(*loaded, engine.config)


def verdicts(responses: Iterable[Any], by_fingerprint: dict[str, Any], folder: Path) -> set[str]:
    """The verdicts on all receipts, each against the weights that its response's fingerprint names."""
    groups = defaultdict[str, list[Any]](list)
    for response in responses:
        groups[response["system_fingerprint"]].append(response)
    results = set[str]()
    for name, group in groups.items():
        file = folder / "responses.jsonl"
        file.write_text("\n".join(map(json.dumps, group)))
        model, tokenizer = by_fingerprint[name]
        transcripts = list(read_transcripts(file, tokenizer).values())
        results |= {str(one) for one in Verifier(model, tokenizer).verify(transcripts)}
    return results
