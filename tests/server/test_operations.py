"""Operations: request ids, the log, names, hosts, origins, and the end of a failed engine."""

import contextlib
import http.client
import io
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any, Final

import openai
import pytest

from detjax.engine import Engine
from detjax.models import Decoder, Tokenizer
from detjax.server import LogSettings, Settings, logging_to_stderr
from detjax.server.http.hosts import is_loopback
from tests.server.running_server import MODEL, Running, serving, streams_held, wait_until
from tests.support.waits import HANGS_AFTER

ASKED = {"model": MODEL, "prompt": "x", "max_tokens": 2}
ID: Final = "X-Request-Id"


@pytest.fixture(scope="module")
def guarded(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> Iterator[Running]:
    """A server with two names, a list of hosts, and an origin."""
    hosts = ("localhost", "127.0.0.1", "[::1]", "*.example.com")
    settings: Any = {"more_names": ("alias",), "allowed_hosts": hosts, "allowed_origins": ("https://page.example",)}
    with serving(engine, loaded, **settings) as running:
        yield running


def ask(
    running: Running, method: str = "GET", path: str = "/health", **headers: str
) -> tuple[int, dict[str, str], str]:
    """The status, the headers and the body of a response. Underscores of header names stand for hyphens."""
    connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=HANGS_AFTER)
    with contextlib.closing(connection):
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read().decode()


@contextlib.contextmanager
def logged(**settings: Any) -> Iterator[io.StringIO]:
    """Captures the server's log.

    A line is written when its client has its answer already. So lines of two requests may come in either order, and a
    line of a request before the context may come within it: tests look for the lines of their requests by the ids.
    """
    stream = io.StringIO()
    stderr, sys.stderr = sys.stderr, stream
    try:
        with logging_to_stderr(LogSettings(**settings)):
            yield stream
    finally:
        sys.stderr = stderr


def wait_for_lines(stream: io.StringIO, *ids: str) -> list[dict[str, Any]]:
    """Waits until each of these requests has a line of JSON, and returns the lines in the order of the ids."""

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in stream.getvalue().splitlines()]

    wait_until(lambda: {line.get("request_id") for line in lines()}.issuperset(ids))
    return sorted(
        (line for line in lines() if line["request_id"] in ids), key=lambda line: ids.index(line["request_id"])
    )


# --- hosts and origins -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "localhost:80", "LOCALHOST.", "127.0.0.1:1", "[::1]:8", "a.example.com"])
def test_accepted_hosts_are_served(guarded: Running, host: str) -> None:
    assert ask(guarded, Host=host)[0] == 200


@pytest.mark.parametrize(
    "host", ["attacker.example", "example.com", "localhost.attacker.example", "127.0.0.2", "", "a]"]
)
def test_other_hosts_are_refused(guarded: Running, host: str) -> None:
    status, _, body = ask(guarded, path="/v1/models", Host=host)
    assert status == 403
    assert f"the request is for the host {host!r}; accepted: localhost, " in json.loads(body)["error"]["message"]


def test_only_allowed_origins_may_read_answers_in_browsers(guarded: Running) -> None:
    asked = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization,content-type"}
    for origin, is_allowed in (("https://page.example", True), ("https://other.example", False)):
        status, preflight, _ = ask(guarded, "OPTIONS", "/v1/completions", Origin=origin, **asked)
        assert (status == 200) == is_allowed
        _, headers, _ = ask(guarded, path="/v1/models", Origin=origin)
        for given in (preflight, headers):
            assert given.get("access-control-allow-origin") == (origin if is_allowed else None)


def test_without_allowed_origins_no_page_may_read_answers(server: Running) -> None:
    assert not [
        name for name in ask(server, path="/v1/models", Origin="https://a.example")[1] if "access-control" in name
    ]


def test_addresses_that_only_this_machine_reaches_are_known() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.0.1", "fe80::1%eth0")))


# --- names -----------------------------------------------------------------------------------------------------------


def test_every_name_of_the_model_is_listed_and_served(guarded: Running) -> None:
    with guarded.client() as client:
        assert [model.id for model in client.models.list()] == [MODEL, "alias"]
        assert client.models.retrieve("alias").id == "alias"
        answers = [client.completions.create(**ASKED | {"model": name}) for name in (MODEL, "alias")]
        with pytest.raises(openai.NotFoundError, match="model is 'other'; accepted: 'little', 'alias'"):
            client.completions.create(**ASKED | {"model": "other"})
    assert [answer.model for answer in answers] == [MODEL, "alias"]
    assert answers[0].choices == answers[1].choices


# --- ids and the log -------------------------------------------------------------------------------------------------


def test_a_sane_request_id_is_returned_and_another_one_is_replaced(server: Running) -> None:
    assert ask(server, X_Request_Id="abc-1/2:3")[1]["x-request-id"] == "abc-1/2:3"
    for given in ({"X_Request_Id": "a b"}, {"X_Request_Id": "x" * 129}, {"X_Request_Id": "\xe9"}, {}):
        made = ask(server, path="/v1/missing", **given)[1]["x-request-id"]
        assert made.startswith("req-")
        assert made != ask(server, path="/v1/missing", **given)[1]["x-request-id"]


def test_the_access_log_has_a_line_for_each_request(server: Running) -> None:
    with logged(format="json") as stream, server.client() as client:
        client.completions.create(**ASKED, extra_headers={ID: "first"})
        list(client.completions.create(**ASKED, stream=True, n=2, extra_headers={ID: "second"}))
        ask(server, path="/v1/%0Aforged", X_Request_Id="missing")
        with pytest.raises(openai.BadRequestError):
            client.completions.create(**ASKED | {"temperature": -1}, extra_headers={ID: "bad"})
        first, second, missing, bad = wait_for_lines(stream, "first", "second", "missing", "bad")
    assert (first["request_id"], first["method"], first["path"], first["status"]) == (
        "first",
        "POST",
        "/v1/completions",
        200,
    )
    assert (first["prompt_tokens"], first["generated_tokens"], first["complete"]) == (1, 2, True)
    assert (second["request_id"], second["prompt_tokens"], second["generated_tokens"]) == ("second", 1, 4)
    assert first["client"].startswith("127.0.0.1:")
    assert first["seconds"] > 0
    assert (missing["path"], missing["status"], missing["prompt_tokens"]) == ("/v1/\nforged", 404, None)
    assert bad["status"] == 400
    assert {"time", "level", "logger", "message"} <= first.keys()


def test_lines_of_text_cannot_be_forged(server: Running) -> None:
    with logged() as stream:
        ask(server, path="/v1/%0Aforged", X_Request_Id="me")
        wait_until(lambda: stream.getvalue().endswith("[me]\n"))
    # One of a request before may have come first.
    (line,) = [line for line in stream.getvalue().splitlines() if "/v1/" in line or "forged" in line]
    assert " INFO 127.0.0.1:" in line
    assert r'"GET /v1/\nforged" 404 ' in line
    assert line.endswith("[me]")


def test_a_stream_that_its_client_leaves_is_logged_as_cut_off(server: Running) -> None:
    with logged(format="json") as stream, streams_held(server.engine), server.client() as client:
        options = {"extra_body": {"ignore_eos": True}, "extra_headers": {ID: "left"}}
        answer = client.completions.create(**ASKED | {"max_tokens": 40}, stream=True, **options)
        next(iter(answer))
        answer.close()
        (line,) = wait_for_lines(stream, "left")
    assert (line["status"], line["complete"]) == (200, False)
    assert " 200 cut off " in line["message"]


@pytest.mark.parametrize("settings", [{"access": False}, {"level": "warning"}])
def test_the_access_log_can_be_switched_off(server: Running, settings: dict[str, Any]) -> None:
    with logged(**settings) as stream:
        ask(server)
        logging.getLogger("detjax.server").error("a message")
    assert stream.getvalue().count("\n") == 1
    assert "ERROR a message" in stream.getvalue()


def test_a_traceback_is_one_line_of_json() -> None:
    with logged(format="json") as stream:
        try:
            raise RuntimeError("cause")
        except RuntimeError:
            logging.getLogger("detjax.engine").critical("failed", exc_info=True)
    (content,) = [one for line in stream.getvalue().splitlines() if (one := json.loads(line))["level"] == "critical"]
    assert content["message"] == "failed"
    assert content["traceback"].startswith("Traceback")
    assert content["traceback"].endswith("RuntimeError: cause")


def test_settings_do_not_show_keys() -> None:
    assert "secret" not in repr(Settings("x", api_keys=("secret",)))


# --- a failed engine -------------------------------------------------------------------------------------------------


def test_a_server_whose_engine_fails_tells_clients_logs_why_and_ends(
    loaded: tuple[Decoder, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: a secret")

    with (
        logged(format="json", access=False) as stream,
        Engine(*loaded, max_samples=1, token_budget=8, max_length=64) as broken,
        serving(broken, loaded, grace=HANGS_AFTER) as running,
        running.client() as client,
    ):
        monkeypatch.setattr(broken._loop, "step", fail)
        with pytest.raises(openai.InternalServerError) as raised:
            client.completions.create(**ASKED)
        assert raised.value.status_code == 503
        assert "secret" not in raised.value.response.text
        running.thread.join()
        assert running.server.exit_code == 70
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    (failure,) = [line for line in lines if "traceback" in line]
    assert "RESOURCE_EXHAUSTED: a secret" in failure["traceback"]
    assert lines[-1]["message"] == "exiting with code 70 because the engine failed"
