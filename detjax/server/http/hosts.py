"""Host header checks, which keep web pages of other hosts away from servers on this machine."""

import ipaddress
from collections.abc import Sequence
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from detjax.server.http.errors import ApiError

_LOOPBACK: Final = ("localhost", "127.0.0.1", "[::1]")


def is_loopback(address: str) -> bool:
    """Returns whether an address is reachable only from this machine."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def default_hosts(address: str, needs_key: bool) -> tuple[str, ...] | None:
    """Returns the hosts that a server on an address accepts by default; None accepts all.

    A web page can make its host name resolve to 127.0.0.1 once a browser has loaded it ("DNS rebinding"), and then read
    answers of a server without a key on the browser's machine. Its requests carry the page's host name.
    """
    if needs_key or not is_loopback(address):
        return None
    return tuple(dict.fromkeys((*_LOOPBACK, f"[{address}]" if ":" in address else address)))


class HostCheck:
    """ASGI middleware that rejects requests for hosts that are not accepted."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        """Wraps `app`. A host "*.example.com" accepts all subdomains of example.com, and "*" accepts every host."""
        self._app = app
        self._names = ", ".join(hosts)
        self._hosts = frozenset(host.lower() for host in hosts)
        self._endings = tuple(host[1:].lower() for host in hosts if host.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._accepts(host := _host(scope)):
            error = ApiError(
                403,
                f"the request is for the host {host[:100]!r}; accepted: {self._names}. Start the server with "
                "--allowed-host to accept another one.",
                code="host_not_allowed",
            )
            return await error.response()(scope, receive, send)
        await self._app(scope, receive, send)

    def _accepts(self, host: str) -> bool:
        return "*" in self._hosts or host in self._hosts or (bool(self._endings) and host.endswith(self._endings))


def _host(scope: Scope) -> str:
    """Returns the Host header without its port, in lower case."""
    values = [value for name, value in scope["headers"] if name == b"host"]
    host = values[0].decode("latin-1").lower() if len(values) == 1 else ""
    name, _, port = host.rpartition(":")
    return (name if name and port.isdecimal() and not host.endswith("]") else host).removesuffix(".")
