"""Serve a model over HTTP with OpenAI's API; the page at / demonstrates that answers repeat. Stop it with Ctrl-C.

The exit code is 70 if the engine fails, so that a supervisor can restart the server.
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
from detjax.cli.loading import LORA_MODULES, Backend, Loading, lora_adapters
from detjax.cli.options import Fields, Option, command
from detjax.models import Decoder
from detjax.runtime import backends

API_KEY_VARIABLE: Final = "DETJAX_API_KEY"
"""Environment variable with the clients' key, used if the command line has none."""

CONTROL_KEY_VARIABLE: Final = "DETJAX_CONTROL_KEY"
"""Environment variable with the control key, used if the command line has none."""

_ADDRESS, _CLIENTS, _CONNECTIONS, _CONTROL = "Address and names", "Clients", "Connections", "Control by a trainer"

_LOADING = Fields(Loading, positional=("model",), options={"chat_template": Option(panel=_CLIENTS)})
_SETTINGS = Fields(
    server.Settings,
    _CLIENTS,
    without=("name", "more_names", "max_in_flight", "body_seconds"),
    options={
        "api_keys": Option(
            f"API key that clients must send. Other users of the machine can see command lines, so prefer the "
            f"environment variable {API_KEY_VARIABLE}.",
            default=f"{API_KEY_VARIABLE}, else no key",
        ),
        "allowed_hosts": Option(default="localhost when listening on it without a key, else all"),
        "separate_prefixes": Option(name="--separate-prefixes/--shared-prefixes"),
        "max_pending_bytes": Option(panel=_CONNECTIONS),
        "control_key": Option(
            f"Key for the paths that pause the server, put it to sleep and replace its weights. Prefer the environment "
            f"variable {CONTROL_KEY_VARIABLE}.",
            default=f"{CONTROL_KEY_VARIABLE}, else the server does not have these paths",
            panel=_CONTROL,
        ),
        "weights_directory": Option(panel=_CONTROL),
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
    """The address of a server, and the names of its model.

    Attributes:
        host: address to listen on; 0.0.0.0 listens on all interfaces.
        port: port to listen on; 0 picks a free port.
        names: name of the model for clients. Default: the directory's name.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replicas:
    """The replicas of a server's engine.

    Attributes:
        data_parallel: number of replicas of the engine, each a process with the whole model and its own devices; it
            does not change any bits.
        replica_seconds: restart a replica that has sent no heartbeat, or has been stuck in one step, for this long.
    """

    data_parallel: int = 1
    replica_seconds: float = 30

    def check(self, certify: bool) -> None:
        """Raises a ValueError if there are no replicas, or if `certify` is combined with several."""
        if self.data_parallel < 1:
            raise ValueError(f"--data-parallel is {self.data_parallel}; accepted: at least 1")
        if self.data_parallel > 1 and certify:
            raise ValueError(
                f"--certify is given and --data-parallel is {self.data_parallel}; accepted: one of the two. Certify a "
                "server with one engine first: every replica runs the same programs"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """The compiled programs of a server.

    Attributes:
        cache_dir: directory for compiled programs; it must not be writable by other users. Default: detjax in the
            user's cache directory.
        compilation_cache: cache compiled programs on disk.
        certify: before serving, check that no program leaves any bits up to the compiler; exit with code 1 if one does.
    """

    cache_dir: Path | None = None
    compilation_cache: bool = True
    certify: bool = False

    def prepared_cache(self) -> Path | None:
        """Creates the directory for compiled programs if necessary, and returns it; None if they are not cached."""
        if not self.compilation_cache:
            return None
        try:
            directory = self.cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "detjax"
            engine.prepare_cache(directory)
        except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
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
    config: Annotated[engine.EngineConfig, Fields(engine.EngineConfig, "Engine", without=("speculative",))],
    speculative_config: Annotated[str | None, Option(panel="Engine")] = None,
    lora_modules: Annotated[tuple[str, ...], dataclasses.replace(LORA_MODULES, panel="Engine")] = (),
    connections: Annotated[server.ConnectionSettings, _CONNECTION_SETTINGS],
    log: Annotated[server.LogSettings, _LOG],
    programs: Annotated[Programs, Fields(Programs, "Compiled programs")],
) -> int:
    """Serves a model.

    Args:
        max_queue: maximum number of samples in the queue; further requests get status 429.
        lora_modules: adapter as NAME=PATH, or as a JSON object with name and path, as for vLLM; its name is another
            name of the model for clients. Without --max-loras, all of them share steps.
        speculative_config: JSON object with the settings of speculative decoding, as for vLLM: method, model,
            num_speculative_tokens, prompt_lookup_min and prompt_lookup_max. Default: no tokens are guessed.
    """
    adapters = lora_adapters(lora_modules)
    slots = config.max_loras or len(adapters)
    config = dataclasses.replace(config, speculative=loading.speculative(speculative_config), max_loras=slots)
    if slots and not adapters and replicas.data_parallel > 1:
        raise ValueError(
            f"--max-loras is {slots} and --data-parallel {replicas.data_parallel}, without adapters; accepted: "
            "--lora-modules, as several engines load no adapters later"
        )
    if max_queue < 0:
        raise ValueError(f"--max-queue is {max_queue}; accepted: at least 0")
    replicas.check(programs.certify)
    names = address.names or (loading.model.resolve().name,)
    if taken := [name for name in adapters if name in names]:
        raise ValueError(f"--lora-modules has the name {taken[0]!r}; accepted: names that the model does not have")
    if API_KEY_VARIABLE in os.environ:  # even if it is empty, so that `Settings` rejects it
        client_settings = {"api_keys": (os.environ[API_KEY_VARIABLE],)} | client_settings
    if CONTROL_KEY_VARIABLE in os.environ:
        client_settings = {"control_key": os.environ[CONTROL_KEY_VARIABLE]} | client_settings
    in_flight = replicas.data_parallel * config.max_samples + max_queue
    settings = server.Settings(names[0], more_names=names[1:], max_in_flight=in_flight, **client_settings)
    template, cache = loading.template(), programs.prepared_cache()
    server.tls_context(connections)  # report a bad certificate now: loading takes minutes
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
                overrides=loading.overrides(),
                quantized=loading.quantized,
                config=config,
                cache=cache,
                adapters=adapters,
            )
            processes = server.ProcessReplicas(
                options, replicas.data_parallel, log=log, silence=replicas.replica_seconds
            )
            held.enter_context(contextlib.closing(processes))
            held.enter_context(server.no_accelerator())  # the devices belong to the replicas
            app = server.app_of_replicas(processes, settings)
            _start_texts(app, held)
        else:
            backends.check_device()
            compilers = held.enter_context(engine.Compilers(cache))  # they start while weights are loaded
            decoder, tokenizer = loading.load(template, adapters)
            running = held.enter_context(engine.Engine(decoder, tokenizer, config))
            if programs.certify and not _are_certified(decoder, running):
                return 1
            app = server.create_app(running, decoder, tokenizer, settings)
            del decoder  # sleep frees the memory of weights that nothing else refers to
            _start_texts(app, held)  # the workers load the tokenizer while programs compile
            progress = sys.stderr.isatty()
            running.warm_up(progress=progress, cache=cache, in_background=True, compilers=compilers)
        ready = f"{settings.name} on {server.url(bound, connections)}, fingerprint {app.state.fingerprint}"
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        return server.Server(app, connections).serve_on(bound, lambda: console.print(ready, markup=False))


def _start_texts(app: Starlette, held: contextlib.ExitStack) -> None:
    """Starts the text workers, which end with `held`."""
    held.enter_context(contextlib.closing(app.state.texts)).start()


def _are_certified(decoder: Decoder, running: engine.Engine) -> bool:
    """Prints the numbers that an engine's programs leave to the compiler. Returns True if nothing is left to it."""
    programs = running.programs()
    console = Console(stderr=True, highlight=False)
    risks = audit.engine_risks(decoder, programs)
    for purpose, unproven in risks.items():
        console.print(purpose, certificates.risk_table(unproven))
    certified = len(programs) - len(risks)
    console.print(f"certified: {certified} of {len(programs)} programs compute all numbers under contract")
    return not risks
