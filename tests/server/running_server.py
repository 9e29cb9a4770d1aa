"""A server in this process, on loopback."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
from starlette.applications import Starlette

from detjax.engine import Engine
from detjax.models import Decoder, Tokenizer
from detjax.server import Server, Settings, bound_socket, create_app

FIXTURE = Path(__file__).parents[1] / "fixtures" / "qwen3"
MODEL = "little"


@dataclasses.dataclass
class Running:
    """A server that is up.

    Attributes:
        url: without a slash at its end.
        model: the name that clients ask for.
    """

    url: str
    model: str
    engine: Engine
    app: Starlette
    server: Server
    thread: threading.Thread

    def client(self, kind: Any = openai.OpenAI, **options: Any) -> Any:
        return kind(base_url=f"{self.url}/v1", **({"api_key": "none", "max_retries": 0} | options))


@contextlib.contextmanager
def serving(
    engine: Engine, loaded: tuple[Decoder, Tokenizer], *, grace: float = 1, **settings: Any
) -> Iterator[Running]:
    app = create_app(engine, *loaded, Settings(MODEL, **settings))
    server = Server(app, grace=grace)
    with contextlib.closing(bound_socket("127.0.0.1", 0)) as own:
        thread = threading.Thread(target=server.serve_on, args=(own,))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield Running(f"http://127.0.0.1:{own.getsockname()[1]}", MODEL, engine, app, server, thread)
        finally:
            server.should_exit = True
            thread.join()
