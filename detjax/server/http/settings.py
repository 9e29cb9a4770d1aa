"""Settings of a server: its clients, connections and log.

Given its seed, no answer depends on them, except for the logprobs that it reports.
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
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
RAW: Final[LogprobsMode] = "raw_logprobs"
PROCESSED: Final[LogprobsMode] = "processed_logprobs"
ToolFormatName = Literal[
    "hermes",
    "llama3_json",
    "mistral",
    "openai",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "kimi_k2",
    "qwen3_coder",
    "glm45",
]

_KEY: Final = re.compile(r"[!-~]+")
_HOST: Final = re.compile(r"\*|(\*\.)?[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")
_ORIGIN: Final = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings for a server's clients.

    Attributes:
        name: the model's name for clients.
        more_names: additional names of the model.
        api_keys: the accepted API keys. If empty, no key is required.
        separate_prefixes: keep a separate prefix cache for each API key, so that clients cannot learn from response
            times what others sent. With a shared cache, a fast answer may reveal that another client has sent the
            beginning of the prompt.
        max_in_flight: maximum number of samples in flight, including waiting ones. Further requests get status 429.
        max_body: maximum size of a request body, in bytes.
        body_seconds: timeout for receiving a request's body.
        request_seconds: timeout for answering a request.
        text_seconds: limit on the CPU time of a request's chat template and tokenizer.
        max_pending_bytes: limit on the bytes of all streams that wait for slow clients. Beyond it, the stream with the
            most pending bytes is aborted.
        allowed_hosts: accept requests for this host, without a port; *.example.com accepts all subdomains, * every
            host. None accepts every host.
        image_directory: directory of images and videos that requests may refer to by name. Default: none; requests
            contain their images.
        unseeded: seed for requests that sample without a seed: random draws one per prompt; fixed uses 0, so that
            repeated requests have the same answer. Answers report the seed.
        logprobs_mode: the logprobs in answers: raw_logprobs are the model's; processed_logprobs are under the
            distribution that tokens are drawn from, after penalties, biases, masks, temperature and filters.
        control_key: key for the paths that pause the server, put it to sleep and replace its weights. Default: the
            server does not have these paths.
        weights_directory: directory of the checkpoints that may replace the weights, and of uploads. Default: none;
            weights can only be uploaded, to the directory for temporary files.
        tool_format: the format in which the model writes tool calls. Default: the format in the checkpoint's chat
            template, if it is known.
        allowed_origins: let web pages of this origin, such as https://example.com, use the server from browsers; *
            allows every origin. Default: none.
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
    logprobs_mode: LogprobsMode = RAW
    tool_format: ToolFormatName | None = None
    control_key: str | None = dataclasses.field(default=None, repr=False)
    weights_directory: Path | None = None

    def __post_init__(self) -> None:
        """Raises a ValueError for the first invalid field, with the given and the accepted values."""
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
                "weights_directory": (
                    self.weights_directory is None or self.weights_directory.is_dir(),
                    "a directory that exists",
                ),
                "tool_format": (
                    self.tool_format in (None, *get_args(ToolFormatName)),
                    ", ".join(get_args(ToolFormatName)),
                ),
                "logprobs_mode": (self.logprobs_mode in get_args(LogprobsMode), ", ".join(get_args(LogprobsMode))),
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
        if self.control_key is not None and not _KEY.fullmatch(self.control_key):
            raise ValueError(
                "Settings: control_key (--control-key, DETJAX_CONTROL_KEY) is empty or has white space or characters "
                "beyond ASCII; accepted: printable ASCII characters without white space"
            )
        if self.control_key in self.api_keys:
            raise ValueError(
                "Settings: control_key (--control-key, DETJAX_CONTROL_KEY) is one of api_keys; accepted: a key that "
                "clients do not have"
            )
        if self.weights_directory is not None and self.control_key is None:
            raise ValueError(
                "Settings: weights_directory is given without control_key; accepted: both, since only the holder of "
                "the control key can replace weights"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """All distinct names of the model."""
        return tuple(dict.fromkeys((self.name, *self.more_names)))


@dataclasses.dataclass(frozen=True)
class ConnectionSettings:
    """Limits, timeouts and TLS of connections.

    Attributes:
        grace: seconds that requests in flight have to finish after a stop signal; a second signal cancels them.
        max_connections: maximum number of open connections. At the limit, a new connection replaces the one that has
            waited longest without a request in progress; if all have one, the client gets status 503.
        header_seconds: timeout for receiving a request's headers.
        idle_seconds: timeout of a connection between two requests.
        write_seconds: timeout for a client to read 16 KiB of pending output.
        certificate: serve HTTPS with the certificate chain in this PEM file. Default: HTTP.
        key: file with the certificate's private key. Default: the certificate's file.
    """

    grace: float = 30
    max_connections: int = 4096
    header_seconds: float = 10
    idle_seconds: float = 30
    write_seconds: float = 30
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        """Raises a ValueError for the first invalid field, with the given and the accepted values."""
        _check(
            self,
            {
                "grace": (0 <= self.grace <= _LONGEST, f"0 to {_LONGEST} seconds"),
                "max_connections": (self.max_connections >= 1, "at least 1"),
                "header_seconds": _is_time(self.header_seconds),
                "idle_seconds": _is_time(self.idle_seconds),
                "write_seconds": _is_time(self.write_seconds),
                "key": (self.key is None or self.certificate is not None, "a key with a certificate"),
            },
        )


@dataclasses.dataclass(frozen=True)
class LogSettings:
    """Settings of a server's log on stderr.

    Attributes:
        level: minimum level of messages to log.
        format: format of the log: text, or json with one object per line.
        access: log a line at level info for each request.
    """

    level: LogLevel = "info"
    format: LogFormat = "text"
    access: bool = True

    def __post_init__(self) -> None:
        """Raises a ValueError for the first invalid field, with the given and the accepted values."""
        _check(
            self,
            {
                "level": (self.level in get_args(LogLevel), ", ".join(get_args(LogLevel))),
                "format": (self.format in get_args(LogFormat), ", ".join(get_args(LogFormat))),
            },
        )


_LONGEST: Final = 10**7
"""Maximum timeout in seconds: event loops do not accept arbitrarily long timers."""


def _is_time(seconds: float) -> tuple[bool, str]:
    is_accepted = math.isfinite(seconds) and 0 < seconds <= _LONGEST
    return is_accepted, f"more than 0, up to {_LONGEST} seconds"


def _check(settings: object, fields: Mapping[str, tuple[bool, str]]) -> None:
    """Raises an error for the first field that is not accepted; `fields` has this and the accepted values by name."""
    for name, (is_accepted, description) in fields.items():
        if not is_accepted:
            given = getattr(settings, name)
            raise ValueError(f"{type(settings).__name__}: {name} is {given!r}; accepted: {description}")
