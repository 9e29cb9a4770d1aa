"""An OpenAI-compatible HTTP server, whose answers do not depend on which other requests it serves."""

from detjax.server.app import create_app as create_app
from detjax.server.app import system_fingerprint as system_fingerprint
from detjax.server.connections import tls_context as tls_context
from detjax.server.logs import logging_to_stderr as logging_to_stderr
from detjax.server.process_replicas import ProcessReplicas as ProcessReplicas
from detjax.server.process_replicas import app_of_replicas as app_of_replicas
from detjax.server.process_replicas import no_accelerator as no_accelerator
from detjax.server.replica_engine import ReplicaOptions as ReplicaOptions
from detjax.server.run import Server as Server
from detjax.server.run import bound_socket as bound_socket
from detjax.server.run import protected as protected
from detjax.server.run import url as url
from detjax.server.settings import ConnectionSettings as ConnectionSettings
from detjax.server.settings import LogSettings as LogSettings
from detjax.server.settings import Settings as Settings
