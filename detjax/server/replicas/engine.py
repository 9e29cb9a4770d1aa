"""A replica's engine, wherever the replica runs, and what a front has to know of it."""

import contextlib
import dataclasses
import datetime
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from detjax import models
from detjax.audit import Origin
from detjax.engine import Engine, EngineConfig, prepare_cache
from detjax.models import ModelMetadata, Tokenizer
from detjax.runtime import backends
from detjax.server.app import fingerprint_of


@dataclasses.dataclass(frozen=True)
class ReplicaOptions:
    """The options that a replica computes with, the same for all replicas.

    Attributes:
        model: the checkpoint's directory.
        dtype: the dtype of the weights; see `detjax.models.load`.
        backend: see `detjax.use_backend`.
        tensor_parallel: devices of each replica that share the model; see `detjax.models.mesh_of`.
        expert_parallel: the number of groups of `tensor_parallel` devices that share its experts.
        chat_template: takes the place of the checkpoint's.
        template_date: the date that chat templates are told.
        config: the settings of the engine.
        cache: a directory of compiled programs, with which replicas start sooner; see `Engine.warm_up`.
    """

    model: Path
    dtype: str | None = None
    backend: str | None = None
    tensor_parallel: int = 1
    expert_parallel: int = 1
    chat_template: str | None = None
    template_date: datetime.date | None = None
    config: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    cache: Path | None = None


@dataclasses.dataclass(frozen=True)
class ReplicaFacts:
    """Facts that the front needs about the replicas, the same for all of them.

    Attributes:
        outline: the outline of the model.
        tokenizer_files: the files of its tokenizer; see `Tokenizer.files`.
        config: the engine's settings, resolved.
        origin: what answers depend on besides requests.
    """

    outline: ModelMetadata
    tokenizer_files: dict[str, bytes]
    config: EngineConfig
    origin: Origin

    @property
    def fingerprint(self) -> str:
        """The result of `system_fingerprint` for the replica's model and engine."""
        return fingerprint_of(self.origin, self.config, self.outline)

    def tokenizer(self) -> Tokenizer:
        """Makes the replica's tokenizer in this process."""
        return Tokenizer(self.tokenizer_files, "the checkpoint")


def started_engine(options: ReplicaOptions) -> tuple[Engine, ReplicaFacts]:
    """Loads the model, and returns its engine, which has its programs, and the facts.

    Raises:
        ValueError: an option is out of range, the device cannot serve, or the checkpoint has no tokenizer.
        OSError: the checkpoint cannot be read, or the cache cannot be written.
    """
    with backends.use_backend(options.backend):
        backends.check_device()
        mesh = models.mesh_of(options.tensor_parallel, options.expert_parallel)
        model, tokenizer = models.load(options.model, dtype=options.dtype, progress=False, mesh=mesh)
        if tokenizer is None:
            raise ValueError(f"{options.model} has no tokenizer.json; accepted: a checkpoint with a tokenizer")
        if options.template_date is not None:
            tokenizer = tokenizer.with_template_date(options.template_date)
        if options.chat_template is not None:
            tokenizer = tokenizer.with_chat_template(options.chat_template)
        engine = Engine(model, tokenizer, options.config)
        with _turn_to_compile(options.cache):
            engine.warm_up(cache=options.cache, in_background=True)
        # Memory that is free differs between machines, and with it how many pages there are, on which no bit depends.
        origin = Origin.here(model, tokenizer, options.config.kv_cache_dtype)
        return engine, ReplicaFacts(ModelMetadata.from_model(model), tokenizer.files, engine.config, origin)


@contextlib.contextmanager
def _turn_to_compile(cache: Path | None) -> Iterator[None]:
    """A context in which no other replica of this machine compiles for the same cache.

    Replicas that start side by side need the same programs: the first one compiles them, and the others find them.
    """
    if cache is None:
        yield
        return
    prepare_cache(cache)
    directory = os.open(cache, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # where a file system locks no directory, each replica compiles
            fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)
