"""The settings of a server: what it lets clients do, what it spends on connections, and what it logs.

No answer depends on any of them, given its seed.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, get_args

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
Unseeded = Literal["random", "fixed"]

_KEY: Final = re.compile(r"[!-~]+")
_HOST: Final = re.compile(r"\*|(\*\.)?[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")
_ORIGIN: Final = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a server treats its clients.

    Attributes:
        name: what clients call the model.
        more_names: further names of the same model.
        api_keys: keys, one of which clients have to send. Without any, nobody needs a key.
        separate_prefixes: keep pages for clients of each API key apart, so that no client can tell by time what others
            sent. Otherwise the time that an answer takes may tell that another one has sent the beginning of a prompt.
        max_in_flight: samples in flight at most, those that wait included. Further requests get status 429.
        max_body: bytes of a request's body at most.
        body_seconds: seconds that a client may take to send its request.
        request_seconds: time that an answer may take.
        text_seconds: CPU time that the chat template and the tokenizer may take for a request.
        max_pending_bytes: limit on the bytes of all streams that wait for slow clients. Beyond it, the stream with the
            most pending bytes is ended.
        allowed_hosts: serve requests that name this host, without a port; *.example.com: all below it; *: all. None
            accepts every host.
        image_directory: requests may name the files of this directory as images and videos. Default: images come with
            requests alone.
        unseeded: the seed of requests at a temperature above 0 that give none: random draws one for each prompt from
            the operating system; fixed takes 0, so that the same request has the same answer. Answers say it.
        allowed_origins: let web pages of this origin, such as https://example.com, use the server from browsers; *:
            all. Default: none.
    """

    name: str
    more_names: Sequence[str] = ()
    api_keys: Sequence[str] = dataclasses.field(default=(), repr=False)
    separate_prefixes: bool = False
    max_in_flight: int = 1024
    max_body: int = 8 << 20
    body_seconds: float = 30
    request_seconds: float = 600
    text_seconds: float = 30
    max_pending_bytes: int = 64 << 20
    allowed_hosts: Sequence[str] | None = None
    allowed_origins: Sequence[str] = ()
    image_directory: Path | None = None
    unseeded: Unseeded = "random"

    def __post_init__(self) -> None:
        """Checks every field.

        Raises:
            ValueError: names the field, what was given and what is accepted.
        """
        hosts = self.allowed_hosts if self.allowed_hosts is not None else ("*",)
        _check(
            self,
            {
                "name": (bool(self.name), "a name"),
                "more_names": (all(self.more_names), "names that are not empty"),
                "max_in_flight": (self.max_in_flight >= 1, "at least 1"),
                "max_body": (self.max_body >= 1, "at least 1"),
                "body_seconds": _is_time(self.body_seconds),
                "request_seconds": _is_time(self.request_seconds),
                "text_seconds": _is_time(self.text_seconds),
                "max_pending_bytes": (self.max_pending_bytes >= 1, "at least 1"),
                "image_directory": (
                    self.image_directory is None or self.image_directory.is_dir(),
                    "a directory that exists",
                ),
                "unseeded": (self.unseeded in get_args(Unseeded), ", ".join(get_args(Unseeded))),
                "allowed_hosts": (all(map(_HOST.fullmatch, hosts)), "host names and addresses without a port"),
                "allowed_origins": (
                    all(map(_ORIGIN.fullmatch, self.allowed_origins)),
                    "origins such as 'https://example.com', without a path",
                ),
            },
        )
        if not all(map(_KEY.fullmatch, self.api_keys)):
            # An error message must not show keys.
            raise ValueError(
                "Settings: one of api_keys (--api-key, DETJAX_API_KEY) is empty or has white space or characters "
                "beyond ASCII; accepted: printable ASCII characters without white space"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model, without repetition."""
        return tuple(dict.fromkeys((self.name, *self.more_names)))


@dataclasses.dataclass(frozen=True)
class ConnectionSettings:
    """What a server spends on connections, and how it ends them.

    Attributes:
        grace: time in seconds that requests in flight have when the server is told to stop; a second signal ends it.
        max_connections: open connections at most. Where they are used up, a new one takes the place of the one that has
            waited longest without a request in progress; where there is none, the client gets status 503.
        header_seconds: time that a client may take until the headers of a request are complete.
        idle_seconds: time that a connection stays open between two requests.
        write_seconds: time in which a client has to read 16 KiB of an answer that waits for it.
        certificate: serve HTTPS with the TLS certificate of this file, and those that vouch for it, in PEM format.
            Default: HTTP.
        key: the file with the certificate's private key. Default: in the certificate's file.
    """

    grace: float = 30
    max_connections: int = 4096
    header_seconds: float = 10
    idle_seconds: float = 30
    write_seconds: float = 30
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        """Checks every field.

        Raises:
            ValueError: names the field, what was given and what is accepted.
        """
        _check(
            self,
            {
                "grace": (0 <= self.grace <= _LONGEST, f"0 to {_LONGEST} seconds"),
                "max_connections": (self.max_connections >= 1, "at least 1"),
                "header_seconds": _is_time(self.header_seconds),
                "idle_seconds": _is_time(self.idle_seconds),
                "write_seconds": _is_time(self.write_seconds),
                "key": (self.key is None or self.certificate is not None, "a key beside a certificate"),
            },
        )


@dataclasses.dataclass(frozen=True)
class LogSettings:
    """What a server logs on stderr.

    Attributes:
        level: log messages of this severity or more.
        format: log as text, in lines for people, or as json, an object a line.
        access: log a line for each request, of level info.
    """

    level: LogLevel = "info"
    format: LogFormat = "text"
    access: bool = True

    def __post_init__(self) -> None:
        """Checks every field.

        Raises:
            ValueError: names the field, what was given and what is accepted.
        """
        _check(
            self,
            {
                "level": (self.level in get_args(LogLevel), ", ".join(get_args(LogLevel))),
                "format": (self.format in get_args(LogFormat), ", ".join(get_args(LogFormat))),
            },
        )


_LONGEST: Final = 10**7
"""Seconds that a time limit may have at most: timers of event loops do not take any number."""


def _is_time(seconds: float) -> tuple[bool, str]:
    is_accepted = math.isfinite(seconds) and 0 < seconds <= _LONGEST
    return is_accepted, f"more than 0, up to {_LONGEST} seconds"


def _check(settings: object, fields: Mapping[str, tuple[bool, str]]) -> None:
    """Raises an error for the first field that is not accepted; `fields` says so and describes what is accepted."""
    for name, (is_accepted, description) in fields.items():
        if not is_accepted:
            given = getattr(settings, name)
            raise ValueError(f"{type(settings).__name__}: {name} is {given!r}; accepted: {description}")
