"""A server in this process, on the loopback interface."""

import asyncio
import contextlib
import dataclasses
import threading
import time
import unittest.mock
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
from starlette.applications import Starlette

from detjax.engine import Engine, Request, Token
from detjax.models import Decoder, Tokenizer
from detjax.server import ConnectionSettings, Server, Settings, bound_socket, create_app
from tests.support.waits import HANGS_AFTER

FIXTURE = Path(__file__).parents[1] / "fixtures" / "qwen3"
MODEL = "little"


@dataclasses.dataclass
class Running:
    """A server that answers.

    Attributes:
        url: its address, without a slash at the end.
        model: what clients call its model.
        engine: its engine.
        app: its application.
        server: controls it.
        thread: the thread that it runs in.
    """

    url: str
    model: str
    engine: Engine
    app: Starlette
    server: Server
    thread: threading.Thread

    def client(self, kind: Any = openai.OpenAI, **options: Any) -> Any:
        """OpenAI's client for this server."""
        return kind(base_url=f"{self.url}/v1", **({"api_key": "none", "max_retries": 0} | options))


def wait_until(holds: Callable[[], object]) -> None:
    """Waits until a condition holds.

    The time limit only keeps a test from hanging. No test depends on how fast the machine is.
    """
    end = time.monotonic() + HANGS_AFTER
    while not holds():
        assert time.monotonic() < end, f"waited for {HANGS_AFTER} s"
        time.sleep(0.01)


@contextlib.contextmanager
def streams_held(engine: Engine) -> Iterator[threading.Event]:
    """A context in which every stream stops after its first token until the event is set.

    Tests of what happens in the middle of a stream need it, so that no stream ends before they have looked.
    """
    released = threading.Event()

    async def stream_all(requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Token]]:
        async with contextlib.aclosing(Engine.stream_all(engine, requests)) as tokens:
            yield await anext(tokens)
            while not released.is_set():
                await asyncio.sleep(0.01)
            async for token in tokens:
                yield token

    with unittest.mock.patch.object(engine, "stream_all", stream_all):
        yield released


@contextlib.contextmanager
def served(app: Any, settings: ConnectionSettings | None = None) -> Iterator[str]:
    """Serves an application in a thread while the context is open. Returns its address."""
    server = Server(app, settings or ConnectionSettings(grace=1))
    with contextlib.closing(bound_socket("127.0.0.1", 0)) as bound:
        thread = threading.Thread(target=server.serve_on, args=(bound,))
        thread.start()
        wait_until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextlib.contextmanager
def serving(
    engine: Engine,
    loaded: tuple[Decoder, Tokenizer],
    *,
    grace: float = 1,
    connections: ConnectionSettings | None = None,
    **settings: Any,
) -> Iterator[Running]:
    """A server that runs in a thread while the context is open. `connections` takes the place of `grace`.

    Requests without a seed have seed 0, unless `unseeded` says otherwise, so that no test depends on chance.
    """
    app = create_app(engine, *loaded, Settings(MODEL, **{"unseeded": "fixed"} | settings))
    server = Server(app, ConnectionSettings(grace=grace) if connections is None else connections)
    with contextlib.closing(app.state.texts), contextlib.closing(bound_socket("127.0.0.1", 0)) as bound:
        thread = threading.Thread(target=server.serve_on, args=(bound,))
        thread.start()
        wait_until(lambda: server.started)
        try:
            yield Running(f"http://127.0.0.1:{bound.getsockname()[1]}", MODEL, engine, app, server, thread)
        finally:
            server.should_exit = True
            thread.join()
