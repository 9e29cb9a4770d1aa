"""Serve a model over HTTP with OpenAI's API; the page at / shows that answers repeat. Ctrl-C ends it.

The exit code is 70 if the engine fails, so that a supervisor can start the server again.
"""

import contextlib
import dataclasses
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Final

from rich.console import Console
from starlette.applications import Starlette

from detjax import audit, engine, server
from detjax.audit.certification import certify as certificates
from detjax.cli.loading import Backend, Loading
from detjax.cli.options import Fields, Option, command
from detjax.models import Decoder
from detjax.runtime import backends

API_KEY_VARIABLE: Final = "DETJAX_API_KEY"
"""The environment variable with the key that clients need, where the command line names none."""

_ADDRESS, _CLIENTS, _CONNECTIONS = "Address and names", "Clients", "Connections"

_LOADING = Fields(Loading, positional=("model",), options={"chat_template": Option(panel=_CLIENTS)})
_SETTINGS = Fields(
    server.Settings,
    _CLIENTS,
    without=("name", "more_names", "max_in_flight", "body_seconds"),
    options={
        "api_keys": Option(
            "Require this key of clients. Other users can see a command line, but not its environment: without this "
            f"option the key is that of {API_KEY_VARIABLE}.",
            default="no key",
        ),
        "allowed_hosts": Option(default="localhost, when listening on it without a key; else all"),
        "separate_prefixes": Option(name="--separate-prefixes/--shared-prefixes"),
        "max_pending_bytes": Option(panel=_CONNECTIONS),
    },
)
_CONNECTION_SETTINGS = Fields(
    server.ConnectionSettings,
    _CONNECTIONS,
    options={
        "certificate": Option(name="--tls-certificate", panel=_ADDRESS),
        "key": Option(name="--tls-key", panel=_ADDRESS),
    },
)
_LOG = Fields(
    server.LogSettings,
    "Log",
    options={
        "level": Option(name="--log-level"),
        "format": Option(name="--log-format"),
        "access": Option(name="--access-log"),
    },
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Address:
    """The addresses of a server, and the names of its model.

    Attributes:
        host: listen on this address; 0.0.0.0: on all.
        port: listen on this port; 0: any that is free.
        names: what clients call the model. Default: the directory's name.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replicas:
    """The replicas of a server's engine.

    Attributes:
        data_parallel: engines behind this one address, each with the whole model in a process and on devices of its
            own; no bit depends on their number.
        replica_seconds: time without a sign of life, or of one step of its engine, after which a replica is started
            again.
    """

    data_parallel: int = 1
    replica_seconds: float = 30

    def check(self, certify: bool) -> None:
        """Refuses what cannot be served.

        Raises:
            ValueError: there are no replicas, or several are to be certified.
        """
        if self.data_parallel < 1:
            raise ValueError(f"--data-parallel is {self.data_parallel}; accepted: 1 and more")
        if self.data_parallel > 1 and certify:
            raise ValueError(
                f"--certify is given and --data-parallel is {self.data_parallel}; accepted: one of them. Certify a "
                "server of one engine first, whose programs are those of every replica"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """The compiled programs of a server.

    Attributes:
        cache_dir: keep compiled programs here; nobody else may be able to write to it. Default: detjax in the user's
            cache.
        compilation_cache: keep compiled programs.
        certify: before serving, check that no program leaves a bit to the compiler; the exit code is 1 if one does.
    """

    cache_dir: Path | None = None
    compilation_cache: bool = True
    certify: bool = False

    def prepared_cache(self) -> Path | None:
        """Returns the directory of compiled programs, which is made if it is not there; None: there is to be none.

        Raises:
            ValueError: the directory cannot be made or written to, or others can write to it.
        """
        if not self.compilation_cache:
            return None
        try:
            directory = self.cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "detjax"
            engine.prepare_cache(directory)
        except (OSError, RuntimeError) as error:  # RuntimeError: the home directory is unknown
            raise ValueError(
                f"{error}. Choose another directory with --cache-dir, or compile at every start with "
                "--no-compilation-cache"
            ) from error
        return directory


@command
def serve(
    *,
    backend: Backend = None,
    replicas: Annotated[Replicas, Fields(Replicas, "Replicas")],
    address: Annotated[Address, Fields(Address, _ADDRESS)],
    loading: Annotated[Loading, _LOADING],
    client_settings: Annotated[dict[str, Any], _SETTINGS],
    max_queue: Annotated[int, Option(panel=_CLIENTS)] = 1024,
    config: Annotated[engine.EngineConfig, Fields(engine.EngineConfig, "Engine")],
    connections: Annotated[server.ConnectionSettings, _CONNECTION_SETTINGS],
    log: Annotated[server.LogSettings, _LOG],
    programs: Annotated[Programs, Fields(Programs, "Compiled programs")],
) -> int:
    """Serves a model.

    Args:
        max_queue: samples that may wait; further requests get status 429.
    """
    if max_queue < 0:
        raise ValueError(f"--max-queue is {max_queue}; accepted: 0 and more")
    replicas.check(programs.certify)
    names = address.names or (loading.model.resolve().name,)
    chosen: dict[str, Any] = {"api_keys": _api_keys()} | client_settings
    in_flight = replicas.data_parallel * config.max_samples + max_queue
    settings = server.Settings(names[0], more_names=names[1:], max_in_flight=in_flight, **chosen)
    template, cache = loading.template(), programs.prepared_cache()
    server.tls_context(connections)  # a certificate that cannot be used is reported before loading takes minutes
    with (
        contextlib.closing(server.bound_socket(address.host, address.port)) as bound,
        backends.use_backend(backend),
        server.logging_to_stderr(log),
        contextlib.ExitStack() as held,
    ):
        settings = server.protected(settings, bound)
        if replicas.data_parallel > 1:
            options = server.ReplicaOptions(
                loading.model,
                dtype=loading.dtype,
                backend=backend,
                tensor_parallel=loading.tensor_parallel,
                expert_parallel=loading.expert_parallel,
                chat_template=template,
                template_date=loading.template_date,
                config=config,
                cache=cache,
            )
            silence = replicas.replica_seconds
            processes = server.ProcessReplicas(options, replicas.data_parallel, log=log, silence=silence)
            held.enter_context(contextlib.closing(processes))
            held.enter_context(server.no_accelerator())  # the replicas have their devices by now
            app = server.app_of_replicas(processes, settings)
            _start_texts(app, held)
        else:
            backends.check_device()
            decoder, tokenizer = loading.load(template)
            running = held.enter_context(engine.Engine(decoder, tokenizer, config))
            if programs.certify and not _are_certified(decoder, running):
                return 1
            app = server.create_app(running, decoder, tokenizer, settings)
            _start_texts(app, held)  # they load the tokenizer while programs are compiled
            running.warm_up(progress=sys.stderr.isatty(), cache=cache, in_background=True)
        ready = f"{settings.name} on {server.url(bound, connections)}, fingerprint {app.state.fingerprint}"
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        return server.Server(app, connections).serve_on(bound, lambda: console.print(ready, markup=False))


def _start_texts(app: Starlette, held: contextlib.ExitStack) -> None:
    """Starts the processes that read the texts of requests. They end with `held`."""
    held.enter_context(contextlib.closing(app.state.texts)).start()


def _api_keys() -> tuple[str, ...]:
    """The key of the environment. An empty one is kept, so that it is refused."""
    variable = os.environ.get(API_KEY_VARIABLE)
    return () if variable is None else (variable,)


def _are_certified(decoder: Decoder, running: engine.Engine) -> bool:
    """Says on stderr whether programs of an engine leave a bit to the compiler, and returns whether none does."""
    programs = running.programs()
    console = Console(stderr=True, highlight=False)
    risks = audit.engine_risks(decoder, programs)
    for purpose, unproven in risks.items():
        console.print(purpose, certificates.risk_table(unproven))
    kept = len(programs) - len(risks)
    console.print(f"certified: {kept} of {len(programs)} programs compute all numbers under contract")
    return not risks
