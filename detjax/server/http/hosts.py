"""The check of the header Host, which keeps web pages of other hosts out of servers on this machine."""

import ipaddress
from collections.abc import Sequence
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from detjax.server.http.errors import ApiError

_LOOPBACK: Final = ("localhost", "127.0.0.1", "[::1]")


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def default_hosts(address: str, needs_key: bool) -> tuple[str, ...] | None:
    """The hosts that a server on an address accepts by default; None stands for all.

    A web page can make its own host name resolve to 127.0.0.1 after a browser has loaded it ("DNS rebinding"), and then
    read the answers of a server on the browser's machine that asks for no key. Its requests name the page's host.
    """
    if needs_key or not is_loopback(address):
        return None
    return tuple(dict.fromkeys((*_LOOPBACK, f"[{address}]" if ":" in address else address)))


class HostCheck:
    """ASGI middleware that refuses requests to other hosts than the accepted ones."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        """Middleware around `app`. A host "*.example.com" stands for every host below example.com, and "*" for all."""
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
    """The header Host without its port, in lower case."""
    values = [value for name, value in scope["headers"] if name == b"host"]
    host = values[0].decode("latin-1").lower() if len(values) == 1 else ""
    name, _, port = host.rpartition(":")
    return (name if name and port.isdecimal() and not host.endswith("]") else host).removesuffix(".")
