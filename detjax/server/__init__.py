"""An OpenAI-compatible HTTP server whose answers do not depend on the other requests that it serves.

Read `app` first: it takes a request from its body (`api`) through the engine to the response. `http` limits clients,
`text` has the tokenizing workers, `tools` tool calls, `control` what trainers do with a server, and `replicas` servers
with several engines.
"""

from detjax.server.app import create_app as create_app
from detjax.server.app import system_fingerprint as system_fingerprint
from detjax.server.http.connections import tls_context as tls_context
from detjax.server.http.logs import logging_to_stderr as logging_to_stderr
from detjax.server.http.run import Server as Server
from detjax.server.http.run import bound_socket as bound_socket
from detjax.server.http.run import protected as protected
from detjax.server.http.run import url as url
from detjax.server.http.settings import ConnectionSettings as ConnectionSettings
from detjax.server.http.settings import LogSettings as LogSettings
from detjax.server.http.settings import Settings as Settings
from detjax.server.replicas.engine import ReplicaOptions as ReplicaOptions
from detjax.server.replicas.processes import ProcessReplicas as ProcessReplicas
from detjax.server.replicas.processes import app_of_replicas as app_of_replicas
from detjax.server.replicas.processes import no_accelerator as no_accelerator
