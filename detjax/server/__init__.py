"""An OpenAI-compatible HTTP server, whose answers do not depend on which other requests it serves."""

from detjax.server.app import Settings as Settings
from detjax.server.app import create_app as create_app
from detjax.server.app import system_fingerprint as system_fingerprint
from detjax.server.run import Server as Server
from detjax.server.run import bound_socket as bound_socket
